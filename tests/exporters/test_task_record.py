"""An artifact carries how its rows become prompts: a task, a template of one's own, or the rows' labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ondevice.api import export as artifacts
from ondevice.api.predict import predict
from ondevice.api.runfile import RunConfig
from ondevice.api.train import run_artifact
from ondevice.api.trained_chat import TrainedChat
from ondevice.artifact.manifest import read_manifest
from ondevice.core.errors import DataError
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


def config(method: str = "mesp", target: str = "android-cpu", **data: Any) -> RunConfig:
    settings = {
        "model.source": str(model("one layer")),
        "method.name": method,
        "export.target": target,
        "export.lengths_tokens": [24],
        "export.check_steps": 1,
        **{f"data.{key}": value for key, value in data.items()},
    }
    return RunConfig.load(None, settings)


def recorded(**data: Any) -> TrainedTask | None:
    return artifacts.export_jobs(config(**data))[0].trained


def test_the_artifact_of_a_custom_template_renders_its_rows(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(TEMPLATE, encoding="utf-8")
    settings = config(target="cuda-server", task=str(tmp_path / "own.yaml"))
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


@pytest.mark.parametrize(
    ("method", "target"),
    [
        pytest.param("prge", "android-cpu", marks=pytest.mark.nightly),
        ("mesp", "cuda-server"),
    ],
)
def test_run_predict_and_chat_follow_the_template_of_the_artifact(
    method: str, target: str, tmp_path: Path
) -> None:
    """Nobody names the template again, and its file is gone."""
    if target == "android-cpu":
        pytest.importorskip("executorch.exir")
    (tmp_path / "own.yaml").write_text(TEMPLATE, encoding="utf-8")
    artifact = artifacts.export(
        config(method, target, task=str(tmp_path / "own.yaml")), tmp_path / "artifact"
    ).path
    (tmp_path / "own.yaml").unlink()
    rows = tmp_path / "rows.csv"
    rows.write_text("Text;Kind\nmy card;1\nmy bill;0\n", encoding="utf-8")
    settings = {"data.path": str(rows), "train.steps": 1, "train.out": str(tmp_path / "run")}
    trained = run_artifact(artifact, artifacts.run_config(artifact, None, settings))
    assert trained.adapter is not None
    record = read_trained_task(artifact)
    written = read_trained_task(trained.adapter)
    assert record is not None and written is not None
    assert (written.template, written.format) == (record.template, "classification")
    assert written.prompt == "Ticket: {Text}\nTeam:\n"
    labels = ("Billing", "Tech: \u2028\x85nical", "Größe 🐈")
    for adapter in (None, trained.adapter):
        found = predict(artifact, [{"Text": "my card"}], adapter=adapter)
        assert tuple(found[0].probabilities) == labels
        (reply,) = TrainedChat(str(artifact), adapter).stream(
            [{"role": "user", "content": "my card"}]
        )
        assert reply.startswith(str(found[0].prediction))

    with pytest.raises(DataError):
        rows.write_text("Body;Kind\nmy card;1\n", encoding="utf-8")
        run_artifact(artifact, artifacts.run_config(artifact, None, settings), overwrite=True)
