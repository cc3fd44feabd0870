"""The arguments of a plan, and the time of its step from the work of its method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from ondevice.core.config import ExportConfig
from ondevice.core.dims import ModelDims
from ondevice.core.registry import spec_of
from ondevice.core.target import Runtime
from ondevice.planning.devices import Device
from ondevice.planning.runtime import product_rate, runtime_of


@dataclass(frozen=True)
class Request:
    """The arguments of a plan, stored so that a variation can be planned, too."""

    dims: ModelDims
    method: Any
    batch_size: int
    length_tokens: int
    dtype: str
    export: ExportConfig | None
    runtime: Runtime
    device: Device
    evaluates: bool
    world: int = 1
    """Processes that train together."""
    why: str = ""
    """The reason for the settings of `method`, in a sentence."""


class StepTime(NamedTuple):
    """Work and time of a step.

    Attributes:
        flops: floating-point operations.
        seconds: None if the device's rates are not known.
        basis: what the estimate is based on, in words.
    """

    flops: float
    seconds: float | None
    basis: str


def step_time(request: Request, weight_bytes: int) -> StepTime:
    """Estimate a step's time: the longer of compute and memory, which overlap.

    Args:
        weight_bytes: of weights that one pass over the model reads.
    """
    device = request.device
    dims = request.dims
    cost = spec_of(request.method).cost()(
        request.dims, request.method, request.batch_size, request.length_tokens, weight_bytes
    )
    flops_s = device.flops_s.get(cost.dtype or request.dtype, device.flops_s.get(request.dtype))
    if flops_s is None:  # bandwidth is only a bound, not an estimate
        basis = "no rate of matrix products is known for this device and dtype"
        return StepTime(cost.flops, None, basis)
    compute_s = cost.flops / flops_s
    if device.is_this_cpu and request.runtime == "torch":
        sides = (max(dims.hidden, 1), max(dims.intermediate, 1))
        compute_s = cost.flops / product_rate(request.batch_size * request.length_tokens, *sides)
        if measured := runtime_of(request.method.name):
            compute_s += measured.block_s * dims.layers
    if device.bandwidth_bytes_s is not None:
        memory_s = cost.moved_bytes / device.bandwidth_bytes_s
        if memory_s > compute_s:
            return StepTime(cost.flops, memory_s, "estimate: bound by memory bandwidth")
    return StepTime(cost.flops, compute_s, "estimate: bound by matrix products")
