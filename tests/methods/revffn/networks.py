"""Small reversible networks, their gradients by rebuilt inputs, and those with every activation stored."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ondevice.methods.revffn.config import RevffnConfig
from ondevice.methods.revffn.reversible import Reversible
from ondevice.models import Family, tiny_model

Gradients = dict[str, Tensor]
SMALL: dict[str, Any] = {"hidden": 32, "heads": 2, "kv_heads": 1, "intermediate": 24}


def network(
    family: str | Family = "llama", *, sizes: dict[str, Any] | None = None, dtype: str = "float32", **settings: Any
) -> Reversible:
    """A network whose parameters all require gradients; settings are `RevffnConfig`'s."""
    if isinstance(family, str):
        family = tiny_model(family, 1, **{**SMALL, **(sizes or {})}).family
        for parameter in family.model.parameters():
            parameter.data = parameter.data.to(getattr(torch, dtype))
    made = Reversible(family, RevffnConfig(**settings))
    for parameter in (*family.model.parameters(), *made.adapters.values()):
        parameter.requires_grad_(True)
    return made


def random_ids(made: Reversible, rows: int = 2, length: int = 7, seed: int = 3) -> Tensor:
    vocabulary = made.family.embedding.weight.shape[0]
    return torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))


def direction(hidden: Tensor) -> Tensor:
    """A gradient to begin with, of `hidden`'s shape and dtype."""
    return torch.randn(hidden.shape, generator=torch.Generator().manual_seed(4)).to(hidden)


def rebuilt(made: Reversible, ids: Tensor) -> tuple[Tensor, Gradients]:
    """The hidden states and all gradients by rebuilt inputs, with what reaches the embedding as `embedding`."""
    saved = made.forward(ids)
    hidden = made.hidden(saved)
    found: Gradients = {}
    found["embedding"] = made.backward(saved, direction(hidden), lambda _, grads: found.update(grads))
    return hidden, found


def stored(made: Reversible, ids: Tensor) -> tuple[Tensor, Gradients]:
    """As `rebuilt`, by autograd with every activation stored."""
    seen: list[Tensor] = []
    handle = made.family.embedding.register_forward_hook(lambda *parts: seen.append(parts[2]))
    hidden = made.stored_hidden(ids)
    handle.remove()
    named = {name: p for i in range(made.blocks) for name, p in made.block_parameters(i).items()}
    grads = torch.autograd.grad(
        hidden, [seen[0], *named.values()], direction(hidden), materialize_grads=True, retain_graph=True
    )
    return hidden.detach(), {"embedding": grads[0], **dict(zip(named, grads[1:], strict=True))}


def relative_error(found: Gradients, expected: Gradients) -> float:
    """Norm of the difference of all gradients, as a part of the norm of `expected`."""
    assert found.keys() == expected.keys()
    difference = sum(float((found[name].double() - expected[name].double()).square().sum()) for name in expected)
    return (difference / sum(float(value.double().square().sum()) for value in expected.values())) ** 0.5


def same_bits(found: Gradients, expected: Gradients) -> bool:
    """True where all gradients are the same; a gradient of the embedding's output comes in float32."""
    assert found.keys() == expected.keys()
    return all(torch.equal(found[name].to(expected[name].dtype), expected[name]) for name in expected)
