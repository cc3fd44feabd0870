"""Seconds of a SlideFormer step by lane, from measured rates (section 3.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ondevice.offload.host import DTYPES, moments_bytes

if TYPE_CHECKING:
    from ondevice.offload.calibrate import Rates
    from ondevice.planning.estimate import Request


def lanes(request: Request, rates: Rates, rows: int, flops: float) -> dict[str, float]:
    """Return seconds by lane of a step of that many rows, which takes `flops` operations; see `MethodSpec.lanes`."""
    dims, method = request.dims, request.method
    item = DTYPES[method.compute].itemsize
    kept = dims.layers * rows * request.length_tokens * dims.hidden * item * (method.activations != "device")
    moved = dims.parameters * item
    on_disk = 2 * method.disk_fraction * moments_bytes(dims.parameters, method.moments)
    on_disk += 2 * kept * (method.activations == "disk")
    return {
        "compute": flops / rates.flops_s,
        "h2d": (2 * moved + kept) / rates.h2d_bytes_s if rates.h2d_bytes_s else 0.0,
        "d2h": (moved + kept) / rates.d2h_bytes_s if rates.d2h_bytes_s else 0.0,
        "update": dims.parameters / rates.parameters_s,
        "disk": on_disk / rates.disk_bytes_s if rates.disk_bytes_s else 0.0,
    }
