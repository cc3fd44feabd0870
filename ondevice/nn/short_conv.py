"""A causal convolution of a few tokens, each channel by itself, and its gradient by hand.

y[t] = sum over j of w[:, taps - 1 - j] * x[t - j]: the last tap is the token itself, as in
transformers' Conv1d. A token before the first of its row is zero.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def short_conv(x_BTD: Tensor, taps_DK: Tensor, places_BT: Tensor | None = None) -> Tensor:
    """Convolve rows [B, T, D] with `taps_DK`.

    Args:
        places_BT: int64, each token's place in its row, if a sequence has several rows: a tap that
            would read the row before reads zero.
    """
    count = taps_DK.shape[1]
    y = x_BTD * taps_DK[:, -1]
    for back in range(1, min(count, x_BTD.shape[1])):
        earlier = functional.pad(x_BTD[:, :-back], (0, 0, back, 0))
        if places_BT is not None:
            earlier = earlier * (places_BT >= back)[..., None]
        y = y + earlier * taps_DK[:, -1 - back]
    return y


def short_conv_backward(g_BTD: Tensor, taps_DK: Tensor) -> Tensor:
    """Return the gradient of the rows from that of `short_conv`: the same sum, towards later
    tokens."""
    count = taps_DK.shape[1]
    gx = g_BTD * taps_DK[:, -1]
    for back in range(1, min(count, g_BTD.shape[1])):
        gx = gx + functional.pad(g_BTD[:, back:], (0, 0, 0, back)) * taps_DK[:, -1 - back]
    return gx


def short_conv_behind(
    x_TD: Tensor, earlier_PD: Tensor, taps_DK: Tensor, last: Tensor
) -> tuple[Tensor, Tensor]:
    """Convolve T tokens behind the P that were read last; return them [T, D] and the last P of all.

    Args:
        last: int64 [P], where these stand among the P + T; those that only fill up are not kept.
    """
    whole = torch.cat((earlier_PD, x_TD))
    y = short_conv(whole[None], taps_DK)[0, len(earlier_PD) :]
    return y, torch.index_select(whole, 0, last)
