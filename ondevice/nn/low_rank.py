"""A low-rank part of a sum, which a kernel adds as it reads the sum's other part."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LowRank:
    """scale * h b, with h [N, rank] and b [rank, outputs] of any strides."""

    h: Tensor
    b: Tensor
    scale: float = 1.0
