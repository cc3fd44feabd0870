"""What the forward pass keeps for the backward pass: blocks' inputs, and what there is room for inside a block."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ondevice.offload.device import buffer


@dataclass
class Kept:
    """What a block's forward pass hands to its backward pass, in addition to the block's input.

    Attributes:
        attention: keep attention's output and its log-sum-exp.
        mlp: keep gate and up.
        projections: keep q, k, v and the block's middle.
        tensors: what was kept, by name.
    """

    attention: bool = False
    mlp: bool = False
    projections: bool = False
    tensors: dict[str, Any] = field(default_factory=dict)

    def take(self, name: str) -> Any:
        """Return what was kept, and let it go; None if it was not."""
        return self.tensors.pop(name, None)


class Inputs:
    """The inputs of blocks between the two passes, on the device.

    Attributes:
        host: memory of the host in which they wait.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.saved: dict[int, Tensor] = {}
        self.host: list[Tensor] = []

    def begin(self, layers: int, like: Tensor) -> None:
        """Begin a step; `like` is an input."""
        self.saved = {}

    def save(self, i: int, x: Tensor) -> None:
        self.saved[i] = x

    def load(self, i: int, shape: tuple[int, ...]) -> Tensor:
        """Return the input of block `i`, which comes after block `i + 1`'s."""
        return self.saved.pop(i)


class HostInputs(Inputs):
    """See `Inputs`; they wait in pinned host memory, and come back a block ahead. The last one, which
    is needed first, stays on the device.

    Only streams wait for each other, never the host: so both passes can be CUDA graphs.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.lane = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.last = 0
        self.leaving: tuple[Tensor, Any] | None = None
        self.arriving: dict[int, tuple[Tensor, Any]] = {}

    def begin(self, layers: int, like: Tensor) -> None:
        """See `Inputs`; host memory grows with the largest input.

        Raises:
            DoesNotFitError: the system does not give or lock so much memory.
        """
        super().begin(layers, like)
        self.last = layers - 1
        self.leaving = None
        self.arriving = {}
        if len(self.host) < self.last or (self.host and self.host[0].nbytes < like.nbytes):
            pin = self.lane is not None
            self.host = [buffer(like.nbytes, pin) for _ in range(self.last)]

    def save(self, i: int, x: Tensor) -> None:
        if self.leaving is not None:
            self._wait(self.leaving[1])  # before the memory of what leaves is another's
        if i == self.last:
            self.leaving = None
            super().save(i, x)
            return
        self.leaving = x, self._copy(self._waiting(i, x), x)

    def load(self, i: int, shape: tuple[int, ...]) -> Tensor:
        if i == self.last:
            x = super().load(i, shape)
        else:
            x, arrived = self.arriving.pop(i)
            self._wait(arrived)
        if i > 0:
            ahead = torch.empty_like(x)
            self.arriving[i - 1] = ahead, self._copy(ahead, self._waiting(i - 1, ahead))
        return x

    def _waiting(self, i: int, like: Tensor) -> Tensor:
        return self.host[i][: like.nbytes].view(like.dtype).view(like.shape)

    def _copy(self, target: Tensor, source: Tensor) -> Any:
        """Copy after what the device computes until now; return what says that it is done."""
        if self.lane is None:
            target.copy_(source)
            return None
        self.lane.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.lane):
            target.copy_(source, non_blocking=True)
            return self.lane.record_event()

    def _wait(self, copied: Any) -> None:
        """Let what the device computes from now on start after a copy."""
        if copied is not None:
            torch.cuda.current_stream(self.device).wait_event(copied)
