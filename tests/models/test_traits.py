"""The description of a block is kept where a program is written, and comes back."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

pytest.importorskip("torch")

from ondevice.core.dims import BlockTraits, ModelDims
from ondevice.models import tiny_model


def test_dimensions_come_back_from_a_manifest() -> None:
    traits = BlockTraits(
        norms=(("before_mlp", "norm"),), windows=(4, 0), rotary=(True, False), logit_scale=3.0
    )
    dims = replace(tiny_model("llama").dims, traits=traits)
    written = json.loads(json.dumps(asdict(dims)))
    assert ModelDims.from_manifest(written) == dims
    written["traits"] |= {"score_cap": 0.0, "logit_cap": 0.0}  # as older versions wrote them
    assert ModelDims.from_manifest(written) == dims
