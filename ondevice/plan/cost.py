"""Floating-point operations and bytes of a training step, and from them an estimate of its time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ondevice.methods.lsp.sizes import extra

if TYPE_CHECKING:
    from ondevice.models import ModelDims
    from ondevice.plan.devices import Device


@dataclass(frozen=True)
class StepCost:
    """What one step computes and moves.

    Attributes:
        flops: floating-point operations, a multiply-add counted as two.
        moved_bytes: weights read, and for first-order methods gradients and moments read and written.
    """

    flops: float
    moved_bytes: float


def forward_flops(dims: ModelDims, rows: float, length_tokens: int, layers: int | None = None) -> float:
    """Of `layers` blocks (None: all) over [rows, length_tokens], without the head; attention is causal."""
    tokens = rows * length_tokens
    matrices = dims.active_matrices / dims.layers
    attention = 2 * tokens * length_tokens * dims.heads * dims.head_dim
    return (dims.layers if layers is None else layers) * (2.0 * tokens * matrices + attention)


def recomputed_flops(dims: ModelDims, batch_size: int, length_tokens: int) -> float:
    """Of first-order training of all parameters where the backward pass computes each layer again."""
    head = 2.0 * batch_size * length_tokens * dims.vocab * dims.hidden
    return 4 * forward_flops(dims, batch_size, length_tokens) + 3 * head


def step_cost(
    dims: ModelDims, method: Any, batch_size: int, length_tokens: int, weights: int, quantize: str = "none"
) -> StepCost:
    """Cost of a step of `method` on [batch_size, length_tokens]; every token is taken as trained on.

    Args:
        weights: bytes that one pass over the model reads.
        quantize: one-pass methods read the weights as stored.
    """
    head = 2.0 * batch_size * length_tokens * dims.vocab * dims.hidden
    forward = forward_flops(dims, batch_size, length_tokens)
    if method.name == "prge":
        above = dims.layers if method.top_layers is None else min(method.top_layers, dims.layers)
        below = forward_flops(dims, batch_size, length_tokens, dims.layers - above)
        flops = below + method.copies * (forward_flops(dims, batch_size, length_tokens, above) + head)
        passes = 1 if method.outer_loop else method.queries
        passes *= 1 if method.inner_loop or method.estimator == "one_sided" else 2
        return StepCost(flops, passes * weights)
    if method.name == "mezo":
        moves = 4 * method.queries * 2 * weights
        return StepCost(2 * method.queries * (forward + head), 2 * method.queries * weights + moves)
    # The tiled loss computes the logits a second time in backward; only full training needs weight gradients.
    if method.name == "slideformer":  # a layer's forward pass runs twice; the head's logits once
        return StepCost(4 * forward + 3 * head * (1 if method.vocabulary_chunks == 1 else 4 / 3), 3 * weights)
    if method.name == "lsp":
        more = extra(dims, method, batch_size, length_tokens).flops
        return StepCost(recomputed_flops(dims, batch_size, length_tokens) + more, 3 * weights)
    if method.name == "revffn":  # a block's branch is computed a second time, and not a third for the inversion
        return StepCost((3 if method.recompute == "stored" else 4) * forward + 4 * head, 5 * weights)
    if method.name == "full":
        return StepCost(3 * forward + 4 * head, 3 * weights + 8 * weights)
    return StepCost(2 * forward + 3 * head, 2 * weights)


def step_seconds(cost: StepCost, device: Device, dtype: str) -> tuple[float | None, str]:
    """Estimate of a step's time and what it rests on; None where the device's rates are not known.

    Compute and memory are taken to overlap, so the longer of the two counts.
    """
    flops_s = device.flops_s.get(dtype)
    compute = None if flops_s is None else cost.flops / flops_s
    memory = None if device.bandwidth_bytes_s is None else cost.moved_bytes / device.bandwidth_bytes_s
    if compute is None:
        # Bandwidth alone is a bound, not an estimate.
        return None, "no rate of matrix products is known for this device and dtype"
    if memory is not None and memory > compute:
        return memory, "estimate: bound by memory bandwidth"
    return compute, "estimate: bound by matrix products"
