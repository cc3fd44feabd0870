"""Several rows in one sequence: which token sees which.

A packed batch says each token's place in its own row (transformers' `position_ids`). A row begins
where that is 0, and a token sees its own row up to itself: the mask is block-diagonal and, within a
block, causal. Padding is a row of one token, so that no token is without one that it sees.
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_numbers(position_ids_BT: Tensor) -> Tensor:
    """Number the rows of each sequence from 1: int64 [B, T] of int64 [B, T]."""
    return (position_ids_BT == 0).cumsum(1)


def row_mask(position_ids_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the additive mask [B, 1, T, T]: 0 if a query sees a key, else the least number of
    `dtype`."""
    numbers = row_numbers(position_ids_BT)
    length = position_ids_BT.shape[1]
    seen = numbers[:, :, None] == numbers[:, None, :]
    seen &= torch.ones(length, length, dtype=torch.bool, device=seen.device).tril()
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]


def branch_mask(branches_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the additive mask [B, 1, T, T] of prompts with continuations: a token sees branch 0,
    which is the prompt, and its own branch, up to itself."""
    length = branches_BT.shape[1]
    keys_B1T = branches_BT[:, None, :]
    seen = (keys_B1T == 0) | (keys_B1T == branches_BT[:, :, None])
    seen &= torch.ones(length, length, dtype=torch.bool, device=seen.device).tril()
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None]


def of_rows(table_1TX: Tensor, position_ids_BT: Tensor) -> Tensor:
    """Return each token's entry of a table by position: [B, T, ...] of [1, T, ...]."""
    return table_1TX[0][position_ids_BT]
