"""Runs that learn from preference pairs and rated answers."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import ondevice
from ondevice.api.runfile import RunConfig
from ondevice.artifact.files import sha256_file
from ondevice.cli.app import app
from ondevice.core.capabilities import LearnsPreferences
from ondevice.core.errors import CheckpointError, ConfigError, DataError
from ondevice.core.method import MethodSpec
from ondevice.core.registry import name_methods
from ondevice.data import encode
from ondevice.data.examples import Dataset, Example, Item
from ondevice.data.readers.objects import take_rows
from ondevice.data.reading import as_rows
from ondevice.models.load import tiny_model
from ondevice.objectives import objective
from ondevice.training.choices import place
from ondevice.training.events import read_log
from ondevice.training.fit import with_answers
from ondevice.training.metrics import RunHistory
from ondevice.training.objective import with_objective
from ondevice.training.picture import draw
from ondevice.training.preferences import FILE_NAME, Preferences, mismatched
from ondevice.training.rows import OpenedRows, RunRows
from tests.methods.reference import open_tiny

WORDS = ("the", "film", "was", "long", "and", "dull", "bright", "fun", "slow", "deep", "plain")
ADAPTER = "adapter/adapter_model.safetensors"


def pairs(count: int = 24) -> list[dict[str, Any]]:
    """Made pairs: the shorter answer is preferred."""
    draw = random.Random(0)
    return [
        {
            "prompt": f"Tell me about film {number}.",
            "chosen": " ".join(draw.choices(WORDS, k=3)),
            "rejected": " ".join(draw.choices(WORDS, k=12)),
        }
        for number in range(count)
    ]


def thumbs(count: int = 24) -> list[dict[str, Any]]:
    return [
        {
            "prompt": row["prompt"],
            "completion": row[("chosen", "rejected")[number % 2]],
            "label": number % 2 == 0,
        }
        for number, row in enumerate(pairs(count))
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def run(rows: Any, out: Path, steps: int = 8, **settings: Any) -> Any:
    values = {"method": "lora", "batch_size": 4, "learning_rate": 5e-3, **settings}
    return ondevice.train("tiny:llama", rows, steps=steps, out=out, **values)


def steps_of(out: Path) -> list[Any]:
    entries = read_log(out / "events.jsonl").entries
    return [entry.event for entry in entries if entry.event.kind == "step"]


@pytest.mark.parametrize("method", ["lora", "mesp", "prge", "mezo", "full"])
def test_pairs_are_learnt_from_with_dpo(method: str, tmp_path: Path) -> None:
    rate = {"lora": 5e-3, "mesp": 5e-3, "prge": 2e-2, "mezo": 1e-4, "full": 1e-4}[method]
    trained = run(
        pairs(), tmp_path / "run", steps=12, method=method, learning_rate=rate, eval_rows=pairs(6)
    )
    steps = steps_of(tmp_path / "run")
    assert steps[0].loss == pytest.approx(np.log(2), abs=2e-2)
    assert trained.result.evaluation.loss < np.log(2)
    assert trained.result.evaluation.accuracy > 0.8
    assert trained.result.evaluation.preferences["margin"] > 0
    assert {"rewards_chosen", "rewards_rejected", "margin", "accuracy"} <= set(
        steps[-1].preferences
    )
    low, high = trained.result.evaluation.accuracy_interval
    assert low < trained.result.evaluation.accuracy <= high


def test_a_plot_has_the_rewards_of_both_sides(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for rows, panels in ((pairs(), 3), ([{"text": "a b c"}] * 8, 1)):
        given = {"eval_rows": rows[:6]} if panels == 3 else {}
        trained = run(rows, tmp_path / f"run {panels}", 8, **given)
        axes = trained.plot().axes
        assert len(axes) == panels
    chosen, rejected = (run_axes.get_ydata() for run_axes in run_of(tmp_path / "run 3").lines)
    steps = steps_of(tmp_path / "run 3")
    assert list(chosen) == [step.preferences["rewards_chosen"] for step in steps]
    assert list(rejected) == [step.preferences["rewards_rejected"] for step in steps]


def run_of(out: Path) -> Any:
    """The last panel of a run's picture, as `ondevice runs plot` draws it from the folder."""
    entries = read_log(out / "events.jsonl").entries
    return draw({"run": RunHistory(entry.event for entry in entries)}).axes[-1]


def test_rated_answers_are_learnt_from_with_kto(tmp_path: Path) -> None:
    trained = run(thumbs(), tmp_path / "run", steps=16, eval_rows=thumbs(8))
    start = read_log(tmp_path / "run" / "events.jsonl").entries[0].event
    assert "objective: kto, beta 0.1, as the rows are rated answers" in start.said
    figures = trained.result.evaluation.preferences
    assert figures["margin"] > 0
    assert figures["kl"] >= 0
    assert trained.result.evaluation.loss < 0.5


@pytest.mark.parametrize("name", ["ipo", "orpo", "simpo"])
def test_other_objectives_of_pairs_are_named(name: str, tmp_path: Path) -> None:
    trained = run(pairs(), tmp_path / "run", objective=name, beta=0.5)
    losses = trained.history.losses
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    has_reference = name == "ipo"
    assert (tmp_path / "run" / FILE_NAME).exists() == has_reference


@pytest.mark.sampled
@pytest.mark.parametrize("rows", [pairs(), thumbs()], ids=["pairs", "thumbs"])
@pytest.mark.parametrize(
    "method",
    ["full", "lora", "lora-fa", "lsp", "mesp", "mezo", "prge", "revffn", "slideformer"],
)
def test_a_resumed_run_has_the_same_bits(method: str, rows: Any, tmp_path: Path) -> None:
    settings = {
        "method": method,
        "checkpoint_every": 3,
        "eval_rows": rows[:6],
        "train.schedule": "constant",
    }
    run(rows, tmp_path / "whole", 6, **settings)
    run(rows, tmp_path / "parts", 3, **settings)
    before = (tmp_path / "parts" / FILE_NAME).read_bytes()
    run(rows, tmp_path / "parts", 6, resume=True, **settings)
    assert (tmp_path / "parts" / FILE_NAME).read_bytes() == before
    file = ADAPTER if (tmp_path / "whole" / ADAPTER).exists() else "model/model.safetensors"
    whole, parts = (sha256_file(tmp_path / part / file) for part in ("whole", "parts"))
    assert whole == parts


def test_likelihoods_of_one_token_answers_are_over_the_whole_vocabulary() -> None:
    """A classification's loss is over its label tokens; a preference's is not."""
    texts = tuple(Example((1, token), (-100, token)) for token in (2, 3))
    rows = RunRows(Dataset([Item(texts[0], texts, 0)]), None, 0)
    for name, answers in (("loss", (2, 3)), ("dpo", ())):
        config = RunConfig.load(
            None, {"model.source": "tiny:llama", "method.name": "prge", "train.objective": name}
        )
        assert with_answers(config.train, config.method, rows).answers == answers


def test_changed_rows_are_seen_when_a_run_goes_on(tmp_path: Path) -> None:
    run(pairs(), tmp_path / "run", 3, checkpoint_every=3)
    with pytest.raises(ondevice.OndeviceError):
        run(pairs()[::-1], tmp_path / "run", 6, resume=True)


def test_a_second_answer_that_is_the_first_one_is_left_out_with_its_line(tmp_path: Path) -> None:
    rows = pairs(8)
    rows[3]["rejected"] = rows[3]["chosen"]
    trained = run(write(tmp_path / "pairs.jsonl", rows), tmp_path / "run", 2)
    (problem,) = trained.problems
    assert (problem.line, problem.field) == (4, "rejected")


def test_what_cannot_be_learnt_from_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(DataError) as caught:
        run([row for row in thumbs() if row["label"]], out)
    assert caught.value.received == "12 rows, all rated up"
    for rows, settings in (
        (pairs(), {"objective": "kto"}),
        (thumbs(), {"objective": "dpo"}),
        (pairs(), {"train_on_prompt": True}),
        (pairs(), {"packing": True}),
        (pairs(), {"group_by_length": True}),
        (pairs(), {"objective": "accuracy", "method": "prge"}),
        (pairs(), {"objective": "dpo", "margin": 1.0}),
        (pairs(), {"loss": "answers"}),
    ):
        with pytest.raises(ConfigError):
            run(rows, out, **settings)
    assert not (out / "events.jsonl").exists()


@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["run", "dry run"])
def test_a_method_that_cannot_is_refused_with_those_that_can(
    dry: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capability = MethodSpec.capability

    def without(spec: Any, kind: Any) -> Any:
        if (spec.name, kind) == ("slideformer", LearnsPreferences):
            return None
        return capability(spec, kind)

    monkeypatch.setattr(MethodSpec, "capability", without)
    file = write(tmp_path / "pairs.jsonl", pairs(8))
    arguments = ["train", "tiny:llama", "--data", str(file), "--method", "slideformer", *dry]
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "run")])
    error = done.exception
    assert isinstance(error, ConfigError)
    name_methods(error)
    others = {"full", "lora", "lora-fa", "lsp", "mesp", "mezo", "prge", "revffn"}
    assert set(error.methods) == others
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["dpo", "grpo"])
def test_several_processes_learn_from_preferences_and_not_from_rewards(name: str) -> None:
    settings = {"model.source": "tiny:llama", "train.objective": name}
    if name == "grpo":
        settings["train.reward"] = "my_rewards:vowels"
    config = RunConfig.load(None, {"method.name": "slideformer", **settings})
    given = pairs(4) if name == "dpo" else [{"prompt": "a", "completion": "b"}] * 4
    rows = OpenedRows(config.data, take_rows(given))
    placement = replace(place(config.method, config.train, "auto"), world=2)
    if name == "dpo":
        _, said = with_objective(config.train, config.method, placement, rows)
        assert said == ("objective: dpo, beta 0.1",)
        return
    with pytest.raises(ConfigError) as caught:
        with_objective(config.train, config.method, placement, rows)
    assert caught.value.message == "method slideformer does not learn from rewards here"


@pytest.mark.parametrize("method", ["slideformer", "lsp", "revffn"])
@pytest.mark.parametrize("rows", [pairs(), thumbs()], ids=["pairs", "thumbs"])
def test_methods_of_all_parameters_learn_from_preferences(
    method: str, rows: Any, tmp_path: Path
) -> None:
    trained = run(rows, tmp_path / "run", 12, method=method, learning_rate=1e-3, eval_rows=rows[:8])
    assert trained.result.evaluation.preferences["margin"] > 0.05
    assert steps_of(tmp_path / "run")[-1].loss < steps_of(tmp_path / "run")[0].loss


@pytest.mark.parametrize("made", [pairs, thumbs])
def test_a_dry_run_refuses_what_the_run_refuses(made: Any, tmp_path: Path) -> None:
    rows = made(8)
    if made is thumbs:
        rows = [row for row in rows if not row["label"]]
    else:
        rows = [{**row, "rejected": row["chosen"]} for row in rows]
    file = write(tmp_path / "rows.jsonl", rows)
    arguments = ["train", "tiny:llama", "--data", str(file), "--method", "lora"]
    messages = []
    for dry in ([], ["--dry-run"]):
        out = ["--out", str(tmp_path / "run")]
        done = CliRunner().invoke(app, [*arguments, *dry, *out])
        assert isinstance(done.exception, DataError)
        messages.append(str(done.exception))
    assert messages[0] == messages[1]
    where = {pairs: "rows.jsonl:1: 'rejected': is the same", thumbs: "rows.jsonl:1: 'label', "}
    assert where[made] in messages[0]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["run", "dry run"])
def test_pairs_that_all_lack_a_side_are_named_with_what_to_do(
    dry: list[str], tmp_path: Path
) -> None:
    for side, other in (("chosen", "rejected"), ("rejected", "chosen")):
        rows = [{"prompt": row["prompt"], side: row[side]} for row in pairs(4)]
        file = write(tmp_path / "pairs.jsonl", rows)
        arguments = ["train", "tiny:llama", "--data", str(file), "--method", "lora", *dry]
        done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "run")])
        assert isinstance(done.exception, DataError)
        assert done.exception.message == f"{file}: '{other}' is missing in every row"
        assert f"--column {other}=COLUMN" in done.exception.hint
    assert not (tmp_path / "run").exists()


def test_the_command_names_the_first_row_that_it_left_out(tmp_path: Path) -> None:
    rows = pairs(8)
    del rows[2]["rejected"]
    file = write(tmp_path / "pairs.jsonl", rows)
    arguments = ["train", "tiny:llama", "--data", str(file), "--method", "lora", "--steps", "1"]
    done = CliRunner().invoke(app, [*arguments, "--quiet", "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    assert f"{file}:3: 'rejected': is missing; `ondevice data FILE`" in done.output


def test_ratings_of_one_kind_are_refused_with_their_file_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    liked = [row for row in thumbs(8) if row["label"]]
    write(tmp_path / "rows" / "first.jsonl", liked)
    write(tmp_path / "rows" / "second.jsonl", liked)
    with pytest.raises(DataError) as caught:
        run(tmp_path / "rows", tmp_path / "run")
    assert caught.value.message.startswith("first.jsonl:1: 'label', 'thumbs' or 'liked': ")
    assert "rated down" in caught.value.hint


def test_a_pair_without_a_rejected_side_is_left_out_with_its_line(tmp_path: Path) -> None:
    rows = pairs(8)
    del rows[2]["rejected"]
    rows[5]["rejected"] = " "
    trained = run(write(tmp_path / "pairs.jsonl", rows), tmp_path / "run", 2)
    found = [(problem.line, problem.field) for problem in trained.problems]
    assert found == [(3, "rejected"), (6, "rejected")]


def test_likelihoods_of_another_model_are_never_taken(tmp_path: Path) -> None:
    run(pairs(), tmp_path / "run", 3, checkpoint_every=3)
    file = tmp_path / "run" / FILE_NAME
    first = file.read_bytes()
    file.write_text(json.dumps(json.loads(first) | {"model": "0" * 64}), encoding="utf-8")
    with pytest.raises(CheckpointError) as caught:
        run(pairs(), tmp_path / "run", 6, resume=True, checkpoint_every=3)
    assert "of another model" in caught.value.message and "delete the file" in caught.value.hint
    rows = write(tmp_path / "pairs.jsonl", pairs())
    command = ["train", "tiny:llama", "--data", str(rows), "--method", "lora", "--resume"]
    command += ["--batch-size", "4", "--lr", "0.005", "--out", str(tmp_path / "run")]
    for dry in ([], ["--dry-run"]):
        done = CliRunner().invoke(app, [*command, *dry])
        assert isinstance(done.exception, CheckpointError)
        assert done.exception.message == caught.value.message
    file.unlink()
    run(pairs(), tmp_path / "run", 6, resume=True, checkpoint_every=3)
    assert file.read_bytes() == first
    # A new run in the same folder, in other numbers, has others.
    run(pairs(), tmp_path / "run", 3, overwrite=True, dtype="bfloat16")
    assert json.loads(file.read_bytes())["log_likelihoods"] != json.loads(first)["log_likelihoods"]


def test_a_stop_during_the_first_pass_stores_nothing(tmp_path: Path) -> None:
    session = open_tiny("lora")
    rows = as_rows(take_rows(pairs(4)), None, {})
    dataset = encode(rows, tiny_model("llama").tokenizer, max_length_tokens=200)
    learns = Preferences(objective("dpo"), dataset, None, 0, {})
    learns.begin(session, tmp_path, should_stop=lambda: True)
    assert not (tmp_path / FILE_NAME).exists()
    learns.begin(session, tmp_path)
    assert (tmp_path / FILE_NAME).exists()


def test_only_what_follows_the_prompt_is_judged() -> None:
    """Earlier answers are in both texts: they would count for means, and for a rating."""
    before = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
    ]
    tokenizer = tiny_model("llama").tokenizer

    def labelled(row: dict[str, Any]) -> list[str]:
        rows = as_rows(take_rows([row]), None, {})
        (item,) = encode(rows, tokenizer, max_length_tokens=200).items
        return [
            tokenizer.decode([token for token in text.labels if token >= 0])
            for text in item.candidates or (item.example,)
        ]

    one, other = ({"role": "assistant", "content": text} for text in ("See you", "No"))
    ends = ["See you<|im_end|>", "No<|im_end|>"]
    assert labelled({"prompt": before, "chosen": [one], "rejected": [other]}) == ends
    assert labelled({"chosen": [*before, one], "rejected": [*before, other]}) == ends
    rated = {"prompt": before, "completion": [one], "label": True}
    assert labelled(rated) == ends[:1]


def test_the_plan_counts_both_texts_of_a_row(tmp_path: Path) -> None:
    file = write(tmp_path / "pairs.jsonl", pairs(8))
    plan = ondevice.plan("tiny:llama", file, method="lora", batch_size=3)
    assert plan.request.batch_size == 6
    file = write(tmp_path / "thumbs.jsonl", thumbs(8))
    plan = ondevice.plan("tiny:llama", file, method="lora", batch_size=3)
    assert plan.request.batch_size == 3


def test_another_rows_answer_stands_after_this_rows_prompt() -> None:
    one = Item(Example((1, 2, 3, 4), (-100, -100, 3, 4)), prompt_tokens=2)
    other = Item(Example((7, 8, 9, 10, 11), (-100, 8, 9, 10, 11)), prompt_tokens=1)
    assert mismatched(one, other, 9) == Example((1, 2, 8, 9, 10, 11), (-100, -100, 8, 9, 10, 11))
    assert mismatched(one, other, 5) == Example((2, 8, 9, 10, 11), (-100, 8, 9, 10, 11))
    assert mismatched(one, other, 3) == Example((2, 8, 9), (-100, 8, 9))
