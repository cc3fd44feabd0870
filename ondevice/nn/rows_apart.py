"""Rows of packed sequences, each by itself and together again."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ondevice.data.prompt_tree import branch_rows
from ondevice.nn.row_mask import branch_mask


@dataclass(frozen=True)
class RowsApart:
    """Where the tokens of packed sequences [B, T] are among rows [R, L].

    Attributes:
        tokens: int64 [n], places in B * T of the tokens whose rows have more than one; padding is
            not among them.
        apart: int64 [n], the same tokens' places in R * L.
        rows: R; `length` is L, tokens of the longest row.
        shape: (B, T).
    """

    tokens: Tensor
    apart: Tensor
    rows: int
    length: int
    shape: tuple[int, int]

    @classmethod
    def of(cls, position_ids_BT: Tensor) -> RowsApart:
        """Find the rows of int64 [B, T]; a row begins where the position is 0."""
        batch, length = position_ids_BT.shape
        after = torch.cat((position_ids_BT[:, 1:], position_ids_BT.new_zeros(batch, 1)), 1)
        tokens = ((position_ids_BT > 0) | (after > 0)).reshape(-1).nonzero().squeeze(1)
        places = position_ids_BT.reshape(-1)[tokens]
        number = (places == 0).cumsum(0) - 1
        longest = int(places.max()) + 1
        return cls(tokens, number * longest + places, int(number[-1]) + 1, longest, (batch, length))

    def take_apart(self, x_BTHh: Tensor) -> Tensor:
        """Return [R, L, H, h], zero for padding."""
        out = x_BTHh.new_zeros(self.rows * self.length, *x_BTHh.shape[2:])
        out[self.apart] = x_BTHh.flatten(0, 1)[self.tokens]
        return out.view(self.rows, self.length, *x_BTHh.shape[2:])

    def together(self, x_RLHh: Tensor) -> Tensor:
        """Return [B, T, H, h], contiguous; zero for padding."""
        batch, length = self.shape
        out = x_RLHh.new_zeros(batch * length, *x_RLHh.shape[2:])
        out[self.tokens] = x_RLHh.flatten(0, 1)[self.apart]
        return out.view(batch, length, *x_RLHh.shape[2:])


@dataclass(frozen=True)
class BranchesApart:
    """Prompts [B, T] with their continuations: as rows [R, L], each continuation behind its prompt,
    or under a mask. After a row's end are tokens of other rows, which none of its own sees."""

    apart_RL: Tensor
    together_BT: Tensor
    mask_B1TT: Tensor

    @classmethod
    def of(cls, branches: np.ndarray, dtype: torch.dtype, device: torch.device) -> BranchesApart:
        """Find the rows of int64 [B, T] (`data.prompt_tree.TreeBatch`); the mask is of `dtype`."""
        apart, together = (torch.from_numpy(part).to(device) for part in branch_rows(branches))
        return cls(apart, together, branch_mask(torch.from_numpy(branches).to(device), dtype))

    def take_apart(self, x_BTHh: Tensor) -> Tensor:
        """Return [R, L, H, h]; a prompt is there once for each of its continuations."""
        return x_BTHh.flatten(0, 1)[self.apart_RL]

    def together(self, x_RLHh: Tensor) -> Tensor:
        """Return [B, T, H, h], contiguous."""
        return x_RLHh.flatten(0, 1)[self.together_BT]

    @property
    def shape(self) -> tuple[int, int]:
        """(B, T)."""
        batch, length = self.together_BT.shape
        return batch, length
