"""Exact gradients by another road: autograd in float64 over transformers' own forward, adapters merged into weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ondevice.core.registry import method_config, open_session
from ondevice.core.session import Weigh
from tests.methods.reference import in_double, plain_loss
from tests.methods.rounding import modelled_errors


def session(
    loaded: Any,
    seed: int = 3,
    device: str | None = None,
    gradients: str = "manual",
    **settings: Any,
) -> Any:
    """A session of mesp whose B matrices are not zero, so that A has gradients.

    Args:
        gradients: `manual` is mesp's; `blockwise`, `checkpoint` and `autodiff` are automatic differentiation's.
    """
    opened = opened_with(gradients, loaded, method_config("mesp", settings), seed, device)
    adapter, random = opened.adapter(), np.random.default_rng(seed)
    for name, value in adapter.tensors.items():
        if ".lora_B." in name:
            value[:] = 0.3 * random.standard_normal(value.shape) / value.shape[1] ** 0.5
    opened.load_adapter(adapter)
    return opened


def opened_with(
    gradients: str, loaded: Any, config: Any, seed: int, device: str | None = None
) -> Any:
    """A session of mesp, or one that computes its steps by automatic differentiation."""
    from benchmarks.mesp.baselines_torch import autodiff_session, blockwise_session
    from ondevice.methods.mesp.torch.reference import reference_session

    sessions = {
        "autodiff": autodiff_session,
        "blockwise": blockwise_session,
        "checkpoint": reference_session,
    }
    return sessions.get(gradients, open_session)(loaded, config, seed, device)


def learned(
    opened: Any, ids: np.ndarray, labels: np.ndarray, weigh: Weigh | None = None
) -> tuple[float, dict[str, np.ndarray]]:
    """The loss of one step and every gradient that was applied in it, summed over micro-batches.

    Args:
        weigh: makes it a step on weighted rows.
    """
    by_name: dict[str, np.ndarray] = {}
    apply = opened.optimizer.apply

    def keep(parameters: Any, ga: torch.Tensor, gb: torch.Tensor) -> None:
        for name, value in ((parameters.a_name, ga), (parameters.b_name, gb)):
            by_name[name] = by_name.get(name, 0.0) + value.double().cpu().numpy()
        apply(parameters, ga, gb)

    opened.optimizer.apply = keep
    if weigh is None:
        loss = opened.step(ids, labels, 0, 1e-3).loss
    else:
        loss = opened.weighted_step(ids, labels, weigh, 0, 1e-3).loss
    opened.optimizer.apply = apply
    return loss, by_name


def sums_rounding(labels: np.ndarray, vocab: int) -> float:
    """The relative difference of a loss whose float32 sums are made in another order, at most: a unit
    roundoff for each term, of the exponentials of a token and of the tokens."""
    return float(np.finfo(np.float32).eps) / 2 * (vocab + int((labels >= 0).sum()))


def exact(
    loaded: Any,
    tensors: dict[str, np.ndarray],
    scale: float,
    ids: np.ndarray,
    labels: np.ndarray,
    loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = plain_loss,
) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients of every A and B; `loaded` becomes a float64 model.

    Args:
        loss_of: logits and labels to the loss.
    """
    model = in_double(loaded.model)
    leaves = {
        name: torch.from_numpy(value).double().requires_grad_(True)
        for name, value in tensors.items()
    }
    weights = {}
    for name in tensors:
        if name.endswith(".lora_A.weight"):
            linear = name.removesuffix(".lora_A.weight")
            b, a = leaves[f"{linear}.lora_B.weight"], leaves[name]
            if ".experts." in linear:  # PEFT's layout, told apart in PEFT's own words
                weight = model.get_parameter(linear)
                count = weight.shape[0]
                a, b = a.reshape(count, -1, a.shape[1]), b.reshape(len(b), -1, count)
                delta = torch.einsum("o r e, e r i -> e o i", b, a)
                weights[linear] = weight + scale * delta
                continue
            weights[f"{linear}.weight"] = model.get_parameter(f"{linear}.weight") + scale * (b @ a)
    output = torch.func.functional_call(
        model, weights, (torch.from_numpy(ids),), {"use_cache": False}
    )
    loss = loss_of(output.logits, torch.from_numpy(labels))
    loss.backward()
    return loss.item(), {
        name: leaf.grad.numpy() for name, leaf in leaves.items() if leaf.grad is not None
    }


def exact_and_rounding(
    loaded: Any, tensors: dict[str, np.ndarray], opened: Any, ids: np.ndarray, labels: np.ndarray
) -> tuple[float, dict[str, np.ndarray], dict[str, float]]:
    """Return loss and gradients as `exact` does, and the relative error that float32 is modelled to make in each."""
    losses: list[float] = []

    def gradients() -> dict[str, np.ndarray]:
        loss, values = exact(loaded, tensors, opened.config.scale, ids, labels)
        losses.append(loss)
        return values

    values, rounding = modelled_errors(gradients, errors)
    return losses[0], values, rounding


FLOOR = 1e-4
"""Of the largest tensor's norm: what a tensor's error is relative to at least. With one labelled token the gradient of
the queries is zero in exact arithmetic."""


def errors(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> dict[str, float]:
    """Relative error of each tensor, ||ours - theirs|| / ||theirs||."""
    assert ours.keys() == theirs.keys()
    norms = {name: float(np.linalg.norm(value)) for name, value in theirs.items()}
    least = FLOOR * max(norms.values()) + 1e-30
    return {
        name: float(np.linalg.norm(ours[name] - theirs[name])) / max(norms[name], least)
        for name in theirs
    }


def rows(count: int, length: int, seed: int, vocab: int = 256) -> tuple[np.ndarray, np.ndarray]:
    """Random ids and labels: rows of different true length padded on the right, some prompt tokens not labelled."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, vocab, (count, length))
    labels = ids.copy()
    for row in range(count):
        true = int(random.integers(2, length + 1)) if row else length
        ids[row, true:], labels[row, true:] = 256, -100
        labels[row, : int(random.integers(0, true - 1)) if row else 1] = -100
    return ids, labels
