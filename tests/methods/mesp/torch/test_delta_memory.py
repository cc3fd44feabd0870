"""A gated delta rule keeps a state a chunk, and the wide tensors of one chunk, not of the row."""

from __future__ import annotations

import torch

from ondevice.core.dims import ModelDims
from ondevice.core.traits import BlockTraits
from ondevice.methods.mesp.torch.kernels import TorchKernels
from ondevice.methods.mesp.torch.stages import Blocks, Stages
from ondevice.nn.delta_rule import CHUNK_TOKENS
from tests.methods.mesp.torch.live import LiveBytes
from tests.methods.mesp.torch.test_traits import tensors

HEADS = 8
WIDTH = 8
FLOAT64 = 8


def peak_bytes(dims: ModelDims, length: int) -> int:
    """Return the most that lives at once in a block's forward and backward pass over one row."""
    block = tensors(dims, {"delta_qkv", "delta_out"}, 0, length)
    for linear in block.linears.values():
        for side in (linear.a, linear.b):
            if side is not None:
                side.requires_grad_(False)
    x = torch.randn(length, dims.hidden, dtype=torch.float64)
    position = (torch.ones(1, length, 1, 2), torch.zeros(1, length, 1, 2))
    blocks = Blocks(Stages(dims, TorchKernels()), None)
    with torch.no_grad(), LiveBytes() as live:
        blocks.forward(block, x, position, 1)
        blocks.backward(block, x, torch.ones_like(x), position, 1, lambda *_: None)
    return live.peak


def test_memory_of_a_row_grows_by_what_every_token_has_and_a_state_a_chunk() -> None:
    places = ("before_attention", "before_mlp")
    traits = BlockTraits(
        norms=tuple((place, place) for place in places),
        mixers=("delta",),
        delta=(HEADS, HEADS, WIDTH, WIDTH),
        taps=4,
    )
    dims = ModelDims("drawn", 1, 16, 16, 2, 1, 4, 9, True, False, 1e4, 1e-6, 4096, traits=traits)
    lengths = [CHUNK_TOKENS * count for count in (8, 16, 32)]
    peaks = [peak_bytes(dims, length) for length in lengths]
    growth = [
        (after - before) / (longer - shorter)
        for before, after, shorter, longer in zip(peaks, peaks[1:], lengths, lengths[1:])
    ]
    assert abs(growth[1] - growth[0]) <= 0.02 * growth[0], "linear in the tokens"
    state = HEADS * WIDTH * WIDTH * FLOAT64 / CHUNK_TOKENS
    channels = 3 * HEADS * WIDTH
    # The projections and their gradients, each at most twice at once where parts are joined.
    of_tokens = 4 * (channels + 2 * HEADS * WIDTH + 2 * HEADS + 2 * dims.hidden) * FLOAT64
    assert growth[1] <= state + of_tokens, (growth, state, of_tokens)
