"""MLPs cut into tiles of tokens (Arctic Long Sequence Training, section 3.1.1), for long rows.

An MLP computes each token by itself. Its activations are several times as wide as the residual, so
for a long row they take most of a block's memory. Those of a tile exist only while the tile is
computed, in the forward pass and again before it is differentiated.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ondevice.core.errors import ConfigError


def mlps(layer: nn.Module) -> list[nn.Module]:
    """Return a layer's modules that compute each token by itself: linear modules, with activations
    and dropout between them, of hidden states only."""
    found = []
    for module in layer.modules():
        inner = [part for part in module.modules() if not list(part.children())]
        linear = [part for part in inner if _is_linear(part)]
        pointwise = all(_is_linear(part) or not list(part.parameters()) for part in inner)
        takes = len(inspect.signature(module.forward).parameters)
        if type(module).__name__.endswith("MLP") and pointwise and len(linear) > 1 and takes == 1:
            found.append(module)
    return found


def tile(family: Any, tokens: int) -> Callable[[], None]:
    """Let the MLPs of a model compute at most so many tokens at once; return what ends that.

    Raises:
        ConfigError: it has none.
    """
    layers = (family.layer(i) for i in range(family.dims.layers))
    modules: list[Any] = [module for layer in layers for module in mlps(layer)]
    if not modules:
        raise ConfigError(
            f"{family.dims.family} has no MLP that computes each token by itself",
            expected="mlp_chunk_tokens: null",
            received=f"mlp_chunk_tokens: {tokens}",
        )
    before = [module.__dict__.get("forward") for module in modules]
    for module in modules:
        module.forward = partial(_tiled, module.forward, module, tokens)

    def undo() -> None:
        for module, own in zip(modules, before, strict=True):
            del module.forward
            if own is not None:
                module.forward = own

    return undo


def _tiled(own: Any, module: nn.Module, tokens: int, x: Tensor) -> Tensor:
    if x.shape[-2] <= tokens:
        return own(x)
    compute = own
    if torch.is_grad_enabled():
        again = {"use_reentrant": False, "preserve_rng_state": module.training}
        compute = partial(checkpoint, own, **again)
    return torch.cat([compute(part.contiguous()) for part in x.split(tokens, dim=-2)], dim=-2)


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
