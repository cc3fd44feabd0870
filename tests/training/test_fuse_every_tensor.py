"""`fuse` keeps every tensor of the base's files that the adapter does not change, and proves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ondevice.artifact.adapter import Adapter, save_adapter
from ondevice.core.errors import VerificationError
from ondevice.models import LoadedModel, load_model, merged, save_tiny
from ondevice.models.tiny import tiny_tokenizer
from ondevice.training.fuse import fuse

TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 288, "max_position_embeddings": 256,
}  # fmt: skip
EYES = {"hidden_size": 32, "intermediate_size": 48}


def gemma3() -> Any:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    layers = ["sliding_attention", "full_attention"]
    config = Gemma3Config(
        text_config={**TEXT, "sliding_window": 32, "layer_types": layers, "pad_token_id": 0},
        vision_config={
            **EYES, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4, boi_token_index=200, eoi_token_index=201, image_token_index=202,
    )  # fmt: skip
    return Gemma3ForConditionalGeneration(config)


def qwen3_5() -> Any:
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    linear = {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
    }  # fmt: skip
    config = Qwen3_5Config(
        text_config={**TEXT, **linear},
        vision_config={
            **EYES, "depth": 2, "num_heads": 2, "out_hidden_size": 64, "patch_size": 4,
            "num_position_embeddings": 16,
        },
        image_token_id=200, video_token_id=201, vision_start_token_id=202, vision_end_token_id=203,
    )  # fmt: skip
    return Qwen3_5ForConditionalGeneration(config)


NESTED = {"gemma3": (gemma3, "vision_tower."), "qwen3_5": (qwen3_5, "model.visual.")}


def on_every_linear(loaded: LoadedModel) -> Adapter:
    rng = np.random.default_rng(0)
    tensors = {}
    for linear in loaded.dims.linear_list:
        name = loaded.family.linear_name(linear.layer, linear.target)
        a = rng.normal(size=(3, linear.inputs)) / linear.inputs**0.5
        b = rng.normal(size=(linear.outputs, 3)) * 0.1
        tensors[f"{name}.lora_A.weight"] = a.astype(np.float32)
        tensors[f"{name}.lora_B.weight"] = b.astype(np.float32)
    targets = {linear.target.rpartition(".")[2] for linear in loaded.dims.linear_list}
    return Adapter(tensors, 3, 7.0, tuple(targets), loaded.source.source)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for path in folder.glob("*.safetensors")
        for name, value in load_file(path).items()
    }


def changed_names(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    assert after.keys() == before.keys()
    assert all(after[name].dtype == value.dtype for name, value in before.items())
    return {name for name, value in before.items() if not torch.equal(value, after[name])}


@pytest.mark.parametrize("kind", NESTED)
def test_a_checkpoint_that_also_sees_keeps_its_vision_tower(kind: str, tmp_path: Path) -> None:
    build, tower = NESTED[kind]
    torch.manual_seed(0)
    base = tmp_path / "base"
    build().save_pretrained(base)
    tiny_tokenizer().save_pretrained(base)
    (base / "preprocessor_config.json").write_text('{"size": 28}')
    loaded = load_model(str(base))
    adapter = on_every_linear(loaded)
    save_adapter(adapter, tmp_path / "adapter")
    fuse(str(base), tmp_path / "adapter", tmp_path / "fused")
    changed = changed_names(tensors_of(base), tensors_of(tmp_path / "fused"))
    assert len(changed) == len(adapter.linears)
    assert not any(name.startswith(tower) for name in changed)
    assert any(name.startswith(tower) for name in tensors_of(tmp_path / "fused"))
    config = json.loads((tmp_path / "fused" / "config.json").read_text())
    written = json.loads((base / "config.json").read_text())
    assert config == written
    assert (tmp_path / "fused" / "preprocessor_config.json").read_text() == '{"size": 28}'
    again = build().__class__.from_pretrained(tmp_path / "fused", output_loading_info=True)[1]
    assert not again["missing_keys"] and not again["unexpected_keys"]


def test_shards_and_precisions_are_those_of_the_base(tmp_path: Path) -> None:
    """Norms in float32 beside matrices in bfloat16, in several files, with a tensor of no layer."""
    base = save_tiny(tmp_path / "base", "qwen2", tied=False)
    save_adapter(on_every_linear(load_model(str(base))), tmp_path / "adapter")
    stored = {
        name: value.bfloat16() if value.ndim == 2 else value
        for name, value in load_file(base / "model.safetensors").items()
    } | {"mtp.norm.weight": torch.arange(7)}
    (base / "model.safetensors").unlink()
    places = {name: f"part-{number % 3}.safetensors" for number, name in enumerate(sorted(stored))}
    for file in set(places.values()):
        save_file({name: stored[name] for name in places if places[name] == file}, base / file)
    (base / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": places})
    )
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    fuse(str(base), tmp_path / "adapter", tmp_path / "fused")
    changed = changed_names(stored, tensors_of(tmp_path / "fused"))
    assert len(changed) == 2 * 7 and "mtp.norm.weight" not in changed
    index = json.loads((tmp_path / "fused" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == places

    fuse(str(base), tmp_path / "adapter", tmp_path / "half", dtype="float16")
    half = tensors_of(tmp_path / "half")
    assert half.keys() == stored.keys() and half.pop("mtp.norm.weight").dtype == torch.int64
    assert {value.dtype for value in half.values()} == {torch.float16}


@pytest.mark.parametrize("fault", ["a bit", "a tensor less", "a tensor more", "another type"])
def test_a_file_that_is_not_what_it_should_be_gets_no_name(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault is in a norm that no prompt's logits would show: its last bit."""
    base = save_tiny(tmp_path / "base")
    save_adapter(on_every_linear(load_model(str(base))), tmp_path / "adapter")
    write = merged._write

    def broken(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        name = next(name for name in tensors if name.endswith("norm.weight"))
        if fault == "a bit":
            tensors[name].view(torch.int32)[0] ^= 1
        elif fault == "a tensor less":
            del tensors[name]
        elif fault == "a tensor more":
            tensors["more"] = tensors[name].clone()
        else:
            tensors[name] = tensors[name].double()
        write(path, tensors)

    monkeypatch.setattr(merged, "_write", broken)
    with pytest.raises(VerificationError) as caught:
        fuse(str(base), tmp_path / "adapter", tmp_path / "fused")
    assert "read back, tensor" in str(caught.value)
    assert not (tmp_path / "fused").exists()
