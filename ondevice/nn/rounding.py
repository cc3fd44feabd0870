"""Rounding that keeps small changes on average, for weights that are updated in 16 bits."""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT16 = torch.finfo(torch.float16)


def stochastic_round(out: Tensor, weight: Tensor, seed: int) -> Tensor:
    """Write `weight`, float32, into `out`: to bfloat16 or float16 up or down by chance, so that
    changes below a unit of the last place survive on average; other types as they round. The
    chances are a function of `seed`."""
    rng = torch.Generator(weight.device).manual_seed(seed)
    if out.dtype == torch.bfloat16:
        noise = _below(1 << 16, weight, rng)
        bits = (weight.contiguous().view(torch.int32) + noise) & -(1 << 16)
        return out.copy_(bits.view(torch.float32))
    if out.dtype == torch.float16:
        return out.copy_(_to_float16(weight.contiguous(), rng))
    return out.copy_(weight)


def _to_float16(weight: Tensor, rng: torch.Generator) -> Tensor:
    """Return float32 values that float16 has. Below 2**-14 float16 has one unit for all values, so
    bits cannot be cut off as for bfloat16. Values beyond its range stay as they are."""
    power = (weight.view(torch.int32) & 0x7F80_0000).view(torch.float32)
    unit = power.clamp_min(FLOAT16.tiny) * FLOAT16.eps
    chance = _below(1 << 13, weight, rng) * 2.0**-13
    rounded = torch.floor(weight / unit + chance) * unit
    return torch.where(weight.abs() < FLOAT16.max, rounded, weight)


def _below(limit: int, weight: Tensor, rng: torch.Generator) -> Tensor:
    return torch.randint(
        0, limit, weight.shape, dtype=torch.int32, device=weight.device, generator=rng
    )
