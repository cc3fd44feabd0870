"""Where blocks' inputs wait between the two passes."""

from __future__ import annotations

import torch
from torch import Tensor

from ondevice.offload.device import Timeline, open_device
from ondevice.offload.transfers import Activations


class Inputs:
    """The inputs of blocks between the two passes, on the device."""

    def __init__(self, device: torch.device) -> None:
        self.saved: list[Tensor] = []

    def begin(self, layers: int, like: Tensor) -> None:
        """Begin a step; `like` is an input."""
        self.saved = []

    def save(self, i: int, x: Tensor) -> None:
        self.saved.append(x)

    def load(self, i: int, shape: tuple[int, ...]) -> Tensor:
        """Return the input of block `i`, which comes after block `i + 1`'s."""
        return self.saved.pop()

    def done(self, i: int) -> None:
        """Release an input: what was computed until now is the last that reads it."""


class HostInputs(Inputs):
    """See `Inputs`; they wait in pinned host memory, and come back a block ahead."""

    def __init__(self, device: torch.device) -> None:
        opened = open_device(str(device))
        self.timeline = Timeline(opened)
        self.activations = Activations(opened, self.timeline, "host", None)

    def begin(self, layers: int, like: Tensor) -> None:
        self.activations.begin(layers, 1, like)

    def save(self, i: int, x: Tensor) -> None:
        self.activations.save(i, 0, x)

    def load(self, i: int, shape: tuple[int, ...]) -> Tensor:
        x = self.activations.load(i, 0, shape)
        self.activations.prefetch(i - 1, 0)
        return x

    def done(self, i: int) -> None:
        self.activations.done(i, 0)
        if i == 0:
            self.timeline.drain()
