"""The subspace that an exact gradient spans: Delta W = A R C, of which a step moves the diagonal R alone.

A and C are the leading singular vectors of the gradient by each adapted weight, of some rows of the task. Between them
that gradient is diagonal: R begins with all that it says, in as many numbers as there are directions. An estimate from
q random directions is as good as sqrt(q / numbers) allows, so 3,840 numbers instead of 368,640 are learned many times
faster, as long as what is to be learned lies among them. What they hold is used up after a hundred steps; then a new
gradient gives a new subspace, and the change so far stays beside it as an adapter of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ondevice.artifact.files import read_tensors
from ondevice.core.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    from ondevice.methods.prge.layout import Entry
    from ondevice.methods.prge.step import PrgeProgram

OVERSAMPLED, POWERS = 8, 3
"""Columns and rounds of the subspace iteration beyond what is asked for."""
LOSS_SCALE = 1024.0
"""Keeps small gradients above float16's smallest number; their directions are all that is used."""


@dataclass(frozen=True)
class Factors:
    """One linear layer's: a float32 [inputs, rank], c float32 [rank, outputs]."""

    a: Tensor
    c: Tensor


def leading_vectors(matrix_IO: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the leading singular vectors, float32 [inputs, rank] and [outputs, rank], by subspace iteration.

    It is in float64, and its random start is drawn from a fixed seed on the CPU: a machine gives the same bits again.
    """
    matrix = matrix_IO.double()
    wide = min(rank + OVERSAMPLED, *matrix.shape)
    start = torch.randn(
        matrix.shape[1], wide, generator=torch.Generator().manual_seed(0), dtype=matrix.dtype
    )
    y = matrix @ start.to(matrix.device)
    for _ in range(POWERS):
        y = matrix @ (matrix.t() @ torch.linalg.qr(y)[0])
    q = torch.linalg.qr(y)[0]
    left, _, right = torch.linalg.svd(q.t() @ matrix, full_matrices=False)
    return (q @ left)[:, :rank].float(), right[:rank].t().float().contiguous()


def gradient_factors(
    program: PrgeProgram, rows: Iterable[tuple[Tensor, Tensor]]
) -> dict[Entry, Factors]:
    """Return factors from the exact gradient of the loss at the program's weights, adapters so far included.

    A lets as much of the layer's input through as a Gaussian matrix of variance 1 / inputs would; C is sqrt(outputs /
    rank) times orthonormal rows.

    Args:
        rows: (ids int64 [1, T], labels int64 [1, T]), one row after the other, whose activations are then all that is
            kept at a time.
    """
    linears = program.linears
    gradients: dict[Entry, Tensor] = {}
    moments = {entry: torch.zeros(entry.inputs, device=program.device) for entry in linears}
    hooks = []
    for entry, linear in linears.items():

        def count(_module: object, inputs: tuple[Tensor, ...], entry: Entry = entry) -> None:
            moments[entry] += inputs[0].detach().float().square().flatten(0, -2).sum(0)

        hooks.append(linear.register_forward_pre_hook(count))
    try:
        with torch.inference_mode(False), torch.enable_grad():
            for ids, labels in rows:
                for entry, linear in linears.items():
                    zero = torch.zeros(
                        (), device=program.device
                    )  # one number: the gradient alone has a place
                    linear.probe = zero.expand(entry.inputs, entry.outputs).requires_grad_(True)
                nll, tokens = program.row_nll(program.plain_hidden(ids), labels)
                probes = [linear.probe for linear in linears.values() if linear.probe is not None]
                found = torch.autograd.grad(LOSS_SCALE * (nll / tokens.clamp(min=1)).sum(), probes)
                for entry, gradient in zip(linears, found, strict=True):
                    gradients[entry] = (
                        gradients[entry].add_(gradient) if entry in gradients else gradient
                    )
    finally:
        for hook in hooks:
            hook.remove()
        for linear in linears.values():
            linear.probe = None
    return {
        entry: _factors(entry, gradient, moments[entry]) for entry, gradient in gradients.items()
    }


def _factors(entry: Entry, gradient_IO: Tensor, moment_I: Tensor) -> Factors:
    left, right = leading_vectors(gradient_IO, entry.rank)
    passed = (left.square() * moment_I[:, None]).sum()
    a = left * (entry.rank * moment_I.mean() / passed.clamp(min=1e-30)).sqrt()
    return Factors(a.contiguous(), right.t().contiguous() * (entry.outputs / entry.rank) ** 0.5)


def joined(parts: list[tuple[Tensor, Tensor]], rank: int) -> tuple[Tensor, Tensor]:
    """Return the sum of products [inputs, k] [k, outputs] as one of at most `rank`, cut where it has more."""
    left, right = torch.cat([a for a, _ in parts], 1), torch.cat([b for _, b in parts])
    if left.shape[1] <= rank:
        return left, right
    ql, rl = torch.linalg.qr(left.double())
    qr, rr = torch.linalg.qr(right.double().t())
    u, s, v = torch.linalg.svd(rl @ rr.t())
    return (ql @ u[:, :rank] * s[:rank]).float(), (v[:rank] @ qr.t()).float()


def to_arrays(factors: dict[Entry, Factors]) -> dict[str, np.ndarray]:
    """Return the tensors of a subspace's file, by layer and target."""
    arrays = {}
    for entry, value in factors.items():
        arrays[f"{entry.layer}.{entry.target}.a"] = value.a.cpu().numpy()
        arrays[f"{entry.layer}.{entry.target}.c"] = value.c.cpu().numpy()
    return arrays


def from_arrays(
    arrays: dict[str, np.ndarray], entries: Iterable[Entry], device: torch.device
) -> dict[Entry, Factors]:
    """Return what `to_arrays` was given.

    Raises:
        CheckpointError: a tensor is missing, or of another shape.
    """
    factors = {}
    for entry in entries:
        found = []
        for name, shape in (("a", (entry.inputs, entry.rank)), ("c", (entry.rank, entry.outputs))):
            value = arrays.get(f"{entry.layer}.{entry.target}.{name}")
            if value is None or value.shape != shape:
                raise CheckpointError(
                    f"the subspace is not of this run: {entry.layer}.{entry.target}.{name}",
                    expected=list(shape),
                    received=None if value is None else list(value.shape),
                )
            found.append(torch.from_numpy(np.ascontiguousarray(value, dtype=np.float32)).to(device))
        factors[entry] = Factors(*found)
    return factors


def read_factors(path: Path, entries: Iterable[Entry]) -> dict[Entry, Factors]:
    """Return the leading directions of a run's subspace, as many as the entries' rank.

    Raises:
        CheckpointError: there is no such file, or it is of another run.
    """
    if not path.is_file():
        raise CheckpointError(
            f"{path} is not there", expected="a subspace-*.safetensors that a run wrote"
        )
    arrays, wanted = read_tensors(path), list(entries)
    for entry in wanted:
        name = f"{entry.layer}.{entry.target}"
        a, c = arrays.get(f"{name}.a"), arrays.get(f"{name}.c")
        if a is not None and c is not None and a.shape[1] == c.shape[0] > entry.rank:
            arrays[f"{name}.a"] = a[:, : entry.rank]
            arrays[f"{name}.c"] = c[: entry.rank] * np.float32((len(c) / entry.rank) ** 0.5)
    return from_arrays(arrays, wanted, torch.device("cpu"))
