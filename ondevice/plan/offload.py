"""The step of an offloading method predicted from ten seconds of measurement on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ondevice.errors import ConfigError
from ondevice.methods.registry import OFFLOADING

if TYPE_CHECKING:
    from ondevice.plan.estimate import Plan


def predict_step(plan: Plan) -> dict[str, Any]:
    """Measured rates, seconds a step by lane, and the smallest batch that hides the update.

    Raises:
        ConfigError: the method does not offload, or the plan is for another machine.
    """
    request = plan.request
    if request.method.name not in OFFLOADING:
        raise ConfigError("--calibrate is for methods that offload", expected=", ".join(OFFLOADING))
    if not request.device.name.startswith("this"):
        raise ConfigError("--calibrate measures this machine", expected="--device this", received=request.device.name)
    from dataclasses import asdict

    from ondevice.offload.calibrate import calibrate, predict

    rates = calibrate(request.method, request.device.torch_device)
    found = predict(request.dims, request.method, rates, plan.flops, request.batch_size, request.length_tokens)
    return {"rates": asdict(rates), **found.to_dict()}


def describe(found: dict[str, Any]) -> list[str]:
    """The prediction in sentences."""
    lanes = ", ".join(f"{lane} {found[f'{lane}_s']:.3g} s" for lane in ("compute", "h2d", "d2h", "update", "disk"))
    smallest = found["smallest_batch"]
    hidden = f"a batch of {smallest} or more" if smallest else "no batch up to 1024"
    return [
        f"measured here: about {found['step_s']:.3g} s a step, bound by {found['bound']} ({lanes})",
        f"hiding factor {found['hiding_factor']:.2f}; {hidden} hides the update",
    ]
