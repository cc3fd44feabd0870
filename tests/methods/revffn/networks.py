"""Small reversible networks, their gradients by rebuilt inputs, and those with every activation
stored."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.revffn.stored import stored_hidden
from ondevice.methods.revffn.config import RevffnConfig
from ondevice.methods.revffn.reversible import Reversible
from ondevice.models import Family, tiny_model

Gradients = dict[str, Tensor]
SMALL: dict[str, Any] = {"hidden": 32, "heads": 2, "kv_heads": 1, "intermediate": 24}


def network(
    family: str | Family = "llama",
    *,
    sizes: dict[str, Any] | None = None,
    dtype: str = "float32",
    **settings: Any,
) -> Reversible:
    """A network whose parameters all require gradients; settings are `RevffnConfig`'s."""
    if isinstance(family, str):
        family = tiny_model(family, 1, **{**SMALL, **(sizes or {})}).family
        for parameter in family.model.parameters():
            parameter.data = parameter.data.to(getattr(torch, dtype))
    reversible = Reversible(family, RevffnConfig(**settings))
    for parameter in (*family.model.parameters(), *reversible.adapters.values()):
        parameter.requires_grad_(True)
    return reversible


def random_ids(built: Reversible, rows: int = 2, length: int = 7, seed: int = 3) -> Tensor:
    vocabulary = built.family.embedding.weight.shape[0]
    return torch.randint(
        0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed)
    )


def direction(hidden: Tensor) -> Tensor:
    """A gradient to begin with, of `hidden`'s shape and dtype."""
    return torch.randn(hidden.shape, generator=torch.Generator().manual_seed(4)).to(hidden)


def rebuilt(built: Reversible, ids: Tensor) -> tuple[Tensor, Gradients]:
    """The hidden states and all gradients by rebuilt inputs, with what reaches the embedding as
    `embedding`."""
    saved = built.forward(ids)
    hidden = built.hidden(saved)
    by_name: Gradients = {}
    by_name["embedding"] = built.backward(
        saved, direction(hidden), lambda _, grads: by_name.update(grads)
    )
    return hidden, by_name


def stored(built: Reversible, ids: Tensor) -> tuple[Tensor, Gradients]:
    """As `rebuilt`, by autograd with every activation stored."""
    seen: list[Tensor] = []
    embed = built.family.embed

    def keep(ids: Tensor) -> Tensor:
        seen.append(embed(ids))
        return seen[0]

    built.family.embed = keep  # type: ignore[method-assign]
    hidden = stored_hidden(built, ids)
    built.family.embed = embed  # type: ignore[method-assign]
    named = {name: p for i in range(built.blocks) for name, p in built.block_parameters(i).items()}
    grads = torch.autograd.grad(
        hidden,
        [seen[0], *named.values()],
        direction(hidden),
        materialize_grads=True,
        retain_graph=True,
    )
    return hidden.detach(), {"embedding": grads[0], **dict(zip(named, grads[1:], strict=True))}


def relative_error(actual: Gradients, expected: Gradients) -> float:
    """Norm of the difference of all gradients, as a part of the norm of `expected`."""
    assert actual.keys() == expected.keys()
    difference = sum(
        float((actual[name].double() - expected[name].double()).square().sum()) for name in expected
    )
    return (
        difference / sum(float(value.double().square().sum()) for value in expected.values())
    ) ** 0.5


def same_bits(actual: Gradients, expected: Gradients) -> bool:
    """True where all gradients are the same; a gradient of the embedding's output comes in float32."""
    assert actual.keys() == expected.keys()
    return all(
        torch.equal(actual[name].to(expected[name].dtype), expected[name]) for name in expected
    )
