"""Artifacts in bfloat16 with weights that are not packed: what a board with room for them runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from ondevice.api.open import open_artifact
from ondevice.api.train import run_artifact
from ondevice.api.verify import verify
from ondevice.artifact.adapter import load_adapter
from ondevice.core.config import ExportConfig, ModelConfig
from ondevice.core.registry import method_config
from ondevice.core.registry import target as find_target
from ondevice.exporters.base import ExportJob
from tests.conformance.plain import Plain, PlainFirstOrder, PlainPrge
from tests.exporters.cuda.test_session import configured
from tests.methods.reference import batch

RATES = {"prge": 0.05, "lora": 0.01}
"""By method; AdamW moves every number by its rate, so rounding that turns a small gradient shows
sooner."""


def against_double(folder: Path, job: ExportJob) -> tuple[np.ndarray, np.ndarray]:
    """Return the losses of three steps of an artifact, and of the method in double precision at the
    same start."""
    session = open_artifact(folder)
    adapter = session.adapter()
    assert adapter is not None
    plain: Plain = (
        PlainPrge(job.method, job.seed, "llama", {})
        if job.method.name == "prge"
        else PlainFirstOrder(job.method, adapter.tensors, "llama", {})
    )
    received, expected = [], []
    for step in range(3):
        ids, labels = batch(2, 32, seed=0)
        losses, _ = plain.step(ids, labels, step)
        result = session.step(ids, labels, step, RATES[job.method.name])
        plain.apply(np.array(result.projected_gradients), step, RATES[job.method.name])
        received.append(result.losses)
        expected.append(losses)
    session.close()
    return np.array(received), np.array(expected)


@pytest.mark.parametrize("method", ["prge", "lora"])
def test_it_is_the_method_in_bfloat16_and_trains(source: Path, tmp_path: Path, method: str) -> None:
    """Verified against the original model in the same precision, then run to a float32 adapter."""
    settings = {
        "rank": 4,
        "learning_rate": RATES[method],
        **({"queries": 2} if method == "prge" else {}),
    }
    export = ExportConfig(
        target="jetson", lengths_tokens=(32,), batch_size=2, check_steps=1, quantize="none"
    )
    job = ExportJob(
        ModelConfig(source=str(source), dtype="bfloat16"),
        method_config(method, settings),
        export,
        3,
    )
    find_target("jetson").export(job, folder := tmp_path / "a")

    assert json.loads((folder / "program.json").read_text())["dtype"] == "bfloat16"
    session = open_artifact(folder)
    weights = dict(session.loaded.model.named_parameters())
    frozen = {name: value.dtype for name, value in weights.items() if "lora_" not in name}
    assert set(frozen.values()) == {torch.bfloat16}
    session.close()

    assert verify(folder, steps=3)["ok"]
    losses, expected = against_double(folder, job)
    np.testing.assert_allclose(losses, expected, rtol=2e-3)
    assert (losses != expected).all()  # bfloat16's own rounding is there
    trained = run_artifact(folder, configured(folder, tmp_path, **{"data.max_length_tokens": 32}))
    assert (
        trained.adapter is not None
        and trained.result.steps == 6
        and trained.result.final_loss is not None
    )
    tensors = load_adapter(trained.adapter).tensors
    assert tensors and all(str(value.dtype) == "float32" for value in tensors.values())
    assert any(value.any() for name, value in tensors.items() if "lora_B" in name)
