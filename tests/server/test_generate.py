"""Questions are answered by the model, or an artifact's own packed weights; some are refused beside a running job."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ondevice.artifact.manifest import MANIFEST_NAME, read_manifest
from ondevice.core.errors import ArtifactError, BusyError
from ondevice.planning.devices import find_device
from ondevice.server import jobs
from ondevice.server.engine import model
from tests.server.asked import Asked
from tests.server.running import refused, settings, wait_for

QUESTION = {"prompt": "a", "max_new_tokens": 4}


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NF4 weights of a model that is gone once they are packed."""
    pytest.importorskip("bitsandbytes")
    from ondevice.api.export import export
    from ondevice.api.runfile import RunConfig
    from ondevice.models import save_tiny

    folder = tmp_path_factory.mktemp("artifact")
    source = save_tiny(folder / "dense", "llama")
    values = {
        "method.name": "prge",
        "method.rank": 2,
        "method.queries": 2,
        "method.learning_rate": 0.1,
    }
    values |= {"model.source": str(source), "model.dtype": "bfloat16", "export.target": "jetson"}
    values |= {"export.quantize": "nf4", "export.lengths_tokens": [32], "export.batch_size": 2}
    artifact = export(RunConfig.load(None, values), folder / "board").path
    shutil.rmtree(source)
    return artifact


@pytest.fixture
def forgotten() -> Any:
    model._forget()
    yield
    model._forget()


def test_an_adapter_of_an_artifact_is_tried_over_its_own_weights(served, artifact) -> None:
    client = served.client
    name = client.upload("artifact", artifact, name="board")["id"]
    looked = client.preview(served.dataset, artifact=name, max_length_tokens=32)
    assert (
        looked["examples"]
        == client.preview(served.dataset, "tiny:llama", max_length_tokens=32)["examples"]
    )
    job = client.create_job(artifact=name, dataset=served.dataset, config={"train": {"steps": 20}})
    assert client.wait(job["id"], 120)["state"] == "done", client.log(job["id"])
    said = client.generate(None, "a", artifact=name, adapter=job["id"], max_new_tokens=16)
    assert said["adapter"] == job["id"] and said["adapted"] is not None
    assert client.generate(None, "a", artifact=name, max_new_tokens=16)["base"] == said["base"]
    for values in ({}, {"model": "tiny:llama", "artifact": name}):
        with refused(422):
            client.ask("POST", "/v1/generate", {"prompt": "a", **values})
    with refused(404):
        client.generate(None, "a", artifact="none")
    # A running job's plan is asked for, and there is room beside it.
    long = client.create_job(
        model="tiny:llama", dataset=served.dataset, config=settings(steps=1_000_000)
    )["id"]
    try:
        wait_for(lambda: client.job(long)["state"] == "running", "it runs")
        assert client.generate("tiny:llama", "a", max_new_tokens=2)["base"] is not None
    finally:
        client.cancel(long)
        client.wait(long, 120)


def test_it_is_the_packed_layers_that_answer(artifact, forgotten) -> None:
    from ondevice.nn.packed import PackedLinear

    engine = Asked()
    engine.text(artifact=str(artifact), **QUESTION)
    loaded = model._loaded["loaded"]
    assert isinstance(loaded.family.linear(0, "q_proj"), PackedLinear)
    engine.text(model="tiny:llama", **QUESTION)
    assert not isinstance(model._loaded["loaded"].family.linear(0, "q_proj"), PackedLinear)


def test_an_artifact_is_asked_once_whether_it_is_a_program(artifact, tmp_path, monkeypatch) -> None:
    reads = []
    monkeypatch.setattr(
        jobs,
        "read_manifest",
        lambda *place, **how: reads.append(place) or read_manifest(*place, **how),
    )
    folder = tmp_path / "board"
    folder.mkdir()
    shutil.copy(artifact / MANIFEST_NAME, folder)
    assert not jobs.is_program(folder) and not jobs.is_program(folder) and len(reads) == 1
    os.utime(folder / MANIFEST_NAME, (1, 1))  # another version in its place
    assert not jobs.is_program(folder) and len(reads) == 2
    with pytest.raises(ArtifactError):
        jobs.is_program(tmp_path)


def test_weights_in_bfloat16_stay_so(tmp_path, forgotten) -> None:
    import torch

    from ondevice.models import load_model, save_tiny

    folder = save_tiny(tmp_path / "m", "llama")
    loaded = load_model(str(folder), dtype="bfloat16")
    loaded.model.save_pretrained(folder)
    assert model._dtype(str(folder)) == "bfloat16" and model._dtype("tiny:llama") == "float32"
    assert len(Asked().parts(model=str(folder), **QUESTION)) > 1
    assert model._loaded["loaded"].family.head_weight.dtype == torch.bfloat16


@pytest.fixture
def small(monkeypatch) -> dict[str, Any]:
    """A machine with 3 MiB left, and the plan of the job that runs on it."""
    device = replace(find_device("this-cpu"), usable_bytes=3 << 20)
    monkeypatch.setattr("ondevice.server.room.find_device", lambda name: device)
    plan = {"device": {"kind": "computer", "torch_device": "cpu"}, "total_bytes": 500 << 20}
    monkeypatch.setattr("ondevice.server.room._planned", {"job-1": plan})
    return plan


JOB = {"id": "job-1", "config": {}, "artifact": None, "memory_bytes": 5 << 20}
JOB["peak_device_bytes"] = 0


@pytest.mark.parametrize("kind", ["model", "artifact"])
def test_beside_a_job_what_does_not_fit_is_refused_with_the_numbers(
    kind, artifact, forgotten, small
) -> None:
    """What it needs, what is free, what the job will still take, and what to do."""
    asked = {kind: {"model": "tiny:llama", "artifact": str(artifact)}[kind], **QUESTION}
    with pytest.raises(BusyError) as caught:
        Asked().parts(**asked, job=JOB)
    error = caught.value
    assert "job-1" in error.message and "weights" in error.message
    assert "of 3 MiB" in error.expected and "495 MiB" in error.expected
    assert "pause the job" in str(error.hint)
    assert not model._loaded
    small["total_bytes"] = 4 << 20
    engine = Asked()
    engine.parts(**asked, job=JOB)
    small["total_bytes"] = 500 << 20
    engine.parts(**asked, job=JOB)  # it is loaded already
    assert Asked().parts(**asked)


def test_beside_a_job_that_cannot_be_planned_no_model_is_loaded(forgotten) -> None:
    job = JOB | {"id": "job-2", "config": {"model": {"source": "no-such-folder/x"}}}
    with pytest.raises(BusyError) as caught:
        Asked().parts(model="tiny:llama", **QUESTION, job=job)
    assert "cannot tell how much memory job job-2" in caught.value.message


def test_beside_a_job_answers_that_do_not_fit_together_run_one_after_another(
    forgotten, small
) -> None:
    """The second waits for the end of the first, and both are answered."""
    small["total_bytes"] = 4 << 20
    engine = Asked()
    for number in (1, 2):
        engine.begin(number, model="tiny:llama", **QUESTION, job=JOB)
        small["total_bytes"] = 500 << 20
    engine.work.step()
    assert len(engine.work.opened.batch) == 1 and len(engine.work.waiting) == 1
    engine.finish()
    assert [engine.sent[number][-1]["value"]["completion_tokens"] for number in (1, 2)] == [4, 4]


def test_beside_a_job_that_cannot_be_planned_only_the_answer_that_needs_its_plan_is_refused(
    forgotten, small
) -> None:
    """The process of the model goes on, with every other answer."""
    engine = Asked()
    engine.begin(1, model="tiny:llama", **QUESTION)
    engine.work.step()
    job = JOB | {"id": "job-2", "config": {"model": {"source": "no-such-folder/x"}}}
    engine.begin(2, model="tiny:llama", **QUESTION, job=job)
    engine.finish()
    assert "cannot tell how much memory job job-2" in engine.error(2).message
    assert engine.sent[1][-1]["value"]["completion_tokens"] == 4
