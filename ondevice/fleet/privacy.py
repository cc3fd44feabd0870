"""The privacy cost of a device's noisy replies, by Google's dp-accounting."""

from __future__ import annotations

import math

from ondevice.core.errors import MissingPackageError

DELTA = 1e-5


def epsilon(noise_multiplier: float, answers: int, delta: float = DELTA) -> float:
    """Return epsilon of all of a device's replies together, against everybody, the server included.

    Two data sets that a device might hold differ in anything; its clipped vectors are then at most
    twice `clip_norm` apart, so a reply is a Gaussian mechanism of half the multiplier. Neither
    subsampling nor other devices are assumed.

    Args:
        noise_multiplier: of the charter, in multiples of `clip_norm`.
        answers: that the device has sent.
        delta: between 0 and 1.

    Raises:
        MissingPackageError: dp-accounting is not installed.
    """
    if not noise_multiplier:
        if answers:
            return float("inf")
        return 0.0
    if not answers:
        return 0.0
    try:
        import dp_accounting
        from dp_accounting.rdp import rdp_privacy_accountant
    except ImportError:
        raise MissingPackageError(
            "dp-accounting is not installed", hint="pip install 'ondevice-train[fleet-privacy]'"
        ) from None
    accountant = rdp_privacy_accountant.RdpAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(noise_multiplier / 2), answers)
    return float(accountant.get_epsilon(delta))


def bound(noise_multiplier: float, answers: int) -> float:
    """Return `epsilon`, or an upper bound if its accountant is not installed.

    A Gaussian mechanism of a multiplier z has 1/(2 z^2) of zero-concentrated differential privacy,
    and replies add up; the bound in epsilon is Bun and Steinke, 2016, proposition 1.3."""
    try:
        return epsilon(noise_multiplier, answers)
    except MissingPackageError:
        rho = answers * 2 / noise_multiplier**2
        return rho + 2 * math.sqrt(rho * math.log(1 / DELTA))
