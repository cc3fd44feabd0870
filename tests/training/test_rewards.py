"""Runs that learn from rewards of the answers that the model writes itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import ondevice
from examples.reward_tags import number_in_tags
from ondevice.api.runfile import RunConfig
from ondevice.artifact.files import sha256_file
from ondevice.cli.app import app
from ondevice.core.errors import ConfigError, DataError, TrainingError
from ondevice.training.events import read_log
from ondevice.training.policy import seed_of

ADAPTER = "adapter/adapter_model.safetensors"
ROWS = [{"prompt": f"Say {number}:", "completion": f" {number}"} for number in range(24)]
FUNCTIONS = """
import math

calls = []

def vowels(prompt, answer, row):
    calls.append((prompt, answer, row))
    return sum(letter in "aeiou" for letter in answer) / 10

def short(prompt, answer, row):
    return -len(answer) / 10

def broken(prompt, answer, row):
    raise KeyError("number")

def odd(prompt, answer, row):
    return math.nan if row["line"] % 2 else 0.0

def text(prompt, answer, row):
    return "good"

word = "not a function"
"""


@pytest.fixture(autouse=True)
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)


def run(out: Path, steps: int = 4, rows: Any = ROWS, **settings: Any) -> Any:
    values: dict[str, Any] = {
        "method": "lora",
        "learning_rate": 2e-2,
        "batch_size": 3,
        "objective": "grpo",
        "reward": "my_rewards:vowels",
        "group_size": 4,
        "answer_tokens": 8,
        **settings,
    }
    return ondevice.train("tiny:llama", rows, steps=steps, out=out, **values)


def events_of(out: Path, kind: str = "step") -> list[Any]:
    entries = read_log(out / "events.jsonl").entries
    return [entry.event for entry in entries if entry.event.kind == kind]


@pytest.mark.parametrize("method", ["lora", "mesp", "full"])
def test_rewards_rise(method: str, tmp_path: Path) -> None:
    """A byte-level model with random weights learns to write vowels, or shorter answers."""
    rate = {"full": 2e-3}.get(method, 2e-2)
    beta = 0.0 if method == "full" else None
    out = tmp_path / "run"
    trained = run(out, 30, method=method, learning_rate=rate, beta=beta, eval_rows=ROWS[:6])
    rewards = [event.preferences["reward"] for event in events_of(out)]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.05, rewards
    evaluation = trained.result.evaluation
    assert evaluation.metric == "reward" and evaluation.rows == 6
    assert evaluation.metric_value == -evaluation.loss > 0
    figures = events_of(out)[-1].preferences
    assert {"reward", "reward_deviation", "clipped", "answer_tokens"} <= set(figures)
    assert ("kl" in figures) == (method != "full")
    if method != "full":
        assert figures["kl"] > 0
    assert events_of(out)[-1].tokens >= 12 * 8


def test_a_reward_gets_the_prompt_the_answer_and_the_row(tmp_path: Path) -> None:
    run(tmp_path / "run", 1)
    calls = sys.modules["my_rewards"].calls
    assert len(calls) == 12
    groups = {call[0] for call in calls}
    assert len(groups) == 3  # four answers of each prompt
    prompt, answer, row = calls[0]
    assert prompt.startswith("Say ") and isinstance(answer, str)
    own = ROWS[row["line"] - 1]
    assert row["answers"] == [own["completion"].strip()] and row["completion"] == own["completion"]


def test_columns_of_a_file_reach_the_reward_of_either_part(tmp_path: Path) -> None:
    for name in ("train", "valid"):
        rows = [row | {"part": name, "unit": number} for number, row in enumerate(ROWS)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run(tmp_path / "run", 1, rows=tmp_path / "train.jsonl", eval_rows=tmp_path / "valid.jsonl")
    got = [call[2] for call in sys.modules["my_rewards"].calls]
    assert [row["part"] for row in got] == ["train"] * 12 + ["valid"] * len(ROWS)
    assert all(row["unit"] == row["line"] - 1 for row in got)


@pytest.mark.parametrize("settings", [{}, {"method": "mesp", "updates": 2}])
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    run(tmp_path / "whole", 6, checkpoint_every=3, **settings)
    run(tmp_path / "cut", 3, checkpoint_every=3, **settings)
    run(tmp_path / "cut", 6, checkpoint_every=3, resume=True, **settings)
    assert sha256_file(tmp_path / "whole" / ADAPTER) == sha256_file(tmp_path / "cut" / ADAPTER)
    whole, cut = (events_of(tmp_path / name) for name in ("whole", "cut"))
    assert [one.preferences for one in whole] == [one.preferences for one in cut]
    run(tmp_path / "other", 6, checkpoint_every=3, seed=1, **settings)
    assert sha256_file(tmp_path / "whole" / ADAPTER) != sha256_file(tmp_path / "other" / ADAPTER)


def test_seeds_of_answers_differ() -> None:
    seeds = [seed_of(0, step, number) for step in range(20) for number in range(32)]
    assert len(set(seeds)) == len(seeds) and max(seeds) < 2**63


@pytest.mark.parametrize(
    ("reward", "received"),
    [("broken", "KeyError: 'number'"), ("odd", "nan for the answer")],
)
def test_a_reward_that_fails_is_named_with_its_row(
    reward: str, received: str, tmp_path: Path
) -> None:
    with pytest.raises(TrainingError) as caught:
        run(tmp_path / "run", reward=f"my_rewards:{reward}")
    error = caught.value
    assert f"my_rewards:{reward}" in error.message and "line " in error.message
    assert received in str(error.received) and "--resume" in str(error.hint)
    assert events_of(tmp_path / "run", "error")


PROGRAMS = [
    ("print('nan')\n" * 12, ":12 is not a finite number", "'nan' for the answer"),
    ("print('good')\n" * 12, ":12 is not a finite number", "'good' for the answer"),
    ("print(1)\n", "from the answer to {file}:12 on", "'1\\n'"),
    ("import sys\nsys.exit(3)\n", "from the answer to {file}:12 on", "exit code 3"),
]


@pytest.mark.parametrize(("text", "words", "received"), PROGRAMS)
def test_a_program_that_fails_is_named_with_file_and_line(
    text: str, words: str, received: str, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(text)
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    command = f"{sys.executable} {program}"
    with pytest.raises(TrainingError) as caught:
        run(tmp_path / "run", 1, rows=file, reward=None, objective_command=command)
    assert words.format(file=file) in caught.value.message
    assert received in str(caught.value.received) and caught.value.hint


@pytest.mark.parametrize("reward", ["broken", "odd", "text"])
def test_a_reward_that_fails_on_a_file_is_named_with_file_and_line(
    reward: str, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    rows = ["--data", str(file), "--method", "lora", "--objective", "grpo", "--steps", "1"]
    more = ["--reward", f"my_rewards:{reward}", "--group-size", "2", "--quiet", "--out", "run"]
    done = CliRunner().invoke(app, ["train", "tiny:llama", *rows, *more])
    assert isinstance(done.exception, TrainingError)
    assert f"answer to {file}:" in done.exception.message
    assert not list(Path("run").glob("checkpoint-*"))


def test_a_program_gives_rewards_too(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import json, sys\n"
        "for line in sys.stdin:\n"
        "    row = json.loads(line)\n"
        "    print(sum(letter in 'aeiou' for letter in row['answer']) / 10)\n"
    )
    command = f"{sys.executable} {program}"
    run(tmp_path / "program", 2, reward=None, objective_command=command)
    run(tmp_path / "function", 2)
    files = [sha256_file(tmp_path / name / ADAPTER) for name in ("program", "function")]
    assert files[0] == files[1]
    program.write_text("print('nan')\n" * 12)
    with pytest.raises(TrainingError, match="is not a finite number"):
        run(tmp_path / "nan", 1, reward=None, objective_command=command)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"reward": "no_such_module:function"}, "cannot be imported"),
    ({"reward": "my_rewards:absent"}, "cannot be imported"),
    ({"reward": "my_rewards:word"}, "is not a function"),
    ({"reward": "my_rewards"}, "module:function"),
    ({"reward": None}, "give one"),
    ({"objective_command": "cat"}, "give one"),
    ({"reward": None, "objective_command": "no-such-program x"}, "names no program"),
    ({"method": "full"}, "compares with the model before training"),
    ({"method": "prge"}, "does not learn from rewards"),
    ({"group_size": 1}, "group_size"),
    ({"packing": True}, "does not go with rewards"),
    ({"group_by_length": True}, "does not go with rewards"),
    ({"objective": "dpo", "reward": None, "beta": 0.0}, "beta is above 0"),
    ({"answer_tokens": 4096}, "longer than the model takes"),
]


@pytest.mark.parametrize(("settings", "words"), WRONG)
def test_what_a_run_refuses_its_dry_run_refuses(
    settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    with pytest.raises((ConfigError, DataError)) as caught:
        run(tmp_path / "run", **settings)
    assert words in str(caught.value)
    values: dict[str, Any] = {
        "objective": "grpo", "reward": "my_rewards:vowels", "group_size": 4, "answer_tokens": 8,
    }  # fmt: skip
    values |= settings
    method = values.pop("method", "lora")
    arguments = ["train", "tiny:llama", "--data", str(rows), "--method", method, "--out", "dry"]
    for name, value in values.items():
        section = "data" if name in ("packing", "group_by_length") else "train"
        if value is not None:
            arguments += ["--set", f"{section}.{name}={value}"]
    done = CliRunner().invoke(app, [*arguments, "--dry-run"])
    assert done.exit_code != 0 and not Path("dry").exists()
    said = " ".join((done.output + str(done.exception)).split())
    assert words in said, said
    if "answer_tokens" in settings:
        assert f"{rows}:1: " in said


def test_rows_without_a_prompt_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not fit the rows"):
        run(tmp_path / "run", rows=[{"text": "a b c"}] * 4)


def test_a_plan_counts_every_answer(tmp_path: Path) -> None:
    values = {
        "model.source": "tiny:llama", "method.name": "lora", "train.batch_size": 3,
        "data.max_length_tokens": 64, "train.out": str(tmp_path / "run"),
    }  # fmt: skip
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    values["data.path"] = str(rows)
    grpo = {"train.objective": "grpo", "train.reward": "my_rewards:vowels", "train.group_size": 8}
    one, all_answers = (
        ondevice.plan(RunConfig.load(None, given)).total_bytes
        for given in (values | {"train.batch_size": 24}, values | grpo)
    )
    assert one == all_answers


@pytest.mark.parametrize("shares", [True, False])
def test_answers_to_one_prompt_are_those_of_prompts_read_one_by_one(
    shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt is read once for its group, also by a model whose texts cannot share a pass."""
    from ondevice.generation import batch as batches
    from ondevice.generation.batch import Batch, Row
    from ondevice.generation.sample import PlainSampler
    from ondevice.models import load_model

    loaded = load_model("tiny:llama")
    assert batches.can_share(loaded)
    monkeypatch.setattr(batches, "can_share", lambda loaded: shares)

    def rows() -> list[Row]:
        return [Row([5, 6, 7, 8], PlainSampler(1.0, seed), 2 + seed) for seed in range(4)]

    alone = rows()
    for row in alone:
        batch = Batch(loaded)
        batch.add(row)
        while len(batch):
            batch.step()
    first, *others = rows()
    first.others.extend(others)
    together = Batch(loaded)
    together.add(first)
    while len(together):
        together.step()
    assert [row.drawn for row in alone] == [row.drawn for row in (first, *others)]
    assert [len(row.drawn) for row in alone] == [2, 3, 4, 5]


def test_plain_draws_have_the_models_frequencies() -> None:
    import torch

    from ondevice.generation.sample import PlainSampler

    logits = torch.log(torch.tensor([0.5, 0.0, 0.3, 0.2]))
    sampler = PlainSampler(1.0)
    counts = np.bincount([sampler.next(logits).id for _ in range(4000)], minlength=4) / 4000
    np.testing.assert_allclose(counts, [0.5, 0, 0.3, 0.2], atol=0.03)


@pytest.mark.parametrize(
    ("answer", "parts"),
    [
        ("42", 0),
        ("a <n>", 1),
        ("<n></n>", 2),
        ("<n>4", 3),
        ("<n>42</n> or so", 4),
        ("<n>42</n>", 5),
    ],
)
def test_the_example_s_reward_counts_a_part_after_those_in_front_of_it(
    answer: str, parts: int
) -> None:
    assert number_in_tags("", answer, {}) == pytest.approx(parts / 5)
