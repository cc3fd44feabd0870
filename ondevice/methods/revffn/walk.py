"""The reversible network: forward without a graph, and the walk back that rebuilds every block's inputs (section 3.1).

The walk goes through the steps in reverse. From (v, w) it evaluates the branch of v once, under autograd: its value
gives u back, its graph gives the gradients. So an update in between may change the block's parameters at once.
Gradients of the streams are float32. Rounding to fixed point or bfloat16 has gradient 1.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ondevice.methods.revffn.couplings import Step, make_coupling
from ondevice.methods.revffn.inversion import Iteration, refuse, report, solve, token_norms
from ondevice.methods.revffn.scale import StreamOverflow, calibration_ids, check, choose_bits
from ondevice.methods.revffn.stored import stored_hidden
from ondevice.methods.revffn.streams import FixedStreams, FloatStreams, Streams

if TYPE_CHECKING:
    from ondevice.methods.revffn.config import RevffnConfig
    from ondevice.models import Family

_log = logging.getLogger(__name__)

OnStep = Callable[[Tensor, Tensor], None]
OnBlock = Callable[[int, dict[str, Tensor]], None]


@dataclass
class Ends:
    """What a forward pass leaves: the final streams, and what the way back needs besides.

    Attributes:
        u: older stream, `v`: newer stream, in the streams' own dtype.
        length_tokens: T.
        side: by step, the packed low bits that its sum does not hold; of a crossed step, its tokens' norms.
        stored: by step, its older input, where that was kept instead of rebuilt.
    """

    u: Tensor
    v: Tensor
    length_tokens: int
    side: dict[int, Tensor] = field(default_factory=dict)
    stored: dict[int, Tensor] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Of everything that waits for the way back, on the host too."""
        kept = (self.u, self.v, *self.side.values(), *self.stored.values())
        return sum(tensor.numel() * tensor.element_size() for tensor in kept)


class Reversible:
    """A family's blocks as a reversible network. Weights stay the model's own; `adapters` are new.

    Args:
        family: the model, on its device; what it computes in is the dtype of its embedding.
        config: coupling, streams and scale.
        device: moves the model there first; None leaves it.
        seed: of the adapters' first values.
    """

    def __init__(
        self, family: Family, config: RevffnConfig, device: torch.device | str | None = None, seed: int = 0
    ) -> None:
        if device is not None:
            family.model.to(device)
        self.family, self.config = family, config
        self.coupling = make_coupling(family, config, seed)
        self.steps = self.coupling.steps
        self.adapters: dict[str, nn.Parameter] = self.coupling.adapters
        self.blocks = family.dims.layers
        self.iterations: dict[int, Iteration] = {}
        """By step, how the last fixed-point iteration went (`coupling: paper`)."""
        self.unreported = any(step.crossed for step in self.steps)
        """Whether the first forward pass still has to say how the iterations go."""
        self.streams: Streams = FloatStreams(torch.bfloat16 if config.streams == "bfloat16" else torch.float64)
        if config.streams == "int32":
            self.fraction_bits = config.fraction_bits or self._calibrated()

    @property
    def fraction_bits(self) -> int | None:
        """Bits after the point of int32 streams, else None. A resumed run sets what its first start chose."""
        return self.streams.fraction_bits if isinstance(self.streams, FixedStreams) else None

    @fraction_bits.setter
    def fraction_bits(self, bits: int) -> None:
        self.streams = FixedStreams(bits)

    @property
    def dtype(self) -> torch.dtype:
        """What branches are computed in."""
        return self.family.embedding.weight.dtype

    def block_parameters(self, block: int) -> dict[str, nn.Parameter]:
        """Parameters of a block by name in the model, adapters included."""
        found: dict[str, nn.Parameter] = {}
        for step in self.steps:
            if step.block == block:
                found |= self.coupling.parameters(step)
        return found

    @torch.no_grad()
    def forward(self, ids_BT: Tensor, on_step: OnStep | None = None) -> Ends:
        """Embedding and all blocks, without a graph; with `not_converged: store`, each block is inverted at once.

        Args:
            ids_BT: int64 [B, T].
            on_step: is given the streams (u, v) that each step reads.

        Raises:
            StreamOverflow: a fixed-point stream overflows; names the layer and a scale that would do.
        """
        if self.unreported:
            self.unreported = False  # the report goes forward, too
            try:
                report(self, ids_BT)
            except StreamOverflow:
                self.unreported = True
                raise
        peaks: list[Tensor] = []
        ends = self._forward(ids_BT, peaks, on_step, self.config.not_converged == "store")
        self.check(peaks)
        return ends

    @torch.no_grad()
    def _forward(self, ids_BT: Tensor, peaks: list[Tensor], on_step: OnStep | None = None, store: bool = False) -> Ends:
        position = self.position(ids_BT.shape[1])
        u, v = (self.streams.from_float(part) for part in self.coupling.split(self.family.embed(ids_BT)))
        side: dict[int, Tensor] = {}
        stored: dict[int, Tensor] = {}
        for number, step in enumerate(self.steps):
            if on_step is not None:
                on_step(u, v)
            branch = self._branch(step, position, v, u)
            w, bits = self.streams.step(u, v, branch, step.mix)
            peaks.append(self.streams.peaks(w, branch, step.mix))
            if step.crossed:
                bits = token_norms(self.streams, u)
            if bits is not None:
                side[number] = self._kept(bits, step)
            if store and bits is not None and step.crossed:
                went = self.iterations[number] = self._inverted(step, position, v, w, bits)[1]
                if not went.converged:
                    stored[number] = u
            u, v = v, w
        return Ends(u, v, ids_BT.shape[1], side, stored)

    def check(self, peaks: list[Tensor]) -> None:
        """Refuse a forward pass whose fixed-point streams had these peaks, where they overflow; see `scale.check`."""
        if self.fraction_bits is not None:
            check(peaks, self.steps, self.fraction_bits)

    def coarser(self, error: StreamOverflow) -> None:
        """Take the scale that would have done, where it is ours to choose; else the error stands."""
        if self.config.fraction_bits is not None or error.bits >= (self.fraction_bits or 0):
            raise error
        _log.info("%s: fraction_bits %s becomes %d", error.message, self.fraction_bits, error.bits)
        self.fraction_bits = error.bits

    def hidden(self, ends: Ends) -> Tensor:
        """What the final norm reads: [B, T, hidden] in the compute dtype."""
        return self.coupling.merge(*(self.streams.to_float(part) for part in (ends.u, ends.v))).to(self.dtype)

    def backward(self, ends: Ends, grad_BTD: Tensor, on_block: OnBlock) -> Tensor:
        """Walk back through the blocks.

        Args:
            ends: from `forward`; its tensors are let go on the way.
            grad_BTD: gradient of `hidden(ends)`.
            on_block: is called with a block's number, from the last to the first, and the gradients of those of its
                parameters that require one, in their dtypes. It may change that block's parameters.

        Returns:
            the gradient of the embedding's output, float32 [B, T, hidden].
        """
        walk = self.walk(ends, grad_BTD)
        while True:
            try:
                block, gradients = next(walk)
            except StopIteration as end:
                return end.value
            on_block(block, gradients)

    def walk(self, ends: Ends, grad_BTD: Tensor) -> Generator[tuple[int, dict[str, Tensor]], None, Tensor]:
        """`backward` one block at a time, so that several parts of a batch can be walked side by side: a block's number
        and its gradients, from the last to the first; the value at the end is that of `backward`."""
        position = self.position(ends.length_tokens)
        du, dv = self.coupling.merge_back(grad_BTD.float())
        v, w = ends.u, ends.v
        del ends.u, ends.v, grad_BTD
        gradients: dict[str, Tensor] = {}
        for number in reversed(range(len(self.steps))):
            step, stored, side = self.steps[number], ends.stored.pop(number, None), ends.side.pop(number, None)
            side = None if side is None else side.to(v.device, non_blocking=True)
            if step.crossed and stored is None and side is not None:
                with torch.no_grad():
                    stored, went = self._inverted(step, position, v, w, side)
                self.iterations[number] = went
                if not went.converged:
                    raise refuse(step.block, went, self.config.tolerance)
            u, du, dv, found = self._step_back(step, position, v, w, du, dv, side, stored)
            gradients |= found
            del found  # whoever takes the gradients may free them
            v, w = u, v
            if number == 0 or self.steps[number - 1].block != step.block:
                yield step.block, gradients
                gradients = {}
        return self.coupling.split_back(du, dv)

    def _step_back(
        self, step: Step, position: tuple[Tensor, Tensor], v: Tensor, w: Tensor, du: Tensor | None, dv: Tensor,
        side: Tensor | None, u: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor, dict[str, Tensor]]:  # fmt: skip
        """u, the gradients of (u, v), and those of the step's parameters, from those of (v, w).

        Args:
            u: given where the branch reads it; else it is rebuilt here.
        """
        mix = step.mix
        parameters = {name: p for name, p in self.coupling.parameters(step).items() if p.requires_grad}
        read = [v] if u is None else [v, u]
        inputs = [self.streams.to_float(part, self.dtype).detach().requires_grad_() for part in read]
        with torch.enable_grad():
            branch = self.coupling.branch(step, position, *inputs)
        if u is None:
            u = self.streams.unstep(w, v, branch.detach(), mix, side)
        grads = torch.autograd.grad(
            branch, [*inputs, *parameters.values()], mix.branch_of(dv).to(branch.dtype), materialize_grads=True
        )
        # The order of the terms is autograd's: the later step's, this step's sum, this step's branch.
        older, newer = mix.past_of(dv), du
        if mix.present:
            newer = mix.present * dv if newer is None else newer + mix.present * dv
        newer = grads[0].float() if newer is None else newer + grads[0].float()
        if len(inputs) == 2:
            older = grads[1].float() if older is None else older + grads[1].float()
        return u, older, newer, dict(zip(parameters, grads[len(inputs) :], strict=True))

    def stored_hidden(self, ids_BT: Tensor) -> Tensor:
        """`hidden` of the same network under autograd, every activation stored: the reference, [B, T, hidden]."""
        return stored_hidden(self, ids_BT)

    def invert(
        self, step: Step, position: tuple[Tensor, Tensor], v: Tensor, w: Tensor, side: Tensor | None
    ) -> tuple[Tensor, Iteration | None]:
        """u from (v, w) without gradients; an iteration is given as it went, converged or not."""
        side = None if side is None else side.to(v.device)
        if step.crossed and side is not None:
            return self._inverted(step, position, v, w, side)
        return self.streams.unstep(w, v, self._branch(step, position, v, w), step.mix, side), None

    def _inverted(
        self, step: Step, position: tuple[Tensor, Tensor], v: Tensor, w: Tensor, norms: Tensor
    ) -> tuple[Tensor, Iteration]:
        limit, tolerance = self.config.max_iterations, self.config.tolerance
        return solve(
            self.streams, lambda u: self._branch(step, position, v, u), w, v, norms, step.mix, limit, tolerance
        )

    def _kept(self, bits: Tensor, step: Step) -> Tensor:
        """What waits for the way back: packed bits of an accelerator in pinned host memory if so wished. The copies
        there and back are in the stream that computes, so neither is read too early."""
        if not bits.is_cuda or step.crossed or self.config.gamma_bits_on == "device":
            return bits
        return torch.empty(bits.shape, dtype=bits.dtype, pin_memory=True).copy_(bits, non_blocking=True)

    def position(self, length: int) -> tuple[Tensor, Tensor]:
        """What attention takes of positions 0 to `length` - 1."""
        return self.family.positions(length, self.family.embedding.weight.device, self.dtype)

    def _branch(self, step: Step, position: tuple[Tensor, Tensor], v: Tensor, u: Tensor) -> Tensor:
        older = self.streams.to_float(u, self.dtype) if step.crossed else None
        return self.coupling.branch(step, position, self.streams.to_float(v, self.dtype), older)

    def _calibrated(self) -> int:
        """The scale for this model: a forward pass in float32 streams says how large they become."""
        table = self.family.embedding.weight
        ids = calibration_ids(table.shape[0], self.family.dims.max_positions, table.device)
        peaks: list[Tensor] = []
        self._forward(ids, peaks)
        return choose_bits(float(torch.stack(peaks).amax()))
