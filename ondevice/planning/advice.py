"""A method's advice for this machine: a step predicted from ten seconds of measurement, settings."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from ondevice.core.capabilities import Advises, Offloads
from ondevice.core.errors import ConfigError, Need
from ondevice.core.registry import spec_of
from ondevice.planning.estimate import plan_request

if TYPE_CHECKING:
    from ondevice.offload.config import Rates
    from ondevice.planning.estimate import Plan


def measure(plan: Plan) -> Rates:
    """Measure the rates of this machine.

    Raises:
        ConfigError: the method does not offload, or the plan is for another machine.
    """
    request = plan.request
    if spec_of(request.method).capability(Offloads) is None:
        raise ConfigError(
            "--calibrate is for methods that offload",
            received=f"method {request.method.name}",
            needs=Need.OFFLOADS,
        )
    if not request.device.name.startswith("this"):
        raise ConfigError(
            "--calibrate measures this machine",
            expected="--device this",
            received=request.device.name,
        )
    return _calibration().calibrate(request.method, request.device.torch_device)


def _calibration() -> Any:
    """Return the module that measures and predicts; it imports PyTorch."""
    from ondevice.offload import calibrate

    return calibrate


def predict_step(plan: Plan, rates: Rates) -> dict[str, Any]:
    """Predict seconds a step by lane, and the smallest batch that hides the update."""
    request = plan.request
    flops_a_row = plan.flops / plan.request.batch_size
    offloads = spec_of(request.method).capability(Offloads)
    assert offloads is not None  # noqa: S101  `measure` refuses methods that do not offload
    prediction = _calibration().predict(
        lambda rows: offloads.lanes(request, rates, rows, flops_a_row * rows), request.batch_size
    )
    return {"rates": asdict(rates), **prediction.to_dict()}


def recommend(plan: Plan, rates: Rates | None = None) -> dict[str, Any] | None:
    """Return the settings that the method recommends on the plan's device, or None."""
    advises = spec_of(plan.request.method).capability(Advises)
    if advises is None:
        return None
    return advises.recommend(plan, rates, partial(plan_request, plan.model))


def describe(prediction: dict[str, Any]) -> list[str]:
    """Describe the result of `predict_step` in sentences."""
    lanes = ", ".join(
        f"{lane} {prediction[f'{lane}_s']:.3g} s"
        for lane in ("compute", "h2d", "d2h", "update", "disk")
    )
    smallest = prediction["smallest_batch"]
    hidden = "no batch up to 1024"
    if smallest:
        hidden = f"a batch of {smallest} or more"
    return [
        f"measured here: at least {prediction['step_s']:.3g} s a step, "
        f"bound by {prediction['bound']} ({lanes})",
        f"hiding factor {prediction['hiding_factor']:.2f}; {hidden} hides the update",
    ]
