"""`export`, `run`, `verify`, `eval` and `replay` of an artifact through the command line."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys

import pytest

from ondevice.cli.common import stages
from ondevice.core.errors import ArtifactError
from tests.cli.command import classes, write_rows
from tests.cli.test_training import bits
from tests.programs import model, needs_qnn, program, report

pytest.importorskip("executorch.exir")
ARTIFACT = ArtifactError.exit_code


@pytest.fixture
def copy(tmp_path):
    """The functional artifact, to be damaged."""
    return shutil.copytree(program("functional"), tmp_path / "l'artefact")


def flip_a_byte(path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def change_manifest(folder, **values) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


DAMAGE = {
    "a changed byte of the program": (
        lambda a: flip_a_byte(a / "program.pte"),
        "program.pte has changed",
    ),
    "a changed byte of the tokenizer": (
        lambda a: flip_a_byte(a / "tokenizer" / "tokenizer.json"),
        "has changed",
    ),
    "a later version": (lambda a: change_manifest(a, schema_version=3), "another version"),
    "no version": (lambda a: change_manifest(a, schema_version=None), "another version"),
    "a missing file": (lambda a: (a / "program.pte").unlink(), "lacks a file"),
    "an unknown field": (lambda a: change_manifest(a, surprise=1), "surprise"),
    "a truncated manifest": (
        lambda a: (a / "manifest.json").write_text('{"schema'),
        "not readable JSON",
    ),
    "no manifest": (lambda a: (a / "manifest.json").unlink(), "is not an artifact"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_artifact_is_refused(damage, copy, ondevice, tmp_path) -> None:
    spoil, message = DAMAGE[damage]
    spoil(copy)
    data = classes(tmp_path / "rows.jsonl")
    commands = [
        ("run", copy, "--data", data, "--steps", 1, "--out", tmp_path / "run"),
        ("verify", copy),
    ]
    if damage != "no manifest":  # a folder without one is a model's
        commands.append(("eval", copy, "--data", data))
    for command in commands:
        done = ondevice(*command, "--json")
        assert done.code == ARTIFACT and message in done.err and "Traceback" not in done.err, (
            done.err
        )
        assert done.json["error"] == "ArtifactError"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["functional", "stateful", "q4", "npu"])
def test_a_run_resumes_and_replays_with_the_same_bits(name, ondevice, tmp_path) -> None:
    if name == "npu":
        needs_qnn()
    data, out, straight = classes(tmp_path / "rows.jsonl"), tmp_path / "run", tmp_path / "straight"
    run = ("run", program(name), "--data", data)
    figures = ondevice(*run, "--steps", 3, "--out", out, "--json").json
    assert (
        figures["steps"] == 3
        and figures["final_loss"] > 0
        and figures["adapter"] == str(out / "adapter")
    )
    assert ondevice(*run, "--steps", 3, "--out", out).code == 6
    assert ondevice(*run, "--steps", 6, "--out", out, "--resume").code == 0
    whole = ondevice(*run, "--steps", 6, "--out", straight, "--eval-data", data, "--json").json
    assert whole["evaluation"]["rows"] == 12
    assert bits(out / "adapter") == bits(straight / "adapter")
    done = ondevice(
        "replay", out, "--artifact", program(name), "--out", tmp_path / "again", "--json"
    )
    assert (
        done.code == 0
        and done.json["warnings"] == []
        and bits(tmp_path / "again") == bits(out / "adapter")
    )
    assert ondevice("replay", out).code == 2


def test_the_adapter_of_a_run_works_everywhere(ondevice, tmp_path) -> None:
    data, out = classes(tmp_path / "rows.jsonl"), tmp_path / "run"
    base, artifact = model("tied llama"), program("functional")
    done = ondevice(
        "run", artifact, "--data", data, "--steps", 4, "--lr", "0.5", "--out", out, "--json"
    )
    assert done.code == 0, done.err
    inside = ondevice("eval", artifact, "--data", data, "--adapter", out / "adapter", "--json").json
    eager = ondevice(
        "eval", base, "--data", data, "--adapter", out / "adapter", "--max-length", 16, "--json"
    ).json
    before = ondevice("eval", artifact, "--data", data, "--json").json
    assert (
        inside["loss"] == pytest.approx(eager["loss"], rel=1e-5)
        and inside["accuracy"] == eager["accuracy"]
    )
    assert abs(before["loss"] - inside["loss"]) > 1e-3 * before["loss"]
    fused = ondevice("fuse", base, out / "adapter", "--out", tmp_path / "fused", "--json")
    assert fused.code == 0 and fused.json["max_abs_difference_from_base"] > 1e-3
    assert ondevice("eval", tmp_path / "fused", "--data", data, "--max-length", 16, "--json").json[
        "loss"
    ] == (pytest.approx(eager["loss"], rel=1e-5))
    again = ondevice(
        "run",
        artifact,
        "--data",
        data,
        "--steps",
        1,
        "--adapter",
        out / "adapter",
        "--out",
        out / "more",
    )
    assert again.code == 0, again.err
    other = program("fused loss, one-sided")  # of two layers
    other = ondevice(
        "run", other, "--data", data, "--adapter", out / "adapter", "--out", tmp_path / "x"
    )
    assert other.code == ARTIFACT and "adapter" in other.err


def test_a_dry_run_reads_the_rows_and_plans_and_writes_nothing(ondevice, tmp_path) -> None:
    data = classes(tmp_path / "rows.jsonl")
    run = ("run", program("functional"), "--out", tmp_path / "run", "--dry-run", "--json")
    done = ondevice(*run, "--data", data)
    assert done.code == 0 and done.json["plan"]["fits"], done.err
    assert (
        ondevice(*run, "--data", write_rows(tmp_path / "bad.jsonl", [{"text": 3, "label": 4}])).code
        == 3
    )
    extra = [
        {"text": "a good day", "label": 1, "id": 1},
        {"text": "a bad day", "label": 0, "id": 2},
    ]
    unread = write_rows(tmp_path / "unread.jsonl", extra)
    assert ondevice(*run, "--data", unread).code == 0
    refused = ondevice(*run, "--data", unread, "--strict-columns")
    assert refused.code == 3 and "id (2)" in refused.err
    assert not (tmp_path / "run").exists()


def test_what_the_artifact_fixes_cannot_be_set(ondevice, tmp_path) -> None:
    data = classes(tmp_path / "rows.jsonl")
    for setting in (
        "method.queries=8",
        "train.seed=1",
        "model.source=tiny:llama",
        "train.batch_size=4",
    ):
        done = ondevice(
            "run",
            program("functional"),
            "--data",
            data,
            "--set",
            setting,
            "--out",
            tmp_path / "run",
        )
        assert done.code == 2 and setting.split("=")[0] in done.err and "fixed" in done.err
    file = tmp_path / "run.yaml"
    file.write_text("method: {learning_rate: 0.25}\ntrain: {steps: 2}\n")
    run = ("run", program("functional"), "--data", data, "--json")
    assert ondevice(*run, "--config", file, "--out", tmp_path / "a").json["steps"] == 2
    assert '"learning_rate":0.25' in (tmp_path / "a" / "events.jsonl").read_text()
    assert (
        ondevice(
            *run, "--config", file, "--set", "method.learning_rate=0.5", "--out", tmp_path / "b"
        ).code
        == 0
    )
    assert '"learning_rate":0.5' in (tmp_path / "b" / "events.jsonl").read_text()
    assert ondevice(*run, "--config", file, "--lr", "-1", "--out", tmp_path / "c").code == 2


def test_verify_prints_one_object_and_its_exit_code_says_whether_it_holds(
    ondevice, copy, tmp_path
) -> None:
    done = ondevice("verify", program("functional"), "--steps", 4, "--json")
    assert done.code == 0 and done.json["ok"] is True and done.json["steps"] == 4
    wanted = {
        "steps",
        "max_rel_loss_error",
        "max_rel_loss_error_replayed",
        "max_abs_adapter_error",
        "ok",
    }
    assert done.json.keys() >= wanted
    data = classes(tmp_path / "rows.jsonl")
    assert (
        ondevice("verify", program("functional"), "--data", data, "--steps", 2, "--json").json["ok"]
        is True
    )
    change_manifest(
        copy, method={**json.loads((copy / "manifest.json").read_text())["method"], "alpha": 99.0}
    )
    wrong = ondevice("verify", copy, "--steps", 1, "--json")
    assert wrong.code == 12 and json.loads(wrong.out.splitlines()[0])["ok"] is False


def test_export_checks_before_it_loads(ondevice, tmp_path) -> None:
    export = ("export", "--model", model("two layers"), "--out", tmp_path / "a")
    assert ondevice(*export, "--length", 16, "--dry-run").code == 0
    assert (
        "positions" in ondevice(*export, "--max-length", 100_000, "--dry-run").err
    )  # the name of every other verb
    missing = ondevice(*export, "--length", 16, "--data", "/no/rows.jsonl", "--dry-run")
    assert missing.code == 3 and "/no/rows.jsonl" in missing.err
    for options, words in (
        (
            ["--quantize", "torchao"],
            "'none', 'int8', 'q4', 'q4dq', '8da4w', '8da8w', 'w8' or 'nf4'",
        ),
        (["--target", "ios"], "android-cpu"),
        (["--method", "lora"], "does not export"),
        (["--length", "100000"], "positions"),
        (["--form", "state"], "'functional' or 'stateful'"),
    ):
        done = ondevice(*export, *options, "--dry-run", "--json")
        assert done.code == 2 and words in done.err + done.out, (done.err, done.out)
        assert ondevice(*export, *options).code == 2
    assert list(tmp_path.iterdir()) == []
    listed = ondevice("export", "--list", "--json")
    assert listed.code == 0 and "android-cpu" in listed.json


def test_a_run_whose_loss_is_no_number_ends_with_an_error(ondevice, tmp_path) -> None:
    data = classes(tmp_path / "rows.jsonl")
    run = (
        "run",
        program("functional"),
        "--data",
        data,
        "--steps",
        5,
        "--lr",
        "1e38",
        "--out",
        tmp_path / "run",
    )
    done = ondevice(*run, "--json")
    assert (
        done.code == 9
        and done.json["error"] == "TrainingError"
        and not (tmp_path / "run" / "adapter").exists()
    )


def test_an_export_says_which_backend_runs_what(capsys) -> None:
    from ondevice.cli.export import _show

    needs_qnn()
    _show([report("functional"), report("npu")], json=False)
    text = capsys.readouterr().out
    cpu, npu = text.split("artifact")[1:]
    assert (
        "train step on XnnpackBackend" in cpu and "QnnBackend" not in cpu and "operators in" in cpu
    )
    assert (
        "train step on QnnBackend" in npu
        and "qnn-htp-simulator" in npu
        and "2 of 2 as in float32" in npu
    )
    _show([report("functional"), report("npu")], json=True)
    artifacts = json.loads(capsys.readouterr().out)["artifacts"]
    assert artifacts[1]["partition"]["train_step"][0]["backend"] == "QnnBackend"


@pytest.mark.parametrize("name", ["functional", "blocks"])
def test_a_programs_libraries_say_nothing_of_their_own(name, tmp_path) -> None:
    run = [
        "run",
        str(program(name)),
        "--data",
        str(classes(tmp_path / "rows.jsonl")),
        "--steps",
        "1",
    ]
    command = [sys.executable, "-m", "ondevice", *run, "--out", str(tmp_path / "run"), "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert (done.returncode, done.stderr) == (0, "")


def test_stages_are_said_once(capsys) -> None:
    heard: list[logging.LogRecord] = []
    root = logging.Handler()
    root.emit = heard.append
    logging.getLogger().addHandler(root)
    try:
        with stages(silent=False):
            logging.getLogger("ondevice.exporters").info("lowering")
    finally:
        logging.getLogger().removeHandler(root)
    assert capsys.readouterr().err.count("lowering") == 1 and not heard


def test_an_npu_s_flags_reach_the_exporter(ondevice) -> None:
    done = ondevice(
        "export", "--model", "tiny:llama", "--target", "android-npu", "--soc", "SM8650", "--soc", "SM77",
        "--length", 16, "--quantize", "q4", "--dry-run", "--json",
    )  # fmt: skip
    assert done.code == 2 and any("SM77 is not known" in line for line in done.out.splitlines())
    assert "expected none or w8" in done.err and "android-npu" in ondevice("export", "--list").out


def test_an_artifact_scores_mmlu_and_generates_nothing(ondevice, tmp_path) -> None:
    """Its likelihoods are those of the model that it was exported from, of prompts cut to what it takes."""
    choices = [{"question": f"{i}?", "choices": list("abcd"), "answer": i} for i in range(3)]
    data, scores = write_rows(tmp_path / "test.jsonl", choices), []
    for source, more in ((program("functional"), ()), (model("tied llama"), ("--max-length", 16))):
        out = tmp_path / f"out{len(scores)}"
        done = ondevice(
            "eval", source, "--task", "mmlu", "--data", data, "--out", out, *more, "--json"
        )
        assert done.code == 0 and done.json["rows"] == done.json["cut_rows"] == 3, done.err
        scores += [
            json.loads(line)["scores"] for line in (out / "answers.jsonl").read_text().splitlines()
        ]
    assert scores[:3] == [pytest.approx(row, abs=1e-4) for row in scores[3:]]
    refused = ondevice(
        "eval",
        program("functional"),
        "--task",
        "gsm8k",
        "--data",
        sums(tmp_path),
        "--out",
        tmp_path / "g",
    )
    assert refused.code == 2 and "generates none" in refused.err and not (tmp_path / "g").exists()


def sums(folder):
    return write_rows(folder / "sums.jsonl", [{"question": "1 + 1?", "answer": "#### 2"}])
