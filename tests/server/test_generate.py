"""Questions are answered by the model, or an artifact's own packed weights; some are refused beside a running job."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ondevice.planning.devices import find_device
from ondevice.server import generate
from ondevice.server.app import create_app
from tests.server.running import refused, settings, wait_for

QUESTION = {"max_new_tokens": 4, "temperature": 0.0, "seed": 0}


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
    generate._forget()
    yield
    generate._forget()


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

    generate.generate_both(None, None, "a", **QUESTION, artifact=str(artifact))
    loaded = generate._loaded["loaded"]
    assert isinstance(loaded.family.linear(0, "q_proj"), PackedLinear)
    generate.generate_both("tiny:llama", None, "a", **QUESTION)
    assert not isinstance(generate._loaded["loaded"].family.linear(0, "q_proj"), PackedLinear)


def test_weights_in_bfloat16_stay_so(tmp_path, forgotten) -> None:
    import torch

    from ondevice.models import load_model, save_tiny

    folder = save_tiny(tmp_path / "m", "llama")
    loaded = load_model(str(folder), dtype="bfloat16")
    loaded.model.save_pretrained(folder)
    assert generate._dtype(str(folder)) == "bfloat16" and generate._dtype("tiny:llama") == "float32"
    assert generate.generate_both(str(folder), None, "a", **QUESTION)["base"] is not None
    assert generate._loaded["loaded"].family.head_weight.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["model", "artifact"])
def test_beside_a_job_what_does_not_fit_is_refused_with_the_numbers(
    kind, artifact, store, forgotten, monkeypatch
) -> None:
    """409: what it needs, what is free, what the job will still take, and what to do."""
    from dataclasses import replace

    from fastapi.testclient import TestClient

    from ondevice.server.pools import Pools

    monkeypatch.setattr(
        "ondevice.server.generate.find_device",
        lambda name: replace(find_device("this-cpu"), usable_bytes=3 << 20),
    )
    plan = {"device": {"kind": "computer", "torch_device": "cpu"}, "total_bytes": 7 << 20}
    calls = {"plan": lambda **_: plan, "generate": generate.generate_both}
    daemon = SimpleNamespace(
        store=store,
        supervisor=SimpleNamespace(running=SimpleNamespace(job="job-1", memory_bytes=5 << 20)),
        queue=SimpleNamespace(get=lambda _: SimpleNamespace(progress={})),
        model_helper=lambda call, **arguments: calls[call](**arguments),
        pools=Pools(),
    )
    (store.path("jobs", "job-1")).mkdir()
    (store.path("jobs", "job-1") / "job.json").write_text(
        json.dumps({"config": {}, "artifact": None})
    )
    shutil.copytree(artifact, store.path("artifacts", "board"))
    client = TestClient(create_app(daemon))  # type: ignore[arg-type]
    question = {
        "prompt": "a",
        "max_new_tokens": 1,
        kind: {"model": "tiny:llama", "artifact": "board"}[kind],
    }
    plan["total_bytes"] = 500 << 20
    refused = client.post("/v1/generate", json=question)
    answer = refused.json()
    assert (
        refused.status_code == 409
        and "job-1" in answer["message"]
        and "weights" in answer["message"]
    )
    assert (
        "of 3 MiB" in answer["expected"]
        and "495 MiB" in answer["expected"]
        and "pause the job" in answer["hint"]
    )
    assert not generate._loaded
    plan["total_bytes"] = 4 << 20
    assert client.post("/v1/generate", json=question).status_code == 200
    plan["total_bytes"] = 500 << 20
    assert client.post("/v1/generate", json=question).status_code == 200  # it is loaded already
    daemon.supervisor.running = None
    generate._forget()
    assert client.post("/v1/generate", json=question).status_code == 200
