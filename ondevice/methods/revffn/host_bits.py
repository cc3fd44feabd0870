"""The bits next to fixed-point streams in pinned host memory, copied while the device computes."""

from __future__ import annotations

import torch
from torch import Tensor


class HostBits:
    """Copies to the host and back, in a stream of their own; for one thread.

    Args:
        device: the GPU that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def sent(self, bits: Tensor) -> Tensor:
        """Return `bits` in host memory, where they are once the copy has run."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            host = torch.empty(bits.shape, dtype=bits.dtype, pin_memory=True)
            host.copy_(bits, non_blocking=True)
        bits.record_stream(self.stream)  # its memory is used again only after the copy
        return host

    def taken(self, side: dict[int, Tensor], number: int) -> Tensor | None:
        """Take a step's bits out of `side`, on the device, and begin to fetch those of the step
        before it; None if it has none."""
        bits = side.pop(number, None)
        if bits is not None:
            bits = self.here(bits)
        before = side.get(number - 1)
        if before is not None and not before.is_cuda:
            side[number - 1] = self._fetched(before)
        return bits

    def here(self, bits: Tensor) -> Tensor:
        """Return bits that were sent, or fetched already, for the stream that computes."""
        if not bits.is_cuda:
            bits = self._fetched(bits)
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.stream)
        bits.record_stream(current)
        return bits

    def _fetched(self, host: Tensor) -> Tensor:
        with torch.cuda.stream(self.stream):
            return host.to(self.device, non_blocking=True)
