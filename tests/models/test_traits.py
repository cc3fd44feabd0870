"""The description of a block is kept where a program is written, and comes back."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

torch = pytest.importorskip("torch")

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from ondevice.core.dims import ModelDims  # noqa: E402
from ondevice.core.traits import BlockTraits  # noqa: E402
from ondevice.models import tiny_model  # noqa: E402
from ondevice.models.families.configuration import UnknownTrait  # noqa: E402
from ondevice.models.families.lfm2 import Lfm2  # noqa: E402


def test_dimensions_come_back_from_a_manifest() -> None:
    traits = BlockTraits(
        norms=(("before_mlp", "norm"),), windows=(4, 0), rotary=(True, False), logit_scale=3.0
    )
    dims = replace(tiny_model("llama").dims, traits=traits)
    written = json.loads(json.dumps(asdict(dims)))
    assert ModelDims.from_manifest(written) == dims
    written["traits"] |= {"score_cap": 0.0, "logit_cap": 0.0}  # as older versions wrote them
    assert ModelDims.from_manifest(written) == dims


def test_a_published_configuration_of_lfm2_has_the_model_s_own_weights() -> None:
    """LFM2-1.2B's: the MLP's width before it is adjusted, and the layers that attend by number."""
    published = {
        "model_type": "lfm2", "block_auto_adjust_ff_dim": True, "block_dim": 2048, "block_ff_dim": 12288,
        "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "conv_L_cache": 3, "conv_bias": False,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "max_position_embeddings": 128000,
        "norm_eps": 1e-05, "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
        "rope_theta": 1000000.0, "vocab_size": 65536,
    }  # fmt: skip
    dims = Lfm2.dims_from_config(published)
    config = AutoConfig.for_model(**published)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert dims.parameters == model.num_parameters() == 1_170_340_608
    assert dims == Lfm2.dims_from_config(config.to_dict())
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    assert Lfm2.weight_shapes(dims) | {"lm_head.weight": (65536, 2048)} == shapes
    for other in ({"conv_bias": True}, {"layer_types": ["conv", "sliding_attention"] * 8}):
        with pytest.raises(UnknownTrait):
            Lfm2.dims_from_config(published | other)
