"""How far apart two updates in float32 may be, by which a program is held against eager PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ondevice.methods.prge.layout import NOISE_TENSOR

if TYPE_CHECKING:
    from torch import Tensor

    from ondevice.methods.prge.step import PrgeProgram

ADAM_ERROR = 1e-5
"""Of an update of Adam's, which is a few learning rates at most, however large the gradients."""
ROUNDOFF = 2.0**-24
"""Of float32: the largest relative error of one operation."""


def update_limit(
    program: PrgeProgram,
    adapter: Tensor,
    gradients: Tensor,
    seed: Tensor,
    step: Tensor,
    learning_rate: Tensor,
) -> Tensor:
    """Return how far two updates in float32 may be apart, by element, float32 [P].

    An element is a - sum_q c_q z_q with c_q = g_q rate / Q. Each side rounds c_q twice and its
    product once, adds in Q - 1 sums at most, and rounds the difference from a: to first order
    (Q + 2) sum_q |c_q z_q| + |a'| roundoffs, in any order of the sum (Higham, "Accuracy and
    Stability of Numerical Algorithms", section 3.1). Each draws z_q by itself; see `noise_limit`.
    """
    config = program.config
    if config.optimizer == "adam":
        return torch.full_like(adapter, ADAM_ERROR)
    size = len(adapter)
    z = program.noise(seed, step, NOISE_TENSOR, config.queries, 0, size + size % 2)
    c = (gradients * (learning_rate / config.queries))[:, None]
    rounded = (config.queries + 2) * (c * z).abs().sum(dim=0)
    if config.noise == "gaussian":
        rounded += (c.abs() * noise_limit(z)).sum(dim=0)
    updated = adapter - (c * z).sum(dim=0)[:size]
    limit = 2.0 * ROUNDOFF * (rounded[:size] + updated.abs())
    return limit.clamp(min=torch.finfo(limit.dtype).tiny)


def noise_limit(z: Tensor) -> Tensor:
    """Return how far a Gaussian of a program may be from the exact one, in roundoffs, [Q, P].

    It is r cos t or r sin t with r = sqrt(-2 log u). Near u = 1 XNNPACK's logarithm errs by 2,
    however small it is (measured of each of the 120,000 floats below 1), and so r by 2 / r. What
    else there is is relative to r: 1.5 of the logarithm's own three, 1 of the root, pi of the angle
    before its cosine, and less than 3 of the cosine and the product.
    """
    pairs = z.view(len(z), -1, 2)
    r = pairs.square().sum(dim=-1, keepdim=True).sqrt().expand_as(pairs).reshape(z.shape)
    # Where u rounds to 1, r is 0 and at most the root of twice the error.
    return 2.0 / r.clamp(min=ROUNDOFF**0.5) + 8.5 * r
