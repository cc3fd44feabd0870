"""New subspaces for an exported program, between its steps: from a file that was brought, or an exact gradient here.

A program computes no gradient. Whoever hosts it may bring a subspace (`subspace-next.safetensors` in the run's folder),
and where PyTorch and the model are at hand it is computed when one is due, with what the program has learned so far.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ondevice.artifact.files import read_tensors, write_tensors
from ondevice.core.errors import CheckpointError, OndeviceError, TrainingError
from ondevice.core.registry import method_config
from ondevice.methods.prge.informed import Places
from ondevice.methods.prge.step import PrgeProgram
from ondevice.methods.prge.subspace import Factors, from_arrays, gradient_factors, joined, to_arrays
from ondevice.methods.prge.subspaces import calibration_rows, subspace_path
from ondevice.runtime_ops import graph

if TYPE_CHECKING:
    from collections.abc import Callable

    from ondevice.core.session import ProgramSession
    from ondevice.data.examples import Dataset
    from ondevice.methods.prge.config import PrgeConfig
    from ondevice.methods.prge.layout import Entry
    from ondevice.models import LoadedModel

OFFERED = "subspace-next.safetensors"
"""In a run's folder: a subspace that is taken before the next step."""


IN_STATE = Path("state_first.safetensors")
"""`method.factors` of a program whose subspace was computed at its export: the artifact's state begins in it."""


def calibrate(
    loaded: LoadedModel, config: PrgeConfig, rows: Dataset, seed: int
) -> tuple[PrgeConfig, dict[str, np.ndarray]] | None:
    """Take the subspace of an exact gradient of some rows; see `GraphProgram.calibrate`. The model stays as it is."""
    if config.factors is not None or config.subspace == "random" or config.top_layers is not None:
        return None
    config = config.model_copy(update={"factors": IN_STATE})
    places = Places(loaded.dims, config.for_program(), seed)
    program = PrgeProgram(loaded.family, places.small, config.for_program(), graph.aten_normal)
    chosen = np.random.default_rng(seed).permutation(len(rows.items))[: config.calibration_rows]
    examples = [rows.items[number].example for number in chosen]
    factors = gradient_factors(
        program, ((torch.tensor([e.ids]), torch.tensor([e.labels])) for e in examples)
    )
    for entry, linear in program.linears.items():
        loaded.family.replace(loaded.family.linear_name(entry.layer, entry.target), linear.base)
    return config, places.begun(factors)


class Renewal:
    """The renewal of a program's subspaces; without a state `subspace` it does nothing."""

    def __init__(self, session: ProgramSession) -> None:
        self.session, manifest = session, session.manifest
        self.config: PrgeConfig = method_config(
            manifest.method["name"], manifest.method
        ).for_program()
        self.informed = any(tensor.name == "subspace" for tensor in manifest.program_spec.state)

    @cached_property
    def places(self) -> Places:
        """Where everything lies in the state."""
        from ondevice.core.dims import ModelDims

        return Places(
            ModelDims.from_manifest(self.session.manifest.model.dims),
            self.config,
            self.session.seed,
        )

    def before_step(self, step: int, batch_at: Callable[[int], Any], folder: Path) -> Path | None:
        """See `Preparing.before_step`: writes the first subspace for the log, takes an offered one, and a due one is
        computed.

        Raises:
            CheckpointError: an offered subspace is not of this program.
            TrainingError: a subspace is due, none was offered, and the model is not here.
        """
        if not self.informed:
            return None
        path, offered, every = (
            subspace_path(step, folder),
            folder / OFFERED,
            self.config.refresh_every,
        )
        if offered.is_file():
            self._take(read_tensors(offered))
            offered.replace(path)
            return path
        if step and (every is None or step % every):
            return None
        if step:
            factors = gradient_factors(
                self._program(), calibration_rows(step, batch_at, self.config, "cpu")
            )
            arrays = to_arrays(factors)
        else:
            arrays = to_arrays(self._current())
        beside = path.with_name(path.name + ".part")
        write_tensors(beside, arrays)
        if step:
            self._take(arrays)
        beside.replace(path)
        return path

    def before_replay(self, step: int, folder: Path) -> None:
        """See `Preparing.before_replay`."""
        path = subspace_path(step, folder)
        if self.informed and path.is_file():
            self._take(read_tensors(path))

    def _take(self, arrays: dict[str, np.ndarray]) -> None:
        """Keep what was learned behind the new subspace, and begin in it with moments of 0."""
        factors = from_arrays(arrays, self.places.small.entries, torch.device("cpu"))
        state = self.session.state()
        flat = torch.from_numpy(state["adapter"])
        changed = any(
            bool(self.places.b(flat, entry).any()) for entry in self.places.trained.entries
        )
        if changed and not self.places.kept:
            raise CheckpointError(
                "the program has no room for what was learned in its subspace",
                expected="a program that was exported with method.refresh_every",
                received="a new subspace",
            )
        self._fold(flat)
        state |= self.places.begun(factors, flat)
        if "moments" in state:
            state["moments"] = np.zeros_like(state["moments"])
        self.session.load_state(state)

    def _fold(self, flat: torch.Tensor) -> None:
        """Move the directions of this subspace to those that are kept, in place; as `Subspaces.fold` does."""
        places = self.places
        if not places.kept:
            return
        for entry in places.trained.entries:
            a, b = places.a(flat, entry), places.b(flat, entry)
            used = [row for row in range(places.directions, places.rank) if b[row].any()]
            parts = [(a[used].t(), b[used])] if used else []
            if b[: entry.rank].any():
                parts.append((a[: entry.rank].t(), b[: entry.rank]))
            if not parts:
                continue
            left, right = joined(parts, places.kept)
            for rows, values in ((a, left.t()), (b, right)):
                values = values.clone()
                rows[places.directions :] = 0
                rows[places.directions : places.directions + len(values)] = values

    def _current(self) -> dict[Entry, Factors]:
        """Return the subspace that the session is in."""
        state, found = self.session.state(), {}
        adapter, c = (torch.from_numpy(state[name]) for name in ("adapter", "subspace"))
        for of_r, entry in zip(self.places.small.entries, self.places.trained.entries, strict=True):
            found[of_r] = Factors(
                self.places.a(adapter, entry)[: entry.rank].t(), self.places.c(c, entry)
            )
        return found

    @cached_property
    def _loaded(self) -> Any:
        """The model in PyTorch, before any quantisation.

        Raises:
            TrainingError: it is not here.
        """
        from ondevice.models import load_model

        model, reason = self.session.manifest.model, ""
        try:
            loaded = load_model(
                model.source, revision=model.revision, dtype="float32", device="cpu"
            )
            reason = (
                ""
                if loaded.source.sha256 == model.sha256
                else f"{model.source} is another model by now"
            )
        except OndeviceError as error:
            loaded, reason = None, error.message
        if reason:
            raise TrainingError(
                "a new subspace is due, and the model whose gradient gives it is not here",
                received=reason,
                hint=f"put one into the run's folder as {OFFERED}, or export with method.refresh_every null",
            )
        return loaded

    def _program(self) -> PrgeProgram:
        """Return the model in eager, with all that was learned beside its weights."""
        program, places = self._eager, self.places
        adapter = torch.from_numpy(self.session.state()["adapter"])
        for (_, linear), entry in zip(program.linears.items(), places.trained.entries, strict=True):
            a, b = places.a(adapter, entry), places.b(adapter, entry)
            linear.past = (a * linear.scale).t(), b
        return program

    @cached_property
    def _eager(self) -> PrgeProgram:
        diagonal = self.config.model_copy(update={"subspace": "gradient"})
        return PrgeProgram(self._loaded.family, self.places.small, diagonal, graph.aten_normal)
