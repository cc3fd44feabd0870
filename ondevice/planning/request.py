"""The arguments of a plan, and the time of its step from the work of its method."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ondevice.core.capabilities import Offloads
from ondevice.core.config import ExportConfig
from ondevice.core.dims import ModelDims
from ondevice.core.registry import spec_of
from ondevice.core.target import Runtime
from ondevice.data.batching import round_up
from ondevice.planning.devices import Device
from ondevice.planning.runtime import blocks_s, product_rate, runtime_of


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
    rates: Any = None
    """Measured rates of this machine, if there are any."""
    sizes: Any = None
    """Of the rows (`RowSizes`); None if a step is of the longest rows, all labelled."""

    @property
    def step_tokens(self) -> float:
        """Tokens of a row in a step, padding included, as they are on average."""
        if self.sizes is None:
            return self.length_tokens
        return self.sizes.padded_to(self.batch_size, self.length_tokens)

    @property
    def labelled_share(self) -> float:
        """Share of a step's tokens that the loss is of."""
        if self.sizes is None:
            return 1.0
        return min(1.0, self.sizes.labels / self.step_tokens)


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
    """Estimate a step's time: the longer of compute and memory, which overlap, or what a method
    that offloads to an accelerator predicts.

    Args:
        weight_bytes: of weights that one pass over the model reads.
    """
    device = request.device
    cost = spec_of(request.method).cost()(
        request.dims, request.method, request.batch_size, request.length_tokens, weight_bytes
    )
    flops_s = device.flops_s.get(cost.dtype or request.dtype, device.flops_s.get(request.dtype))
    offloads = spec_of(request.method).capability(Offloads)
    if offloads is not None and offloads.step_s is not None and device.torch_device != "cpu":
        seconds, lane = offloads.step_s(request, request.rates)
        known = "measured" if request.rates is not None else "assumed"
        return StepTime(cost.flops, seconds, f"estimate: bound by {lane}, rates {known}")
    if flops_s is None:  # bandwidth is only a bound, not an estimate
        basis = "no rate of matrix products is known for this device and dtype"
        return StepTime(cost.flops, None, basis)
    compute_s = cost.flops / flops_s
    if device.is_this_cpu and request.runtime == "torch":
        compute_s = _on_this_cpu(request)
    if device.bandwidth_bytes_s is not None:
        memory_s = cost.moved_bytes / device.bandwidth_bytes_s
        if memory_s > compute_s:
            return StepTime(cost.flops, memory_s, "estimate: bound by memory bandwidth")
    return StepTime(cost.flops, compute_s, "estimate: bound by matrix products")


LOOP_S = 4e-4
"""What the loop takes around a method's step: the batch, the event, the log."""


def _on_this_cpu(request: Request) -> float:
    """Return the seconds of a step on this machine's CPU: those of its blocks as two of them take
    them, and of its head's operations; or of all operations, if blocks cannot be measured."""
    dims, method = request.dims, request.method
    rows, average = request.batch_size, request.step_tokens
    length = min(request.length_tokens, round_up(math.ceil(average)))
    blocks = None
    if request.dtype == "float32":
        blocks = blocks_s(dims, method, rows, length)
    work = spec_of(method).cost()
    flops = work(dims, method, rows, length, 0).flops
    if blocks is not None:
        head = flops - work(replace(dims, vocab=1), method, rows, length, 0).flops
        labels = average * request.labelled_share
        rate = product_rate(max(1, round(rows * labels)), dims.hidden, dims.vocab)
        return LOOP_S + blocks * average / length + head * labels / length / rate
    rate = product_rate(rows * length, max(dims.hidden, 1), max(dims.intermediate, 1))
    compute_s = LOOP_S + flops * average / length / rate
    if measured := runtime_of(method.name):
        compute_s += measured.block_s * dims.layers
    return compute_s
