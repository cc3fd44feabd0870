"""Gradients in 4 bits: their error, blocks of the end, and the compiled form against torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ondevice.core.errors import DataError
from ondevice.offload.config import CODED_BYTES
from ondevice.runtime_ops import native
from ondevice.runtime_ops.gradient_codes import BLOCK, BLOCK_BYTES, coded_bytes, decode, encode


def values(count: int, seed: int = 0) -> torch.Tensor:
    """Blocks of very different magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.randint(-6, 4, (count,), generator=generator)
    return torch.randn(count, generator=generator) * sizes.sort().values


def decoded(given: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    out = torch.full_like(given, 9, dtype=dtype)
    decode(encode(given), out, threads=3)
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 31, 32, 33, 4000, 100_001])
def test_a_number_is_off_by_half_a_level_of_its_block_or_one_beyond_the_last(
    form, count, dtype
) -> None:
    given = values(count, count).to(dtype)
    codes = encode(given)
    assert codes.dtype == torch.uint8 and len(codes) == coded_bytes(count)
    off = (decoded(given, dtype).double() - given.double()).abs()
    for low in range(0, count, BLOCK):
        block = given[low : low + BLOCK].double()
        largest = block[block.abs().argmax()]
        level = float(largest.abs()) / 8
        # Eight levels have the largest's sign and seven the other. The scale has 8 bits.
        within = block * largest.sign() >= -7.5 * level
        error = off[low : low + BLOCK]
        assert float(error[within].max()) <= level / 2 * (1 + 2**-3)
        assert float(error.max()) <= level * (1 + 2**-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_forms_have_the_same_bits(monkeypatch, dtype) -> None:
    if native.library() is None:
        pytest.skip("no compiler")
    for count in (1, 17, 64, 5001):
        given = values(count, count)
        compiled = decoded(given, dtype)
        with monkeypatch.context() as patch:
            patch.setattr(native, "library", lambda: None)
            assert torch.equal(decoded(given, dtype), compiled)


def test_codes_are_those_of_the_format_written_once_more(form) -> None:
    given = values(96, 5)
    blocks = encode(given).numpy().reshape(-1, BLOCK_BYTES)
    expected = np.empty((3, BLOCK), np.float64)
    for block, row in zip(blocks, expected, strict=True):
        scale = np.frombuffer(b"\0\0" + block[:2].tobytes(), "<f4")[0]
        for j in range(BLOCK):
            byte = int(block[2 + j % 16])
            row[j] = float(scale) * ((byte >> 4 if j >= 16 else byte % 16) - 8)
    np.testing.assert_array_equal(decoded(given).double().numpy(), expected.reshape(-1))
    exact = given.view(-1, BLOCK)
    largest = exact.gather(1, exact.abs().argmax(1, keepdim=True))[:, 0].double()
    np.testing.assert_allclose(expected[np.arange(3), exact.abs().argmax(1)], largest, rtol=2**-8)


def test_the_mean_of_many_codes_is_near_the_mean_of_the_numbers(form) -> None:
    given = torch.randn(1 << 18, generator=torch.Generator().manual_seed(1))
    off = decoded(given) - given
    assert float(off.norm() / given.norm()) < 0.1
    assert abs(float(off.mean())) < 1e-3


def test_zeros_stay_and_what_is_not_finite_shows(form) -> None:
    assert torch.equal(decoded(torch.zeros(70)), torch.zeros(70))
    for value in (float("inf"), float("-inf"), float("nan")):
        given = torch.ones(96)
        given[40] = value
        read = decoded(given)
        assert not read[32:64].isfinite().all() and read[:32].isfinite().all()
        assert read[64:].isfinite().all()


def test_a_plan_counts_the_bytes_of_codes() -> None:
    assert coded_bytes(100 * BLOCK) == 100 * BLOCK * CODED_BYTES


def test_codes_of_another_size_are_refused(form) -> None:
    with pytest.raises(DataError) as error:
        decode(torch.zeros(BLOCK_BYTES, dtype=torch.uint8), torch.zeros(33))
    assert error.value.expected == "36 bytes"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_s_codes_are_the_cpu_s(dtype) -> None:
    given = values(10_001).to(dtype)
    assert torch.equal(encode(given.cuda()).cpu(), encode(given))
