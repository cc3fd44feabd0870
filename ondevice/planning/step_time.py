"""The time of a step, from the work that its method counts and the device's rates."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ondevice.core.registry import spec_of

if TYPE_CHECKING:
    from ondevice.planning.estimate import Request


class StepTime(NamedTuple):
    """Work and time of a step.

    Attributes:
        flops: floating-point operations.
        seconds: None where the device's rates are not known.
        basis: of the estimate, in words.
    """

    flops: float
    seconds: float | None
    basis: str


def step_time(request: Request, weight_bytes: int) -> StepTime:
    """Estimate a step's time. Compute and memory are taken to overlap, so the longer of the two counts.

    Args:
        weight_bytes: of weights that one pass over the model reads.
    """
    device = request.device
    cost = spec_of(request.method).cost()(
        request.dims, request.method, request.batch_size, request.length_tokens, weight_bytes
    )
    flops_s = device.flops_s.get(cost.dtype if cost.dtype in device.flops_s else request.dtype)
    compute = None if flops_s is None else cost.flops / flops_s
    memory = (
        None if device.bandwidth_bytes_s is None else cost.moved_bytes / device.bandwidth_bytes_s
    )
    if compute is None:
        # Bandwidth alone is a bound, not an estimate.
        return StepTime(
            cost.flops, None, "no rate of matrix products is known for this device and dtype"
        )
    if memory is not None and memory > compute:
        return StepTime(cost.flops, memory, "estimate: bound by memory bandwidth")
    return StepTime(cost.flops, compute, "estimate: bound by matrix products")
