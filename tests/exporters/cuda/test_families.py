"""An artifact for boards of each family: exported, opened, and run beside eager PyTorch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ondevice.artifact.manifest import read_manifest
from ondevice.core.config import ExportConfig, ModelConfig
from ondevice.core.registry import method_config, open_session
from ondevice.core.registry import target as find_target
from ondevice.exporters.base import ExportJob
from ondevice.models import load_model, save_tiny

FAMILIES = {
    "llama": "prge", "qwen2": "lora", "qwen3": "lora-fa", "gemma3_text": "mesp", "smollm3": "prge", "phi3": "mesp",
    "granite": "lora", "olmo2": "prge", "mistral": "mesp", "lfm2": "prge",
    "granitemoe": "lora", "lfm2_moe": "mesp", "qwen2_moe": "lora", "qwen3_moe": "mesp",
}  # fmt: skip
"""Each with one of the methods, so that each method has several families."""
EXPERTS = {
    "qwen2_moe": ("q_proj", "experts.down_proj"), "qwen3_moe": ("experts.gate_up_proj", "experts.down_proj", "v_proj"),
}  # fmt: skip
"""Mixtures of experts, and what an adapter stands beside there."""


def job(folder: Path, name: str, **settings: object) -> ExportJob:
    export = ExportConfig(
        target="jetson", lengths_tokens=(16,), batch_size=2, check_steps=1, quantize="none"
    )
    return ExportJob(
        ModelConfig(source=str(folder), dtype="float32"), method_config(name, settings), export, 3
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_an_artifact_of_each_family_computes_what_eager_pytorch_does(
    family: str, tmp_path: Path
) -> None:
    name, target = FAMILIES[family], find_target("jetson")
    model = save_tiny(tmp_path / "model", family, 2, layers=2)
    asked = job(
        model, name, rank=2, **({"target_modules": EXPERTS[family]} if family in EXPERTS else {})
    )
    target.export(asked, tmp_path / "a")
    session = target.open(tmp_path / "a", read_manifest(tmp_path / "a"))
    eager = open_session(load_model(str(model)), asked.method, 3)
    ids = np.random.default_rng(0).integers(1, 250, (2, 16))
    for step in range(2):
        ours, theirs = (one.step(ids, ids, step, 1e-2).loss for one in (session, eager))
        assert ours == pytest.approx(theirs, rel=1e-5)
    np.testing.assert_allclose(
        session.evaluate(ids, ids)[0], eager.evaluate(ids, ids)[0], rtol=1e-5
    )
    ours, theirs = session.adapter(), eager.adapter()
    assert ours is not None and theirs is not None and ours.linears == theirs.linears
    session.close()


def test_families_that_a_target_does_not_know_are_said_before(tmp_path: Path) -> None:
    asked = job(save_tiny(tmp_path / "m", "qwen2_moe"), "lora")
    asked = replace(asked, export=asked.export.model_copy(update={"quantize": "int8"}))
    (problem,) = find_target("jetson").check(asked)
    assert "qwen2_moe is a mixture of experts" in problem and "--quantize none" in problem
    for name in ("prge", "mesp"):
        problems = find_target("android-npu").check(
            job(save_tiny(tmp_path / name, "granite"), name)
        )
        assert any(
            "a factor of each branch" in one and f"a program of {name} for the NPU does not" in one
            for one in problems
        )
