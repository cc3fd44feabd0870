"""Rotation and groups as MLX's settings read them, against transformers."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("mlx.core")

from transformers import Qwen2Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ondevice.core.dims import ModelDims
from ondevice.core.errors import ConfigError
from ondevice.methods.mesp.mlx.settings import Rope, Settings, read_rope

SIZES = ("qwen2", 1, 64, 128, 4, 2, 16, 70, True, True, 1e4, 1e-6, 256)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"mscale": 0.7, "mscale_all_dim": 1.3},
        {"mscale": 0.7},
        {"attention_factor": 1.1, "mscale": 0.7, "mscale_all_dim": 1.3},
        {"beta_fast": 4, "beta_slow": 2, "truncate": False},
    ],
)
def test_yarn_is_that_of_transformers(more: dict[str, Any]) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
            "original_max_position_embeddings": 64, **more}  # fmt: skip
    config = Qwen2Config(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=256, rope_parameters=rope
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    ours = read_rope({"rope_parameters": rope}, ModelDims(*SIZES, rope_type="yarn"))
    assert ours.factor == pytest.approx(factor, rel=1e-6)
    assert ours.wavelengths is not None
    assert [1 / wave for wave in ours.wavelengths] == pytest.approx(frequencies.tolist(), rel=1e-5)


def test_widths_that_groups_do_not_divide_are_refused() -> None:
    for intermediate, bits in ((128, 4), (96, None)):
        settings_of(intermediate, bits).check()
    with pytest.raises(ConfigError) as caught:
        settings_of(96, 4).check()
    assert caught.value.received == "96 inputs"


def settings_of(intermediate: int, bits: int | None) -> Settings:
    sizes = ModelDims(*SIZES[:3], intermediate, *SIZES[4:])
    return Settings(sizes, ("q_proj",), 1.0, Rope(1e4), bits=bits)
