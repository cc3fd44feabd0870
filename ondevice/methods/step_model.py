"""Bytes and operations of a training step that several methods' plans are made of, from dimensions
only.

Held against measurements by `benchmarks.planning.accuracy`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ondevice.core.method import StepCost
from ondevice.offload.config import ITEM_BYTES

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.offload.config import EngineConfig

INPUTS_ON_THE_WAY = 3
"""Inputs of layers that are on the accelerator at once if the others are on the host."""
SHARE = 0.85
"""Of the usable memory that `method.recompute: auto` fills: the plan's parts are estimates, and
allocators leave gaps."""
AROUND_BYTES = 1 << 30
"""Libraries and their workspaces."""


def forward_bytes(dims: ModelDims, rows: int, length_tokens: int, activation_bytes: int) -> int:
    """Return the most that one block holds at once in a forward pass over [rows, length_tokens].

    The MLP holds gate, up and their product, the residual, its norm and two temporaries (without a
    gate, four parts of a GELU); the attention holds queries, keys and values before and after the
    rotation, its output, and the scores if it is not fused.
    """
    tokens = rows * length_tokens
    queries = dims.heads * dims.head_dim
    keys = dims.kv_heads * dims.head_dim
    mlp = tokens * ((3 if dims.gated else 4) * dims.intermediate + 4 * dims.hidden)
    scores = rows * dims.heads * length_tokens**2
    attention = tokens * (3 * dims.hidden + 3 * queries + 4 * keys) + scores
    return max(mlp, attention) * activation_bytes


def backward_bytes(
    dims: ModelDims, batch_size: int, length_tokens: int, activation_bytes: int
) -> int:
    """Return the bytes that backpropagation keeps of all blocks, without checkpointing.

    A token and layer: each norm's input, its normalised form and its output (6 d); queries and the
    attention's output, and keys and values (2 q + 2 kv); the MLP's gate, activation, up and product
    (4 ff). Without a gate, a layer norm keeps its input and its output (4 d), and GPT-2's GELU four
    parts and its result (5 ff).
    """
    tokens = batch_size * length_tokens
    attention = 2 * (dims.heads + dims.kv_heads) * dims.head_dim
    norms = 6 if dims.gated else 4
    mlp = mlp_parts(dims) * dims.intermediate
    per_token = norms * dims.hidden + attention + mlp + dims.heads
    return dims.layers * tokens * per_token * activation_bytes


def mlp_parts(dims: ModelDims) -> int:
    """Return how often an MLP keeps its wide activation for its backward pass."""
    return 4 if dims.gated else 5


def _pointwise(dims: ModelDims) -> int:
    """Return the width of the MLP that computes each token by itself: of a mixture, the expert of
    all tokens."""
    if dims.experts:
        return getattr(dims, "shared_intermediate", 0)
    return dims.intermediate


def mlp_again_flops(
    dims: ModelDims, config: EngineConfig, batch_size: int, length_tokens: int
) -> float:
    """Return operations of the forward passes that MLPs in tiles of tokens do once more."""
    tile = config.mlp_chunk_tokens
    if tile is None or tile >= length_tokens:
        return 0.0
    matrices = (3 if dims.gated else 2) * dims.hidden * _pointwise(dims)
    return 2.0 * dims.layers * batch_size * length_tokens * matrices


def loss_bytes(dims: ModelDims, tokens: int, loss_tiles: int, answers: int = 0) -> int:
    """Return the tiled cross-entropy over `tokens` labelled tokens, float32.

    A tile's logits are there three times (as they are, shifted, exponentiated), and the hidden
    states four times (final norm, shifted by one token, the labelled rows, the rows of the head for
    the labels).

    Args:
        answers: tokens that the loss is over; 0 for the whole vocabulary.
    """
    tile = answers or -(-dims.vocab // loss_tiles)
    return tokens * (3 * tile + 4 * dims.hidden) * 4


def passes_bytes(
    dims: ModelDims,
    config: EngineConfig,
    place: str,
    batch_size: int,
    length_tokens: int,
    vocab: int,
) -> dict[str, int]:
    """Return the bytes that the passes of the offload engines hold on the accelerator, by part:
    inputs of the layers, one layer's activations, logits.

    Args:
        place: where the inputs are; `device` keeps all of them there.
        vocab: columns of the logits that exist at once.
    """
    item = ITEM_BYTES[config.compute]
    rows = min(batch_size, config.micro_batch_size or batch_size)
    tokens = rows * length_tokens
    kept = (
        dims.layers * batch_size * length_tokens
        if place == "device"
        else INPUTS_ON_THE_WAY * tokens
    )
    residual = batch_size * length_tokens * dims.hidden * item
    block = backward_bytes(dims, rows, length_tokens, item) // dims.layers
    if config.mlp_chunk_tokens is not None:
        absent = rows * max(0, length_tokens - config.mlp_chunk_tokens)
        block -= absent * mlp_parts(dims) * _pointwise(dims) * item
    return {
        "kept inputs": kept * dims.hidden * item,
        "activations": block + 3 * residual,
        "logits": min(tokens, config.loss_chunk_tokens) * vocab * (8 + item),
        # Several micro-batches are summed in float32: a layer's, or the head's.
        "sums": 4
        * max(dims.block_parameters, vocab * dims.hidden)
        * (rows < batch_size and item == 2),
    }


def forward_flops(
    dims: ModelDims, rows: float, length_tokens: int, layers: int | None = None
) -> float:
    """Return operations of `layers` blocks (None: all) over [rows, length_tokens], without the
    head; attention is causal."""
    tokens = rows * length_tokens
    matrices = dims.active_matrices / dims.layers
    attention = 2 * tokens * length_tokens * dims.heads * dims.head_dim
    return (dims.layers if layers is None else layers) * (2.0 * tokens * matrices + attention)


def head_flops(dims: ModelDims, rows: float, length_tokens: int) -> float:
    """Return operations of the logits of [rows, length_tokens]."""
    return 2.0 * rows * length_tokens * dims.vocab * dims.hidden


def recomputed_flops(dims: ModelDims, batch_size: int, length_tokens: int) -> float:
    """Return operations of first-order training of all parameters if the backward pass recomputes
    each layer."""
    return 4 * forward_flops(dims, batch_size, length_tokens) + 3 * head_flops(
        dims, batch_size, length_tokens
    )


def adapter_step_cost(
    dims: ModelDims, config: Any, batch_size: int, length_tokens: int, weight_bytes: int
) -> StepCost:
    """Return work of a first-order step that trains only an adapter; see `MethodSpec.step_cost`."""
    # The tiled loss computes the logits a second time in the backward pass; frozen weights need no
    # gradients.
    forward = forward_flops(dims, batch_size, length_tokens)
    head = head_flops(dims, batch_size, length_tokens)
    return StepCost(2 * forward + 3 * head, 2 * weight_bytes)


def room_bytes(request: Any, needed_bytes: int) -> int:
    """Return the memory that is left by a step that keeps nothing, bytes.

    Args:
        request: a plan's request.
        needed_bytes: of weights and step.
    """
    return int(SHARE * request.device.usable_bytes) - AROUND_BYTES - needed_bytes


def item_bytes(dtype: str) -> int:
    """Return the bytes of a number."""
    return 4 if dtype == "float32" else 2
