"""Mixtures of experts: gradients against autograd over transformers' forward, PEFT, the plan, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch

from ondevice.artifact.adapter import save_adapter
from ondevice.core.errors import ModelError
from ondevice.core.registry import method_config, open_session
from ondevice.methods.mesp.memory import memory
from ondevice.models import load_model, open_model, save_tiny
from ondevice.models.load import tiny_model
from tests.methods.mesp.reference import errors, exact, learned, rows, session
from tests.methods.mesp.torch.live import LiveBytes
from tests.methods.reference import in_double

BESIDE = {"enable_moe_block": True}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_moe": ("qwen2_moe", {}),
    "normalised, some without": (
        "qwen2_moe",
        {"norm_topk_prob": True, "layers": 3, "mlp_only_layers": [1]},
    ),
    "qwen3_moe": ("qwen3_moe", {"tied": False, "kv_heads": 1}),
    "not normalised": ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 3}),
    "granitemoe": ("granitemoe", {"tied": False, "attention_bias": True}),
    "lfm2_moe": ("lfm2_moe", {"layers": 3, "routed_scaling_factor": 1.7}),
    "no bias, not normalised": (
        "lfm2_moe",
        {"num_dense_layers": 0, "use_expert_bias": False, "norm_topk_prob": False},
    ),
    "next to an MLP": ("gemma4_text", {**BESIDE, "layers": 5}),
    "next to an MLP, 26B-A4B": (
        "gemma4_text",
        {
            **BESIDE,
            "layers": 4,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "num_experts": 5,
            "top_k_experts": 3,
            "moe_intermediate_size": 9,
        },
    ),
}


FAMILIES = ("gemma4_text", "granitemoe", "lfm2_moe", "qwen2_moe", "qwen3_moe")
BOTH = ("experts.gate_up_proj", "experts.down_proj")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MIXERS = ("q_proj", "k_proj", "v_proj", "out_proj", "in_proj")


def of_family(family: str, chosen: int = 2) -> dict[str, Any]:
    """The fields that give a token so many experts."""
    if family == "gemma4_text":
        return {**BESIDE, "top_k_experts": chosen}
    return {"num_experts_per_tok": chosen}


@pytest.mark.sampled
@pytest.mark.parametrize(
    "targets", [ATTENTION, ("q_proj", *BOTH), BOTH[1:]], ids=["attention", "experts", "down"]
)
@pytest.mark.parametrize("form", FORMS)
def test_gradients_match_autograd_through_transformers(form: str, targets: tuple[str, ...]) -> None:
    """Those of the pairs beside experts too, of which some have no token."""
    family, sizes = FORMS[form]
    if family == "lfm2_moe" and targets == ATTENTION:
        targets = MIXERS
    ids, labels = rows(2, 19, 1)
    double, plain = tiny_model(family, 3, **sizes), tiny_model(family, 3, **sizes)
    in_double(double.model)
    opened = session(double, mlp_chunk_tokens=5, target_modules=targets)
    start = opened.adapter().tensors
    loss, ours = learned(opened, ids, labels)
    wanted, theirs = exact(tiny_model(family, 3, **sizes), start, opened.config.scale, ids, labels)
    assert loss == pytest.approx(wanted, rel=1e-6)
    assert {name.split(".")[-3] for name in ours} == {target.split(".")[-1] for target in targets}
    assert max(errors(ours, theirs).values()) <= 1e-6
    single = session(plain, target_modules=targets)
    assert learned(single, ids, labels)[0] == pytest.approx(wanted, rel=3e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_reads_the_adapter_and_files_are_not_streamed(family: str, tmp_path: Path) -> None:
    folder = str(save_tiny(tmp_path / "model", family, 3, **of_family(family)))
    ids, labels = rows(2, 12, 2)
    opened = open_session(load_model(folder), method_config("mesp", {"rank": 2}), 3)
    losses = [opened.step(ids, labels, step, 1e-2).loss for step in range(3)]
    assert losses[2] < losses[0]
    save_adapter(opened.adapter(), tmp_path / "adapter")
    wrapped = peft.PeftModel.from_pretrained(load_model(folder).model, str(tmp_path / "adapter"))
    with torch.no_grad():
        logits = (
            wrapped(input_ids=torch.from_numpy(ids), use_cache=False)
            .logits[:, :-1]
            .transpose(1, 2)
            .double()
        )
    wanted = torch.nn.functional.cross_entropy(
        logits, torch.from_numpy(labels)[:, 1:], reduction="none"
    )
    np.testing.assert_allclose(opened.evaluate(ids, labels)[0], wanted.sum(1).numpy(), rtol=2e-5)
    with pytest.raises(ModelError) as refused:
        open_session(open_model(folder), method_config("mesp", {"weight_placement": "streamed"}), 3)
    assert refused.value.expected == "method.weight_placement: resident"


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("chosen", "targets"), [(2, ATTENTION), (5, ATTENTION), (2, ("q_proj", *BOTH)), (5, BOTH)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_is_within_15_percent_of_a_step(
    family: str, chosen: int, targets: tuple[str, ...]
) -> None:
    sizes = {
        "layers": 3,
        "hidden": 256,
        "intermediate": 768,
        "heads": 4,
        "kv_heads": 2,
        "vocab": 2000,
    }
    if family == "lfm2_moe" and targets == ATTENTION:
        targets = MIXERS
    opened = session(
        tiny_model(family, **of_family(family, chosen), **sizes),
        loss_tiles=4,
        target_modules=targets,
    )
    planned = memory(opened.loaded.dims, opened.config, 2, 96, 4)
    ids, labels = rows(2, 96, 0)
    opened.step(ids, labels, 0, 1e-3)
    with LiveBytes() as live:
        opened.step(ids, labels, 1, 1e-3)
    working = sum(planned[part] for part in ("block inputs", "activations", "logits"))
    assert working == pytest.approx(live.peak, rel=0.15)
