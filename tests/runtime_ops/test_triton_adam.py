"""AdamW in Triton gives the bits of the compiled step: on a GPU where there is one, else in
Triton's interpreter."""

from __future__ import annotations

import importlib
import os
from dataclasses import replace

import numpy as np
import pytest
import torch

from ondevice.runtime_ops import layer_adam as la
from tests.runtime_ops.test_layer_adam import FORMS, make, same_bits, tensors

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def ops():
    if DEVICE == "cuda":
        return importlib.import_module("ondevice.runtime_ops.triton_adam")
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated
    try:
        return importlib.reload(importlib.import_module("ondevice.runtime_ops.triton_adam"))
    finally:
        os.environ.pop("TRITON_INTERPRET")
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


def there(state: la.HostState) -> la.HostState:
    """A copy on the device."""
    moved = {name: tensor.to(DEVICE).clone() for name, tensor in tensors(state).items()}
    halves = {name: moved.pop(name, None) for name in ("master", "high", "low")}
    return la.HostState(**halves, moments=la.Moments(state.moments.kind, **moved), seed=state.seed)


def back(state: la.HostState) -> la.HostState:
    moved = {name: tensor.cpu() for name, tensor in tensors(state).items()}
    halves = {name: moved.pop(name, None) for name in ("master", "high", "low")}
    return la.HostState(**halves, moments=la.Moments(state.moments.kind, **moved), seed=state.seed)


@pytest.mark.skipif(not la.available(), reason="no C++ compiler")
@pytest.mark.parametrize(("form", "kind"), FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])  # of the gradient
def test_the_bits_of_the_compiled_step(ops, form: str, kind: str, dtype: torch.dtype) -> None:
    """Gradients over 16 decades with zeros; a tile and a part of one; ties; a factor."""
    torch.manual_seed(0)
    count = la.TILE + 37
    master = torch.randn(count)
    words = master.view(torch.int32)
    words[::4] = (words[::4] & ~0xFFFF) | 0x8000
    host = make(master, form, kind)
    device = there(host)
    with np.errstate(all="ignore"):
        for number in range(1, 5):
            grad = torch.randn(count) * 10 ** torch.empty(count).uniform_(-12, 4)
            grad[torch.rand(count) < 0.4] = 0
            grad, scale = grad.to(dtype), torch.tensor([0.3 + 0.1 * number])
            step = la.AdamStep(1e-3, weight_decay=0.1, step=number)
            la.device_adam(grad, host, step, scale)
            if number % 2:
                ops.layer_adam(
                    grad.to(DEVICE), device, la.numbers_of(step), number, scale.to(DEVICE)
                )
            else:
                numbers = la.numbers_of(replace(step, grad_scale=float(scale)))
                ops.layer_adam(grad.to(DEVICE), device, numbers, number, None)
            assert same_bits(host, back(device)), number
    assert not same_bits(host, make(master, form, kind))
