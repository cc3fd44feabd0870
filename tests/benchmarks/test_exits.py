"""The benchmarks of the exits, on a tiny model and few rows: each reader gives the labels of `eval`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.exits import by_heart, labels, rounding
from ondevice.cli.app import app
from ondevice.data.tasks.prompts import Answers
from ondevice.exits.ollama import template_of
from ondevice.models import save_tiny
from ondevice.models.tiny import CHAT_TEMPLATE
from tests.exits.llama_cpp import MESSAGES
from tests.exits.test_ollama import DEFAULT_SYSTEM, Fake


def here(*words: object) -> dict[str, Any]:
    """Run the command in this process, which has imported its packages."""
    done = CliRunner().invoke(app, [*map(str, words), "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout.strip().splitlines()[-1])


def test_labels_of_few_rows_agree_in_every_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xllamacpp")
    monkeypatch.setattr(labels, "ondevice", here)
    model = save_tiny(tmp_path / "model", "llama", vocab=288)
    args = argparse.Namespace(model=str(model), rows=6, steps=2)
    work = labels.Work(tmp_path / "work", "tickets", args)
    rows = labels.compare(work, ["predict", "transformers", "llama.cpp"])
    assert [row["rows"] for row in rows] == [6] * 4
    assert [row["differ"] for row in rows] == [0] * 4, rows


@pytest.mark.parametrize(
    ("task", "base", "exits"),
    [
        ("sst2", "q4_0", "adapter,mlx"),
        ("sst2", "mlx_4bit", "adapter,mlx-pair"),
        ("calls", "q4_0", "pair"),
    ],
)
def test_what_rounding_leaves_is_asked_of_every_exit(
    task: str, base: str, exits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xllamacpp")
    pytest.importorskip("mlx_lm")
    monkeypatch.setattr(rounding, "ondevice", here)
    data = tmp_path / "data" / "sst2"
    data.mkdir(parents=True)
    for name in ("train", "valid"):
        lines = [
            json.dumps({"sentence": f"{word} {name}", "label": str(at % 2)})
            for at, word in enumerate(("dull", "fine", "poor", "great"))
        ]
        (data / f"{name}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    model = save_tiny(tmp_path / "model", "llama", vocab=288, max_positions=256)
    args = argparse.Namespace(
        model=str(model), data=data.parent, rows=3, steps=3, learning_rate=0.02, seeds="0",
        bases=base, exits=exits,
    )  # fmt: skip
    rows = rounding.compare(tmp_path / "work", task, args)
    assert [row["base"] for row in rows] == [base] * len(exits.split(","))
    assert all(0 <= row["accuracy"] <= 1 for row in rows if row["seeds"])
    assert rows[0]["seeds"] == 1 and abs(rows[0]["loss"]) <= 100
    float_run = rounding.Work(tmp_path / "work", task, "float32", 0, args)
    assert rounding.accuracy(float_run, "adapter") is not None


def test_a_label_that_differs_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = argparse.Namespace(model="tiny:llama", rows=6, steps=1)
    work = labels.Work(tmp_path, "tickets", args)
    monkeypatch.setattr(work, "make", lambda: None)
    wanted = ["a", "b", "a", "b", "a", "b"]
    monkeypatch.setattr(labels, "by_eval", lambda work: (wanted, [1.0, 0.5, 2.0, 3.0, 4.0, 5]))
    monkeypatch.setattr(labels.Work, "record", property(lambda self: _Answers()))
    monkeypatch.setitem(labels.EXITS, "predict", lambda work: ["a", "a", "b", "b", "a", "b"])
    row = labels.compare(work, ["predict"])[1]
    assert (row["differ"], row["smallest_margin"]) == (2, 0.5)


class _Answers:
    def answers(self, records: list[object]) -> Answers:
        return Answers({number: {"a"} for number in range(1, len(records) + 1)}, {})


@pytest.mark.parametrize("text", [CHAT_TEMPLATE, DEFAULT_SYSTEM])
def test_a_modelfiles_template_is_rendered_as_the_models_own(text: str) -> None:
    tokenizer = Fake(text)
    found = template_of(tokenizer)
    assert found is not None
    for messages in (MESSAGES, [{"role": "system", "content": "Be brief"}, *MESSAGES]):
        expected = tokenizer.apply_chat_template(messages, False, True)
        assert by_heart.rendered(found.go(), messages) == expected


LINEARS = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"


@pytest.mark.parametrize("name", [pytest.param("completion", marks=pytest.mark.nightly), "chat"])
def test_rows_learned_by_heart_come_back_through_every_reader(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer, its framing and its end: a tiny model that has seen nothing else."""
    pytest.importorskip("xllamacpp")
    monkeypatch.setattr(by_heart, "ondevice", here)
    sizes = {"hidden": 128, "intermediate": 256, "heads": 4, "kv_heads": 2, "head_dim": 32}
    model = save_tiny(tmp_path / "model", "llama", vocab=288, layers=2, **sizes)
    work = by_heart.Work(tmp_path, name, argparse.Namespace(model=str(model), rows=4))
    here("train", model, "--data", work.path, "--out", work.run, "--method", "lora", "--rank", 16,
         "--target-modules", LINEARS, "--steps", 200, "--learning-rate", 0.01, "--schedule",
         "cosine", "--batch-size", 4, "--quiet")  # fmt: skip
    for row in by_heart.ask(work, ["predict", "chat", "ollama"]):
        assert row["right"] == row["rows"] == 4, row
