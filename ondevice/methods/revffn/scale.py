"""The scale of fixed-point streams: chosen for a model, and checked in every forward pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ondevice.errors import TrainingError
from ondevice.methods.revffn.streams import ROOM
from ondevice.runtime_ops import generator

if TYPE_CHECKING:
    from ondevice.methods.revffn.couplings import Step

SPARE_BITS = 1
"""Left free above the largest number that was seen, for other data and for training."""
MOST_BITS = 24
"""A float32 branch has no more."""
_ROWS, _LENGTH, _STREAM = 2, 64, 0x5266


def calibration_ids(vocab: int, max_positions: int, device: torch.device) -> Tensor:
    """The tokens that a scale is chosen with: random, and the same for every run; int64 [2, 64]."""
    length = min(_LENGTH, max_positions)
    words = generator.words(generator.stream_key(0, 0, 0, _STREAM), 0, _ROWS * length)
    ids = (words % np.uint64(vocab)).astype(np.int64).reshape(_ROWS, length)
    return torch.from_numpy(ids).to(device)


def choose_bits(peak: float) -> int:
    """Bits after the point for streams and branches that were at most `peak`."""
    if not math.isfinite(peak):
        raise TrainingError("the model's activations are not numbers", hint="--dtype float32, or other weights")
    return max(1, min(MOST_BITS, math.floor(math.log2(ROOM / max(peak, 1e-9))) - SPARE_BITS))


class StreamOverflow(TrainingError):
    """Fixed-point streams need a coarser scale.

    Args:
        where: part and layer.
        fraction_bits: the scale that was too fine.
        peak: the largest magnitude there, as a number.

    Attributes:
        bits: a `fraction_bits` that would have done.
    """

    def __init__(self, where: str, fraction_bits: int, peak: float) -> None:
        self.bits = choose_bits(peak)
        super().__init__(
            f"fixed-point streams overflow in {where}",
            expected=f"magnitudes of at most {ROOM * 2.0**-fraction_bits:g} with fraction_bits: {fraction_bits}",
            received=f"{peak:.4g}",
            hint=f"method.fraction_bits: {self.bits}; a smaller learning rate if it grew in training",
        )


def check(peaks: Sequence[Tensor], steps: Sequence[Step], fraction_bits: int) -> None:
    """Refuse a forward pass in which a stream or branch has left the room that an int32 has.

    Args:
        peaks: of each step, from `Streams.peaks`.

    Raises:
        StreamOverflow: names the first layer and the scale that would do.
        TrainingError: numbers are none.
    """
    if not peaks:
        return
    largest = torch.stack(tuple(peaks)).amax(1).tolist()  # the one wait for the device
    for step, peak in zip(steps, largest, strict=True):
        if peak < ROOM:
            continue
        where = f"the {step.part} of layer {step.block}" if step.part != "block" else f"layer {step.block}"
        if not math.isfinite(peak):
            raise TrainingError(f"{where} gives numbers that are none", hint="a smaller learning rate")
        raise StreamOverflow(where, fraction_bits, peak * 2.0**-fraction_bits)
