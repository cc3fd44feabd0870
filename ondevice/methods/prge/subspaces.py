"""The subspaces of a run one after the other: when a new one is due, what is kept of the old ones, and their files."""

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
    from ondevice.methods.prge.layout import Entry
    from ondevice.methods.prge.step import PrgeProgram
    from ondevice.methods.prge.subspace import Factors

AT = "subspace_step"
"""Step of the subspace in a session's state, int64 [1]; -1 before the first."""


def subspace_path(step: int, folder: Path) -> Path:
    """Return where the subspace is that a run takes before this step."""
    return folder / f"subspace-{step:08d}.safetensors"


def calibration_rows(
    step: int, batch_at: Callable[[int], Any], config: PrgeConfig, device: Any
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield `calibration_rows` rows of this and the next batches, each alone and without its padding."""
    left = config.calibration_rows
    while left > 0:
        rows = list(batch_at(step).rows())
        for ids, labels in rows[:left]:
            # What follows the last labelled token has no part in the loss.
            end = int(np.flatnonzero(labels != IGNORE)[-1]) + 1 if (labels != IGNORE).any() else 2
            one, other = (
                torch.from_numpy(np.ascontiguousarray(v[None, :end])).to(device)
                for v in (ids, labels)
            )
            yield one, other
        left, step = left - len(rows), step + 1


class Subspaces:
    """The subspaces of a session with `subspace: gradient`, beside its flat vector.

    Attributes:
        factors: of the subspace that is trained in; empty before the first step.
        at: the step that it was taken before.
    """

    def __init__(self, program: PrgeProgram, config: PrgeConfig) -> None:
        self.program, self.config = program, config
        self.factors: dict[Entry, Factors] = {}
        self.at = -1

    def due(self, step: int) -> bool:
        """True if a new subspace is taken before this step."""
        if step == self.at:
            return False
        every = self.config.refresh_every
        return self.at < 0 or (every is not None and step % every == 0)

    def fold(self, state: Tensor) -> Tensor:
        """Keep what was learned beside the next subspace, and return the state to begin it with: R and moments 0."""
        if self.factors:
            for entry, part in self._changes(state).items():
                linear = self.program.linears[entry]
                kept = KEPT_BLOCKS * entry.rank
                linear.past = joined([part] if linear.past is None else [linear.past, part], kept)
        return torch.zeros_like(state)

    def _changes(self, state: Tensor) -> dict[Entry, tuple[Tensor, Tensor]]:
        """Return the change in this subspace as (A with the adapter's scale, B) of each linear layer."""
        found = {}
        for entry, factors in self.factors.items():
            r = state[entry.offset : entry.offset + entry.count, None]
            found[entry] = factors.a * self.program.linears[entry].scale, r * factors.c
        return found

    def measure(self, step: int, batch_at: Callable[[int], Any], folder: Path) -> Path:
        """Take the subspace of an exact gradient of this and the next batches' rows, and write it."""
        rows = calibration_rows(step, batch_at, self.config, self.program.device)
        self._set(gradient_factors(self.program, rows), step)
        path = subspace_path(step, folder)
        beside = path.with_name(path.name + ".part")
        write_tensors(beside, to_arrays(self.factors))
        beside.replace(path)
        return path

    def read(self, step: int, folder: Path) -> None:
        """Take the subspace that a run wrote.

        Raises:
            CheckpointError: it is not there, or of another run.
        """
        path = subspace_path(step, folder)
        if not path.is_file():
            raise CheckpointError(
                f"{path} is not there: the run took a new subspace before step {step}",
                expected="the files subspace-*.safetensors beside the log",
                hint="copy them with the log, or take the adapter from the run's newest checkpoint",
            )
        self._set(from_arrays(read_tensors(path), self.program.linears, self.program.device), step)

    def _set(self, factors: dict[Entry, Factors], step: int) -> None:
        self.factors, self.at = factors, step
        self.program.set_factors(factors)

    def state(self) -> dict[str, np.ndarray]:
        """Return what a resume needs beside the flat vector."""
        arrays = {f"subspace/{name}": value for name, value in to_arrays(self.factors).items()}
        for entry, linear in self.program.linears.items():
            if linear.past is not None:
                for name, value in zip("ab", linear.past, strict=True):
                    arrays[f"past/{entry.layer}.{entry.target}.{name}"] = value.cpu().numpy().copy()
        return arrays | {AT: np.array([self.at], dtype=np.int64)}

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` gave.

        Raises:
            CheckpointError: it is of a run with other settings.
        """
        if AT not in state:
            raise CheckpointError(
                "the checkpoint is not of this run", expected=AT, received="no subspace"
            )
        if (at := int(state[AT][0])) >= 0:
            own = {
                name.partition("/")[2]: value
                for name, value in state.items()
                if name.startswith("subspace/")
            }
            self._set(from_arrays(own, self.program.linears, self.program.device), at)
        else:
            self.factors, self.at = {}, -1
        for entry, linear in self.program.linears.items():
            pair = [state.get(f"past/{entry.layer}.{entry.target}.{name}") for name in "ab"]
            linear.past = None
            if pair[0] is not None and pair[1] is not None:
                past = [
                    torch.from_numpy(np.ascontiguousarray(value)).to(self.program.device)
                    for value in pair
                ]
                linear.past = past[0], past[1]

    def adapter(self, state: Tensor, names: dict[tuple[int, str], str], source: str) -> Adapter:
        """Return all that was learned in PEFT's layout: earlier subspaces and this one, of one rank in all layers.

        Alpha grows with the rank, so that the scale stays; layers with less are filled with zeros.
        """
        config, changes = self.config, self._changes(state)
        parts = {}
        for entry, linear in self.program.linears.items():
            own = [part for part in (linear.past, changes.get(entry)) if part is not None]
            a = (
                torch.cat([part[0] for part in own], 1)
                if own
                else torch.zeros(entry.inputs, entry.rank)
            )
            b = (
                torch.cat([part[1] for part in own])
                if own
                else torch.zeros(entry.rank, entry.outputs)
            )
            parts[entry] = a, b
        rank, tensors = max(a.shape[1] for a, _ in parts.values()), {}
        for entry, (a, b) in parts.items():
            name, missing = names[(entry.layer, entry.target)], rank - a.shape[1]
            for key, value in (("A", a.t() / self.program.linears[entry].scale), ("B", b)):
                array = np.pad(value.cpu().numpy(), ((0, missing), (0, 0)))
                tensors[f"{name}.lora_{key}.weight"] = np.ascontiguousarray(
                    array if key == "A" else array.T
                )
        return Adapter(
            tensors, rank, config.alpha * rank / config.rank, targets_of(tensors), source
        )

    def start_from(self, adapter: Adapter, names: dict[tuple[int, str], str]) -> None:
        """Keep an adapter beside what is trained.

        Raises:
            ArtifactError: it is of other linear layers.
        """
        wanted = {
            f"{names[(e.layer, e.target)]}.lora_{x}.weight"
            for e in self.program.linears
            for x in "AB"
        }
        if wanted != set(adapter.tensors):
            raise ArtifactError(
                "the adapter has other linear layers than the run",
                expected=", ".join(self.config.target_modules),
                received=", ".join(adapter.target_modules),
            )
        for entry, linear in self.program.linears.items():
            a, b = (
                torch.from_numpy(
                    np.array(
                        adapter.tensors[f"{names[(entry.layer, entry.target)]}.lora_{x}.weight"]
                    )
                )
                for x in "AB"
            )
            scale = adapter.alpha / adapter.rank
            linear.past = (
                (a.t().float() * scale).to(self.program.device),
                b.t().float().to(self.program.device),
            )
