"""An artifact carries how its rows become prompts: a task, a template of one's own, or the rows' labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ondevice.api import export as artifacts
from ondevice.api.runfile import RunConfig
from ondevice.artifact.manifest import read_manifest
from ondevice.data.tasks.trained import TASK_NAME, TrainedTask, read_trained_task
from tests.programs import model

TEMPLATE = """# the desk's tickets
prompt: |
  Ticket: {body}
  Team:
fields: {body: [Text, text]}
label: Kind
candidates: {0: Billing, 1: "Tech: \\u2028\\x85nical", 2: Größe 🐈}
"""


def config(**data: Any) -> RunConfig:
    settings = {
        "model.source": str(model("one layer")),
        "method.name": "mesp",
        "export.target": "android-cpu",
        "export.lengths_tokens": [24],
        "export.check_steps": 1,
        **{f"data.{key}": value for key, value in data.items()},
    }
    return RunConfig.load(None, settings)


def recorded(**data: Any) -> TrainedTask | None:
    return artifacts.export_jobs(config(**data))[0].trained


def test_the_artifact_of_a_custom_template_renders_its_rows(tmp_path: Path) -> None:
    pytest.importorskip("executorch.exir")
    (tmp_path / "own.yaml").write_text(TEMPLATE, encoding="utf-8")
    settings = config(task=str(tmp_path / "own.yaml"))
    report = artifacts.export(settings, tmp_path / "artifact")
    (tmp_path / "own.yaml").unlink()
    manifest = read_manifest(report.path)
    record = read_trained_task(report.path)
    assert TASK_NAME in manifest.files
    assert record is not None and record.base_model.sha256 == manifest.model.sha256
    assert record.template is not None and json.loads(record.template)["label"] == "Kind"
    task = record.found_task()
    assert task is not None and task.own is not None
    rendered = task.own(task, {"Text": "my card", "Kind": "1"})
    assert rendered.pairs[1] == ("Ticket: my card\nTeam:\n", "Tech: \u2028\x85nical")
    assert rendered.gold == 1


def test_the_labels_of_the_rows_travel_in_the_candidates_order(tmp_path: Path) -> None:
    rows = tmp_path / "tickets.csv"
    rows.write_text("Text;Label\nso;billing\nno;Account\nso;billing\n", encoding="utf-8")
    record = recorded(path=rows)
    assert record is not None and record.format == "classification"
    assert list(record.labels.values()) == ["Account", "billing"]


def test_a_streamed_file_gives_the_labels_of_its_first_rows(tmp_path: Path) -> None:
    rows = tmp_path / "tickets.csv"
    rows.write_text("text,label\nso,billing\nno,account\n", encoding="utf-8")
    record = recorded(path=rows, streaming=True)
    assert record is not None and list(record.labels.values()) == ["account", "billing"]


def test_a_task_needs_no_rows_and_no_task_leaves_no_record() -> None:
    record = recorded(task="SST-2")
    assert record is not None
    assert (record.task, record.format, record.max_length_tokens) == ("sst2", "classification", 24)
    assert recorded() is None
