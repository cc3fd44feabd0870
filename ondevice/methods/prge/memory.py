"""Bytes of a P-RGE step by part, and its work, from dimensions only (P-RGE section 3.2 and appendix A.8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ondevice.core.method import MemoryModel, Reduction, StepCost
from ondevice.methods.prge.layout import KEPT_BLOCKS, AdapterLayout
from ondevice.methods.prge.subspace_program import SubspaceLayout
from ondevice.methods.step_model import (
    backward_bytes,
    forward_bytes,
    forward_flops,
    head_flops,
    loss_bytes,
)

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.methods.prge.config import PrgeConfig


def memory(
    dims: ModelDims,
    config: PrgeConfig,
    batch_size: int,
    length_tokens: int,
    activation_bytes: int = 4,
) -> dict[str, int]:
    """Return peak bytes of adapter, noise, activations, logits and optimizer; weights are the
    caller's.

    Args:
        dims: the model.
        config: the method.
        batch_size: rows of data; the program runs `config.copies` times as many.
        length_tokens: tokens a row.
        activation_bytes: bytes of one activation.
    """
    layout = AdapterLayout.build(dims, config, 0)
    copies = 1
    if config.batch_queries:
        copies = config.queries + (config.estimator == "one_sided")
    if config.estimator == "central" and config.batch_signs:
        copies *= 2
    rows = batch_size * copies
    # A functional step holds the old vector, with Adam its moments too, next to the new one.
    adapter = layout.size * 4 * 2 * (3 if config.optimizer == "adam" else 1)
    frozen_a = sum(entry.inputs * entry.rank for entry in layout.entries) * activation_bytes
    layers = {entry.layer for entry in layout.entries}
    largest_layer = max(layout.layer_range(layer)[1] for layer in layers)
    update = min(layout.size, 1 << 18)
    noise = max(largest_layer * (config.copies + config.queries), update * config.queries) * 4
    activations = forward_bytes(dims, rows, length_tokens, activation_bytes)
    subspace: dict[str, int] = {}
    if config.factors is not None:
        # A program: the adapter with A, C and the moments, going in and coming out.
        spans = SubspaceLayout(dims, config.for_program(), 0)
        frozen_a = 0
        adapter = 8 * (spans.size + spans.c_size + 2 * spans.small.size)
    if config.subspace == "gradient":
        # An exact gradient is of one row at a time, between two steps: its activations take the
        # step's place.
        activations = max(activations, backward_bytes(dims, 1, length_tokens, activation_bytes))
        elements = 0
        for entry in layout.entries:
            elements += entry.rank * (KEPT_BLOCKS * (entry.inputs + entry.outputs) + entry.outputs)
            elements += 2 * entry.inputs * entry.outputs
        subspace["subspace"] = 4 * elements
    return subspace | {
        "adapter": adapter + frozen_a,
        "noise": noise,
        "activations": activations,
        "logits": loss_bytes(dims, rows * length_tokens, config.loss_tiles, len(config.answers)),
        "optimizer": 0,
    }


def _fewer_queries(config: PrgeConfig, batch_size: int) -> PrgeConfig | None:
    if config.queries < 2 or config.estimator != "central":
        return None
    return config.model_copy(update={"queries": 1})


MEMORY = MemoryModel(
    memory, reductions=(Reduction("{config.queries} query a step", _fewer_queries),)
)


def step_cost(
    dims: ModelDims, config: PrgeConfig, batch_size: int, length_tokens: int, weight_bytes: int
) -> StepCost:
    """See `MethodSpec.step_cost`."""
    above = min(config.top_layers or dims.layers, dims.layers)
    below = forward_flops(dims, batch_size, length_tokens, dims.layers - above)
    copy = forward_flops(dims, batch_size, length_tokens, above) + head_flops(
        dims, batch_size, length_tokens
    )
    passes = 1 if config.batch_queries else config.queries
    if not config.batch_signs and config.estimator == "central":
        passes *= 2
    return StepCost(below + config.copies * copy, passes * weight_bytes)
