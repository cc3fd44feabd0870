"""The same on a GPU: bits of a fused step, 8-bit moments, memory by depth, resume.

Attention's fused backward kernels add in any order, so where bits are compared PyTorch's plain ones
run.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.common import peak_bytes
from benchmarks.revffn.peers import Ordinary
from ondevice.core.registry import method_config, open_session
from ondevice.methods.revffn.updates import Updates
from ondevice.models.load import tiny_model
from tests.methods.reference import batch

pytestmark = pytest.mark.gpu
SIZES = {"hidden": 256, "intermediate": 512, "heads": 4, "kv_heads": 2, "tied": False}
RATE = 1e-3


@pytest.fixture
def same_order() -> Iterator[None]:
    with sdpa_kernel(SDPBackend.MATH):
        yield


def on_gpu(family: str = "qwen2_moe", dtype: str = "bfloat16", layers: int = 3) -> Any:
    loaded = tiny_model(family, **SIZES, layers=layers)
    for parameter in loaded.model.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    loaded.model.cuda()
    return loaded


def opened(loaded: Any, **settings: Any) -> Any:
    return open_session(loaded, method_config("revffn", {"skip_stage1": True, **settings}), 3)


def after(
    session: Any, steps: int = 3, first: int = 0
) -> tuple[list[float], dict[str, np.ndarray]]:
    rows = batch(4, 96)
    return [
        session.step(*rows, step, RATE).loss for step in range(first, first + steps)
    ], session.state()


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert left.keys() == right.keys()
    differing = [name for name, value in left.items() if value.tobytes() != right[name].tobytes()]
    assert not differing


@pytest.mark.parametrize("coupling", ["full", "exact"])
@pytest.mark.parametrize("family", ["qwen2_moe", "llama"])
def test_a_fused_walk_has_the_bits_of_stored_activations(family, coupling, same_order) -> None:
    fused = after(opened(on_gpu(family), coupling=coupling))
    stored = after(
        opened(on_gpu(family), coupling=coupling, recompute="stored", fused_update=False)
    )
    assert fused[0] == stored[0] and fused[0][-1] < fused[0][0]
    same(fused[1], stored[1])


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "adafactor", "sgd"])
def test_a_resume_has_the_same_bits(optimizer, same_order) -> None:
    if optimizer == "adamw8bit":
        pytest.importorskip("bitsandbytes")
    settings = {
        "coupling": "exact",
        "optimizer": optimizer,
        "micro_batch_size": 3,
        "max_grad_norm": 1.0,
    }
    straight = opened(on_gpu(), **settings)
    _, state = after(straight)
    losses, expected = after(straight, 2, 3)
    resumed = opened(on_gpu(), **settings)
    resumed.load_state(state)
    again, actual = after(resumed, 2, 3)
    assert again == losses
    same(actual, expected)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "adafactor"])
def test_updates_on_a_gpu_are_the_libraries(optimizer) -> None:
    """bitsandbytes' CUDA kernels may round a moment the other way than ours in one call: within a
    quantum."""
    random = torch.Generator("cuda").manual_seed(0)
    start = torch.randn(300, 128, device="cuda", generator=random)
    grads = [torch.randn(300, 128, device="cuda", generator=random) for _ in range(3)]
    leaf = torch.nn.Parameter(start.clone())
    if optimizer == "adamw":
        peer: Any = torch.optim.AdamW([leaf], lr=RATE, weight_decay=0.1, fused=True)
    elif optimizer == "adafactor":
        peer = torch.optim.Adafactor([leaf], lr=RATE, weight_decay=0.1)
    else:
        bitsandbytes = pytest.importorskip("bitsandbytes")
        peer = bitsandbytes.optim.AdamW8bit([leaf], lr=RATE, weight_decay=0.1)
    ours = {"w": start.clone()}
    updates = Updates(
        method_config("revffn", {"optimizer": optimizer, "weight_decay": 0.1}), ours, 0
    )
    for step, gradient in enumerate(grads):
        leaf.grad = gradient.clone()
        peer.step()
        updates.apply("w", gradient, step + 1, RATE)
    torch.testing.assert_close(ours["w"], leaf.detach(), rtol=1e-5, atol=1e-6)


def test_memory_does_not_grow_with_depth() -> None:
    """Beyond weights and optimizer: at most 2% from 6 to 24 layers; with a checkpoint a block, an
    input a layer."""
    ids = np.random.default_rng(0).integers(0, 256, (8, 256))
    by_name: dict[str, list[int]] = {}
    for name in ("ours", "checkpoint"):
        for layers in (6, 24):
            loaded = on_gpu(layers=layers)
            way = (
                opened(loaded, coupling="exact")
                if name == "ours"
                else Ordinary(loaded, "sft-fused", "adamw")
            )
            way.step(ids, ids, 0, RATE)
            by_name.setdefault(name, []).append(
                peak_bytes(partial(way.step, ids, ids, 1, RATE), "cuda")
            )
            way.close()
            torch.cuda.empty_cache()
    ours, checkpoint = by_name["ours"], by_name["checkpoint"]
    assert ours[1] <= 1.02 * ours[0]
    assert checkpoint[1] - checkpoint[0] >= 0.9 * 18 * ids.size * SIZES["hidden"] * 2
