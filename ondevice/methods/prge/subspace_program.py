"""P-RGE's step with the subspace in its state: a refresh needs no new export.

The state is an ordinary adapter with both of its matrices, so that hosts read, write and average it
as they do any other. The first directions of each linear layer are trained: B's rows there are R C,
and a step moves them by a change of the diagonal R times C. The directions after them are what
earlier subspaces changed. C, and with Adam the moments of R, are states of their own.

A program computes no gradient. Its host offers a subspace (`subspace-next.safetensors` in the run's
folder), or PyTorch computes one here if the model is at hand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ondevice.artifact.files import read_tensors
from ondevice.core.dims import ModelDims
from ondevice.core.errors import CheckpointError, OndeviceError, TrainingError
from ondevice.core.registry import method_config
from ondevice.methods.prge.layout import KEPT_BLOCKS, NOISE_TENSOR, AdapterLayout, Entry, Factors
from ondevice.methods.prge.step import CopiesOf, PrgeProgram, adam
from ondevice.methods.prge.subspace import (
    calibration_rows,
    from_arrays,
    gradient_factors,
    joined,
    subspace_path,
    to_arrays,
    write_subspace,
)
from ondevice.models.text_model import load_text_model
from ondevice.runtime_ops import graph

if TYPE_CHECKING:
    from collections.abc import Callable

    from ondevice.core.session import ProgramSession
    from ondevice.data.encode import Dataset
    from ondevice.methods.prge.config import PrgeConfig
    from ondevice.methods.prge.step import Noise, TokenLoss
    from ondevice.models import Family, LoadedModel

OFFERED = "subspace-next.safetensors"
"""In a run's folder: a subspace for the next step."""
IN_STATE = Path("state_first.safetensors")
"""`method.factors` of a program whose first state has the subspace, computed at its export."""


class SubspaceLayout:
    """Ranges of the state.

    Attributes:
        small: of R, as a session in PyTorch has it.
        trained: B's rows of the subspace, in the flat adapter.
        directions: rows of the subspace; a small matrix has fewer, and zeros behind.
        kept: rows of earlier subspaces.
        rank: of the adapter, all of these rows.
        a_offsets: where A is, float32 [directions + kept, inputs].
        c_offsets: where C is in the state `subspace`, float32 [entry's rank, outputs].
        size, c_size: elements of the adapter, and of the state `subspace`.
    """

    def __init__(self, dims: ModelDims, config: PrgeConfig, seed: int) -> None:
        self.small = AdapterLayout.build(dims, config, seed)
        self.directions = max(entry.rank for entry in self.small.entries)
        self.kept = 0
        if config.refresh_every is not None:
            self.kept = KEPT_BLOCKS * self.directions
        self.rank = self.directions + self.kept
        entries = []
        self.size = self.c_size = 0
        for entry in self.small.entries:
            entries.append(replace(entry, offset=self.size, diagonal=False))
            self.size += self.rank * entry.outputs
        self.a_offsets: dict[Entry, int] = {}
        self.c_offsets: dict[Entry, int] = {}
        for entry in entries:
            self.a_offsets[entry] = self.size
            self.c_offsets[entry] = self.c_size
            self.size += self.rank * entry.inputs
            self.c_size += entry.count
        self.trained = AdapterLayout(tuple(entries), self.size, seed)
        self.pairs = list(zip(self.small.entries, self.trained.entries, strict=True))

    def a(self, adapter: Tensor, entry: Entry) -> Tensor:
        """Return A of the flat adapter, [rank, inputs]."""
        return _matrix(adapter, self.a_offsets[entry], self.rank, entry.inputs)

    def b(self, adapter: Tensor, entry: Entry) -> Tensor:
        """Return B of the flat adapter, [rank, outputs]."""
        return _matrix(adapter, entry.offset, self.rank, entry.outputs)

    def c(self, subspace: Tensor, entry: Entry) -> Tensor:
        """Return C, [entry's rank, outputs]."""
        return _matrix(subspace, self.c_offsets[entry], entry.rank, entry.outputs)

    def begun(
        self, factors: Mapping[Entry, Factors], adapter: Tensor | None = None
    ) -> dict[str, np.ndarray]:
        """Return adapter and C at the first step in a subspace.

        Args:
            factors: by the entries of `small`.
            adapter: whose directions behind the subspace's are kept; None for zeros.
        """
        flat = torch.zeros(self.size) if adapter is None else adapter.clone()
        c = torch.zeros(self.c_size)
        for of_r, entry in self.pairs:
            value = factors[of_r]
            self.a(flat, entry)[: self.directions] = 0
            self.a(flat, entry)[: entry.rank] = value.a.t()
            self.b(flat, entry)[: self.directions] = 0
            self.c(c, entry)[:] = value.c
        return {"adapter": flat.numpy(), "subspace": c.numpy()}

    def fold(self, flat: Tensor) -> None:
        """Move the directions of this subspace to those of earlier ones, in place."""
        if not self.kept:
            return
        for entry in self.trained.entries:
            a, b = self.a(flat, entry), self.b(flat, entry)
            earlier = [row for row in range(self.directions, self.rank) if b[row].any()]
            rows = [rows for rows in (earlier, range(entry.rank)) if b[list(rows)].any()]
            if rows:
                parts = [(a[list(part)].t(), b[list(part)]) for part in rows]
                left, right = joined(parts, self.kept)
                for matrix, values in ((a, left.t().clone()), (b, right.clone())):
                    matrix[self.directions :] = 0
                    matrix[self.directions : self.directions + len(values)] = values


def _matrix(flat: Tensor, start: int, rows: int, columns: int) -> Tensor:
    return flat[start : start + rows * columns].reshape(rows, columns)


class SubspaceProgram(PrgeProgram):
    """The training program over states `adapter`, `subspace`, and with Adam `moments`.

    Args:
        draw: noise of R.
        spans: ranges of the state.
    """

    def __init__(
        self,
        family: Family,
        spans: SubspaceLayout,
        config: PrgeConfig,
        draw: Noise,
        token_loss: TokenLoss | None = None,
    ) -> None:
        super().__init__(family, spans.trained, config, self._directions, token_loss)
        self.spans = spans
        self.draw = draw
        self.c: dict[Entry, Tensor] = {}
        self.pairs = {entry.offset: (of_r, entry) for of_r, entry in spans.pairs}
        for linear in self.linears.values():
            linear.lora_a = torch.zeros(())  # it is a part of the state

    @property
    def state_shapes(self) -> dict[str, int]:
        """See `PrgeProgram.state_shapes`; the moments are followed by the number of updates they
        have seen."""
        shapes = {"adapter": self.spans.size, "subspace": self.spans.c_size}
        if self.config.optimizer == "adam":
            shapes["moments"] = 2 * self.spans.small.size + 1
        return shapes

    def bindings(self, adapter_P: Tensor) -> tuple[Tensor, ...]:
        """Return of each linear layer A [inputs, directions] and, if there is room for them, A
        and B of earlier subspaces."""
        bindings = []
        for entry, linear in self.linears.items():
            a, b = self.spans.a(adapter_P, entry), self.spans.b(adapter_P, entry)
            if linear.scale != 1.0:
                a = a * linear.scale
            bindings.append(a[: entry.rank].t())
            if self.spans.kept:
                bindings += [a[self.spans.directions :].t(), b[self.spans.directions :]]
        return tuple(bindings)

    def bind(self, tensors: Sequence[Tensor]) -> None:
        """Put what `bindings` gave into the layers; nothing takes it out."""
        each = 3 if self.spans.kept else 1
        for number, linear in enumerate(self.linears.values()):
            linear.slot.a = linear.past = None
            if tensors:
                linear.slot.a, *past = tensors[number * each : (number + 1) * each]
                if past:
                    linear.past = past[0], past[1]

    @contextmanager
    def bound(self, state: Sequence[Tensor]) -> Iterator[None]:
        """See `PrgeProgram.bound`."""
        self.bind(self.bindings(state[0]))
        if len(state) > 1:
            self.c = {entry: self.spans.c(state[1], entry) for entry in self.linears}
        try:
            yield
        finally:
            self.bind(())
            self.c = {}

    def _directions(
        self, seed: Tensor, step: Tensor, tensor: int, queries: int, start: int, count: int
    ) -> Tensor:
        """Return Z C of the linear layer whose B is at `start`."""
        of_r, entry = self.pairs[start]
        z = self.draw(seed, step, tensor, queries, of_r.offset, of_r.count)
        return (z[:, :, None] * self.c[entry]).reshape(queries, count)

    def layer_copies(self, layer: int, copies_of: CopiesOf) -> Iterator[tuple[Entry, Tensor]]:
        """See `PrgeProgram.layer_copies`; other directions lie between those of two linear layers."""
        for entry in self.layout.of_layer(layer):
            yield entry, copies_of(entry.offset, entry.count)

    def every_copy(self, copies_of: CopiesOf) -> list[Tensor]:
        """See `PrgeProgram.every_copy`."""
        return [
            copies_of(e.offset, e.count).reshape(-1, e.rank, e.outputs) for e in self.layout.entries
        ]

    def update(
        self, state: Sequence[Tensor], gradients_Q: Tensor, *scalars: Tensor
    ) -> tuple[Tensor, ...]:
        """See `PrgeProgram.update`."""
        seed, step, learning_rate = scalars
        adapter, subspace, *moments = state
        spans = self.spans
        size = self.spans.small.size
        q = self.config.queries
        z = self.draw(seed, step, NOISE_TENSOR, q, 0, size)
        change = ((gradients_Q / q)[:, None] * z).sum(dim=0)
        if moments:
            count = moments[0][2 * size :] + 1.0
            change, mean, square = adam(
                change, moments[0][:size], moments[0][size : 2 * size], count
            )
            moments = [torch.cat([mean, square, count])]
        change = learning_rate * change
        at = 0
        parts = []
        for of_r, entry in self.pairs.values():
            if entry.offset > at:
                parts.append(adapter[at : entry.offset])
            at = entry.offset + entry.count
            moved = change[of_r.offset : of_r.offset + of_r.count, None] * spans.c(subspace, entry)
            parts.append(adapter[entry.offset : at] - moved.reshape(-1))
        # A tensor of the state that a host keeps goes in and comes out.
        return torch.cat([*parts, adapter[at:]]), subspace.clone(), *moments


def at_export(
    loaded: LoadedModel, config: PrgeConfig, rows: Dataset, seed: int
) -> tuple[PrgeConfig, dict[str, np.ndarray]] | None:
    """Take the subspace of an exact gradient of some rows; see `GraphProgram.calibrate`.

    The model stays as it is.
    """
    if config.factors is not None or config.subspace == "random" or config.top_layers is not None:
        return None
    config = config.model_copy(update={"factors": IN_STATE})
    layout = SubspaceLayout(loaded.dims, config.for_program(), seed)
    program = PrgeProgram(loaded.family, layout.small, config.for_program(), graph.aten_normal)
    chosen = np.random.default_rng(seed).permutation(len(rows.items))[: config.calibration_rows]
    examples = [rows.items[number].example for number in chosen]
    tokens = ((torch.tensor([e.ids]), torch.tensor([e.labels])) for e in examples)
    factors = gradient_factors(program, tokens)
    program.release()
    return config, layout.begun(factors)


class ProgramSubspace:
    """The subspace of a program; if its state has no `subspace`, this does nothing."""

    def __init__(self, session: ProgramSession) -> None:
        self.session = session
        manifest = session.manifest
        config: PrgeConfig = method_config(manifest.method["name"], manifest.method)
        self.config = config.for_program()
        self.in_state = any(one.name == "subspace" for one in manifest.program_spec.state)

    @cached_property
    def layout(self) -> SubspaceLayout:
        """Ranges of the state."""
        dims = ModelDims.from_manifest(self.session.manifest.model.dims)
        return SubspaceLayout(dims, self.config, self.session.seed)

    def before_step(self, step: int, batch_at: Callable[[int], Any], folder: Path) -> Path | None:
        """Write the first subspace for the log, take an offered one, or compute one that is due.

        See `Session.before_step`.

        Raises:
            CheckpointError: an offered subspace is not of this program.
            TrainingError: a subspace is due, none was offered, and the model is not here.
        """
        if not self.in_state:
            return None
        path = subspace_path(step, folder)
        offered = folder / OFFERED
        every = self.config.refresh_every
        if offered.is_file():
            self._take(read_tensors(offered))
            return offered.replace(path)
        if not step:
            return write_subspace(to_arrays(self._current()), path)
        if every is None or step % every:
            return None
        program = self._program()
        arrays = to_arrays(gradient_factors(program, calibration_rows(program, step, batch_at)))
        self._take(arrays)
        return write_subspace(arrays, path)

    def before_replay(self, step: int, folder: Path) -> None:
        """See `Session.before_replay`."""
        path = subspace_path(step, folder)
        if self.in_state and path.is_file():
            self._take(read_tensors(path))

    def _take(self, arrays: dict[str, np.ndarray]) -> None:
        """Retain what was learned behind the new subspace, and begin in it with moments of 0."""
        layout = self.layout
        state = self.session.state()
        factors = from_arrays(arrays, layout.small.entries, torch.device("cpu"))
        flat = torch.from_numpy(state["adapter"])
        changed = any(bool(layout.b(flat, entry).any()) for entry in layout.trained.entries)
        if changed and not layout.kept:
            raise CheckpointError(
                "the program has no room for what was learned in its subspace",
                expected="a program that was exported with method.refresh_every",
                received="a new subspace",
            )
        layout.fold(flat)
        state |= layout.begun(factors, flat)
        if "moments" in state:
            state["moments"] = np.zeros_like(state["moments"])
        self.session.load_state(state)

    def _current(self) -> dict[Entry, Factors]:
        """The subspace that the session is in."""
        state = self.session.state()
        layout = self.layout
        adapter, c = (torch.from_numpy(state[name]) for name in ("adapter", "subspace"))
        return {
            of_r: Factors(layout.a(adapter, entry)[: entry.rank].t(), layout.c(c, entry))
            for of_r, entry in layout.pairs
        }

    def _program(self) -> PrgeProgram:
        """The model in eager PyTorch, with all that was learned next to its weights."""
        program = self._eager
        layout = self.layout
        adapter = torch.from_numpy(self.session.state()["adapter"])
        for linear, entry in zip(program.linears.values(), layout.trained.entries, strict=True):
            linear.past = (layout.a(adapter, entry) * linear.scale).t(), layout.b(adapter, entry)
        return program

    @cached_property
    def _eager(self) -> PrgeProgram:
        """The model before any quantisation.

        Raises:
            TrainingError: it is not here.
        """
        model = self.session.manifest.model
        settings = {"revision": model.revision, "dtype": "float32", "device": "cpu"}
        try:
            loaded = load_text_model(model.source, **settings)
            if loaded.source.sha256 == model.sha256:
                return PrgeProgram(loaded.family, self.layout.small, self.config, graph.aten_normal)
            reason = f"{model.source} is another model by now"
        except OndeviceError as error:
            reason = error.message
        raise TrainingError(
            "a new subspace is due, and the model whose gradient gives it is not here",
            received=reason,
            hint=f"put one into the run's folder as {OFFERED}, "
            "or export with method.refresh_every null",
        )
