"""A job's worker chooses what the request leaves open, once: paused and resumed, the job keeps it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("fastapi", reason="the serve extra is not installed")

from ondevice.core.errors import DoesNotFitError
from ondevice.core.process import python_command
from ondevice.server import jobs, supervisor, uploads, worker, worker_process
from ondevice.server.store import Store
from ondevice.training import choices
from ondevice.training.events import FILE_NAME, read_log, read_start
from tests.api.flipped import flip
from tests.cli.command import classes


@pytest.fixture
def dataset(store: Store, tmp_path: Path) -> str:
    data = classes(tmp_path / "rows.jsonl").read_bytes()
    request = uploads.UploadRequest(kind="dataset", name="rows.jsonl", bytes=len(data))
    name = uploads.create(store, request)["id"]
    uploads.write(store, name, 0, data)
    found = {"problems": [], "rows": 12, "format": "classification"}
    return uploads.finish(store, name, lambda *_, **__: found)["id"]


def written(store: Store, dataset: str, folder: Path, steps: int) -> None:
    """Write `job.json` as the daemon does."""
    config = {"train": {"steps": steps, "batch_size": 2}, "method": {"name": "slideformer"}}
    spec = jobs.JobSpec(model="tiny:llama", dataset=dataset, config=config)
    run = jobs.resolve(spec, store, folder / worker.RUN)
    values = supervisor.job_values(SimpleNamespace(attempt=steps), spec, run, store)  # type: ignore[arg-type]
    (folder / worker.JOB).write_text(json.dumps(values))


def attempt(store: Store, dataset: str, folder: Path, steps: int) -> int:
    """Do what the daemon does with a job: write `job.json`, and run its worker on it."""
    written(store, dataset, folder, steps)
    return worker.run(folder)


def test_a_jobs_choices_are_its_first_attempts(
    store: Store, dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "has_bfloat16_units", choices.has_bfloat16_units)
    from ondevice.methods.slideformer.config import SlideformerConfig

    monkeypatch.setattr(SlideformerConfig, "fixed", SlideformerConfig.fixed)
    flip(1)
    folder = tmp_path / "job"
    folder.mkdir()
    heads: list[Any] = []
    for steps in (1, 2, 3):
        assert attempt(store, dataset, folder, steps) == 0
        heads.append(read_start(folder / worker.RUN / FILE_NAME).decided)
    assert heads[0] == heads[1] == heads[2]
    assert heads[0]["method.compute"] == "float32", "a job has the precision of its processor"
    kinds = [entry.event.kind for entry in read_log(folder / worker.RUN / FILE_NAME).entries]
    assert (kinds.count("step"), kinds.count("resume")) == (3, 2)


def test_a_worker_that_the_system_refuses_memory_ends_with_a_sentence(
    store: Store, dataset: str, tmp_path: Path
) -> None:
    written(store, dataset, tmp_path, 1)
    command = python_command(
        "-m", "ondevice.server.worker", str(tmp_path), str(os.getpid()), python=None
    )
    line = f"ulimit -v 1500000; exec {shlex.join(command)}"
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode == DoesNotFitError.exit_code, done.stderr
    assert "Traceback" not in done.stderr
    told = worker_process.reported_error(tmp_path)
    assert told is not None and told["message"] == "the system refused this process memory"
    assert told[worker.AGAIN]
