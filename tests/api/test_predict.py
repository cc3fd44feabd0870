"""Predictions follow the task that was trained, and agree with an evaluation."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

import ondevice
from ondevice.core.errors import ArtifactError, DataError
from ondevice.data.tasks.scoring import softmax
from tests.cli.command import write_rows

ROWS = [
    {"Ticket": f"{'ab'[i % 2]} number {i}", "Kind": ["Billing", "login", "other"][i % 3]}
    for i in range(12)
]
SETTINGS: dict[str, Any] = {
    "model.source": "tiny:llama",
    "method.name": "lora",
    "train.steps": 4,
    "train.batch_size": 2,
    "data.columns": {"text": "Ticket", "label": "Kind"},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run on tickets with three labels."""
    out = tmp_path_factory.mktemp("a run") / "tickets"
    ondevice.train({**SETTINGS, "train.out": str(out)}, rows=ROWS, eval_rows=ROWS)
    return out


def test_labels_are_those_that_an_evaluation_picks(run: Path, tmp_path: Path):
    data = write_rows(tmp_path / "rows.jsonl", ROWS)
    predicted = ondevice.predict(run, data)
    evaluated = ondevice.evaluate(run, data)
    labels = predicted.labels
    assert sorted(labels) == ["Billing", "login", "other"]
    for row, other in zip(predicted, evaluated.predictions, strict=True):
        assert row.prediction == labels[other.predicted]
        assert list(row.probabilities.values()) == pytest.approx(softmax(other.scores), abs=1e-5)
        assert math.fsum(row.probabilities.values()) == pytest.approx(1)
    assert predicted.accuracy == evaluated.accuracy


def test_labels_that_were_not_trained_are_counted(run: Path):
    """They cannot be right: no candidate is one of them, and the accuracy leaves them out."""
    rows = [dict(row) for row in ROWS]
    for number, label in ((1, "refund"), (2, "refund"), (5, "it's spam"), (7, "")):
        rows[number]["Kind"] = label
    predicted = ondevice.predict(run, rows)
    assert predicted.unseen_labels == {"refund": 2, "it's spam": 1}
    assert predicted.compared == 8 and predicted.summary()["unseen_labels"] == {
        "refund": 2,
        "it's spam": 1,
    }
    assert "3 rows have labels that were not trained" in repr(predicted)
    only = ondevice.predict(run, [{**row, "Kind": "refund"} for row in ROWS])
    assert (only.unseen_labels, only.accuracy) == ({"refund": 12}, None)
    assert ondevice.predict(run, ROWS).unseen_labels == {}
    assert ondevice.predict(run, [{"Ticket": "a"}]).unseen_labels == {}


def test_rows_need_no_labels_and_bad_rows_keep_their_place(run: Path):
    rows = [{"Ticket": row["Ticket"]} for row in ROWS]
    rows[3] = {"Ticket": " "}
    predicted = ondevice.predict(run, rows)
    assert [row.prediction is None for row in predicted].index(True) == 3
    assert predicted.summary()["not_predicted"] == [{"row": 4, "reason": "is empty"}]
    assert predicted.accuracy is None
    whole = ondevice.predict(run, ROWS)
    assert [a == b for a, b in zip(predicted, whole)].count(False) == 1


def test_a_file_without_the_columns_is_refused(run: Path, tmp_path: Path):
    data = write_rows(tmp_path / "rows.jsonl", [{"Body": "a"}])
    with pytest.raises(DataError) as caught:
        ondevice.predict(run, data)
    assert re.search("lacks the columns", str(caught.value))
    assert (caught.value.expected, caught.value.received) == ("Ticket", "Body")
    renamed = ondevice.predict(run, data, columns={"text": "Body"})
    assert renamed[0].prediction == ondevice.predict(run, [{"Ticket": "a"}])[0].prediction


def test_a_folder_without_a_task_is_refused(tmp_path: Path):
    with pytest.raises(ArtifactError) as caught:
        ondevice.predict(tmp_path, ROWS)
    assert re.search("nothing trained in", str(caught.value))
    with pytest.raises(ArtifactError) as caught:
        ondevice.predict("tiny:llama", ROWS)
    assert re.search("does not record", str(caught.value))
    rows = [{"sentence": "nice"}]
    assert ondevice.predict("tiny:llama", rows, task="sst2")[0].prediction in ("great", "terrible")


def test_an_adapter_of_another_base_model_is_refused(run: Path):
    with pytest.raises(ArtifactError) as caught:
        ondevice.predict(run, ROWS, model="tiny:qwen2")
    assert re.search("trained on another model", str(caught.value))
    assert "SHA-256" in str(caught.value) and "--model tiny:llama" in str(caught.value)
