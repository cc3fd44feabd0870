"""Every mistake of a user through the command line: a message that helps, an exit code, nothing lost."""

from __future__ import annotations

import resource

import pytest

from ondevice.models.tiny import save_tiny
from ondevice.training.checkpoint import RunLock
from tests.cli.command import classes, tiny, write_rows
from tests.cli.test_training import bits

PRGE = ["--method", "prge"]
CONFIG, DATA, MODEL, ARTIFACT, CHECKPOINT, BUSY, TRAINING, STORAGE = 2, 3, 4, 5, 6, 7, 9, 11


def lines(*texts: str):
    return lambda path: path.write_text("".join(text + "\n" for text in texts))


MISTAKES = {
    "a key in --set": (["--set", "train.stepz=3"], CONFIG, "did you mean 'steps'"),
    "a key of the method": (["--set", "method.ranks=3"], CONFIG, "did you mean 'rank'"),
    "a key that has another name now": (
        [*PRGE, "--set", "method.inner_loop=false"], CONFIG, "'method.inner_loop' is now 'method.batch_signs'"
    ),
    "a key that is gone": ([*PRGE, "--set", "method.form=copies"], CONFIG, "'method.form' is no longer a setting"),
    "a section": (["--set", "trian.steps=3"], CONFIG, "did you mean 'train'"),
    "a --set without a value": (["--set", "train.steps"], CONFIG, "key=value"),
    "a flag": (["--stepz", "3"], CONFIG, "--stepz"),
    "a value": (["--steps", "many"], CONFIG, "--steps"),
    "no steps": (["--steps", "0"], CONFIG, "train.steps"),
    "a negative seed": (["--seed", "-1"], CONFIG, "train.seed"),
    "a method": (["--method", "prgee"], CONFIG, "full, lora, lora-fa, lsp, mesp, mezo, prge"),
    "a key of another method": (["--method", "lora", "--queries", "4"], CONFIG, "queries"),
    "two settings that exclude each other": (
        [*PRGE, "--queries", "1", "--set", "method.estimator=one_sided"], CONFIG, "needs queries >= 2"
    ),
    "a target": (["--set", "method.target_modules=[q_proj, qq_proj]"], MODEL, "q_proj"),
    "a task": (["--task", "sst"], CONFIG, "sst2"),
    "a device": (["--set", "model.device=tpu"], CONFIG, "'auto', 'cpu' or 'cuda'"),
    "a data file that is not there": (["--data", "/no/rows.jsonl"], DATA, "/no/rows.jsonl"),
    "a model that is not there": (["--model", "/no/model"], MODEL, "/no/model"),
    "a tiny model that is none": (["--model", "tiny:gpt"], MODEL, "tiny:gpt2, tiny:granite, tiny:granitemoe"),
    "an adapter that is not there": (["--adapter", "/no/adapter"], ARTIFACT, "/no/adapter"),
    "a run file that is not there": (["--config", "/no/run.yaml"], CONFIG, "/no/run.yaml"),
}  # fmt: skip
FILES = {
    "empty": (lines(), "is empty"),
    "only blank lines": (lines("", ""), "row"),
    "not JSON": (lines("{'text': 'x'}"), "rows.jsonl:1"),
    "no format": (lines('{"foo": 1}'), "foo"),
    "an answer that is empty": (lines('{"prompt": "a", "completion": ""}'), "completion"),
    "bytes that are no text": (lambda path: path.write_bytes(b"\xff\xfe\x00"), "UTF-8"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_setting(mistake, ondevice, tmp_path) -> None:
    options, code, message = MISTAKES[mistake]
    data, out = classes(tmp_path / "rows.jsonl"), tmp_path / "run"
    plain = ["--model", "tiny:llama", "--data", data, "--steps", 1, "--out", out]
    done = ondevice("train", *plain, *options, "--json")
    assert done.code == code and message in done.err and "Traceback" not in done.err, done.err
    assert done.json["exit_code"] == code and done.json["error"].endswith("Error")
    assert not out.exists()


@pytest.mark.parametrize("kind", FILES)
def test_a_data_file_without_a_usable_row(kind, ondevice, tmp_path) -> None:
    write, message = FILES[kind]
    write(tmp_path / "rows.jsonl")
    done = ondevice(
        "train", *tiny(), "--data", tmp_path / "rows.jsonl", "--steps", 1, "--out", tmp_path / "run"
    )
    assert done.code == DATA and message in done.err and done.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_labels_that_the_verbalisers_do_not_know(ondevice, tmp_path) -> None:
    rows = [{"task": "sst2", "prompt_fields": {"sentence": "good"}, "label": "maybe"}] * 2
    data = write_rows(tmp_path / "rows.jsonl", rows)
    options = (
        "--data",
        data,
        "--task",
        "sst2",
        "--max-length",
        64,
        "--steps",
        1,
        "--out",
        tmp_path / "run",
    )
    done = ondevice("train", *tiny(), *options)
    assert (
        done.code == DATA
        and "label" in done.err
        and "maybe" in done.err
        and "rows.jsonl:1" in done.err
    )
    assert ondevice("eval", "tiny:llama", "--data", data, "--task", "sst2").code == DATA


def test_a_model_without_a_tokenizer(ondevice, tmp_path) -> None:
    folder, data = save_tiny(tmp_path / "model"), classes(tmp_path / "rows.jsonl")
    for path in folder.glob("*token*"):
        path.unlink()
    for command in (
        ["train", *tiny(model=str(folder)), "--steps", 1, "--out", tmp_path / "run"],
        ["eval", folder],
    ):
        done = ondevice(*command, "--data", data)
        assert done.code == MODEL and "tokenizer" in done.err, done.err


def test_a_hub_id_without_a_network(ondevice, tmp_path) -> None:
    done = ondevice(
        "train", *tiny(model="nobody/no-such-model"), "--data", classes(tmp_path / "rows.jsonl")
    )
    assert done.code == MODEL and "nobody/no-such-model" in done.err and "Traceback" not in done.err


@pytest.mark.parametrize("method", ["prge", "lora", "full", "mezo"])
def test_a_loss_that_is_not_a_number(method, ondevice, tmp_path) -> None:
    data, out = classes(tmp_path / "rows.jsonl"), tmp_path / "run"
    options = ["--data", data, "--steps", 30, "--set", "train.checkpoint_every=1", "--out", out]
    done = ondevice("train", *tiny(method, "--lr", "1e38"), *options, "--json")
    assert done.code == TRAINING and "lower learning rate" in done.err, done.err
    assert done.json["error"] == "TrainingError"
    again = ondevice("train", *tiny(method, "--lr", "1e38"), *options)
    assert again.code == CHECKPOINT and "--resume" in again.err


@pytest.mark.parametrize("method", ["prge", "lora", "full", "mezo"])
def test_a_last_step_that_leaves_no_numbers_is_not_saved(method, ondevice, tmp_path) -> None:
    """The loss of the only step is fine; what it did to the parameters is not."""
    data, out = classes(tmp_path / "rows.jsonl"), tmp_path / "run"
    done = ondevice(
        "train", *tiny(method, "--lr", "1e39"), "--data", data, "--steps", 1, "--out", out
    )
    assert done.code == TRAINING and "step 0" in done.err and "inf or nan" in done.err, done.err
    left = {
        path.name for path in out.iterdir() if not path.name.startswith("subspace-")
    }  # of the gradient before it
    assert left == {"events.jsonl", "run.lock"}


def test_a_full_disk_leaves_the_checkpoint_before(ondevice, tmp_path) -> None:
    data, out, straight = classes(tmp_path / "rows.jsonl"), tmp_path / "run", tmp_path / "straight"
    train = ("train", *tiny("mezo", "--lr", "0.001"), "--data", data)
    assert ondevice(*train, "--steps", 2, "--out", out).code == 0
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))  # the state has 400 kB
    try:
        done = ondevice(*train, "--steps", 4, "--out", out, "--resume", "--json")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (
        done.code == STORAGE
        and "checkpoint-00000004" in done.err
        and done.json["error"] == "StorageError"
    )
    assert [path.name for path in out.glob("*checkpoint*")] == ["checkpoint-00000002"]
    assert ondevice(*train, "--steps", 4, "--out", out, "--resume").code == 0
    assert ondevice(*train, "--steps", 4, "--out", straight).code == 0
    ours, theirs = (
        folder / "checkpoint-00000004" / "state.safetensors" for folder in (out, straight)
    )
    assert ours.read_bytes() == theirs.read_bytes()


def test_a_damaged_checkpoint_is_passed_over(ondevice, tmp_path) -> None:
    data, out, straight = classes(tmp_path / "rows.jsonl"), tmp_path / "run", tmp_path / "straight"
    train = ("train", *tiny("prge", "--lr", "0.1", "--schedule", "constant"), "--data", data)
    train = (*train, "--set", "train.checkpoint_every=2")
    assert ondevice(*train, "--steps", 4, "--out", out).code == 0
    state = out / "checkpoint-00000004" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-3])
    assert ondevice(*train, "--steps", 6, "--out", out, "--resume").code == 0
    assert "checkpoint-00000004 is damaged" in (out / "events.jsonl").read_text()
    assert ondevice(*train, "--steps", 6, "--out", straight).code == 0
    assert bits(out / "adapter") == bits(straight / "adapter")
    for path in out.glob("checkpoint-*"):
        (path / "meta.json").write_text("{")
    done = ondevice(*train, "--steps", 8, "--out", out, "--resume")
    assert done.code == CHECKPOINT and "whole" in done.err and "--overwrite" in done.err


@pytest.mark.parametrize(
    ("key", "value"), [("train.seed", 4), ("method.rank", 3), ("model.dtype", "bfloat16")]
)
def test_a_run_of_other_settings_is_not_resumed(key, value, ondevice, tmp_path) -> None:
    data, out = classes(tmp_path / "rows.jsonl"), tmp_path / "run"
    train = ("train", "--model", "tiny:llama", *PRGE, "--queries", 2, "--data", data, "--out", out)
    assert ondevice(*train, "--steps", 2).code == 0
    done = ondevice(*train, "--steps", 4, "--set", f"{key}={value}", "--resume")
    assert done.code == CHECKPOINT and key.split(".")[1] in done.err
    write_rows(data, [{"text": "other", "label": "yes"}, {"text": "rows", "label": "no"}])
    done = ondevice(*train, "--steps", 4, "--resume")
    assert done.code == CHECKPOINT and "data" in done.err


def test_a_resume_with_fewer_steps_than_there_are_is_refused(ondevice, tmp_path) -> None:
    data, out = classes(tmp_path / "rows.jsonl"), tmp_path / "run"
    train = ("train", *tiny(), "--data", data, "--out", out)
    assert ondevice(*train, "--steps", 3).code == 0
    before = (out / "events.jsonl").read_bytes()
    done = ondevice(*train, "--steps", 2, "--resume")
    assert done.code == CHECKPOINT and "--steps 3 or more" in done.err
    assert (out / "events.jsonl").read_bytes() == before


def test_a_group_without_a_verb_shows_its_help(ondevice) -> None:
    done = ondevice("config")
    assert done.code == CONFIG and done.err.startswith("Usage:") and "schema" in done.err


def test_two_runs_in_one_folder(ondevice, tmp_path) -> None:
    data, out = classes(tmp_path / "rows.jsonl"), tmp_path / "run"
    train = ("train", *tiny(), "--data", data, "--steps", 2, "--out", out)
    with RunLock(out):
        done = ondevice(*train, "--json")
        assert (
            done.code == BUSY
            and "another run holds" in done.err
            and done.json["error"] == "BusyError"
        )
        assert ondevice(*train, "--overwrite").code == BUSY
    assert ondevice(*train).code == 0


def test_a_place_that_cannot_be_written(ondevice, tmp_path) -> None:
    data = classes(tmp_path / "rows.jsonl")
    done = ondevice("train", *tiny(), "--data", data, "--steps", 1, "--out", data)
    assert done.code == STORAGE and "rows.jsonl" in done.err and data.read_text().startswith("{")
