"""The gated delta rule over chunks of tokens, and its gradient by hand.

Each head has a state S [K, V], which maps keys to values. A token lets it decay, corrects its
answer to the token's key, and reads it with the token's query:

    S <- e^a S;  S <- S + k (beta (v - k S))^T;  o = q S

The corrections d of a chunk's C tokens solve one triangular system. With c the running sum of a,
D_ij = e^(c_i - c_j) for j <= i, and S the state at the chunk's start:

    A = strictly lower part of (beta k) k^T * D;  T = (I + A)^-1
    d = T (beta (v - e^c k S))
    o = (e^c q) S + ((q k^T) * D) d
    S' = e^(c_C) S + (e^(c_C - c) k)^T d

That is the chunked form of the gated delta rule's paper (section 3.3, arXiv 2412.06464). Who calls
this keeps only the states at the starts of chunks, and computes a chunk again in the backward pass.
Everything is in float32 at least, without writes in place, so that a graph of an
exported program has the same operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ondevice.core.traits import DELTA_CHUNK_TOKENS

CHUNK_TOKENS = DELTA_CHUNK_TOKENS


def chunk_bounds(length_tokens: int) -> list[tuple[int, int]]:
    """Return the first token of each chunk of a row, and the one behind its last."""
    size = CHUNK_TOKENS
    return [(low, min(low + size, length_tokens)) for low in range(0, length_tokens, size)]


@dataclass(frozen=True)
class DeltaInputs:
    """What a chunk of a gated delta rule is of, float32 at least.

    Attributes:
        q, k: [B, H, C, K], keys of length 1 at most.
        v: [B, H, C, V].
        decay: [B, H, C], the logarithm of what a token leaves of the state.
        beta: [B, H, C], how much of the difference a token corrects.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor


class DeltaChunk:
    """One chunk of tokens, from the state [B, H, K, V] at its start."""

    def __init__(self, inputs: DeltaInputs, state: Tensor) -> None:
        self.inputs = inputs
        self.state = state
        count = inputs.k.shape[2]
        seen = torch.ones(count, count, dtype=inputs.k.dtype, device=inputs.k.device).tril()
        self.seen = seen
        # A product with ones is a running sum that every runtime has; its transpose goes back.
        since = inputs.decay @ seen.t()
        self.end = since[..., -1:, None]
        self.read = since[..., None].exp()
        self.left = (self.end - since[..., None]).exp()
        # Above the diagonal the exponent would be positive: it is zero before it grows.
        between = ((since[..., :, None] - since[..., None, :]) * seen).exp() * seen
        self.between = between
        self.before = between - torch.eye(count, dtype=seen.dtype, device=seen.device)
        self.beta = inputs.beta[..., None]
        k = inputs.k
        self.system = (self.beta * k) @ k.transpose(-1, -2) * self.before
        self.inverse = unit_inverse(self.system)
        self.wrong = inputs.v - self.read * k @ state
        self.corrected = self.inverse @ (self.beta * self.wrong)
        self.scores = inputs.q @ k.transpose(-1, -2) * between

    def output(self) -> Tensor:
        """Return o, [B, H, C, V]."""
        return self.read * self.inputs.q @ self.state + self.scores @ self.corrected

    def next_state(self) -> Tensor:
        """Return the state behind the chunk."""
        kept = self.end.exp() * self.state
        return kept + (self.left * self.inputs.k).transpose(-1, -2) @ self.corrected

    def backward(self, go: Tensor, gnext: Tensor | None) -> tuple[DeltaInputs, Tensor]:
        """Return the gradients of the inputs and of the state, from those of the output and of the
        next state (None is zero)."""
        q = self.inputs.q
        k = self.inputs.k
        state_VK = self.state.transpose(-1, -2)
        corrected_VC = self.corrected.transpose(-1, -2)
        gd = self.scores.transpose(-1, -2) @ go
        gstate = (self.read * q).transpose(-1, -2) @ go
        gread_q = self.read * (go @ state_VK)
        gk = torch.zeros_like(k)
        gsince = (gread_q * q).sum(-1)
        gend = torch.zeros_like(self.end)
        if gnext is not None:
            gd = gd + (self.left * k) @ gnext
            gstate = gstate + self.end.exp() * gnext
            gk = self.left * (self.corrected @ gnext.transpose(-1, -2))
            left = (gk * k).sum(-1)
            gsince = gsince - left
            whole = (self.state * gnext).sum((-1, -2), keepdim=True) * self.end.exp()
            gend = whole + left.sum(-1)[..., None, None]
        gscaled = self.inverse.transpose(-1, -2) @ gd
        gbeta = (gscaled * self.wrong).sum(-1)
        gv = self.beta * gscaled
        gread_k = -self.read * (gv @ state_VK)
        gstate = gstate - (self.read * k).transpose(-1, -2) @ gv
        gsince = gsince + (gread_k * k).sum(-1)
        # The solution's derivative: -T^T gd d^T, of the entries below the diagonal.
        gsystem = -gscaled @ corrected_VC
        gscores = go @ corrected_VC
        gaps = gsystem * self.system + gscores * self.scores
        gsince = gsince + gaps.sum(-1) - gaps.sum(-2)
        gpairs = gsystem * self.before
        gproducts = gscores * self.between
        by_key = gpairs @ k
        gbeta = gbeta + (by_key * k).sum(-1)
        gk = gk + gread_k + self.beta * by_key
        gk = gk + gpairs.transpose(-1, -2) @ (self.beta * k) + gproducts.transpose(-1, -2) @ q
        gq = gread_q + gproducts @ k
        # The end's own gradient reaches every token of the sum.
        gdecay = gsince @ self.seen + gend[..., 0]
        return DeltaInputs(gq, gk, gv, gdecay, gbeta), gstate


def unit_inverse(lower: Tensor) -> Tensor:
    """Return (I + L)^-1 of strictly lower triangular L [..., C, C].

    Diagonal blocks are inverted in pairs, twice as wide each time, as a substitution does it: with
    the blocks X and Y and L between them, the block below is -Y L X.
    """
    count = lower.shape[-1]
    number = torch.arange(count, device=lower.device)
    inverse = torch.eye(count, dtype=lower.dtype, device=lower.device).expand_as(lower)
    width = 1
    while width < count:
        block = number // width
        pair = block // 2
        between = (pair[:, None] == pair[None]) & (block[:, None] != block[None])
        inverse = inverse - inverse @ (lower * between.to(lower.dtype)) @ inverse
        width *= 2
    return inverse
