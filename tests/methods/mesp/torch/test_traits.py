"""The backward pass of a block with any traits, also such that no model has together, is autograd's in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice.core.dims import ModelDims
from ondevice.core.traits import BlockTraits
from ondevice.methods.mesp.block_modules import seen
from ondevice.methods.mesp.torch import kernels
from ondevice.methods.mesp.torch.block import Block, Linear
from ondevice.methods.mesp.torch.graph_kernels import GraphKernels
from ondevice.methods.mesp.torch.kernels import Dense, TorchKernels
from ondevice.methods.mesp.torch.stages import Blocks, Stages
from ondevice.methods.mesp.torch.weights import plain_norms
from ondevice.nn import delta_rule
from ondevice.nn.cross_entropy import Loss
from tests.methods.mesp.torch.plain_block import block_forward
from tests.sampling import part_of

PLACES = ("before_attention", "after_attention", "before_mlp", "after_mlp")
ROWS = 2


@st.composite
def blocks(draw: Any) -> ModelDims:
    places = draw(st.lists(st.sampled_from(PLACES), min_size=1, unique=True))
    places += ["q", "k"] if draw(st.booleans()) else []
    head_dim, kv_heads = draw(st.sampled_from((4, 6, 12))), draw(st.sampled_from((1, 2)))
    key_heads = draw(st.integers(1, 2))
    traits = BlockTraits(
        norms=tuple((place, place) for place in places),
        qk_norm_all=draw(st.booleans()),
        activation=draw(st.sampled_from(("silu", "gelu_tanh"))),
        fused=draw(st.booleans()),
        rotary=draw(st.sampled_from(((), (True,), (False,)))),
        rotary_width=draw(st.sampled_from((0, 2))),
        windows=draw(st.sampled_from(((), (1,), (3,), (100,)))),
        score_scale=draw(st.sampled_from((0.0, 0.31))),
        residual_scale=draw(st.sampled_from((1.0, 0.4))),
        mixers=draw(st.sampled_from(((), (), ("conv",), ("delta",)))),
        delta=(key_heads, key_heads * draw(st.integers(1, 2)), 3, 5),
        output_gate=draw(st.booleans()),
        taps=draw(st.integers(1, 5)),
        keys_as_values=draw(st.sampled_from(((), (True,), (False,)))),
        value_norm=draw(st.booleans()),
        layer_input=draw(st.sampled_from((0, 5))),
        output_scale=draw(st.booleans()),
    )
    if traits.mixers or traits.output_gate:
        traits = replace(traits, fused=False)
    if traits.fused or traits.mixers:
        traits = replace(traits, keys_as_values=(), value_norm=False, layer_input=0)
    if traits.layer_input and draw(st.booleans()):
        places.append("after_layer_input")
        traits = replace(traits, norms=tuple((place, place) for place in places))
    return ModelDims("drawn", 1, 10, 14, kv_heads * draw(st.integers(1, 3)), kv_heads, head_dim, 9, True,
                     draw(st.booleans()), 1e4, 1e-6, 64, traits=traits)  # fmt: skip


def tensors(dims: ModelDims, adapted: set[str], seed: int, tokens: int) -> Block:
    """A block of random numbers, whose adapters are leaves."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * scale

    linears = {}
    for target, one in dims.block_linears(0).items():
        inputs = one.inputs
        outputs = one.outputs
        bias = random(outputs) if dims.linear_bias(target) else None
        pair = (None, None)
        if target in adapted:
            pair = (
                random(3, inputs, scale=0.4).requires_grad_(),
                random(3, outputs, scale=0.4).requires_grad_(),
            )
        linears[target] = Linear(
            Dense(random(outputs, inputs, scale=inputs**-0.5)), bias, *pair, 0.7
        )
    norms = {
        place: 1 + random(dims.norm_width(place), scale=0.2) for place, _ in dims.traits.norms_of(0)
    }
    layer_input = None
    if dims.traits.layer_input:
        layer_input = random(tokens, dims.traits.layer_input)
    return Block(
        norms | plain_norms(dims, 0, layer_input if layer_input is not None else random(1)),
        linears,
        layer_input=layer_input,
        mixer={
            part: random(*shape, scale=0.5).squeeze(1) if part == "taps" else random(*shape)
            for part, (_, shape) in dims.mixer_tensors(0).items()
        },
    )


@settings(max_examples=part_of(80), deadline=None)
@given(
    blocks(),
    st.data(),
    st.integers(1, 9),
    st.sampled_from((None, 2)),
    st.integers(0, 99),
)
def test_gradients_of_a_block_match_autograd(dims, data, length, chunk, seed) -> None:
    graph = data.draw(st.booleans())
    adapted = set(data.draw(st.lists(st.sampled_from(sorted(dims.block_linears(0))), unique=True)))
    check(dims, adapted, graph, length, chunk, seed)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("normed", [(), ("q", "k")])
def test_values_that_are_the_keys_are_not_rotated_with_them(normed, graph) -> None:
    """Without a norm of either, both are one tensor until the keys are rotated in its memory."""
    places = ("before_attention", "before_mlp", *normed)
    traits = BlockTraits(norms=tuple((place, place) for place in places), keys_as_values=(True,))
    dims = ModelDims("drawn", 1, 10, 14, 2, 1, 4, 9, True, False, 1e4, 1e-6, 64, traits=traits)
    check(dims, {"k_proj"}, graph, 5, None, 0)


def check(
    dims: ModelDims, adapted: set[str], graph: bool, length: int, chunk: int | None, seed: int
) -> None:
    """Hold a block's outputs and gradients against autograd's; `graph` takes the operations of a
    program's graph."""
    chosen = TorchKernels()
    if graph:
        chunk = None
        chosen = GraphKernels(seen(length, dims.traits.window(0)).double())
    count = ROWS * length
    block = tensors(dims, adapted, seed, count)
    x = torch.randn(count, dims.hidden, dtype=torch.float64, requires_grad=True)
    angle = torch.randn(
        1, length, 1, (dims.traits.rotary_width or dims.head_dim) // 2, dtype=torch.float64
    )
    position, g = (angle.cos(), angle.sin()), torch.randn(count, dims.hidden, dtype=torch.float64)
    expected = block_forward(dims, block, x, position, ROWS)
    leaves: dict[str, Any] = {t: (block.linears[t].a, block.linears[t].b) for t in sorted(adapted)}
    theirs = torch.autograd.grad(
        expected, [x, *(leaf for pair in leaves.values() for leaf in pair)], g
    )

    before, kernels.CHUNK_SCORES = kernels.CHUNK_SCORES, 8
    chunk_tokens, delta_rule.CHUNK_TOKENS = delta_rule.CHUNK_TOKENS, 4
    chunk_queries, kernels.CHUNK_QUERIES = kernels.CHUNK_QUERIES, 2
    try:
        with torch.no_grad():
            ours, learned = Blocks(Stages(dims, chosen), chunk), {}
            y = ours.forward(block, x.detach(), position, ROWS)
            gx = ours.backward(
                block,
                x.detach(),
                g.clone(),
                position,
                ROWS,
                lambda t, *pair: learned.update({t: pair}),
            )
    finally:
        kernels.CHUNK_SCORES, kernels.CHUNK_QUERIES = before, chunk_queries
        delta_rule.CHUNK_TOKENS = chunk_tokens
    torch.testing.assert_close(y, expected.detach(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gx, theirs[0], rtol=1e-8, atol=1e-8)
    assert learned.keys() == leaves.keys()
    for number, target in enumerate(leaves):
        for which in (0, 1):
            # Gradients of adapters are kept in float32.
            wanted = theirs[1 + 2 * number + which]
            limit = 1e-6 * float(wanted.abs().max()) + 1e-12
            torch.testing.assert_close(learned[target][which].double(), wanted, rtol=0, atol=limit)


@settings(max_examples=part_of(20), deadline=None)
@given(
    st.sampled_from((1.0, 0.3)),
    st.integers(1, 4),
    st.sampled_from((None, 3)),
    st.sampled_from((0.0, 1.5)),
)
def test_scaled_and_capped_logits_match_torch_cross_entropy(scale, tiles, chunk, cap) -> None:
    generator = torch.Generator().manual_seed(tiles)
    head, weight = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((11, 6), (6,))
    )
    x = torch.randn(10, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[-100, 3, 10, 0, 7], [1, 2, -100, 4, 5]])

    class Rows:
        vocab = 11

        def tile(self, low: int, high: int, then: Any = None) -> torch.Tensor:
            return head[low:high]

    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
    logits = normed @ head.T * scale
    if cap:
        logits = cap * torch.tanh(logits / cap)
    expected = torch.nn.functional.cross_entropy(
        logits.view(2, 5, -1)[:, :-1].flatten(0, 1),
        labels[:, 1:].flatten(),
        ignore_index=-100,
        reduction="sum",
    )
    (theirs,) = torch.autograd.grad(0.5 * expected, x)
    with torch.no_grad():
        loss = Loss(Rows(), weight, 1e-6, TorchKernels(), tiles, chunk, scale=scale, cap=cap)
        total, gradient = loss.backward(x.detach().clone(), labels, 0.5)
    torch.testing.assert_close(total.double(), expected.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, theirs, rtol=1e-8, atol=1e-10)
