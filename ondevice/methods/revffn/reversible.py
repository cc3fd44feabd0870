"""The reversible network: forward without a graph, and a backward pass that rebuilds every block's
inputs (section 3.1).

The backward pass goes through the steps in reverse. From (v, w) it evaluates the branch of v once,
under autograd: its value gives u back, its graph gives the gradients. So an update in between may
change the block's parameters at once. Gradients of the streams are float32. Rounding to fixed point
or bfloat16 has gradient 1.

The last blocks may keep their graphs from the forward pass (`kept`): the same graphs over the same
numbers, so that gradients have the same bits, and nothing of these blocks is computed again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ondevice.core.errors import TrainingError
from ondevice.core.method import has_triton
from ondevice.core.traits import check_length
from ondevice.methods.revffn.couplings import Place, Step, make_coupling
from ondevice.methods.revffn.fixed_point import Iteration, not_inverted, solve, token_norms
from ondevice.methods.revffn.host_bits import HostBits
from ondevice.methods.revffn.streams import (
    FixedStreams,
    FloatStreams,
    StreamOverflow,
    Streams,
    calibration_ids,
    check_overflow,
    choose_bits,
)

if TYPE_CHECKING:
    from ondevice.methods.revffn.config import RevffnConfig
    from ondevice.models import Family

_log = logging.getLogger(__name__)

Gradients = dict[str, Tensor]
Tree = tuple[Tensor, Tensor]
"""Positions and branches, int64 [B, T] each; see `core.session.Branching`."""
OnStep = Callable[[Tensor, Tensor], None]
OnBlock = Callable[[int, Gradients], None]
BlockGradients = Generator[tuple[int, Gradients], None, Tensor]
"""A block's number and the gradients of its parameters, from the last block to the first; the value
at the end is the gradient of the embedding's output."""


class Graph(NamedTuple):
    """A branch that was computed under autograd.

    Attributes:
        inputs: what it read, in the compute dtype: of the newer stream, of a crossed step the older
            one too.
        root: where its gradient goes in. The branch's value is not kept.
        dtype: of the branch.
    """

    inputs: list[Tensor]
    root: GradientEdge
    dtype: torch.dtype


@dataclass
class Saved:
    """All that a forward pass saves for the backward pass: the final streams, and what a step's
    inverse needs besides.

    Attributes:
        u: older stream, `v`: newer stream, in the streams' own dtype.
        length_tokens: T.
        graphs: by step, the graph of a block that is not computed again.
        middle: the streams that the first of these steps reads; None if there is no such step, or
            none before it.
        side: by step, the packed low bits that its sum does not hold; of a crossed step, its
            tokens' norms.
        stored: by step, its older input, if that was kept instead of rebuilt.
        ids: int64 [B, T], which the streams began with.
        sums: by step, the sum of the older stream that it reads, int64 []; if the backward pass
            rebuilds each bit.
    """

    u: Tensor
    v: Tensor
    length_tokens: int
    graphs: dict[int, Graph] = field(default_factory=dict)
    middle: tuple[Tensor, Tensor] | None = None
    side: dict[int, Tensor] = field(default_factory=dict)
    stored: dict[int, Tensor] = field(default_factory=dict)
    ids: Tensor | None = None
    sums: list[Tensor] = field(default_factory=list)

    def leave_end(self) -> None:
        """Free the final streams, once they are read, if the way back does not begin with them."""
        if self.middle is not None:
            self.u, self.v = self.middle
            self.middle = None
        elif 0 in self.graphs:
            self.u = self.v = self.u.new_empty(0)

    @property
    def bytes(self) -> int:
        """Size in bytes without graphs, on the host too."""
        kept = (self.u, self.v, *self.side.values(), *self.stored.values())
        return sum(tensor.numel() * tensor.element_size() for tensor in kept)


class Reversible:
    """A family's blocks as a reversible network. Weights stay the model's own; `adapters` are new.

    Args:
        family: the model, on its device; it computes in the dtype of its embedding.
        config: coupling, streams and scale.
        device: moves the model there first; None leaves it.
        seed: of the adapters' first values.
    """

    def __init__(
        self,
        family: Family,
        config: RevffnConfig,
        device: torch.device | str | None = None,
        seed: int = 0,
    ) -> None:
        if device is not None:
            family.model.to(device)
        self.family = family
        self.config = config
        self.coupling = make_coupling(family, config, seed)
        self.steps = self.coupling.steps
        self.adapters: dict[str, nn.Parameter] = self.coupling.adapters
        self.blocks = family.dims.layers
        self.iterations: dict[int, Iteration] = {}
        """By step, how the last fixed-point iteration went (`coupling: paper`)."""
        self.host_bits: HostBits | None = None
        """What takes the bits next to the streams to the host and back; None leaves them here."""
        place = family.embedding.weight.device
        if config.gamma_bits_on == "host" and place.type == "cuda":
            self.host_bits = HostBits(place)
        self.streams: Streams = FloatStreams(
            torch.bfloat16 if config.streams == "bfloat16" else torch.float64
        )
        if config.streams == "int32":
            self.fraction_bits = config.fraction_bits or self._calibrated()

    @property
    def fraction_bits(self) -> int | None:
        """Bits after the point of int32 streams, else None. A resumed run sets what its first start
        chose."""
        if isinstance(self.streams, FixedStreams):
            return self.streams.fraction_bits
        return None

    @fraction_bits.setter
    def fraction_bits(self, bits: int) -> None:
        self.streams = fixed_streams(bits, self.family.embedding.weight.device)

    @property
    def exact(self) -> bool:
        """True if the backward pass rebuilds every bit: integers, and no step that an iteration
        inverts."""
        return isinstance(self.streams, FixedStreams) and not any(
            step.crossed for step in self.steps
        )

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype of the branches."""
        return self.family.embedding.weight.dtype

    def block_parameters(self, block: int) -> dict[str, nn.Parameter]:
        """Return parameters of a block by name in the model, adapters included."""
        parameters: dict[str, nn.Parameter] = {}
        for step in self.steps:
            if step.block == block:
                parameters |= self.coupling.parameters(step)
        return parameters

    @torch.no_grad()
    def forward(
        self,
        ids_BT: Tensor,
        on_step: OnStep | None = None,
        tree: Tree | None = None,
        kept: int = 0,
    ) -> Saved:
        """Run the embedding and all blocks, without a graph; with `not_converged: store`, each
        block is inverted at once.

        Args:
            ids_BT: int64 [B, T].
            on_step: is given the streams (u, v) that each step reads.
            tree: of prompts with their continuations, where each token is; without a backward pass.
            kept: blocks, the last ones, that keep their graphs.

        Raises:
            StreamOverflow: a fixed-point stream overflows; names the layer and a scale that would
                do.
        """
        peaks: list[Tensor] = []
        store = self.config.not_converged == "store" and tree is None
        saved = self._forward(ids_BT, peaks, on_step, store, tree, kept)
        self.check(peaks)
        return saved

    @torch.no_grad()
    def _forward(
        self,
        ids_BT: Tensor,
        peaks: list[Tensor],
        on_step: OnStep | None = None,
        store: bool = False,
        tree: Tree | None = None,
        kept: int = 0,
    ) -> Saved:
        if tree is None:
            place = self.place(ids_BT.shape[1])
            embedded = self.family.embed(ids_BT)
        else:
            embedded = self.family.embed(ids_BT, tree[0])
            place = Place(*self.family.branched(embedded, *tree))
        u, v = (self.streams.from_float(part) for part in self.coupling.split(embedded))
        side: dict[int, Tensor] = {}
        stored: dict[int, Tensor] = {}
        sums: list[Tensor] = []
        graphs: dict[int, Graph] = {}
        middle = None
        for number, step in enumerate(self.steps):
            if on_step is not None:
                on_step(u, v)
            if step.block >= self.blocks - kept:
                if number and not graphs:
                    middle = (u, v)
                branch, graphs[number] = self._with_graph(step, place, v, u)
                w, _, peak = self.streams.step(u, v, branch, step.mix, inverted=False)
                peaks.append(peak)
                u = v
                v = w
                continue
            if self.exact:
                sums.append(u.sum(dtype=torch.int64))
            branch = self._branch(step, place, v, u)
            w, bits, peak = self.streams.step(u, v, branch, step.mix)
            peaks.append(peak)
            if step.crossed:
                bits = token_norms(self.streams, u)
            elif bits is not None and self.host_bits is not None:
                bits = self.host_bits.sent(bits)
            if bits is not None:
                side[number] = bits
            if store and bits is not None and step.crossed:
                iteration = self.iterations[number] = self._solve(step, place, v, w, bits)[1]
                if not iteration.converged:
                    stored[number] = u
            u = v
            v = w
        return Saved(u, v, ids_BT.shape[1], graphs, middle, side, stored, ids_BT, sums)

    def check(self, peaks: list[Tensor]) -> None:
        """Refuse a forward pass whose fixed-point streams overflow; see `streams.check_overflow`."""
        if self.fraction_bits is not None:
            check_overflow(peaks, [step.place for step in self.steps], self.fraction_bits)

    def coarsen(self, error: StreamOverflow) -> None:
        """Take the scale that would have done; raise `error` if the settings fix the scale."""
        if self.config.fraction_bits is not None or error.bits >= (self.fraction_bits or 0):
            raise error
        _log.info("%s: fraction_bits %s becomes %d", error.message, self.fraction_bits, error.bits)
        self.fraction_bits = error.bits

    def hidden(self, saved: Saved) -> Tensor:
        """Return the final norm's input: [B, T, hidden] in the compute dtype."""
        return self.coupling.merge(
            *(self.streams.to_float(part) for part in (saved.u, saved.v))
        ).to(self.dtype)

    def backward(self, saved: Saved, grad_BTD: Tensor, on_block: OnBlock) -> Tensor:
        """Return gradients of all blocks, from the last to the first.

        Args:
            saved: from `forward`; its tensors are freed on the way.
            grad_BTD: gradient of `hidden(saved)`.
            on_block: is called with a block's number, from the last to the first, and the gradients
                of those of its parameters that require one, in their dtypes. It may change that
                block's parameters.

        Returns:
            the gradient of the embedding's output, float32 [B, T, hidden].

        Raises:
            TrainingError: the streams that were rebuilt are not those of the forward pass; names
                the layer.
        """
        blocks = self.backward_by_block(saved, grad_BTD)
        while True:
            try:
                block, gradients = next(blocks)
            except StopIteration as end:
                return end.value
            on_block(block, gradients)

    def backward_by_block(self, saved: Saved, grad_BTD: Tensor) -> BlockGradients:
        """Yield `backward` one block at a time, so that micro-batches can go back through each
        block together."""
        place = self.place(saved.length_tokens)
        du, dv = self.coupling.merge_back(grad_BTD.float())
        saved.leave_end()
        v = saved.u
        w = saved.v
        del (
            saved.u,
            saved.v,
            grad_BTD,
        )  # the caller holds `saved` on: its tensors are to go as the streams go back
        gradients: Gradients = {}
        sums: list[Tensor] = []
        for number in reversed(range(len(self.steps))):
            step = self.steps[number]
            graph = saved.graphs.pop(number, None)
            if graph is None:
                u, graph = self._step_back(saved, number, place, v, w)
                v, w = u, v
                if self.exact:
                    sums.append(u.sum(dtype=torch.int64))
            du, dv, of_step = self._gradients(step, graph, du, dv)
            gradients |= of_step
            del of_step, graph  # the consumer may free the gradients: no second reference here
            if number == 0 or self.steps[number - 1].block != step.block:
                yield step.block, gradients
                gradients = {}
        self._compare(saved, v, w, sums[::-1])
        return self.coupling.split_back(du, dv)

    @torch.no_grad()
    def _compare(self, saved: Saved, u: Tensor, v: Tensor, sums: list[Tensor]) -> None:
        """Refuse streams that are not the embedding's again: their gradients were those of other
        activations. One comparison of every bit, and sums that say where it began."""
        if not self.exact or saved.ids is None or not sums:
            return
        first = (
            self.streams.from_float(part)
            for part in self.coupling.split(self.family.embed(saved.ids))
        )
        differs = torch.stack(
            [(one != other).sum() for one, other in zip((u, v), first, strict=True)]
        ).sum()
        wrong = torch.stack(sums) != torch.stack(saved.sums)
        if not int(differs):
            return
        last = 0
        if bool(wrong.any()):
            last = int(wrong.nonzero().max())
        raise TrainingError(
            f"{self.steps[last].place}: the stream that the backward pass rebuilt is not the forward pass's",
            expected="the embedding's own numbers again, in every bit",
            received=f"{int(differs)} of {u.numel() + v.numel()} differ",
            hint="a kernel of this layer gives other bits when it runs again: torch.use_deterministic_algorithms(True) "
            "or another attention; method.recompute: stored trains without rebuilding",
        )

    def _step_back(
        self, saved: Saved, number: int, place: Place, v: Tensor, w: Tensor
    ) -> tuple[Tensor, Graph]:
        """The older stream that a step read, and the step's branch computed again, from what it
        gave."""
        step = self.steps[number]
        u = saved.stored.pop(number, None)
        if self.host_bits is None:
            side = saved.side.pop(number, None)
        else:
            side = self.host_bits.taken(saved.side, number)
        if step.crossed and u is None and side is not None:
            with torch.no_grad():
                u, iteration = self._solve(step, place, v, w, side)
            self.iterations[number] = iteration
            if not iteration.converged:
                raise not_inverted(step.block, iteration, self.config.tolerance)
        branch, graph = self._with_graph(step, place, v, u)
        if u is None:
            u = self.streams.inverse_step(w, v, branch, step.mix, side)
        return u, graph

    def _with_graph(
        self, step: Step, place: Place, v: Tensor, u: Tensor | None
    ) -> tuple[Tensor, Graph]:
        """A step's branch, without a graph, and its graph; `u` is read by a crossed step only."""
        read = [v]
        if step.crossed and u is not None:
            read = [v, u]
        inputs = [
            self.streams.to_float(part, self.dtype).detach().requires_grad_() for part in read
        ]
        with torch.enable_grad():
            branch = self.coupling.branch(step, place, *inputs)
        return branch.detach(), Graph(inputs, get_gradient_edge(branch), branch.dtype)

    def _gradients(
        self, step: Step, graph: Graph, du: Tensor | None, dv: Tensor
    ) -> tuple[Tensor | None, Tensor, Gradients]:
        """The gradients of the streams (u, v) that a step reads, and those of its parameters, from
        the gradients of (v, w)."""
        mix = step.mix
        parameters = {
            name: p for name, p in self.coupling.parameters(step).items() if p.requires_grad
        }
        grads = torch.autograd.grad(
            graph.root,
            [*graph.inputs, *parameters.values()],
            mix.branch_of(dv).to(graph.dtype),
            materialize_grads=True,
        )
        older, newer = self.streams.gradients(mix, du, dv, grads[0])
        count = len(graph.inputs)
        if count == 2:
            older = grads[1].float() if older is None else older + grads[1]
        return older, newer, dict(zip(parameters, grads[count:], strict=True))

    def invert(
        self, step: Step, place: Place, v: Tensor, w: Tensor, side: Tensor | None
    ) -> tuple[Tensor, Iteration | None]:
        """Rebuild u from (v, w) without gradients; an iteration is given as it went, converged or
        not."""
        if side is not None and self.host_bits is not None:
            side = self.host_bits.here(side)
        if step.crossed and side is not None:
            return self._solve(step, place, v, w, side)
        return self.streams.inverse_step(
            w, v, self._branch(step, place, v, w), step.mix, side
        ), None

    def _solve(
        self, step: Step, place: Place, v: Tensor, w: Tensor, norms: Tensor
    ) -> tuple[Tensor, Iteration]:
        limit = self.config.max_iterations
        tolerance = self.config.tolerance
        return solve(
            self.streams,
            lambda u: self._branch(step, place, v, u),
            w,
            v,
            norms,
            step.mix,
            limit,
            tolerance,
        )

    def place(self, length: int) -> Place:
        """Return the places of a row's tokens, positions 0 to `length` - 1."""
        if any(step.crossed for step in self.steps):  # written out here, without a window
            check_length(self.family.dims, length)
        device = self.family.embedding.weight.device
        return Place(self.family.positions(length, device, self.dtype))

    def _branch(self, step: Step, place: Place, v: Tensor, u: Tensor) -> Tensor:
        older = None
        if step.crossed:
            older = self.streams.to_float(u, self.dtype)
        return self.coupling.branch(step, place, self.streams.to_float(v, self.dtype), older)

    def _calibrated(self) -> int:
        """Choose the scale for this model by a forward pass in float32 streams, which shows how
        large they become."""
        table = self.family.embedding.weight
        ids = calibration_ids(table.shape[0], self.family.dims.max_positions, table.device)
        peaks: list[Tensor] = []
        self._forward(ids, peaks)
        return choose_bits(float(torch.stack(peaks).amax()))


def fixed_streams(fraction_bits: int, device: torch.device) -> FixedStreams:
    """Return streams of int32, with one kernel for each step on a GPU that has Triton."""
    if has_triton(device.type):
        from ondevice.methods.revffn.stream_kernels import TritonStreams

        return TritonStreams(fraction_bits)
    return FixedStreams(fraction_bits)
