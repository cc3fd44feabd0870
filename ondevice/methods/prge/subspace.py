"""The subspace that an exact gradient spans: Delta W = A R C, of which a step moves only the
diagonal R.

A and C are the leading singular vectors of the gradient of each adapted weight, over some rows of
the task. Between them that gradient is diagonal, so R has one number for each direction. An
estimate from q random directions is as good as sqrt(q / numbers) allows, so 3,840 numbers instead
of 368,640 are learned many times faster, as long as the change lies among them. After about a
hundred steps their use is exhausted. Then a new gradient gives a new subspace, and the change so
far stays as an adapter of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ondevice.artifact.files import read_tensors
from ondevice.core.errors import CheckpointError
from ondevice.methods.prge.layout import Factors

if TYPE_CHECKING:
    from pathlib import Path

    from ondevice.methods.prge.layout import Entry
    from ondevice.methods.prge.step import PrgeProgram

OVERSAMPLED, POWERS = 8, 3
"""Additional columns, and rounds, of the subspace iteration."""
LOSS_SCALE = 1024.0
"""Keeps small gradients above float16's smallest number; only their directions are used."""


def leading_vectors(matrix_IO: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the leading singular vectors, float32 [inputs, rank] and [outputs, rank].

    The subspace iteration is in float64. It starts at random numbers of a fixed seed, drawn on the
    CPU, so that a machine gives the same bits again.
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
    """Return factors from the exact gradient of the loss at the program's weights and adapters.

    A passes as much of the layer's input as a Gaussian matrix of variance 1 / inputs would; C is
    sqrt(outputs / rank) times orthonormal rows.

    Args:
        rows: (ids int64 [1, T], labels int64 [1, T]); the activations of one row exist at a time.
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
                    zero = torch.zeros((), device=program.device)  # only its gradient is stored
                    linear.probe = zero.expand(entry.inputs, entry.outputs).requires_grad_(True)
                nll, tokens = program.row_nll(program.plain_hidden(ids), labels)
                probes = [linear.probe for linear in linears.values() if linear.probe is not None]
                loss = LOSS_SCALE * (nll / tokens.clamp(min=1)).sum()
                for entry, gradient in zip(linears, torch.autograd.grad(loss, probes), strict=True):
                    if entry in gradients:
                        gradients[entry].add_(gradient)
                    else:
                        gradients[entry] = gradient
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
    """Return the sum of products [inputs, k] [k, outputs] as one product of rank at most `rank`."""
    left, right = torch.cat([a for a, _ in parts], 1), torch.cat([b for _, b in parts])
    if left.shape[1] <= rank:
        return left, right
    ql, rl = torch.linalg.qr(left.double())
    qr, rr = torch.linalg.qr(right.double().t())
    u, s, v = torch.linalg.svd(rl @ rr.t())
    rank = min(rank, len(s))  # a narrow layer has fewer singular values
    return (ql @ u[:, :rank] * s[:rank]).float(), (v[:rank] @ qr.t()).float()


def to_arrays(factors: dict[Entry, Factors]) -> dict[str, np.ndarray]:
    """Return the tensors of a subspace's file, by layer and target."""
    arrays = {}
    for entry, value in factors.items():
        arrays[f"{entry.name}.a"] = value.a.cpu().numpy()
        arrays[f"{entry.name}.c"] = value.c.cpu().numpy()
    return arrays


def from_arrays(
    arrays: dict[str, np.ndarray], entries: Iterable[Entry], device: torch.device
) -> dict[Entry, Factors]:
    """Return the factors that `to_arrays` took.

    Raises:
        CheckpointError: a tensor is missing, or of another shape.
    """
    return {
        entry: Factors(
            _tensor(arrays, f"{entry.name}.a", (entry.inputs, entry.rank), device),
            _tensor(arrays, f"{entry.name}.c", (entry.rank, entry.outputs), device),
        )
        for entry in entries
    }


def _tensor(
    arrays: dict[str, np.ndarray], name: str, shape: tuple[int, int], device: torch.device
) -> Tensor:
    value = arrays.get(name)
    if value is None or value.shape != shape:
        raise CheckpointError(
            f"the subspace is not of this run: {name}",
            expected=list(shape),
            received=None if value is None else list(value.shape),
        )
    return torch.from_numpy(np.ascontiguousarray(value, dtype=np.float32)).to(device)


def read_factors(path: Path, entries: Iterable[Entry]) -> dict[Entry, Factors]:
    """Return the leading directions of a run's subspace, as many as the entries' rank.

    Raises:
        CheckpointError: the file is missing, or of another run.
    """
    if not path.is_file():
        raise CheckpointError(
            f"missing {path}", expected="a subspace-*.safetensors that a run wrote"
        )
    arrays, entries = read_tensors(path), list(entries)
    for entry in entries:
        a, c = arrays.get(f"{entry.name}.a"), arrays.get(f"{entry.name}.c")
        if a is not None and c is not None and a.shape[1] == c.shape[0] > entry.rank:
            scale = np.float32((len(c) / entry.rank) ** 0.5)
            arrays[f"{entry.name}.a"] = a[:, : entry.rank]
            arrays[f"{entry.name}.c"] = c[: entry.rank] * scale
    return from_arrays(arrays, entries, torch.device("cpu"))
