"""Gradients of several micro-batches summed in float32: each is rounded to the compute dtype once, and the sum once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ondevice.offload.device import Device


class Accumulator:
    """The sum beside memory that each micro-batch's gradient is put into; nothing where `dtype` is float32 already, or
    where there is one micro-batch."""

    def __init__(self, device: Device, dtype: torch.dtype) -> None:
        self.device, self.needed = device, dtype != torch.float32
        self.memory, self.count = device.empty(0, torch.float32), 0

    def begin(self, micro_batches: int) -> None:
        """Begin the sum of so many gradients."""
        self.several, self.count = self.needed and micro_batches > 1, 0

    @torch.no_grad()
    def add(self, gradient: Tensor) -> None:
        """Add a gradient, flat, and clear its memory for the next one."""
        if not self.several:
            return
        if self.memory.numel() < gradient.numel():
            self.memory = self.device.empty(gradient.numel(), torch.float32)
        total = self.memory[: gradient.numel()]
        total.add_(gradient) if self.count else total.copy_(gradient)
        gradient.zero_()
        self.count += 1

    @torch.no_grad()
    def finish(self, gradient: Tensor) -> None:
        """Put the sum where the gradients were."""
        if self.several and self.count:
            gradient.copy_(self.memory[: gradient.numel()])
