"""The kernels of fixed-point streams give the bits of PyTorch's operations: on a GPU where there is
one, else in Triton's interpreter."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ondevice.methods.revffn.streams import ROOM, FixedStreams, Mix
from tests.interpreter import needs_interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [] if DEVICE == "cuda" else needs_interpreter
BLOCK = 64
SHAPES = [(1, 1, 1), (2, 3, 23)]
"""The last one takes three programs, of which the third is nearly empty."""
MIXES = [Mix(), Mix(1.0, 2.0), Mix(0.0, 0.875)] + [
    Mix(sign * 2.0**-bits, 1 + sign * 2.0**-bits, bits) for bits, sign in ((3, -1), (4, 1), (8, -1))
]


@pytest.fixture(scope="module")
def kernels() -> Iterator[Any]:
    """The kernels; the interpreter is asked for as they are decorated, and again in each call."""
    module = importlib.import_module("ondevice.methods.revffn.stream_kernels")
    if DEVICE == "cuda":
        yield module
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        module = importlib.reload(module)
        patch.setattr(module, "BLOCK", BLOCK)  # the interpreter reduces one number after another
        yield module
    importlib.reload(module)


def integers(seed: int, shape: tuple[int, ...], high: int = ROOM) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-high, high + 1, shape, generator=generator, dtype=torch.int32)
    return drawn.to(DEVICE)


def same(ours: Tensor | None, theirs: Tensor | None) -> bool:
    """Return True if both are None or have the same bits."""
    if ours is None or theirs is None:
        return ours is theirs
    return ours.dtype == theirs.dtype and torch.equal(ours.view(-1), theirs.view(-1))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_and_its_inverse_have_the_bits_of_pytorch(
    kernels: Any, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    plain = FixedStreams(7)
    fused = kernels.TritonStreams(7)
    u = integers(1, shape)
    v = integers(2, shape)
    branch = (integers(3, shape, 2**26).double() / 2**9).to(dtype)  # half of them round
    for mix in MIXES:
        wanted = plain.step(u, v, branch, mix)
        found = fused.step(u, v, branch, mix)
        assert all(same(*pair) for pair in zip(found, wanted, strict=True)), mix
        assert fused.step(u, v, branch, mix, inverted=False).side is None
        back = fused.inverse_step(found.w, v, branch, mix, found.side)
        assert same(back, u if mix.past else v), mix


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -3.0e9])
def test_what_has_no_room_shows_in_the_peaks(kernels: Any, value: float) -> None:
    branch = torch.zeros(1, 2, 40, device=DEVICE)
    branch[0, 1, 7] = value
    zero = torch.zeros_like(branch, dtype=torch.int32)
    peaks = kernels.TritonStreams(0).step(zero, zero, branch, Mix()).peaks
    assert not float(peaks[0]) < ROOM
    assert float(peaks[0]) == abs(value) or value != value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_values_of_a_stream_have_the_bits_of_pytorch(kernels: Any, dtype: torch.dtype) -> None:
    stream = integers(4, (2, 3, 17))
    if DEVICE == "cpu" and dtype == torch.bfloat16:  # the interpreter cuts where a GPU rounds
        stream = stream >> 23 << 8
    assert same(
        kernels.TritonStreams(11).to_float(stream, dtype), FixedStreams(11).to_float(stream, dtype)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [True, False])
def test_gradients_have_the_bits_of_pytorch(kernels: Any, dtype: torch.dtype, first: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    du, dv, of_branch = (torch.randn(*SHAPES[-1], generator=generator).to(DEVICE) for _ in range(3))
    of_branch = of_branch.to(dtype)
    for mix in MIXES:
        later = None if first else du
        wanted = FixedStreams(7).gradients(mix, later, dv, of_branch)
        found = kernels.TritonStreams(7).gradients(mix, later, dv, of_branch)
        assert all(same(*pair) for pair in zip(found, wanted, strict=True)), mix
