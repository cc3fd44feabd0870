"""The plan's parts against what a step really allocates and what the optimizer really keeps."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.common import peak_bytes
from benchmarks.revffn.peers import Reversible, make
from ondevice.core.registry import method_config
from ondevice.methods.revffn.memory import host_memory, memory
from ondevice.planning.estimate import plan

ROWS, LENGTH = 8, 96
CASES: list[dict[str, Any]] = [
    {"coupling": "exact"},
    {"coupling": "full"},
    {"coupling": "exact", "micro_batch_size": 2},
    {"coupling": "full", "recompute": "stored"},
    {"coupling": "full", "fused_update": False},
    {"coupling": "exact", "optimizer": "adafactor"},
    {"coupling": "full", "optimizer": "adamw8bit"},
    {"coupling": "exact", "skip_stage1": False, "stage1_only": True},
]


@pytest.mark.sampled
@pytest.mark.parametrize("settings", CASES, ids=lambda one: ", ".join(map(str, one.values())))
@pytest.mark.parametrize(("shape", "layers"), [("narrow", 4), ("tiny-moe", 3)])
def test_a_step_needs_what_the_plan_says(shape, layers, settings) -> None:
    loaded = make(shape, layers)
    way = Reversible(loaded, **settings)
    ids = np.random.default_rng(0).integers(0, 500, (ROWS, LENGTH))
    way.step(ids, ids, 0, 1e-5)
    measured = peak_bytes(partial(way.step, ids, ids, 1, 1e-5))
    states = [value for actual in way.session.updates.states.values() for value in actual.values()]
    kept = sum(value.numel() * value.element_size() for value in states)
    config = method_config("revffn", {"skip_stage1": True, **settings})
    parts = memory(loaded.dims, config, ROWS, LENGTH) | host_memory(
        loaded.dims, config, ROWS, LENGTH
    )
    planned = sum(size for part, size in parts.items() if part not in ("adapter", "optimizer"))
    assert 0.75 * measured <= planned <= 1.4 * measured, parts
    assert parts["optimizer"] == pytest.approx(kept, rel=0.3)


def test_bits_beside_the_streams_are_where_they_wait() -> None:
    loaded = make("narrow", 4)
    way = Reversible(loaded, coupling="full")
    ids = np.random.default_rng(0).integers(0, 500, (ROWS, LENGTH))
    saved = way.session.network.forward(torch.from_numpy(ids))
    (kept,) = host_memory(loaded.dims, method_config("revffn", {}), ROWS, LENGTH).values()
    assert kept == sum(bits.numel() for bits in saved.side.values())
    on_host, on_device = (
        plan(
            loaded.dims, method_config("revffn", {"gamma_bits_on": place, "recompute": "reversible"}),
            batch_size=ROWS, length_tokens=LENGTH,
            device="h200", dtype="bfloat16",
        )
        for place in ("host", "device")
    )  # fmt: skip
    (beside,) = on_host.host_parts.values()
    assert (
        on_host.parts["streams"] + beside == on_device.parts["streams"] and not on_device.host_parts
    )


def test_qwen_s_moe_fits_the_paper_s_peak() -> None:
    """14.3e9 parameters: weights and one block's gradients with a factored optimizer; AdamW's
    moments alone do not."""
    with torch.device("meta"):
        dims = make("Qwen1.5-MoE-A2.7B", device="meta").dims
    assert dims.parameters == pytest.approx(14.3e9, rel=5e-3)
    weights = 2 * dims.parameters
    needs = {
        optimizer: weights
        + sum(memory(dims, method_config("revffn", {"optimizer": optimizer}), 8, 512, 2).values())
        for optimizer in ("adafactor", "sgd", "adamw8bit", "adamw")
    }
    assert needs["sgd"] <= needs["adafactor"] < 39.5e9 < needs["adamw8bit"] < 80e9 < needs["adamw"]
