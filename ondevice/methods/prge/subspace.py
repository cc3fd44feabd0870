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

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ondevice.artifact.adapter import Adapter, targets_of
from ondevice.artifact.files import read_tensors, write_tensors
from ondevice.core.errors import ArtifactError, CheckpointError
from ondevice.core.session import IGNORE
from ondevice.methods.prge.layout import KEPT_BLOCKS, Factors

if TYPE_CHECKING:
    from pathlib import Path

    from ondevice.methods.prge.config import PrgeConfig
    from ondevice.methods.prge.layout import Entry
    from ondevice.methods.prge.step import PrgeProgram

AT = "subspace_step"
"""Step of the subspace in a session's state, int64 [1]; -1 before the first."""
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
    factors: dict[Entry, Factors] = {}
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
                # Of the model and of earlier subspaces only.
                nll, tokens = program.row_nll(program.family.hidden(ids), labels)
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
    for entry, gradient in gradients.items():
        left, right = leading_vectors(gradient, entry.rank)
        passed = (left.square() * moments[entry][:, None]).sum()
        a = left * (entry.rank * moments[entry].mean() / passed.clamp(min=1e-30)).sqrt()
        c = right.t().contiguous() * (entry.outputs / entry.rank) ** 0.5
        factors[entry] = Factors(a.contiguous(), c)
    return factors


def calibration_rows(
    program: PrgeProgram, step: int, batch_at: Callable[[int], Any]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield `calibration_rows` rows of this and the next batches one at a time, without their
    padding, for `gradient_factors`."""
    left = program.config.calibration_rows
    while left > 0:
        rows = list(batch_at(step).rows())
        for ids, labels in rows[:left]:
            # Tokens after the last label token do not change the loss.
            label_positions = np.flatnonzero(labels != IGNORE)
            end = int(label_positions[-1]) + 1 if label_positions.size else 2
            yield _tensor(ids[None, :end], program), _tensor(labels[None, :end], program)
        left -= len(rows)
        step += 1


def _tensor(array: np.ndarray, program: PrgeProgram) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(program.device)


def joined(parts: list[tuple[Tensor, Tensor]], rank: int) -> tuple[Tensor, Tensor]:
    """Return the sum of products [inputs, k] [k, outputs] as one product of rank at most `rank`:
    the fold of earlier subspaces and the one that ends."""
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
    factors = {}
    for entry in entries:
        shapes = {"a": (entry.inputs, entry.rank), "c": (entry.rank, entry.outputs)}
        tensors = []
        for part, shape in shapes.items():
            value = arrays.get(f"{entry.name}.{part}")
            if value is None or value.shape != shape:
                raise CheckpointError(
                    f"the subspace is not of this run: {entry.name}.{part}",
                    expected=list(shape),
                    received=value if value is None else list(value.shape),
                )
            value = np.ascontiguousarray(value, dtype=np.float32)
            tensors.append(torch.from_numpy(value).to(device))
        factors[entry] = Factors(*tensors)
    return factors


def read_factors(path: Path, entries: Iterable[Entry]) -> dict[Entry, Factors]:
    """Return the leading directions of a run's subspace, as many as the entries' rank.

    Raises:
        CheckpointError: the file is missing, or of another run.
    """
    if not path.is_file():
        raise CheckpointError(
            f"missing {path}", expected="a subspace-*.safetensors that a run wrote"
        )
    arrays = read_tensors(path)
    entries = list(entries)
    for entry in entries:
        a, c = arrays.get(f"{entry.name}.a"), arrays.get(f"{entry.name}.c")
        if a is not None and c is not None and a.shape[1] == c.shape[0] > entry.rank:
            scale = np.float32((len(c) / entry.rank) ** 0.5)
            arrays[f"{entry.name}.a"] = a[:, : entry.rank]
            arrays[f"{entry.name}.c"] = c[: entry.rank] * scale
    return from_arrays(arrays, entries, torch.device("cpu"))


def subspace_path(step: int, folder: Path) -> Path:
    """Return the file of the subspace that a run takes before this step."""
    return folder / f"subspace-{step:08d}.safetensors"


def write_subspace(arrays: dict[str, np.ndarray], path: Path) -> Path:
    """Write a subspace under another name first, and return its path."""
    part = path.with_name(path.name + ".part")
    write_tensors(part, arrays)
    return part.replace(path)


class SessionSubspace:
    """The subspace of a session with `subspace: gradient`, in addition to its flat vector.

    Attributes:
        factors: of the subspace that is trained in; empty before the first step.
        at: the step before which it was taken.
    """

    def __init__(self, program: PrgeProgram, config: PrgeConfig) -> None:
        self.program = program
        self.config = config
        self.factors: dict[Entry, Factors] = {}
        self.at = -1

    def due(self, step: int) -> bool:
        """Return True if a new subspace is taken before this step."""
        if step == self.at:
            return False
        every = self.config.refresh_every
        return self.at < 0 or (every is not None and step % every == 0)

    def fold(self, state: Tensor) -> Tensor:
        """Retain what was learned, and return the state of the next subspace: R and moments 0."""
        for entry in self.factors:
            parts = self._parts(entry, state)
            self.program.linears[entry].past = joined(parts, KEPT_BLOCKS * entry.rank)
        return torch.zeros_like(state)

    def _parts(self, entry: Entry, state: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return what earlier subspaces and this one changed in a linear layer, as products of A
        with the adapter's scale and B."""
        linear = self.program.linears[entry]
        factors = self.factors.get(entry)
        parts = [linear.past] if linear.past is not None else []
        if factors is not None:
            r = state[entry.offset : entry.offset + entry.count, None]
            parts.append((factors.a * linear.scale, r * factors.c))
        return parts

    def measure(self, step: int, batch_at: Callable[[int], Any], folder: Path) -> Path:
        """Take the subspace of an exact gradient, and write it."""
        rows = calibration_rows(self.program, step, batch_at)
        self._set(gradient_factors(self.program, rows), step)
        return write_subspace(to_arrays(self.factors), subspace_path(step, folder))

    def read(self, step: int, folder: Path) -> None:
        """Take the subspace that a run wrote.

        Raises:
            CheckpointError: it is missing, or of another run.
        """
        path = subspace_path(step, folder)
        if not path.is_file():
            raise CheckpointError(
                f"missing {path}: the run took a new subspace before step {step}",
                expected="the files subspace-*.safetensors next to the log",
                hint="copy them with the log, or take the adapter from the run's newest checkpoint",
            )
        self._set_arrays(read_tensors(path), step)

    def _set_arrays(self, arrays: dict[str, np.ndarray], step: int) -> None:
        self._set(from_arrays(arrays, self.program.linears, self.program.device), step)

    def _set(self, factors: dict[Entry, Factors], step: int) -> None:
        self.factors = factors
        self.at = step
        for entry, value in factors.items():
            linear = self.program.linears[entry]
            linear.lora_a = (value.a * linear.scale).to(linear.lora_a.dtype)
            linear.c_RO = value.c

    def state(self) -> dict[str, np.ndarray]:
        """Return what a resume needs in addition to the flat vector."""
        arrays = {f"subspace/{name}": value for name, value in to_arrays(self.factors).items()}
        for entry, linear in self.program.linears.items():
            for name, value in zip("ab", linear.past or (), strict=False):
                arrays[f"past/{entry.name}.{name}"] = value.cpu().numpy().copy()
        return arrays | {AT: np.array([self.at], dtype=np.int64)}

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` returned.

        Raises:
            CheckpointError: it is of a run with other settings.
        """
        if AT not in state:
            raise CheckpointError(
                "the checkpoint is not of this run", expected=AT, received="no subspace"
            )
        self.factors = {}
        self.at = int(state[AT][0])
        if self.at >= 0:
            self._set_arrays({k.removeprefix("subspace/"): v for k, v in state.items()}, self.at)
        for entry, linear in self.program.linears.items():
            a, b = (state.get(f"past/{entry.name}.{name}") for name in "ab")
            linear.past = None
            if a is not None and b is not None:
                linear.past = _tensor(a, self.program), _tensor(b, self.program)

    def adapter(self, state: Tensor, names: dict[tuple[int, str], str], source: str) -> Adapter:
        """Return all that was learned in PEFT's layout: earlier subspaces and this one.

        All layers have one rank, smaller ones are filled with zeros; alpha grows with the rank, so
        that the scale stays.
        """
        products = {}
        for entry in self.program.linears:
            parts = self._parts(entry, state)
            if not parts:
                a = torch.zeros(entry.inputs, entry.rank)
                parts = [(a, torch.zeros(entry.rank, entry.outputs))]
            products[entry] = torch.cat([a for a, _ in parts], 1), torch.cat([b for _, b in parts])
        tensors = {}
        rank = max(a.shape[1] for a, _ in products.values())
        for entry, (a, b) in products.items():
            name = names[(entry.layer, entry.target)]
            zeros = ((0, rank - a.shape[1]), (0, 0))
            a = np.pad((a.t() / self.program.linears[entry].scale).cpu().numpy(), zeros)
            b = np.pad(b.cpu().numpy(), zeros).T
            tensors[f"{name}.lora_A.weight"] = np.ascontiguousarray(a)
            tensors[f"{name}.lora_B.weight"] = np.ascontiguousarray(b)
        alpha = self.config.alpha * rank / self.config.rank
        return Adapter(tensors, rank, alpha, targets_of(tensors), source)

    def start_from(self, adapter: Adapter, names: dict[tuple[int, str], str]) -> None:
        """Retain an adapter next to the trained one.

        Raises:
            ArtifactError: it is of other linear layers.
        """
        linears = {names[(e.layer, e.target)]: linear for e, linear in self.program.linears.items()}
        expected = {f"{name}.lora_{side}.weight" for name in linears for side in "AB"}
        if expected != set(adapter.tensors):
            raise ArtifactError(
                "the adapter has other linear layers than the run",
                expected=", ".join(self.config.target_modules),
                received=", ".join(adapter.target_modules),
            )
        for name, linear in linears.items():
            pair = (adapter.tensors[f"{name}.lora_{side}.weight"] for side in "AB")
            a, b = (_tensor(np.array(value), self.program).t().float() for value in pair)
            linear.past = a * (adapter.alpha / adapter.rank), b
