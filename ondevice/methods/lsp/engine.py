"""The engine of LSP-Offload: weights stay where they are, and P^T G Q goes to the host and comes
back as a change.

It runs `offload.passes` over a `ProjectedWeightCache`, with the gradients' way to the host and back
in `Updates`. Every `check_every` steps the bias of each matrix' projectors is checked on its first
gradient, and they are replaced if it is too large; the moments move into the new subspace, the
change so far into the base."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ondevice.methods.lsp.bases import Base, OnHost, Quantised, Resident
from ondevice.methods.lsp.cache import ProjectedWeightCache, view
from ondevice.methods.lsp.config import FOLDED
from ondevice.methods.lsp.linear import attach, detach, is_linear
from ondevice.methods.lsp.matrix import BiasCheck, Matrix, Plane, carried
from ondevice.methods.lsp.projected import PastChange, ProjectedUnit, split, widen
from ondevice.methods.lsp.updates import Updates
from ondevice.offload.engine import OffloadEngine, host_threads
from ondevice.offload.graphs import Graphs, recorder
from ondevice.offload.host import DTYPES, HostStore, release
from ondevice.offload.passes import Passes
from ondevice.offload.transfers import Activations, Slot
from ondevice.offload.units import SINGLE, Piece, Ranks, Unit
from ondevice.runtime_ops.generator import stream_key

if TYPE_CHECKING:
    from ondevice.methods.lsp.config import LspConfig
    from ondevice.models import Family

FOLD = 2
"""The generator's query that a fold's chances are drawn from."""


class LspEngine(OffloadEngine):
    """AdamW steps in learned subspaces of a model whose optimizer states are on the host.

    Args:
        family: the model on the CPU; its parameters' values move into the engine.
        config: of projectors, schedule and memory.
        device: `cpu`, `cuda` or `cuda:N`.
        seed: of the projectors.
        ranks: those that train together: each has all weights on its accelerator and its shards of
            the states.

    Attributes:
        bias_checks: the last check of each matrix's bias, by parameter name.

    Raises:
        DoesNotFitError: host memory cannot be locked.
        MissingPackageError: bitsandbytes, liger-kernel or a compiler is requested but not
            installed.
    """

    config: LspConfig

    def __init__(
        self, family: Family, config: LspConfig, device: str, seed: int = 0, ranks: Ranks = SINGLE
    ) -> None:  # fmt: skip
        super().__init__(family, config, device, ranks)
        self.family = family
        self.seed = seed
        self.dtype = DTYPES[config.compute]
        self.attached: list[Any] = []
        graphs = config.cuda_graphs
        self.graphs = Graphs(recorder(self.where) if graphs else None)
        self.plane = Plane(recorder(self.where) if graphs else None)
        self.parts = self._parts()
        self.bias_checks = dict[str, BiasCheck]()
        self.base = None
        if any(part.matrices for part in self.parts):
            self.base = self._base()
        tables = tuple(
            part.unit for part in self.parts if part.matrices and part.unit.kind != "layer"
        )
        self.tables = Resident(tables, self.device, self.dtype, self.dtype)
        self.exact = self._exact()
        self.store = HostStore(
            (part.own_exact for part in self.parts if part.exact.numel), config, self.device
        )
        for unit in self.units.all:
            release(unit, self.dtype)
        threads = config.threads or host_threads(self.device.type, ranks.sharing)
        lanes = (self.device, self.timeline, self.watch)
        self.updates = Updates(self.units, self.parts, self.store, config, *lanes, threads, ranks)
        self._meet_ranks(self.updates.transfers, self.updates.workers)
        try:
            self._assemble(family)
        except BaseException:  # no thread stays where memory does not suffice
            self.close()
            raise

    def _assemble(self, family: Family) -> None:
        config = self.config
        where = (self.device, self.dtype, self.updates)
        memory = (self.base, self.tables.memory, self.exact)
        self.cache = ProjectedWeightCache(
            self.units, self.parts, *memory, config, *where, self.graphs
        )
        self.activations = Activations(self.device, self.timeline, config.activations, None)
        ahead = (self.units, config, self.device, self.timeline, self.cache, self.activations)
        self.passes = Passes(family, *ahead, self.where, self.liger)
        self.total = self.device.pinned(1, torch.float32)
        self._attach()

    def step(self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float) -> float:
        """Run one AdamW step on int64 [B, T] of all ranks, as `SlideformerEngine.step` does."""
        count = self._labelled(labels)
        rows = self.ranks.rows(len(ids))
        self._open(True)
        if self.updates.after:
            self.updates.flush()
        self.updates.clipping.begin(step, learning_rate)
        self._watch(step)
        ids = ids[rows]
        labels = labels[rows]
        micro_batches = self._micro_batches(ids)
        h = self.passes.forward(ids, micro_batches, keep=True, every=ids)
        with self.watch.whole("the step"):  # gradients leave, and updates begin
            gradients, total = self.passes.head(
                h, [labels[rows] for rows in micro_batches], 1.0 / count
            )
            known = self.cache.all_reduce_total(total.reshape(1), self.total)
            self.passes.backward(gradients, ids, micro_batches)
            self.updates.end_backward()
        known().wait()
        return float(self.total) / count

    def flush(self) -> None:
        """Wait for every update and apply it."""
        self.updates.flush()
        for part in self.parts:
            self.cache.resolve(part)
        self.device.synchronize()
        self.watch.check()

    @property
    def host_bytes(self) -> int:
        """Host memory of the engine: moments, exact parameters, gradients and updates, and weights
        that slide."""
        base = 0
        if isinstance(self.base, OnHost):
            base = self.base.bytes
        return self.store.bytes + self.updates.bytes + self.activations.bytes + base

    @torch.no_grad()
    def weights(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Return every parameter by name, on the host; call `flush` before."""
        weights = {}
        masters = None
        if self.ranks.single:
            masters = self.store.masters()
        for part in self.parts:
            for piece in part.exact.pieces:
                # No rank has the masters of all; their values in the compute dtype are on every
                # accelerator.
                if masters is None:
                    here = view(self.exact[part.unit.index], piece).cpu()
                else:
                    here = masters[piece.name]
                weights[piece.name] = here.to(dtype, copy=True)
            base = self.total
            if part.matrices:
                base = self._whole(part)
            for piece, matrix, offset in part.matrices:
                weight = view(base, piece).to(torch.float32, copy=True)
                weights[piece.name] = (
                    part.effective(matrix, part.changes(matrix, offset), weight, weight)
                    .to(dtype)
                    .cpu()
                )
        return weights

    def base_of(self, part: ProjectedUnit) -> Tensor:
        """Return the weights that a part's changes are added to, flat on the host, for a
        checkpoint."""
        return self._base_for(part).flat(part.unit)

    def put_base(self, part: ProjectedUnit, flat: Tensor) -> None:
        """Load what `base_of` returned, bfloat16 as uint16."""
        part.folded = True
        self._base_for(part).load(
            part.unit, flat if flat.dtype == torch.float32 else flat.view(torch.bfloat16)
        )

    def put_exact(self) -> None:
        """Copy the parameters that are not projected from the host to the accelerator."""
        for part in self.parts:
            if part.exact.numel:
                target, source = self.updates.outgoing(part, self.exact[part.unit.index])
                target.copy_(source)
                self.updates.gather(
                    part, self.exact[part.unit.index], self.device.record("compute"), changes=False
                )

    def close(self) -> None:
        """End the threads and give the model's modules their own forward passes back."""
        for module in self.attached:
            detach(module)
        if self.overdue is not None:
            self.overdue.close()
        if self.updates.close():
            self.device.close()

    def _parts(self) -> list[ProjectedUnit]:
        config = None
        if self.config.project:
            config = self.config
        plane = self.plane
        numbers = {
            name: number for number, (name, _) in enumerate(self.family.model.named_parameters())
        }
        where = (self.device, self.where)
        decays = self.config.weight_decay > 0
        drawn = (self.seed, numbers, *where, plane, decays, self.ranks)
        return [split(unit, config, *drawn) for unit in self.units.all]

    def _base(self) -> Base:
        layers = self.units.layers
        kind = self.config.weight_dtype
        if self.config.weight_placement == "host":
            return OnHost(layers, self.device, self.timeline, self.dtype)
        if kind in ("int8", "nf4"):
            return Quantised(layers, self.where, self.dtype, kind)
        return Resident(
            layers, self.device, self.dtype, torch.float32 if kind == "float32" else self.dtype
        )

    def _exact(self) -> dict[int, Tensor]:
        """Copy the parameters that are not projected to the accelerator: flat, in the compute
        dtype."""
        exact = {}
        for part in self.parts:
            memory = exact[part.unit.index] = self.device.empty(part.numel - part.start, self.dtype)
            for piece in part.exact.pieces:
                view(memory, piece).copy_(piece.parameter.detach())
        return exact

    def _base_for(self, part: ProjectedUnit) -> Base:
        """Return the base that the changes of a part's matrices are added to."""
        if part.unit.kind != "layer" or self.base is None:
            return self.tables
        return self.base

    def _whole(self, part: ProjectedUnit) -> Tensor:
        """The unit's base, flat, in the compute dtype or in float32; not a copy if it is
        resident."""
        base = self._base_for(part)
        if isinstance(base, Resident):
            return base.memory[part.unit.index]
        return base.source(part.unit, Slot(self.device.empty(part.unit.numel, self.dtype)))

    def _attach(self) -> None:
        """Attach matrices to the layers' projected weights; tables are handled as a whole."""
        matrices = {
            id(piece.parameter): matrix for part in self.parts for piece, matrix, _ in part.matrices
        }
        layers = [
            m
            for i in range(len(self.units.layers))
            for m in self.family.layer(i).modules()
            if is_linear(m)
        ]
        self.attached = [module for module in layers if id(module.weight) in matrices]
        for module in self.attached:
            attach(module, matrices[id(module.weight)])

    def _watch(self, step: int) -> None:
        """Let every matrix check its bias in this step, if it is one for it."""
        self.graphs.paused = due = step % self.config.check_every == 0
        for part in self.parts:
            for piece, matrix, offset in part.matrices:
                matrix.watch = None
                if due:
                    matrix.watch = partial(self._check_bias, part, piece, offset)

    @torch.no_grad()
    def _check_bias(
        self, part: ProjectedUnit, piece: Piece, offset: int, matrix: Matrix, gradient: Tensor
    ) -> None:
        """Check the bias on a gradient; with other projectors the change goes into the base, and
        moments are carried. The host is at rest for this unit: its forward pass has waited for its
        last update. Ranks look at the sum of their gradients, and rank 0's decision and projectors
        are those of all."""
        if not self.ranks.single:
            gradient = self._together(
                part.unit,
                gradient.clone(memory_format=torch.contiguous_format),
                self.ranks.all_reduce,
            )
        old = PastChange(
            matrix.left, matrix.right, matrix.gain, part.changes(matrix, offset).clone()
        )

        def first(value: Tensor) -> Tensor:
            return self._together(part.unit, value, self.ranks.first)

        check = matrix.refresh(gradient, None if self.ranks.single else first)
        self.bias_checks[matrix.name] = check
        if check.carry is None:
            return
        change = part.changes(matrix, offset)
        if change.any():
            self._fold(part, piece, matrix, old)
            change.zero_()
        span = slice(offset, offset + matrix.numel)
        bounds = self.ranks.bounds(part.subspace, span)
        own = self.ranks.own(bounds)
        low = span.start - part.own.low
        here = [
            moment[own.start + low : own.stop + low] for moment in (part.moments.m, part.moments.v)
        ]
        whole = [self.device.empty(matrix.numel, torch.float32) for _ in here]
        for moment, memory in zip(here, whole, strict=True):
            memory[own].copy_(moment)
            self._together(part.unit, memory, lambda shared: self.ranks.gather(shared, bounds))
        mean, square = (memory.view(matrix.sizes) for memory in whole)
        moved = carried(mean, square, check)
        for moment, value in zip(here, moved, strict=True):
            moment.copy_(value.reshape(-1)[own])

    def _together(self, unit: Unit, memory: Tensor, run: Callable[[Tensor], None]) -> Tensor:
        """Let the ranks do something together with memory of the accelerator."""
        if not self.ranks.single:
            event = self.updates.together(unit, self.device.record("compute"), lambda: run(memory))
            self.device.hold("compute", event)
        return memory

    def _fold(self, part: ProjectedUnit, piece: Piece, matrix: Matrix, old: PastChange) -> None:
        """Add the old projectors' change to the base, or retain both if the base cannot take it."""
        target = self._base_for(part)
        if not target.folds:
            part.older.setdefault(matrix.number, []).append(old)
            return
        base = view(self._whole(part), piece)
        seed = stream_key(self.seed, matrix.turn, FOLD, matrix.number) >> 1
        part.folded = True
        (height, width) = matrix.shape
        rows = height
        if not old.left.exact:
            rows = max(1, FOLDED // width)
        for low in range(0, height, rows):
            weight = base[low : low + rows].float()
            widen(replace(old, left=old.left.part(slice(low, low + rows))), weight, 1 / part.decay)
            target.fold(part.unit, piece.offset + low * width, weight, seed ^ low)

    def _open(self, step: bool) -> bool:
        """Begin a pass, its schedule planned by the last step's times."""
        seen = super()._open(step)
        if seen and self.overlap is not None:
            last = self.overlap
            layers = len(self.units.layers)
            lanes = {"offload": last.d2h_s, "upload": last.h2d_s, "update": last.update_s}
            self.updates.plan(
                last.backward_s, {lane: s / layers for lane, s in lanes.items()}, layers
            )
        return seen
