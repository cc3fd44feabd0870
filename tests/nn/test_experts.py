"""A mixture of experts against a loop over tokens, its gradients against autograd's, and the same bits every time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.functional import linear, silu

from ondevice.nn import experts as experts_module
from ondevice.nn.experts import ExpertLora, grouped_linear, mixture, pair_of, peft_layout
from tests.sampling import part_of


def inputs(
    tokens: int, experts: int, chosen: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> list[Tensor]:
    """Tokens, expert ids, their weights, and the experts' two tensors; hidden 6, width 5."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator)
    ids = scores.topk(chosen).indices
    floats = [
        torch.randn(*shape, generator=generator)
        for shape in ((tokens, 6), (experts, 10, 6), (experts, 6, 5))
    ]
    x, gate_up, down = (value.to(dtype).requires_grad_() for value in floats)
    return [
        x,
        ids,
        torch.rand(tokens, chosen, generator=generator).to(dtype).requires_grad_(),
        gate_up,
        down,
    ]


def by_token(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    rows = []
    for token in range(x.shape[0]):
        row = torch.zeros_like(x[0])
        for place, expert in enumerate(ids[token].tolist()):
            gate, up = linear(x[token], gate_up[expert]).chunk(2)
            row = row + weights[token, place] * linear(silu(gate) * up, down[expert])
        rows.append(row)
    return torch.stack(rows)


def gradients(out: Tensor, parts: list[Tensor]) -> tuple[Tensor, ...]:
    wanted = [part for part in parts if part.requires_grad]
    into = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out)
    return torch.autograd.grad(out, wanted, into, materialize_grads=True)


@settings(max_examples=part_of(25), deadline=None)
@given(st.integers(1, 13), st.integers(1, 7), st.integers(1, 7), st.integers(0, 99))
def test_value_and_gradients_are_those_of_a_loop_over_tokens(
    tokens: int, experts: int, chosen: int, seed: int
) -> None:
    parts = inputs(tokens, experts, min(chosen, experts), seed=seed)
    actual, expected = mixture(*parts, silu), by_token(*parts)
    torch.testing.assert_close(actual, expected)
    for mine, theirs in zip(gradients(actual, parts), gradients(expected, parts), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_pairs_of_experts_are_their_sum_with_the_matrices() -> None:
    parts = inputs(9, 4, 2)
    random = torch.Generator().manual_seed(4)
    adapters = {}
    for name, (outputs, width) in {"gate_up_proj": (10, 6), "down_proj": (6, 5)}.items():
        shapes = (4, 3, width), (4, outputs, 3)
        a, b = (torch.randn(*shape, generator=random, dtype=torch.float64) for shape in shapes)
        adapters[name] = ExpertLora(a, b, 0.7).leaf()
    sums = [
        weight + adapters[name].scale * adapters[name].b_EOR @ adapters[name].a_ERI
        for name, weight in zip(("gate_up_proj", "down_proj"), parts[3:], strict=True)
    ]
    actual, expected = mixture(*parts, silu, adapters), by_token(*parts[:3], *sums)
    torch.testing.assert_close(actual, expected)
    leaves = [*parts, *(one for pair in adapters.values() for one in pair[:2])]
    for mine, theirs in zip(gradients(actual, leaves), gradients(expected, leaves), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_experts_without_tokens_have_gradients_of_zero() -> None:
    parts = inputs(3, 6, 1)
    parts[1] = torch.tensor([[4], [1], [4]])
    *_, gate_up, down = gradients(mixture(*parts, silu), parts)
    for expert in range(6):
        assert bool(gate_up[expert].any()) == bool(down[expert].any()) == (expert in (1, 4))


def test_no_tokens_give_no_rows() -> None:
    actual = grouped_linear(
        torch.zeros(0, 6), torch.randn(3, 4, 6), torch.zeros(3, dtype=torch.int64)
    )
    assert actual.shape == (0, 4)


def assert_the_same_bits(device: str, dtype: torch.dtype, hidden: int, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.rand(257, 8, generator=generator).topk(3).indices.to(device)
    floats = [(257, hidden), (257, 3), (8, 2 * width, hidden), (8, hidden, width)]
    x, weights, gate_up, down = (
        torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_()
        for shape in floats
    )
    parts = [x, ids, weights, gate_up, down]
    first = mixture(*parts, silu)
    expected = gradients(first, parts)
    for _ in range(5):
        again = mixture(*parts, silu)
        assert torch.equal(again, first)
        assert all(
            torch.equal(a, b) for a, b in zip(gradients(again, parts), expected, strict=True)
        )
    with torch.no_grad():
        assert torch.equal(mixture(*parts, silu), first)  # as the forward pass of a walk runs it


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_every_time(dtype: torch.dtype) -> None:
    assert_the_same_bits("cpu", dtype, 40, 24)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [704, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_bits_every_time_on_cuda(dtype: torch.dtype, width: int) -> None:
    """With torch's grouped product (bfloat16, whole 16 bytes) and without."""
    assert_the_same_bits("cuda", dtype, 512, width)


@pytest.mark.gpu
def test_the_grouped_product_is_the_loop_on_cuda() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, weight = (
        torch.randn(*shape, generator=generator).bfloat16() for shape in ((97, 128), (5, 64, 128))
    )
    ends = torch.tensor([10, 10, 50, 96, 97])
    actual = grouped_linear(rows.cuda(), weight.cuda(), ends.cuda()).cpu()
    torch.testing.assert_close(actual, grouped_linear(rows, weight, ends), atol=0.2, rtol=0.02)


def test_a_pair_of_all_experts_has_peft_s_layout() -> None:
    """A's rows go expert by expert; in B the experts of one rank lie together."""
    experts, rank, outputs, width = 3, 2, 5, 4
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(experts * rank, width, generator=generator)
    b = torch.randn(outputs, rank * experts, generator=generator)
    pair = pair_of(a, b, experts, 0.5)
    assert pair.scale == 0.5
    for expert in range(experts):
        change = sum(
            torch.outer(b[:, r * experts + expert], a[expert * rank + r]) for r in range(rank)
        )
        torch.testing.assert_close(pair.b_EOR[expert] @ pair.a_ERI[expert], change)
    back_a, back_b = peft_layout(pair.a_ERI, pair.b_EOR)
    assert torch.equal(back_a, a) and torch.equal(back_b, b.t())


@pytest.mark.skipif(experts_module._grouped_mm is None, reason="torch before 2.10")
def test_the_kernel_for_all_experts_is_the_product_of_each(monkeypatch) -> None:
    """In float32 also a CPU has it; an expert in the middle has no row."""
    random = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(*shape, generator=random) for shape in ((7, 16), (3, 8, 16)))
    ends = torch.tensor([4, 4, 7])
    expected = grouped_linear(rows, weight, ends)
    monkeypatch.setattr(experts_module, "_grouped", lambda *_: True)
    torch.testing.assert_close(grouped_linear(rows, weight, ends), expected)


@pytest.mark.skipif(experts_module._grouped_mm is None, reason="torch before 2.10")
@pytest.mark.parametrize(
    ("outputs", "inputs", "dtype", "grouped"),
    [
        (8, 16, torch.bfloat16, True),
        (12, 16, torch.bfloat16, False),
        (8, 20, torch.bfloat16, False),
        (8, 16, torch.float32, False),
    ],
)
def test_the_kernel_for_all_experts_takes_rows_of_whole_16_bytes(
    outputs: int, inputs: int, dtype: torch.dtype, grouped: bool, monkeypatch
) -> None:
    """Tensors of a GPU, without one."""
    capability = experts_module.GROUPED_CAPABILITY
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with FakeTensorMode():
        rows = torch.empty(5, inputs, device="cuda", dtype=dtype)
        weight = torch.empty(3, outputs, inputs, device="cuda", dtype=dtype)
        assert experts_module._grouped(rows, weight) == grouped
