"""The engine of LSP-Offload: `OffloadEngine` whose gradients are compressed. Weights stay where they
are, P^T G Q goes to the host, and the change in that subspace comes back.

A unit's wire has the changes of its matrices instead of the matrices (`projected`); the engine keeps,
updates and moves it like any unit. Every `check_every` steps the bias of each matrix' projectors is
checked on its first gradient, and they are replaced if it is too large; the moments move into the
new subspace, the change so far into the base."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ondevice.core.errors import ModelError
from ondevice.methods.lsp.bases import Base, OnHost, Quantised, Resident
from ondevice.methods.lsp.config import FOLDED
from ondevice.methods.lsp.linear import attach, detach, is_linear
from ondevice.methods.lsp.matrix import BiasCheck, Matrix, Plane, carried
from ondevice.methods.lsp.projected import PastChange, ProjectedUnit, split, widen, wires
from ondevice.methods.lsp.window import ProjectedWindow, view
from ondevice.offload.engine import OffloadEngine
from ondevice.offload.graphs import Graphs, recorder
from ondevice.offload.host import DTYPES, parameters, release
from ondevice.offload.transfers import Slot
from ondevice.offload.units import SINGLE, Piece, Ranks, Unit, Units
from ondevice.runtime_ops.adam_state import HostState, Moments, merge, split_
from ondevice.runtime_ops.generator import stream_key

if TYPE_CHECKING:
    from ondevice.methods.lsp.config import LspConfig
    from ondevice.models import Family
    from ondevice.nn.cross_entropy import WeighedRows
    from ondevice.offload.units import Arrays

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
        parts: of each unit, what crosses the bus.
        bias_checks: the last check of each matrix's bias, by parameter name.

    Raises:
        DoesNotFitError: host memory cannot be locked.
        MissingPackageError: bitsandbytes, liger-kernel or a compiler is requested but not
            installed.
    """

    config: LspConfig
    window: ProjectedWindow

    def __init__(
        self, family: Family, config: LspConfig, device: str, seed: int = 0, ranks: Ranks = SINGLE
    ) -> None:  # fmt: skip
        self.seed = seed
        self.dtype = DTYPES[config.compute]
        self.attached: list[Any] = []
        self.hooks: list[Any] = []
        self.bias_checks = dict[str, BiasCheck]()
        self.base: Base | None = None
        super().__init__(family, config, device, ranks)

    def _wires(self, family: Any) -> Units:
        """Choose the projected matrices; their weights move to where they stay."""
        self.family = family
        record = self.config.cuda_graphs
        self.graphs = Graphs(recorder(self.where) if record else None)
        self.plane = Plane(recorder(self.where) if record else None)
        self.parts = self._parts()
        if any(part.matrices for part in self.parts):
            self.base = self._base()
        tables = tuple(
            part.unit for part in self.parts if part.matrices and part.unit.kind != "layer"
        )
        self.tables = Resident(tables, self.device, self.dtype, self.dtype)
        for part in self.parts:
            for piece in part.held:
                piece.parameter.data = torch.empty(0, dtype=self.dtype)
        return wires(self.units, self.parts)

    def _window(self, family: Any, *shared: Any) -> ProjectedWindow:
        for unit in self.units.all:
            release(unit, self.dtype)
        self._attach()
        memory = (self.base, self.tables.memory, self.graphs)
        return ProjectedWindow(self.units, self.parts, *memory, *shared)

    def step(
        self,
        ids: np.ndarray,
        labels: np.ndarray,
        step: int,
        learning_rate: float,
        weighed: WeighedRows | None = None,
    ) -> float:
        """Run one AdamW step; see `OffloadEngine.step`."""
        if self.config.schedule == "zero":
            self.flush()
        self._watch(step)
        loss = super().step(ids, labels, step, learning_rate, weighed)
        decay = 1 - learning_rate * self.config.weight_decay
        for part in self.parts:
            part.decay_by(decay)
        return loss

    def load(self, arrays: Arrays) -> None:
        """See `OffloadEngine.load`."""
        super().load(arrays)
        self.window.forget_wires()

    @property
    def host_bytes(self) -> int:
        """Host memory of the engine, and weights that slide."""
        base = 0
        if isinstance(self.base, OnHost):
            base = self.base.bytes
        return super().host_bytes + base

    @torch.no_grad()
    def weights(self, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
        """Return every parameter by name, on the host; call `flush` before. Only for one
        process."""
        masters = self.store.masters()
        weights = {}
        for part in self.parts:
            for piece in part.exact:
                weights[piece.name] = masters[piece.name].to(dtype, copy=True)
            changes = {own.name: masters[own.name] for _, _, own in part.matrices}
            weights |= {name: flat.to(dtype) for name, flat in self._projected(part, changes)}
        return weights

    @torch.no_grad()
    def weight_parts(self, arrays: dict[str, Tensor]) -> Iterator[tuple[str, int, Tensor]]:
        """Yield what this rank writes of the parameters: its shards of those that are trained as
        they are, out of `arrays` of the store, and on rank 0 all that are projected."""
        projected = {piece.name for part in self.parts for piece, _, _ in part.matrices}
        for name, first, flat in self.store.weight_parts(arrays):
            if name not in projected:
                yield name, first, flat.to(self.dtype)
        for part in self.parts if self.ranks.rank == 0 else ():
            changes = {}
            if part.matrices:  # no rank has the masters of all
                changes = parameters(part.wire, self.window.wire(part).memory)
            for name, weight in self._projected(part, changes):
                yield name, 0, weight.to(self.dtype).reshape(-1)

    def _projected(
        self, part: ProjectedUnit, changes: dict[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the projected weights of a part with these changes, float32 on the host."""
        for held in part.held:
            weight = view(self._whole(part), held).to(torch.float32, copy=True)
            flat = weight.view(-1)
            for piece, matrix, own in part.matrices:
                if piece.parameter is held.parameter:
                    first = piece.offset - held.offset
                    target = flat[first : first + piece.numel].view(piece.shape)
                    part.effective(matrix, changes[own.name].to(target), target, target)
            yield held.name, weight.cpu()

    def flush(self) -> None:
        """Wait for every update, and until the accelerator has them, on all ranks."""
        super().flush()
        self.window.fetch_wires()
        self.device.synchronize()

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

    def close(self) -> None:
        """End the threads and give the model's modules their own forward passes back."""
        for module in self.attached:
            detach(module)
        for hook in self.hooks:
            hook.remove()
        super().close()

    def _parts(self) -> list[ProjectedUnit]:
        config = None
        if self.config.project:
            config = self.config
        numbers = {
            name: number for number, (name, _) in enumerate(self.family.model.named_parameters())
        }
        linear = {id(module.weight) for module in self._linear()}
        where = (self.device, self.where, self.plane)
        drawn = (config, self.seed, numbers, *where, linear, self.config.weight_decay > 0)
        parts = [split(unit, unit.index, *drawn) for unit in self.units.all]
        # A projected table is one more layer of the wires, and so comes before the rest.
        wires = [part for part in parts if part.wire.kind == "layer"]
        wires += [part for part in parts if part.wire.kind != "layer"]
        for index, part in enumerate(wires):
            part.wire = replace(part.wire, index=index)
        return parts

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

    def _linear(self) -> list[Any]:
        """Return the layers' linear modules."""
        layers = (self.family.layer(i) for i in range(len(self.units.layers)))
        return [module for layer in layers for module in layer.modules() if is_linear(module)]

    def _attach(self) -> None:
        """Attach matrices to the layers' projected weights, and those of experts to their
        gradients, which autograd makes; tables are handled as a whole.

        Raises:
            ModelError: a projected weight belongs to no linear module: nothing would train it.
        """
        layers = [part for part in self.parts if part.unit.kind == "layer"]
        matrices: dict[int, Matrix] = {}
        for part in layers:
            stacks: dict[int, list[Matrix]] = {
                id(piece.parameter): [] for piece in part.held if piece.stacked
            }
            for piece, matrix, _ in part.matrices:
                if id(piece.parameter) in stacks:
                    stacks[id(piece.parameter)].append(matrix)
                else:
                    matrices[id(piece.parameter)] = matrix
            for piece in part.held:
                if piece.stacked:
                    hook = partial(_collect_experts, stacks[id(piece.parameter)])
                    learns = piece.parameter.requires_grad_(True)
                    self.hooks.append(learns.register_post_accumulate_grad_hook(hook))
        self.attached = [module for module in self._linear() if id(module.weight) in matrices]
        found = {id(module.weight) for module in self.attached}
        lost = [matrix.name for key, matrix in matrices.items() if key not in found]
        if lost:
            raise ModelError(
                f"no linear module has the projected weight {lost[0]}",
                expected="nn.Linear or Conv1D",
                received=f"{len(lost)} weights without one",
            )
        for module in self.attached:
            attach(module, matrices[id(module.weight)])

    def _watch(self, step: int) -> None:
        """Let every matrix check its bias in this step, if it is one for it."""
        watched = False
        for part in self.parts:
            for piece, matrix, own in part.matrices:
                matrix.watch = None
                if matrix.checks(step):
                    matrix.watch = partial(self._check_bias, part, piece, own)
                    watched = True
        self.graphs.paused = watched

    @torch.no_grad()
    def _check_bias(
        self, part: ProjectedUnit, piece: Piece, own: Piece, matrix: Matrix, gradient: Tensor
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
        if not gradient.any():  # no label in this micro-batch: the next one is checked
            matrix.watch = partial(self._check_bias, part, piece, own)
            return
        left = matrix.left
        right = matrix.right
        gain = matrix.gain

        def first(value: Tensor) -> Tensor:
            return self._together(part.unit, value, self.ranks.first)

        check = matrix.refresh(gradient, None if self.ranks.single else first)
        self.bias_checks[matrix.name] = check
        if check.carry is None:
            return
        change, mean, square = (x.view(matrix.sizes) for x in self._state(part, own))
        if change.any():
            self._fold(part, piece, matrix, PastChange(left, right, gain, change.clone()))
        memory = self.window.wire(part).memory
        memory[own.offset : own.offset + own.numel].zero_()
        self._put_state(part, own, torch.zeros_like(change), *carried(mean, square, check))

    def _state(self, part: ProjectedUnit, own: Piece) -> list[Tensor]:
        """Return master and moments of a piece of a wire, float32 on the accelerator, of all
        ranks."""
        shard, here = self._here(part, own)
        read: list[Tensor] = []

        def run(state: HostState) -> None:
            moments = _cut(state.moments, here)
            if state.high is not None and state.low is not None:
                read.append(merge(state.high[here], state.low[here], moments))
            else:
                read.append(_there(state.master)[here].clone())
            read.extend((moments.m.float().clone(), moments.v.float().abs()))

        self.updater.edit(shard, run)
        bounds = self.ranks.bounds(part.wire, slice(own.offset, own.offset + own.numel))
        whole = []
        for values in read:
            memory = self.device.empty(own.numel, torch.float32)
            memory[self.ranks.own(bounds)].copy_(values)
            self._together(part.unit, memory, lambda shared: self.ranks.gather(shared, bounds))
            whole.append(memory)
        return whole

    def _put_state(
        self, part: ProjectedUnit, own: Piece, master: Tensor, mean: Tensor, square: Tensor
    ) -> None:
        """Let the host's state of a piece of a wire be this one, [s, s] each."""
        shard, here = self._here(part, own)
        mine = self.ranks.own(
            self.ranks.bounds(part.wire, slice(own.offset, own.offset + own.numel))
        )
        values = [value.reshape(-1)[mine].cpu() for value in (master, mean, square)]

        def run(state: HostState) -> None:
            moments = _cut(state.moments, here)
            moments.m.copy_(values[1])
            moments.v.copy_(values[2])
            if state.high is not None and state.low is not None:
                split_(values[0], state.high[here], state.low[here], moments)
            else:
                _there(state.master)[here].copy_(values[0])

        self.updater.edit(shard, run)

    def _here(self, part: ProjectedUnit, own: Piece) -> tuple[Unit, slice]:
        """Return this rank's shard of a wire, and the elements of a piece in it."""
        shard = self.ranks.shard(part.wire)
        low = min(max(own.offset - shard.low, 0), shard.numel)
        high = min(max(own.offset + own.numel - shard.low, 0), shard.numel)
        return shard, slice(low, high)

    def _together(self, unit: Unit, memory: Tensor, run: Callable[[Tensor], None]) -> Tensor:
        """Let the ranks do something together with memory of the accelerator."""
        if not self.ranks.single:
            ready = self.device.record("compute")
            together = partial(self.window.transfers.together, unit, ready, lambda: run(memory))
            self.device.hold("compute", self.transfers.submit(unit.name, together).wait())
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


def _collect_experts(matrices: list[Matrix], parameter: Tensor) -> None:
    """Project a gradient [experts, m, n] that is complete, and let go of it."""
    gradient = _there(parameter.grad)
    for matrix, own in zip(matrices, gradient, strict=True):
        matrix.collect_whole(own)
    parameter.grad = None


def _cut(moments: Moments, here: slice) -> Moments:
    return Moments(moments.kind, moments.m[here], moments.v[here])


def _there(tensor: Tensor | None) -> Tensor:
    assert tensor is not None  # noqa: S101  a state that is not split has a master
    return tensor
