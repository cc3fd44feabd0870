"""NF4 and INT8 matrices against their definitions, and the linear layer over them against a plain one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

pytest.importorskip("bitsandbytes")

from ondevice.core.errors import ConfigError, ModelError
from ondevice.models.load import tiny_model
from ondevice.nn.packed import KINDS, Int8Matrix, Nf4Matrix, PackedLinear, pack_model, unpack_model
from tests.sampling import part_of

LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""QLoRA, appendix E."""
shapes = st.tuples(st.integers(1, 5).map(lambda n: 8 * n), st.integers(1, 5).map(lambda n: 64 * n))
kinds = st.sampled_from(sorted(KINDS))
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def matrix(
    shape: tuple[int, int], dtype: torch.dtype = torch.float32, seed: int = 0
) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(deadline=None, max_examples=part_of(30))
@given(shape=shapes, seed=st.integers(0, 99))
def test_nf4_is_the_nearest_of_sixteen_levels(shape, seed) -> None:
    """With scales in float32 every weight is a level times its group's largest magnitude, and the nearest one."""
    weight = matrix(shape, seed=seed)
    dense = Nf4Matrix.pack(weight, double=False).dense()
    groups, rounded = weight.reshape(-1, 64), dense.reshape(-1, 64)
    scale = groups.abs().amax(1, keepdim=True)
    levels = torch.tensor(LEVELS)
    nearest = (groups / scale)[..., None].sub(levels).abs().amin(-1)
    torch.testing.assert_close((groups - rounded).abs() / scale, nearest, atol=2e-6, rtol=0)
    place = (rounded / scale)[..., None].sub(levels).abs().amin(-1)
    assert float(place.max()) < 2e-6


def test_scales_in_8_bits_cost_little() -> None:
    weight = matrix((256, 512))
    single, double = (
        float((Nf4Matrix.pack(weight, d).dense() - weight).square().mean()) for d in (False, True)
    )
    assert single < double < 1.02 * single


@settings(deadline=None, max_examples=part_of(30))
@given(shape=shapes, dtype=dtypes, seed=st.integers(0, 99))
def test_int8_errs_by_half_a_step_of_the_row(shape, dtype, seed) -> None:
    weight = matrix(shape, dtype, seed)
    packed = Int8Matrix.pack(weight)
    step = weight.float().abs().amax(1, keepdim=True) / 127
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    error = (packed.dense().float() - weight.float()).abs()
    assert bool(
        (error <= step * 0.5001 + rounding * weight.float().abs().amax(1, keepdim=True)).all()
    )
    assert packed.dense().dtype == dtype and packed.weight.dtype == torch.int8


def test_a_row_of_zeros_stays() -> None:
    weight = matrix((8, 64))
    weight[3] = 0
    for kind in KINDS.values():
        assert not kind.pack(weight).dense()[3].any()


@settings(deadline=None, max_examples=part_of(30))
@given(kind=kinds, shape=shapes, dtype=dtypes, bias=st.booleans(), rows=st.integers(1, 5))
def test_the_layer_is_a_plain_one_over_the_rounded_weights(kind, shape, dtype, bias, rows) -> None:
    packed = KINDS[kind].pack(matrix(shape, dtype))
    added = matrix((1, shape[0]), dtype)[0] if bias else None
    layer, x = PackedLinear(packed, added), matrix((rows, shape[1]), dtype, 1).requires_grad_(True)
    expected = functional.linear(x, packed.dense(), added)
    received = layer(x)
    assert torch.equal(received, expected)
    with torch.no_grad():
        assert torch.equal(layer(x), expected)
    gradient = matrix((rows, shape[0]), dtype, 2)
    (ours,) = torch.autograd.grad(received, x, gradient)
    (theirs,) = torch.autograd.grad(expected, x, gradient)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_backpropagation_keeps_no_dense_matrix(kind) -> None:
    layer, kept = PackedLinear(KINDS[kind].pack(matrix((64, 128)))), []
    x = matrix((2, 128)).requires_grad_(True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.numel()) or t, lambda t: t
    ):
        layer(x).sum()
    assert 64 * 128 not in kept


def test_packed_weights_stay_where_they_are() -> None:
    layer = PackedLinear(Nf4Matrix.pack(matrix((64, 128))))
    before = layer.dense()
    assert (
        torch.equal(layer.to(torch.bfloat16).dense(), before)
        and layer.dense().dtype == torch.float32
    )
    assert layer.to("cpu") is layer
    with pytest.raises(ModelError):
        layer.to("meta")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_model_is_packed_in_place_and_unpacked_to_the_same_function(kind, family) -> None:
    loaded, ids = tiny_model(family), torch.arange(24).view(2, 12)
    before = loaded.model(ids).logits
    pack_model(loaded.family, kind)
    with torch.no_grad():
        packed = loaded.model(ids).logits
    assert isinstance(loaded.family.linear(0, "q_proj"), PackedLinear)
    unpack_model(loaded.family)
    plain = loaded.family.linear(0, "q_proj")
    assert not isinstance(plain, PackedLinear) and not plain.weight.requires_grad
    with torch.no_grad():
        assert torch.equal(loaded.model(ids).logits, packed)
    assert 0 < float((packed - before).abs().max()) < 4


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        pack_model(tiny_model("llama").family, "nf3")
    assert (refused.value.expected, refused.value.received) == ("nf4, int8", "nf3")
