"""The subspaces of a session: when one is refreshed, what earlier ones changed, and their files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ondevice.artifact.adapter import Adapter, targets_of
from ondevice.artifact.files import read_tensors, write_tensors
from ondevice.core.errors import ArtifactError, CheckpointError
from ondevice.core.session import IGNORE
from ondevice.methods.prge.layout import KEPT_BLOCKS
from ondevice.methods.prge.subspace import from_arrays, gradient_factors, joined, to_arrays

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from ondevice.methods.prge.config import PrgeConfig
    from ondevice.methods.prge.layout import Entry, Factors
    from ondevice.methods.prge.step import PrgeProgram

AT = "subspace_step"
"""Step of the subspace in a session's state, int64 [1]; -1 before the first."""


def subspace_path(step: int, folder: Path) -> Path:
    """Return the file of the subspace that a run takes before this step."""
    return folder / f"subspace-{step:08d}.safetensors"


def write_subspace(arrays: dict[str, np.ndarray], path: Path) -> Path:
    """Write a subspace under another name first, and return its path."""
    part = path.with_name(path.name + ".part")
    write_tensors(part, arrays)
    return part.replace(path)


def measure(
    program: PrgeProgram, step: int, batch_at: Callable[[int], Any]
) -> dict[Entry, Factors]:
    """Return the subspace of an exact gradient of `calibration_rows` rows, from this batch on."""
    return gradient_factors(program, _calibration_rows(program, step, batch_at))


def _calibration_rows(
    program: PrgeProgram, step: int, batch_at: Callable[[int], Any]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield rows of this and the next batches one at a time, without their padding."""
    left = program.config.calibration_rows
    while left > 0:
        rows = list(batch_at(step).rows())
        for ids, labels in rows[:left]:
            # Tokens after the last label token do not change the loss.
            end = int(np.flatnonzero(labels != IGNORE)[-1]) + 1 if (labels != IGNORE).any() else 2
            yield (
                _tensor(ids[None, :end], program.device),
                _tensor(labels[None, :end], program.device),
            )
        left, step = left - len(rows), step + 1


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


class SessionSubspace:
    """The subspace of a session with `subspace: gradient`, in addition to its flat vector.

    Attributes:
        factors: of the subspace that is trained in; empty before the first step.
        at: the step before which it was taken.
    """

    def __init__(self, program: PrgeProgram, config: PrgeConfig) -> None:
        self.program, self.config = program, config
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
        for entry, part in self._changes(state).items():
            linear = self.program.linears[entry]
            earlier = [] if linear.past is None else [linear.past]
            linear.past = joined([*earlier, part], KEPT_BLOCKS * entry.rank)
        return torch.zeros_like(state)

    def _changes(self, state: Tensor) -> dict[Entry, tuple[Tensor, Tensor]]:
        """The change in this subspace as (A with the adapter's scale, B) of each linear layer."""
        changes = {}
        for entry, factors in self.factors.items():
            r = state[entry.offset : entry.offset + entry.count, None]
            changes[entry] = factors.a * self.program.linears[entry].scale, r * factors.c
        return changes

    def measure(self, step: int, batch_at: Callable[[int], Any], folder: Path) -> Path:
        """Take the subspace of an exact gradient, and write it."""
        self._set(measure(self.program, step, batch_at), step)
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
        self._set(self._from_arrays(read_tensors(path)), step)

    def _from_arrays(self, arrays: dict[str, np.ndarray]) -> dict[Entry, Factors]:
        return from_arrays(arrays, self.program.linears, self.program.device)

    def _set(self, factors: dict[Entry, Factors], step: int) -> None:
        self.factors, self.at = factors, step
        self.program.set_factors(factors)

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
        self.factors, self.at = {}, -1
        if (at := int(state[AT][0])) >= 0:
            prefix = "subspace/"
            own = {k[len(prefix) :]: v for k, v in state.items() if k.startswith(prefix)}
            self._set(self._from_arrays(own), at)
        for entry, linear in self.program.linears.items():
            a, b = (state.get(f"past/{entry.name}.{name}") for name in "ab")
            linear.past = None
            if a is not None and b is not None:
                linear.past = _tensor(a, self.program.device), _tensor(b, self.program.device)

    def adapter(self, state: Tensor, names: dict[tuple[int, str], str], source: str) -> Adapter:
        """Return all that was learned in PEFT's layout: earlier subspaces and this one.

        All layers have one rank, smaller ones are filled with zeros; alpha grows with the rank, so
        that the scale stays.
        """
        config, changes, parts = self.config, self._changes(state), {}
        for entry, linear in self.program.linears.items():
            own = [part for part in (linear.past, changes.get(entry)) if part is not None]
            if not own:
                own = [
                    (torch.zeros(entry.inputs, entry.rank), torch.zeros(entry.rank, entry.outputs))
                ]
            parts[entry] = torch.cat([a for a, _ in own], 1), torch.cat([b for _, b in own])
        rank, tensors = max(a.shape[1] for a, _ in parts.values()), {}
        for entry, (a, b) in parts.items():
            name, zeros = names[(entry.layer, entry.target)], ((0, rank - a.shape[1]), (0, 0))
            a = np.pad((a.t() / self.program.linears[entry].scale).cpu().numpy(), zeros)
            b = np.pad(b.cpu().numpy(), zeros).T
            tensors[f"{name}.lora_A.weight"] = np.ascontiguousarray(a)
            tensors[f"{name}.lora_B.weight"] = np.ascontiguousarray(b)
        alpha = config.alpha * rank / config.rank
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
            a, b = (
                torch.from_numpy(np.array(adapter.tensors[f"{name}.lora_{side}.weight"]))
                .t()
                .float()
                for side in "AB"
            )
            a = a * (adapter.alpha / adapter.rank)
            linear.past = a.to(self.program.device), b.to(self.program.device)
