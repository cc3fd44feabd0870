"""A gated delta rule in the place of attention: `ondevice.nn.delta_rule` of queries, keys and values
that passed a short convolution, and a norm of its output, times the gate silu(z)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ondevice.methods.mesp.torch.block import Block, BlockLayers, OnGradient
from ondevice.nn.cross_entropy import cast, joined, wide
from ondevice.nn.delta_rule import DeltaChunk, DeltaInputs, chunk_bounds
from ondevice.nn.short_conv import short_conv, short_conv_backward, short_conv_behind

if TYPE_CHECKING:
    from ondevice.methods.mesp.torch.kept import Kept
    from ondevice.methods.mesp.torch.kernels import Position

PROJECTIONS = ("delta_qkv", "delta_z", "delta_b", "delta_a")
KEY_EPS = 1e-6
"""Added to the squared length of a query or a key, as in transformers."""


class Corrected(NamedTuple):
    """What the backward pass of a gated delta rule wants; rows of packed sequences are apart.

    Attributes:
        qkv: before the convolution, [B, T, channels].
        z: [B, T, heads, width]; `b` and `a` [B, T, heads]: the other projections.
        o: of the rule, before norm and gate, [B, T, heads, width], float32 at least.
        states: of each chunk's start.
    """

    qkv: Tensor
    z: Tensor
    b: Tensor
    a: Tensor
    o: Tensor
    states: list[Tensor]


class Delta(BlockLayers):
    """The stages of a gated delta rule.

    Wider tensors than the four projections exist for one chunk of tokens: queries, keys and values
    behind the convolution, the rule's matrices, and their gradients.
    """

    def correct(self, block: Block, n: Tensor, rows: int) -> tuple[Tensor, Corrected]:
        """Return o [N, heads * width], and what the backward pass wants."""
        qkv, z, b, a = (self._by_row(self.linear(block, part, n), rows) for part in PROJECTIONS)
        _, heads, key_width, width = self.traits.delta
        state = wide(b).new_zeros(len(qkv), heads, key_width, width)
        outputs: list[Tensor] = []
        states: list[Tensor] = []
        for low, high in chunk_bounds(qkv.shape[1]):
            states.append(state)
            convolved = self._convolved(block, qkv, low, high)
            chunk = DeltaChunk(
                self._inputs(block, convolved, b[:, low:high], a[:, low:high]), state
            )
            outputs.append(chunk.output().transpose(1, 2))
            state = chunk.next_state()
        o = joined(outputs, 1)
        z = z.unflatten(-1, (heads, width))
        return self._by_token(self._gated(block, o, z)), Corrected(qkv, z, b, a, o, states)

    def correct_behind(
        self,
        block: Block,
        n: Tensor,
        earlier: Tensor,
        state: Tensor,
        last: Tensor,
        real: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return o [T, heads * width] of new tokens, and for those behind them the last tokens
        before the convolution and the state.

        Args:
            earlier: the last tokens that were read, [P, channels], before the convolution.
            state: behind them, [heads, key width, width].
            last: see `short_conv_behind`.
            real: float32 [T], 0 for what fills up: it lets nothing decay and corrects nothing.
        """
        qkv, z, b, a = (self._by_row(self.linear(block, part, n), 1) for part in PROJECTIONS)
        convolved, kept = short_conv_behind(qkv[0], earlier, block.mixer["taps"], last)
        outputs: list[Tensor] = []
        state = state[None]
        for low, high in chunk_bounds(len(n)):
            own = (b[:, low:high], a[:, low:high])
            inputs = self._inputs(block, convolved[None, low:high], *own)
            inputs = replace(
                inputs, decay=inputs.decay * real[low:high], beta=inputs.beta * real[low:high]
            )
            chunk = DeltaChunk(inputs, state)
            outputs.append(chunk.output().transpose(1, 2))
            state = chunk.next_state()
        o = joined(outputs, 1)
        gated = self._gated(block, o, z.view(o.shape))
        return self._by_token(gated), kept, state[0]

    def _gated(self, block: Block, o: Tensor, z: Tensor) -> Tensor:
        """Return the norm of each head times the gate, [B, T, heads, width]."""
        return cast(self._normed(block, o) * silu(wide(z)), z.dtype)

    def correct_backward(
        self, block: Block, g: Tensor, waits: Corrected, position: Position
    ) -> dict[str, Tensor]:
        """Return the gradients of the four projections, by part, from that of o."""
        qkv, z, b, a, o, states = waits
        g = self._by_row(g, self._sequences(qkv)).view(o.shape)
        gstate = None
        found: list[tuple[Tensor, ...]] = []
        for (low, high), state in zip(chunk_bounds(qkv.shape[1])[::-1], states[::-1], strict=True):
            go, gz = self._gate_backward(
                block, wide(g[:, low:high]), wide(z[:, low:high]), o[:, low:high]
            )
            convolved = self._convolved(block, qkv, low, high)
            own = (b[:, low:high], a[:, low:high])
            chunk = DeltaChunk(self._inputs(block, convolved, *own), state)
            gradients, gstate = chunk.backward(go.transpose(1, 2), gstate)
            of_chunk = self._inputs_backward(block, convolved, *own, gradients)
            found.insert(0, tuple(cast(x, qkv.dtype) for x in (*of_chunk, gz)))
        gqkv, gb, ga, gz = (joined(list(parts), 1) for parts in zip(*found, strict=True))
        del found, g
        gqkv = short_conv_backward(gqkv, block.mixer["taps"])
        return {
            part: self._by_token(gradient)
            for part, gradient in zip(PROJECTIONS, (gqkv, gz, gb, ga), strict=True)
        }

    def _convolved(self, block: Block, qkv: Tensor, low: int, high: int) -> Tensor:
        """Return a chunk's queries, keys and values before the activation, [B, C, channels]."""
        taps = block.mixer["taps"]
        first = max(0, low - taps.shape[1] + 1)
        return short_conv(qkv[:, first:high], taps)[:, low - first :]

    def _inputs(self, block: Block, convolved: Tensor, b: Tensor, a: Tensor) -> DeltaInputs:
        """Return what the rule is of; heads of keys are repeated for the heads of values."""
        q, k, v = self._qkv(silu(wide(convolved)))
        q = unit(q) * q.shape[-1] ** -0.5
        steps = functional.softplus(wide(a) + wide(block.mixer["step"]))
        inputs = (
            self._repeated(q),
            self._repeated(unit(k)),
            v,
            -wide(block.mixer["decay"]).exp() * steps,
            torch.sigmoid(wide(b)),
        )
        return DeltaInputs(*(x.transpose(1, 2) for x in inputs))

    def _inputs_backward(
        self, block: Block, convolved: Tensor, b: Tensor, a: Tensor, g: DeltaInputs
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the convolution's output, of b and of a."""
        beta = torch.sigmoid(wide(b))
        gb = g.beta.transpose(1, 2) * beta * (1.0 - beta)
        steps = wide(a) + wide(block.mixer["step"])
        ga = g.decay.transpose(1, 2) * -wide(block.mixer["decay"]).exp() * torch.sigmoid(steps)
        q, k, _ = self._qkv(silu(wide(convolved)))
        gq = self._summed(g.q.transpose(1, 2)) * q.shape[-1] ** -0.5
        gk = self._summed(g.k.transpose(1, 2))
        gqkv = (unit_backward(q, gq), unit_backward(k, gk), g.v.transpose(1, 2))
        gqkv = torch.cat([x.flatten(2) for x in gqkv], -1)
        return gqkv * silu_slope(wide(convolved)), gb, ga

    def _gate_backward(
        self, block: Block, g: Tensor, z: Tensor, o: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of the rule's output and of z [B, C, heads * width]."""
        gz = g * self._normed(block, o) * silu_slope(z)
        heads = o.flatten(0, 2)
        weight = wide(block.mixer["gate_norm"])
        gn = (g * silu(z)).flatten(0, 2)
        go = self.kernels.rms_norm_backward(
            heads, weight, self.dims.norm_eps, gn, torch.zeros_like(heads)
        )
        return go.view(o.shape), gz.flatten(2)

    def _normed(self, block: Block, o: Tensor) -> Tensor:
        """Return the norm of each head of [B, C, heads, width]."""
        weight = wide(block.mixer["gate_norm"])
        heads = o.reshape(-1, o.shape[-1])
        return self.kernels.rms_norm(heads, weight, self.dims.norm_eps).view(o.shape)

    def _qkv(self, x_BCc: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split channels into [B, C, heads, width] of queries, keys and values."""
        key_heads, heads, key_width, width = self.traits.delta
        keys = key_heads * key_width
        q, k, v = x_BCc.split((keys, keys, heads * width), -1)
        by_head = (key_heads, key_width)
        return q.unflatten(-1, by_head), k.unflatten(-1, by_head), v.unflatten(-1, (heads, width))

    def _repeated(self, x_BCHh: Tensor) -> Tensor:
        key_heads, heads, *_ = self.traits.delta
        if key_heads == heads:
            return x_BCHh
        return x_BCHh.repeat_interleave(heads // key_heads, 2)

    def _summed(self, x_BCHh: Tensor) -> Tensor:
        """Transpose `_repeated`."""
        key_heads, heads, *_ = self.traits.delta
        if key_heads == heads:
            return x_BCHh
        return x_BCHh.unflatten(2, (key_heads, -1)).sum(3)

    def _sequences(self, by_row: Tensor) -> int:
        """Return how many sequences the batch has."""
        return len(by_row) if self.apart is None else self.apart.shape[0]

    def _by_row(self, x: Tensor, rows: int) -> Tensor:
        """[N, width] -> [B, T, width]; of packed sequences each row by itself."""
        x = x.view(rows, len(x) // rows, -1)
        return x if self.apart is None else self.apart.take_apart(x)

    def _by_token(self, x_BT: Tensor) -> Tensor:
        """[B, T, ...] -> [N, width]: undo `_by_row`."""
        x = x_BT.flatten(2)
        if self.apart is not None:
            x = self.apart.together(x.contiguous())
        return x.flatten(0, 1)

    # What `Blocks` calls; see `stages.Mixer`.

    def mix_corrected(
        self, block: Block, x: Tensor, position: Position, rows: int, kept: Kept
    ) -> tuple[Tensor, Corrected]:
        return kept.take("mixed") or self.correct(block, self.norm(block, x), rows)

    def corrected_projections_backward(
        self, block: Block, n: Tensor, g: dict[str, Tensor], on_gradient: OnGradient, last: bool
    ) -> Tensor | None:
        return self.inputs_backward(block, n, g, on_gradient, last)


def silu(x: Tensor) -> Tensor:
    """Return SiLU in operations that every runtime has."""
    return x * torch.sigmoid(x)


def silu_slope(x: Tensor) -> Tensor:
    """Return the derivative of SiLU at x."""
    opened = torch.sigmoid(x)
    return opened * (1.0 + x * (1.0 - opened))


def unit(x: Tensor) -> Tensor:
    """Return each vector at length 1."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + KEY_EPS)


def unit_backward(x: Tensor, g: Tensor) -> Tensor:
    """Return the gradient of x from that of `unit`."""
    factor = torch.rsqrt((x * x).sum(-1, keepdim=True) + KEY_EPS)
    y = x * factor
    return factor * (g - y * (g * y).sum(-1, keepdim=True))
