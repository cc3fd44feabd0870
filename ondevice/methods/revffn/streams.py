"""The two residual streams, in fixed point or floating point, and the arithmetic of a reversible
step.

A step takes the streams (u, v) to (v, w):  w = past u + (1 - past) v + branch  (the factor of the
branch is in it). Its inverse gives u from (v, w) and the same branch. In fixed point both are
integer arithmetic, so u comes back without a differing bit; if `past` is +-2^-bits, the `bits`
low bits of u that the shift drops are kept apart.

The scale of fixed-point streams is chosen for a model, and overflows are looked for in every
forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ondevice.core.errors import TrainingError
from ondevice.runtime_ops import generator

ROOM = 2**30
"""Magnitudes of fixed-point streams and branches stay below it. Three times as much does not come
back below it by overflow, so a look at the stream finds every overflow."""
SPARE_BITS = 1
"""Left free above the largest number that was seen, for other data and for training."""
MOST_BITS = 24
"""A float32 branch has no more."""
_ROWS = 2
_LENGTH = 64
_STREAM = 0x5266


@dataclass(frozen=True)
class Mix:
    """Weights of the sum that a step computes.

    Attributes:
        past: weight of the older stream u: 1, +-2^-bits, or 0 if u is v (the first step of
            `full`).
        branch: factor of the branch.
        bits: low bits of u that the step drops.
    """

    past: float = 1.0
    branch: float = 1.0
    bits: int = 0

    @property
    def present(self) -> float:
        """Weight of the newer stream v."""
        if self.past == 1.0:
            return 0.0
        return 1.0 - self.past

    def past_of(self, grad: Tensor) -> Tensor | None:
        """Return the gradient of u through the sum; None is zero."""
        return None if not self.past else grad if self.past == 1.0 else self.past * grad

    def gradients(
        self, du: Tensor | None, dv: Tensor, of_branch: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """Return the gradients of (u, v) from those of (v, w) and of v through the branch; None is
        zero.

        The order of the terms is autograd's: the later step's, this step's sum, this step's branch.
        """
        newer = du
        if self.present:
            newer = self.present * dv if newer is None else newer + self.present * dv
        return self.past_of(dv), of_branch.float() if newer is None else newer + of_branch

    def branch_of(self, values: Tensor) -> Tensor:
        """Return `values` times the branch's factor."""
        if self.branch == 1.0:
            return values
        return values * self.branch


class Stepped(NamedTuple):
    """What a step gives.

    Attributes:
        w: the sum.
        side: the bits of u that w does not hold (uint8, packed); None if there are none, or if the
            step will not be inverted.
        peaks: largest magnitudes of what was added and of the sum: float32 [2] on the device, in
            units of the stream.
    """

    w: Tensor
    side: Tensor | None
    peaks: Tensor


class Streams(Protocol):
    """Numbers of one kind. `branch` is any float dtype, with the mix's factor not yet applied."""

    def from_float(self, values: Tensor) -> Tensor:
        """Return a stream that holds `values`, rounded once."""
        ...

    def to_float(self, stream: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return its values in `dtype`."""
        ...

    def step(
        self, u: Tensor, v: Tensor, branch: Tensor, mix: Mix, inverted: bool = True
    ) -> Stepped:
        """Compute w and, if the step is to be `inverted`, the bits of u that w does not hold."""
        ...

    def inverse_step(
        self, w: Tensor, v: Tensor, branch: Tensor, mix: Mix, side: Tensor | None
    ) -> Tensor:
        """Compute u, from what `step` gave and the same branch."""
        ...

    def gradients(
        self, mix: Mix, du: Tensor | None, dv: Tensor, of_branch: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        """Return `mix.gradients`."""
        ...


@dataclass(frozen=True)
class FloatStreams:
    """Streams of a float dtype: every addition rounds to it, and the inverse rounds again.

    float32 sums drift with depth, by 1e-5 to 1e-3 of a gradient over 4 to 48 layers. So `streams:
    float32` keeps the sums in float64: a float32 value and the error that its roundings have left.
    Branches read float32.
    """

    dtype: torch.dtype = torch.float64

    def from_float(self, values: Tensor) -> Tensor:
        return values.to(self.dtype)

    def to_float(self, stream: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return stream.to(dtype)

    def step(
        self, u: Tensor, v: Tensor, branch: Tensor, mix: Mix, inverted: bool = True
    ) -> Stepped:
        total = self._added(v, branch, mix)
        if mix.past:
            total = total + (self._wide(u) if mix.past == 1.0 else self._wide(u) * mix.past)
        w = total.to(self.dtype)
        added = mix.branch_of(branch.abs().amax().float())
        return Stepped(w, None, torch.stack((added, w.abs().amax().float())))

    def inverse_step(
        self, w: Tensor, v: Tensor, branch: Tensor, mix: Mix, side: Tensor | None
    ) -> Tensor:
        if not mix.past:
            return v
        rest = self._wide(w) - self._added(v, branch, mix)
        return (rest if mix.past == 1.0 else rest / mix.past).to(self.dtype)

    def gradients(
        self, mix: Mix, du: Tensor | None, dv: Tensor, of_branch: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        return mix.gradients(du, dv, of_branch)

    def _added(self, v: Tensor, branch: Tensor, mix: Mix) -> Tensor:
        added = mix.branch_of(self._wide(branch))
        if mix.present:
            return self._wide(v) * mix.present + added
        return added

    def _wide(self, values: Tensor) -> Tensor:
        return values.to(torch.promote_types(self.dtype, torch.float32))


@dataclass(frozen=True)
class FixedStreams:
    """Streams of int32 with `fraction_bits` bits after the point; a branch is rounded once and
    added as integers."""

    fraction_bits: int

    def from_float(self, values: Tensor) -> Tensor:
        return self._quantised(values, 1.0)

    def to_float(self, stream: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        # A number of float32 makes the product float32 in one pass, whatever the default dtype.
        return (stream * torch.tensor(2.0**-self.fraction_bits, dtype=torch.float32)).to(dtype)

    def step(
        self, u: Tensor, v: Tensor, branch: Tensor, mix: Mix, inverted: bool = True
    ) -> Stepped:
        w = self._quantised(branch, mix.branch)
        side = None
        if mix.past == 1.0:
            w.add_(u)
        else:
            w.add_(v)
        if mix.bits:
            sign = 1 if mix.past > 0 else -1
            w.add_(u >> mix.bits, alpha=sign).sub_(v >> mix.bits, alpha=sign)
            if inverted:
                side = pack(u, mix.bits)
        added = _largest(branch) * (mix.branch * 2.0**self.fraction_bits)
        return Stepped(w, side, torch.stack((added, _largest(w))))

    def inverse_step(
        self, w: Tensor, v: Tensor, branch: Tensor, mix: Mix, side: Tensor | None
    ) -> Tensor:
        if not mix.past:
            return v
        added = self._quantised(branch, mix.branch)
        if mix.past == 1.0:
            return torch.sub(w, added, out=added)
        if mix.past < 0:
            rest = added.sub_(w).add_(v)
        else:
            rest = torch.sub(w, added, out=added).sub_(v)
        rest.add_(v >> mix.bits).bitwise_left_shift_(mix.bits)
        if side is None:
            return rest
        return rest.bitwise_or_(unpack(side, mix.bits, rest))

    def gradients(
        self, mix: Mix, du: Tensor | None, dv: Tensor, of_branch: Tensor
    ) -> tuple[Tensor | None, Tensor]:
        return mix.gradients(du, dv, of_branch)

    def _quantised(self, values: Tensor, factor: float) -> Tensor:
        scaled = values.float() * (factor * 2.0**self.fraction_bits)
        return scaled.round_().to(torch.int32)


def _largest(values: Tensor) -> Tensor:
    """Return the largest magnitude, float32 []; -2^31 of int32 included, which has no magnitude of
    its own dtype."""
    low, high = torch.aminmax(values)
    return torch.maximum(-low.float(), high.float())


def packed_bytes(count: int, bits: int) -> int:
    """Return the size of `pack`'s result over so many values, bytes."""
    return sum(-(-count // (8 // width)) for _, width in _fields(bits))


def pack(stream: Tensor, bits: int) -> Tensor | None:
    """Return the `bits` low bits of every int32, at most 8: uint8 of about `bits` / 8 bytes a value,
    field by field (`_fields`); None for no bits.

    One pass over the stream takes its low bytes; all others go over bytes.
    """
    if not bits:
        return None
    low = stream.reshape(-1).to(torch.uint8)
    packed = []
    for shift, width in _fields(bits):
        each = 8 // width
        field = (low >> shift).bitwise_and_((1 << width) - 1)
        if missing := -field.numel() % each:
            field = torch.cat((field, field.new_zeros(missing)))
        columns = field.view(-1, each)
        byte = columns[:, 0].clone()
        for place in range(1, each):
            byte.bitwise_or_(columns[:, place] << place * width)
        packed.append(byte)
    return torch.cat(packed)


def unpack(packed: Tensor, bits: int, like: Tensor) -> Tensor:
    """Return `pack` undone: uint8 of `like`'s shape with the low bits set."""
    count = like.numel()
    low = torch.zeros(count, dtype=torch.uint8, device=packed.device)
    first = 0
    for shift, width in _fields(bits):
        each = 8 // width
        byte = packed[first : first + -(-count // each)]
        first += byte.numel()
        places = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device)
        field = (byte[:, None] >> places).bitwise_and_((1 << width) - 1).reshape(-1)[:count]
        low.bitwise_or_(field << shift)
    return low.view(like.shape)


def _fields(bits: int) -> list[tuple[int, int]]:
    """Return the lowest bit and the width of each field: 8, 4, 2 and 1 bits, as `bits` is their sum,
    so that a field never crosses a byte."""
    found = []
    shift = 0
    for width in (8, 4, 2, 1):
        if bits & width:
            found.append((shift, width))
            shift += width
    return found


def calibration_ids(vocab: int, max_positions: int, device: torch.device) -> Tensor:
    """Draw the tokens that a scale is chosen with, the same for every run; int64 [2, 64]."""
    length = min(_LENGTH, max_positions)
    words = generator.words(generator.stream_key(0, 0, 0, _STREAM), 0, _ROWS * length)
    ids = (words % np.uint64(vocab)).astype(np.int64).reshape(_ROWS, length)
    return torch.from_numpy(ids).to(device)


def choose_bits(peak: float) -> int:
    """Choose the bits after the point for streams and branches that were at most `peak`.

    Raises:
        TrainingError: `peak` is infinite or NaN.
    """
    if not math.isfinite(peak):
        raise TrainingError(
            "the model's activations are not numbers", hint="--dtype float32, or other weights"
        )
    return max(1, min(MOST_BITS, math.floor(math.log2(ROOM / max(peak, 1e-9))) - SPARE_BITS))


class StreamOverflow(TrainingError):
    """Fixed-point streams need a coarser scale.

    Args:
        where: part and layer.
        fraction_bits: the scale that was too fine.
        peak: the largest magnitude there, as a number.

    Attributes:
        bits: a `fraction_bits` that would have done, or the coarsest if none would.
    """

    def __init__(self, where: str, fraction_bits: int, peak: float) -> None:
        self.bits = choose_bits(peak)
        hint = f"method.fraction_bits: {self.bits}; a smaller learning rate if it grew in training"
        if self.bits >= fraction_bits:  # no scale has room for it
            hint = "a smaller learning rate, or method.streams: bfloat16, which has no scale"
        super().__init__(
            f"fixed-point streams overflow in {where}",
            expected=f"magnitudes of at most {ROOM * 2.0**-fraction_bits:g} with fraction_bits: {fraction_bits}",
            received=f"{peak:.4g}",
            hint=hint,
        )


def check_overflow(peaks: Sequence[Tensor], places: Sequence[str], fraction_bits: int) -> None:
    """Refuse a forward pass in which a stream or branch has left the room that an int32 has.

    Args:
        peaks: of each step, from `Streams.peaks`.
        places: of each step, its name for a message.

    Raises:
        StreamOverflow: names the first layer and the scale that would do.
        TrainingError: a step gives infinities or NaN.
    """
    if not peaks:
        return
    largest = torch.stack(tuple(peaks)).amax(1).tolist()  # the one wait for the device
    for place, peak in zip(places, largest, strict=True):
        if peak < ROOM:
            continue
        if not math.isfinite(peak):
            raise TrainingError(f"{place} produced NaN or infinity", hint="a smaller learning rate")
        raise StreamOverflow(place, fraction_bits, peak * 2.0**-fraction_bits)
