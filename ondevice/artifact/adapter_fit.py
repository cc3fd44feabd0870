"""Refuse an adapter that is not of a run's shape: one check for every method and every runtime."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.core.errors import ArtifactError

if TYPE_CHECKING:
    from ondevice.artifact.adapter import Adapter
    from ondevice.core.dims import ModelDims

A_ERROR = 1e-6
"""Largest difference of a frozen A that is accepted: another machine's logarithm and sine have
other last bits."""


def check_fits(
    adapter: Adapter,
    shapes: Mapping[str, tuple[int, ...]],
    rank: int,
    alpha: float,
    dims: ModelDims | None = None,
) -> dict[str, np.ndarray]:
    """Return the tensors of an adapter that has a run's rank, alpha and linear layers.

    Args:
        shapes: of every tensor that the run has, by the adapter's names.
        dims: of the run's model, to tell layers that another run would change from others.

    Raises:
        ArtifactError: another rank or alpha, layers that the run does not change, or tensors that
            are missing or of another shape.
    """
    check_scale(adapter, rank, alpha)
    linears = {name.rpartition(".lora_")[0] for name in shapes}
    beyond = [linear for linear in adapter.linears if linear not in linears]
    if beyond:
        hint = (
            "the method's `target_modules` (and `top_layers`) must be those that the adapter was "
            f"trained with: [{', '.join(adapter.target_modules)}]"
        )
        targets = _targets(dims)
        if targets and not targets.intersection(linear.rpartition(".")[2] for linear in beyond):
            hint = f"train a new adapter: those of this model go on {', '.join(sorted(targets))}"
        raise ArtifactError(
            f"the adapter changes layers that this run does not: {', '.join(beyond[:4])}",
            expected=f"{len(linears)} linear layers",
            received=f"{len(adapter.linears)} linear layers",
            hint=hint,
        )
    return check_shapes(adapter.tensors, shapes)


def _targets(dims: ModelDims | None) -> set[str]:
    """Return the names of linear layers that a run's settings may have; none if not known."""
    if dims is None:
        return set()
    linears = (*dims.linear_list, *dims.expert_list)
    return {linear.target.rpartition(".")[2] for linear in linears}


def check_scale(adapter: Adapter, rank: int, alpha: float) -> None:
    """Refuse a run of another rank or alpha than its adapter's with ArtifactError."""
    for field, asked, stored in (
        ("rank", rank, adapter.rank),
        ("alpha", alpha, adapter.alpha),
    ):
        if asked != stored:
            raise ArtifactError(
                f"the adapter has {field} {stored:g}, and the run {field} {asked:g}",
                expected=f"method.{field} {stored:g}, with which the adapter was trained",
                received=f"method.{field} {asked:g}",
                hint=f"--set method.{field}={stored:g}",
            )


def check_base_weights(adapter: Adapter, method: Any) -> None:
    """Refuse a run over other weights than its adapter was trained on, with ArtifactError.

    Args:
        method: the run's settings.
    """
    asked = getattr(method, "base", None) or ""
    if asked != adapter.base_weights:
        stated = adapter.base_weights or "null"
        raise ArtifactError(
            "the adapter was trained on other base weights than the run has",
            expected=f"method.base: {stated}",
            received=f"method.base: {asked or 'null'}",
            hint=f"--set method.base={stated}",
        )


def check_shapes(
    tensors: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, np.ndarray]:
    """Return the tensors that `shapes` names.

    Raises:
        ArtifactError: one is missing or has another shape.
    """
    for name, shape in shapes.items():
        value = tensors.get(name)
        if value is None or value.shape != tuple(shape):
            raise ArtifactError(
                f"the adapter does not fit: {name}",
                expected=list(shape),
                received="no such tensor" if value is None else list(value.shape),
            )
    return {name: tensors[name] for name in shapes}


def check_frozen_a(linear: str, a: np.ndarray, expected: np.ndarray, seed: int) -> None:
    """Refuse an adapter whose A is not the one that a run keeps frozen.

    Args:
        a, expected: float32 [rank, inputs].
        seed: that draws the run's.

    Raises:
        ArtifactError: an element differs by more than `A_ERROR`.
    """
    if not np.allclose(a, expected, rtol=0, atol=A_ERROR):
        raise ArtifactError(
            f"the adapter's frozen A differs from this run's: {linear}",
            expected=f"the A that seed {seed} draws",
            hint="use an adapter that this run, artifact or seed made",
        )
