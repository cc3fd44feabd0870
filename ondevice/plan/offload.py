"""The step of an offloading method predicted from ten seconds of measurement on this machine, and what to set."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from ondevice.errors import ConfigError
from ondevice.methods.registry import OFFLOADING
from ondevice.plan import subspace

if TYPE_CHECKING:
    from ondevice.offload.calibrate import Rates
    from ondevice.plan.estimate import Plan


def measure(plan: Plan) -> Rates:
    """The rates of this machine.

    Raises:
        ConfigError: the method does not offload, or the plan is for another machine.
    """
    request = plan.request
    if request.method.name not in OFFLOADING:
        raise ConfigError("--calibrate is for methods that offload", expected=", ".join(OFFLOADING))
    if not request.device.name.startswith("this"):
        raise ConfigError("--calibrate measures this machine", expected="--device this", received=request.device.name)
    from ondevice.offload.calibrate import calibrate

    return calibrate(request.method, request.device.torch_device)


def predict_step(plan: Plan, rates: Rates) -> dict[str, Any]:
    """Measured rates, seconds a step by lane, and the smallest batch that hides the update."""
    from ondevice.offload.calibrate import lanes_of, predict

    request, flops = plan.request, plan.flops / plan.request.batch_size
    if request.method.name == "lsp":
        lanes_at = partial(subspace.lanes, request, rates)
    else:

        def lanes_at(rows: int) -> dict[str, float]:
            return lanes_of(request.dims, request.method, rates, flops * rows, rows, request.length_tokens)

    return {"rates": asdict(rates), **predict(lanes_at, request.batch_size).to_dict()}


def describe(found: dict[str, Any]) -> list[str]:
    """The prediction in sentences."""
    lanes = ", ".join(f"{lane} {found[f'{lane}_s']:.3g} s" for lane in ("compute", "h2d", "d2h", "update", "disk"))
    smallest = found["smallest_batch"]
    hidden = f"a batch of {smallest} or more" if smallest else "no batch up to 1024"
    return [
        f"measured here: about {found['step_s']:.3g} s a step, bound by {found['bound']} ({lanes})",
        f"hiding factor {found['hiding_factor']:.2f}; {hidden} hides the update",
    ]
