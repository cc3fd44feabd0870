"""Every field of PEFT's `LoraConfig` is followed as peft follows it, or refused by its name."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ondevice.artifact.adapter import Adapter, load_adapter, save_adapter
from ondevice.artifact.peft_fields import fold_patterns
from ondevice.core.errors import ArtifactError
from ondevice.nn.lora import LoRALinear

TARGETS = ["q_proj", "v_proj"]
IDS = torch.arange(18).reshape(2, 9) % 40


def tiny() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def written_by_peft(folder: Path, **settings: Any) -> Any:
    """Save an adapter with random A and B through peft; return peft's model as it is loaded again."""
    torch.manual_seed(1)
    base = {"r": 4, "lora_alpha": 6, "target_modules": TARGETS, "task_type": "CAUSAL_LM"}
    model = peft.get_peft_model(tiny(), peft.LoraConfig(**{**base, **settings}))
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = torch.randn_like(parameter) * 0.3
    model.save_pretrained(folder)
    return peft.PeftModel.from_pretrained(tiny(), str(folder)).eval()


@torch.no_grad()
def logits_of(adapter: Adapter) -> torch.Tensor:
    model = tiny()
    for name in adapter.linears:
        parent, _, last = name.rpartition(".")
        module = model.get_submodule(parent)
        a, b = adapter.pair(name)
        lora = LoRALinear.from_base(getattr(module, last), adapter.rank, adapter.alpha, a, b)
        setattr(module, last, lora)
    return model(IDS).logits


FOLLOWED: dict[str, list[dict[str, Any]]] = {
    "task_type": [{"task_type": None}, {"task_type": "CAUSAL_LM"}],
    "peft_type": [{}],
    "auto_mapping": [{}],
    "peft_version": [{}],
    "base_model_name_or_path": [{"base_model_name_or_path": "any/name"}],
    "revision": [{"revision": "main"}],
    "inference_mode": [{"inference_mode": False}, {"inference_mode": True}],
    "r": [{"r": 1}, {"r": 8}],
    "target_modules": [{"target_modules": ["o_proj"]}, {"target_modules": r".*\.1\..*_proj"}],
    "exclude_modules": [{"exclude_modules": ["layers.0.self_attn.q_proj"]}],
    "lora_alpha": [{"lora_alpha": 32}, {"lora_alpha": 2.5}],
    "lora_dropout": [{"lora_dropout": 0.3}],
    "fan_in_fan_out": [{"fan_in_fan_out": False}],
    "use_rslora": [{"use_rslora": True}],
    "init_lora_weights": [{"init_lora_weights": how} for how in (True, False, "gaussian", "orthogonal")],
    "layers_to_transform": [{"layers_to_transform": [0, 2]}, {"layers_to_transform": 1}],
    "layers_pattern": [{"layers_to_transform": [1], "layers_pattern": "layers"}],
    "rank_pattern": [
        {"rank_pattern": {"q_proj": 2}},
        {"rank_pattern": {"layers.1.self_attn.v_proj": 7}, "use_rslora": True},
        {"rank_pattern": {"^model.layers.2.self_attn.q_proj": 9}, "alpha_pattern": {"v_proj": 1.5}},
    ],
    "alpha_pattern": [{"alpha_pattern": {"q_proj": 12}}, {"alpha_pattern": {"layers.0.self_attn.q_proj": 0}}],
    "megatron_core": [{"megatron_core": "another.core"}],
    "qalora_group_size": [{"qalora_group_size": 8}],
    "bias": [{"bias": "none"}],
}  # fmt: skip
"""Settings with which an adapter is read, by the field that they are about."""

REFUSED: dict[str, list[Any]] = {
    "task_type": ["SEQ_CLS", "TOKEN_CLS", "FEATURE_EXTRACTION"],
    "peft_type": ["LOHA", "ADALORA", None],
    "bias": ["all", "lora_only", None],
    "use_rslora": ["false", 1],
    "lora_alpha": ["16", None, True, math.nan],
    "r": [8, None, "4"],
    "target_modules": [["q_proj"], ["q_proj", "v_proj", "o_proj"]],
    "target_parameters": ["q_proj", [1]],
    "layers_to_transform": [[0, 1], 2, "all"],
    "modules_to_save": [["lm_head"]],
    "init_lora_weights": [
        "pissa",
        "pissa_niter_16",
        "olora",
        "corda",
        "loftq",
        "lora_ga",
        "mica",
        "later",
    ],
    "rank_pattern": [{"q_proj": 2}, {".*q_proj": 4}, {"(a+)+": 4}, ["q_proj"], {"q_proj": "4"}],
    "alpha_pattern": [{".*": 2}, {"q_proj": None}, 3],
    "megatron_config": [{"hidden_size": 8}],
    "trainable_token_indices": [[1, 2], {"embed_tokens": [1]}],
    "loftq_config": [{"loftq_bits": 4}],
    "eva_config": [{"rho": 2.0}],
    "corda_config": [{"corda_method": "ipm"}],
    "lora_ga_config": [{"direction": "ArB2r"}],
    "use_dora": [True, "yes"],
    "velora_config": [{"num_groups": 4}],
    "alora_invocation_tokens": [[5, 6]],
    "use_qalora": [True],
    "monteclora_config": [{"sample_size": 2}],
    "layer_replication": [[[0, 2], [1, 3]]],
    "lora_bias": [True],
    "use_bdlora": [{"nblocks": 2}, True],
    "arrow_config": [{"top_k": 3}],
    "kasa_config": [{"beta": 1e-4}],
    "ensure_weight_tying": [True],
    "of_a_later_version": [1, 0.5, "on", {"a": 1}, [0], True],
}
"""Values with which an adapter is refused; the error names the field."""


def test_every_field_of_the_installed_peft_is_in_one_of_the_two_tables() -> None:
    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    # Not written into a file: peft drops it from what it saves.
    fields.discard("runtime_config")
    assert fields <= FOLLOWED.keys() | REFUSED.keys()


@pytest.mark.parametrize("settings", [
    pytest.param(settings, id=f"{field} {number}") for field, cases in FOLLOWED.items()
    for number, settings in enumerate(cases)
])  # fmt: skip
@torch.no_grad()
def test_an_adapter_with_this_field_computes_what_peft_computes(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    theirs = written_by_peft(tmp_path, **settings)(IDS).logits
    assert (theirs - tiny()(IDS).logits).abs().max() > 0.05
    torch.testing.assert_close(logits_of(load_adapter(tmp_path)), theirs, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("field", "value"), [
    pytest.param(field, value, id=f"{field} {value}") for field, values in REFUSED.items() for value in values
])  # fmt: skip
def test_an_adapter_with_this_value_is_refused_by_the_name_of_the_field(
    field: str, value: Any, tmp_path: Path
) -> None:
    written_by_peft(tmp_path)
    load_adapter(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(ArtifactError) as caught:
        load_adapter(tmp_path)
    assert f"'{field}'" in caught.value.message and str(path) in caught.value.message


@pytest.mark.parametrize("off", [None, False, {}, []], ids=str)
def test_a_field_that_is_off_changes_nothing(off: Any, tmp_path: Path) -> None:
    written_by_peft(tmp_path)
    path = tmp_path / "adapter_config.json"
    fields = {
        "use_dora",
        "kasa_config",
        "layer_replication",
        "modules_to_save",
        "of_a_later_version",
    }
    before = load_adapter(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | dict.fromkeys(fields, off)))
    after = load_adapter(tmp_path)
    assert dataclasses.replace(after, tensors={}) == dataclasses.replace(before, tensors={})


@pytest.mark.parametrize("how", ["pissa", "olora"])
def test_peft_changes_the_base_model_for_what_is_refused(how: str, tmp_path: Path) -> None:
    """Read as plain LoRA, these adapters would compute something else than peft does."""
    theirs = written_by_peft(tmp_path, init_lora_weights=how)
    layer = theirs.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    assert (layer - tiny().model.layers[0].self_attn.q_proj.weight).abs().max() > 1e-3
    with pytest.raises(ArtifactError) as caught:
        load_adapter(tmp_path)
    assert "init_lora_weights" in str(caught.value)


def test_a_pair_with_the_default_scale_keeps_its_bits(tmp_path: Path) -> None:
    written_by_peft(tmp_path, alpha_pattern={"v_proj": 12})
    pair = "model.layers.0.self_attn.q_proj.lora_B.weight"
    stored = load_stored(tmp_path / "adapter_model.safetensors")
    np.testing.assert_array_equal(
        load_adapter(tmp_path).tensors[pair], stored[f"base_model.model.{pair}"]
    )


def test_an_adapter_with_patterns_is_written_as_one_that_peft_reads_alike(tmp_path: Path) -> None:
    written_by_peft(tmp_path / "theirs", rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 12})
    adapter = load_adapter(tmp_path / "theirs")
    save_adapter(adapter, tmp_path / "ours")
    with torch.no_grad():
        again = peft.PeftModel.from_pretrained(tiny(), str(tmp_path / "ours")).eval()(IDS).logits
    torch.testing.assert_close(again, logits_of(adapter), atol=2e-5, rtol=1e-4)


def test_ranks_that_would_be_padded_beyond_the_limit_are_refused(tmp_path: Path) -> None:
    tensors = {
        "x.lora_A.weight": np.zeros((2000, 1), np.float32),
        "x.lora_B.weight": np.zeros((1, 2000), np.float32),
    }
    config = {"r": 4, "lora_alpha": 4, "rank_pattern": {"x": 2000}}
    with pytest.raises(ArtifactError) as caught:
        fold_patterns(tensors, config, tmp_path)
    assert "rank_pattern" in str(caught.value)


def load_stored(path: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(path)
