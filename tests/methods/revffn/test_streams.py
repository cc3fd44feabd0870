"""A step and its inverse: exact in fixed point for every shape, weight and sign; its value; packed
bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ondevice.methods.revffn.streams import ROOM, FixedStreams, FloatStreams, Mix, pack, unpack

SHAPES = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 19))
MIXES = st.one_of(
    st.sampled_from([Mix(), Mix(1.0, 2.0), Mix(0.0)]),
    st.builds(
        lambda bits, sign: Mix(sign * 2.0**-bits, 1 + sign * 2.0**-bits, bits),
        st.integers(1, 8),
        st.sampled_from([1, -1]),
    ),
)


def integers(seed: int, shape: tuple[int, ...], high: int = ROOM) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-high, high + 1, shape, generator=generator, dtype=torch.int32)


@given(
    SHAPES,
    MIXES,
    st.integers(0, 2**32),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(1, 24),
)
def test_a_fixed_point_step_inverts_bit_for_bit(
    shape: tuple[int, ...], mix: Mix, seed: int, dtype: torch.dtype, bits: int
) -> None:
    streams = FixedStreams(bits)
    u, v = integers(seed, shape), integers(seed + 1, shape)
    branch = (integers(seed + 2, shape, ROOM // 2).double() * 2.0**-bits).to(dtype)
    if not mix.past:
        u = v
    before = u.clone(), v.clone(), branch.clone()
    w, side, _ = streams.step(u, v, branch, mix)
    assert (side is None) == (mix.bits == 0)
    assert torch.equal(streams.inverse_step(w, v, branch, mix, side), u)
    assert all(torch.equal(a, b) for a, b in zip((u, v, branch), before, strict=True))


@given(SHAPES, MIXES, st.integers(0, 2**32))
def test_a_step_adds_what_its_mix_says(shape: tuple[int, ...], mix: Mix, seed: int) -> None:
    streams = FixedStreams(12)
    u, v = integers(seed, shape, 2**24), integers(seed + 1, shape, 2**24)
    u = u if mix.past else v
    branch = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    w = streams.step(u, v, branch, mix).w
    exact = [x.double().numpy() * 2.0**-12 for x in (u, v)]
    expected = mix.past * exact[0] + mix.present * exact[1] + mix.branch * branch.double().numpy()
    np.testing.assert_allclose(w.double().numpy() * 2.0**-12, expected, atol=2.5 * 2.0**-12, rtol=0)
    floats = FloatStreams()
    total = floats.step(torch.from_numpy(exact[0]), torch.from_numpy(exact[1]), branch, mix).w
    np.testing.assert_allclose(total.numpy(), expected, rtol=1e-12, atol=1e-9)


@given(SHAPES, st.integers(1, 8), st.integers(0, 2**32))
def test_low_bits_are_packed_in_so_many_bits(shape: tuple[int, ...], bits: int, seed: int) -> None:
    stream = integers(seed, shape)
    packed = pack(stream, bits)
    assert packed is not None and packed.dtype == torch.uint8
    assert -(-stream.numel() * bits // 8) <= packed.numel() <= bits * -(-stream.numel() // 8)
    assert torch.equal(unpack(packed, bits, stream).to(torch.int32), stream & (2**bits - 1))


@pytest.mark.parametrize(
    ("dtype", "error"), [(torch.float64, 1e-15), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)]
)
def test_floating_point_inverts_to_its_rounding(dtype: torch.dtype, error: float) -> None:
    streams, generator = FloatStreams(dtype), torch.Generator().manual_seed(0)
    u, v, branch = (torch.randn(3, 5, 8, generator=generator) for _ in range(3))
    u, v = streams.from_float(u), streams.from_float(v)
    for mix in (Mix(), Mix(1.0, 2.0)):
        w, side, _ = streams.step(u, v, branch, mix)
        actual = streams.inverse_step(w, v, branch, mix, side)
        assert w.dtype == actual.dtype == dtype and side is None
        difference = float((actual.double() - u.double()).norm() / u.double().norm())
        assert difference <= error
        assert dtype != torch.bfloat16 or difference > 1e-4


def test_values_of_a_fixed_point_stream() -> None:
    streams = FixedStreams(10)
    values = torch.tensor([0.0, 1.0, -1.5, 2.0**-11, 3 * 2.0**-11, 100.25])
    assert streams.from_float(values).tolist() == [
        0,
        1024,
        -1536,
        0,
        2,
        102656,
    ]  # halves go to the even neighbour
    assert streams.to_float(streams.from_float(values)).tolist() == [
        0.0,
        1.0,
        -1.5,
        0.0,
        2.0**-9,
        100.25,
    ]
    assert streams.to_float(streams.from_float(values), torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("mix", [Mix(), Mix(1.0, 2.0), Mix(-0.5, 0.5, 1)])
@pytest.mark.parametrize("extreme", [700, -700, 2**31 - 1, -(2**31)])
def test_peaks_are_the_largest_magnitudes_of_what_is_added_and_of_the_sum(
    mix: Mix, extreme: int
) -> None:
    branch = torch.tensor([[0.25, -3.0], [2.5, 0.0]])
    u = torch.tensor([[-5, 64], [600, extreme]], dtype=torch.int32)
    v = torch.tensor([[-5, 64], [600, extreme]], dtype=torch.int32)
    w, _, peaks = FixedStreams(10).step(u, v, branch, mix)
    assert w[1, 1] == extreme  # nothing is added there
    assert peaks.tolist() == [3.0 * mix.branch * 1024, float(w.double().abs().max().float())]
    w, _, peaks = FloatStreams().step(u.double(), v.double(), branch, mix)
    assert peaks.tolist() == [3.0 * mix.branch, float(w.abs().max().float())]


@pytest.mark.parametrize(
    "mix", [Mix(), Mix(1.0, 2.0), Mix(-0.5, 0.5, 1), Mix(-0.125, 0.875, 3), Mix(0.5, 1.5, 1)]
)
def test_every_overflow_shows(mix: Mix) -> None:
    """The peaks reach `ROOM` whenever the true sum is, even where it has come round to a small
    number."""
    streams = FixedStreams(0)
    grid = torch.tensor(
        [-ROOM, -ROOM + 1, -ROOM // 2, -1, 0, 1, ROOM // 2, ROOM - 1, ROOM], dtype=torch.int64
    )
    u, v, q = (x.reshape(-1) for x in torch.meshgrid(grid, grid, grid, indexing="ij"))
    branch = q.double() / mix.branch
    true = mix.past * u.double() + mix.present * v.double() + q.double()
    wrong = true.abs() > ROOM + 64
    assert wrong.any() and not wrong.all()
    for i in range(0, true.numel(), 7):
        parts = u[i : i + 1].int(), v[i : i + 1].int(), branch[i : i + 1].float()
        assert not wrong[i] or float(streams.step(*parts, mix).peaks.amax()) >= ROOM
