"""A short convolution in the place of attention: o = c * conv(b * x), of b, c and x [N, D]."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ondevice.methods.mesp.torch.block import Block, BlockLayers, OnGradient
from ondevice.nn.short_conv import short_conv, short_conv_backward, short_conv_behind

if TYPE_CHECKING:
    from ondevice.methods.mesp.torch.kept import Kept
    from ondevice.methods.mesp.torch.kernels import Position


class Convolution(BlockLayers):
    """The stages of a short convolution."""

    def convolve(self, block: Block, n: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Return o [N, D], and b, c and x in one tensor [B, T, 3 D], which the backward pass
        wants."""
        bcx = self.linear(block, "conv_in", n)
        bcx = bcx.view(rows, n.shape[0] // rows, -1)
        b, c, x = bcx.chunk(3, -1)
        return (c * self._convolved_rows(short_conv, block, b * x)).flatten(0, 1), bcx

    def convolve_behind(
        self, block: Block, n: Tensor, earlier: Tensor, last: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return o [T, D] of new tokens, and b * x of the last tokens for those behind them; see
        `short_conv_behind`."""
        b, c, x = self.linear(block, "conv_in", n).chunk(3, -1)
        y, kept = short_conv_behind(b * x, earlier, block.mixer["taps"], last)
        return c * y, kept

    def convolve_backward(self, block: Block, g: Tensor, bcx: Tensor, position: Position) -> Tensor:
        """Return the gradient of b, c and x, [B, T, 3 D]."""
        b, c, x = bcx.chunk(3, -1)
        g = g.view(c.shape)
        gc = g * self._convolved_rows(short_conv, block, b * x)
        gbx = self._convolved_rows(short_conv_backward, block, g * c)
        return torch.cat((gbx * x, gc, gbx * b), -1)

    def _convolved_rows(
        self, convolve: Callable[[Tensor, Tensor], Tensor], block: Block, x_BTD: Tensor
    ) -> Tensor:
        """Convolve each row with the block's taps, or do the backward pass of that."""
        taps = block.mixer["taps"]
        if self.apart is None:
            return convolve(x_BTD, taps)
        return self.apart.together(convolve(self.apart.take_apart(x_BTD), taps))

    # What `Blocks` calls; see `stages.Mixer`.

    def mix_convolved(
        self, block: Block, x: Tensor, position: Position, rows: int, kept: Kept
    ) -> tuple[Tensor, Tensor]:
        return kept.take("mixed") or self.convolve(block, self.norm(block, x), rows)

    def convolved_projections_backward(
        self, block: Block, n: Tensor, g: Tensor, on_gradient: OnGradient, last: bool
    ) -> Tensor | None:
        return self.inputs_backward(block, n, {"conv_in": g.reshape(len(n), -1)}, on_gradient, last)
