"""Subspace, projectors and batch for LSP-Offload on a device, and why.

The rule: take the largest subspace of `SIZES` with which a step is at most `SLOWDOWN` longer than
the same training without offloading, even if no transfer were hidden behind the computation. If
there is none, take `USUAL` and the smallest batch for which it holds. Projectors get the most
values of `NONZEROS` a row that take at most `SHARE` of the weights' bytes; the largest from a
subspace of `USUAL` on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ondevice.core.config import size_text
from ondevice.methods.lsp.memory import FLAT_BYTES, PROJECTOR_BYTES
from ondevice.methods.lsp.sizes import bus_bytes, exact, extra, narrow, projected
from ondevice.methods.step_model import recomputed_flops
from ondevice.offload.config import ITEM_BYTES

if TYPE_CHECKING:
    from ondevice.methods.lsp.config import LspConfig
    from ondevice.offload.config import Rates
    from ondevice.planning.estimate import Plan, Request

SIZES = (1024, 512, 256, 128)
USUAL = 512
NONZEROS = (16, 8, 4)
SLOWDOWN = 1.1
SHARE = 0.05
LARGEST_BATCH = 1024
SMALLER: tuple[dict[str, str], ...] = (
    {"weight_dtype": "nf4", "weight_placement": "device"},
    {"weight_dtype": "compute", "weight_placement": "host"},
)
"""Weights that need less of the accelerator's memory, the faster first."""


@dataclass(frozen=True)
class Speed:
    """Rates a second: operations, and bytes over the bus to the host and back; None if unknown."""

    flops: float | None
    to_host: float | None
    to_device: float | None
    simulated: float | None = None

    @property
    def known(self) -> bool:
        return None not in (self.flops, self.to_host, self.to_device)


@dataclass(frozen=True)
class Cost:
    """One step.

    Attributes:
        to_host_bytes, to_device_bytes: over the bus; `to_host_s` and `to_device_s` the time of it.
        making, collecting: multiplications for the projection; `saved` those of the weight
            gradients.
        native_s: the same training without offloading; `compute_s` with the projection's work.
        unhidden: compute and both directions one after the other, over `native_s`.
    """

    to_host_bytes: int
    to_device_bytes: int
    making: int
    collecting: int
    saved: int
    native_s: float | None = None
    compute_s: float | None = None
    to_host_s: float | None = None
    to_device_s: float | None = None
    unhidden: float | None = None


def speed(request: Request, rates: Rates | None = None) -> Speed:
    """Find measured rates, or those of the device table; a simulated bus is in both."""
    limit = request.method.bus_limit_gb_per_s
    if rates is not None:
        return Speed(rates.flops_s, rates.d2h_bytes_s, rates.h2d_bytes_s, limit)
    known = [rate for rate in (request.device.bus_bytes_s, limit and limit * 1e9) if rate]
    bus = min(known, default=None)
    return Speed(request.device.flops_s.get(request.method.compute), bus, bus, limit)


def cost(request: Request, at: Speed) -> Cost:
    """Return a step of the request with its method's settings."""
    dims = request.dims
    method = request.method
    rows = request.batch_size
    length = request.length_tokens
    up, down = bus_bytes(dims, method, rows, length, ITEM_BYTES[method.compute])
    more = extra(dims, method, rows, length)
    counts = Cost(up, down, more.making, more.collecting, more.saved)
    native = recomputed_flops(dims, rows, length)
    if at.flops is None:
        return counts
    seconds = {"native_s": native / at.flops, "compute_s": (native + more.flops) / at.flops}
    if at.to_host is None or at.to_device is None:
        return replace(counts, **seconds)
    bus = {"to_host_s": up / at.to_host, "to_device_s": down / at.to_device}
    unhidden = (seconds["compute_s"] + sum(bus.values())) / seconds["native_s"]
    return replace(counts, **seconds, **bus, unhidden=unhidden)


def lanes(request: Request, rates: Rates, rows: int, flops: float) -> dict[str, float]:
    """Return seconds by lane of a step of that many rows, for `ondevice.offload.calibrate.predict`;
    see `Offloads`."""
    estimate = cost(replace(request, batch_size=rows), speed(request, rates))
    updated = narrow(request.dims, request.method) + exact(request.dims, request.method)
    return {
        "compute": estimate.compute_s or 0.0,
        "h2d": estimate.to_device_s or 0.0,
        "d2h": estimate.to_host_s or 0.0,
        "update": updated / rates.parameters_s,
        "disk": 0.0,
    }


def recommend(
    plan: Plan, rates: Rates | None, plan_of: Callable[[Request], Plan]
) -> dict[str, Any]:
    """Recommend settings; compare the costs of the request, of complete gradients (ZeRO) and of the
    result.

    Args:
        plan: of method lsp.
        rates: measured here; None takes the device table's.
        plan_of: gives the plan of another request.

    Returns:
        `given`, `zero` and `recommended`: each a `Cost`; `settings`: subspace, nonzeros,
            batch_size, weight_dtype and
        weight_placement, None if rates are missing; `fits`; `sentences` for people.
    """
    request = plan.request
    at = speed(plan.request, rates)
    unprojected = _with(
        request,
        project=False,
        weight_placement="device",
        weight_dtype="compute",
        gradient_dtype="compute",
    )
    costs = {"given": cost(request, at), "zero": cost(unprojected, at)}
    sentences = [_compared(request, costs["given"], costs["zero"], at)]
    if not at.known:
        missing = "the bus"
        if at.flops is None:
            missing = "the rate of matrix products"
        sentences.append(
            f"{missing} of {request.device.name} is not known, so nothing is recommended: "
            "--calibrate measures this machine, --bus-limit GB/s assumes a bus"
        )
        return {
            **_dicts(costs),
            "recommended": None,
            "settings": None,
            "fits": plan.fits,
            "sentences": sentences,
        }
    chosen, why = _chosen(request, at)
    costs["recommended"] = cost(chosen, at)
    best, fitting = _fitting(chosen, plan_of)
    method = best.request.method
    rows = best.request.batch_size
    settings = {"subspace": method.subspace, "nonzeros": method.nonzeros}
    settings |= {"batch_size": rows} | {key: getattr(method, key) for key in SMALLER[0]}
    listed = f"subspace {method.subspace}, nonzeros {method.nonzeros}, batch {rows}, weights {_weights(method)}"
    sentences += [f"recommended: {listed}; {why}", _values(chosen), fitting]
    return {**_dicts(costs), "settings": settings, "fits": best.fits, "sentences": sentences}


def _chosen(request: Request, at: Speed) -> tuple[Request, str]:
    for size in SIZES:
        tried = _sized(request, size)
        ratio = cost(tried, at).unhidden or 0.0
        if ratio <= SLOWDOWN:
            return tried, f"the largest of {', '.join(map(str, SIZES))} whose {_unhidden(ratio)}"
    usual = _sized(request, USUAL)
    for rows in range(request.batch_size + 1, LARGEST_BATCH + 1):
        tried = replace(usual, batch_size=rows)
        ratio = cost(tried, at).unhidden or 0.0
        if ratio <= SLOWDOWN:
            least = (
                f"no subspace stays within {SLOWDOWN - 1:.0%} at a batch of {request.batch_size}"
            )
            return (
                tried,
                f"{least}; this is the smallest batch at which {USUAL} does: its {_unhidden(ratio)}",
            )
    smallest = min(SIZES, key=lambda size: cost(_sized(request, size), at).unhidden or 0.0)
    tried = _sized(request, smallest)
    ratio = cost(tried, at).unhidden or 0.0
    return (
        tried,
        f"no batch up to {LARGEST_BATCH} brings {USUAL} within {SLOWDOWN - 1:.0%}; its {_unhidden(ratio)}",
    )


def _sized(request: Request, size: int) -> Request:
    """With that subspace, and as many values a row of the projectors as the rule gives it."""
    tried = _with(request, project=True, subspace=size)
    sides = sum(shape.sides * shape.count for shape in projected(tried.dims, tried.method))
    item = ITEM_BYTES[tried.method.compute]
    limit = SHARE * tried.dims.parameters * item
    value = PROJECTOR_BYTES + FLAT_BYTES + item
    allowed = [
        d for d in NONZEROS if d * sides * value <= limit and (size >= USUAL or d < NONZEROS[0])
    ]
    return _with(tried, nonzeros=max(allowed, default=NONZEROS[-1]))


def _fitting(request: Request, plan_of: Callable[[Request], Plan]) -> tuple[Plan, str]:
    """The plan of the request, or of one with smaller weights that fits, and what to say of it."""
    first = plan_of(request)
    if first.fits:
        return first, f"it fits, {size_text(first.margin_bytes)} to spare"
    over = f"with weights {_weights(request.method)} it does not fit"
    for smaller in SMALLER:
        other = plan_of(_with(request, **smaller))
        if other.fits:
            which = _weights(other.request.method)
            return (
                other,
                f"{over}; with weights {which} it does, {size_text(other.margin_bytes)} to spare",
            )
    return (
        first,
        f"{over}, nor with nf4 or host: shorter rows, method.micro_batch_size: 1, a smaller batch",
    )


def _weights(method: LspConfig) -> str:
    if method.weight_placement == "host":
        return "host"
    return method.weight_dtype


def _compared(request: Request, current: Cost, zero: Cost, at: Speed) -> str:
    """Compare what a step moves and computes with a step of whole gradients."""
    moved = f"{size_text(current.to_host_bytes)} to the host and {size_text(current.to_device_bytes)} back"
    whole = f"{size_text(zero.to_host_bytes)} each"
    text = f"a step moves {moved} (whole gradients and weights, of the embedding the rows read: {whole})"
    if not projected(request.dims, request.method) and request.method.project:
        text += "; no matrix has a side longer than the subspace"
    products = f"{current.making:.3g} multiplications make weights, {current.collecting:.3g} collect gradients"
    text += f"; {products}, {current.saved:.3g} of weight gradients are saved"
    if current.unhidden is None or zero.unhidden is None:
        return text
    bus = "a simulated bus" if at.simulated else "the bus"
    speeds = f"{(at.to_host or 0) / 1e9:.3g} GB/s"
    busy = f"{(current.to_host_s or 0) + (current.to_device_s or 0):.3g} s"
    zeros = f"{(zero.to_host_s or 0) + (zero.to_device_s or 0):.3g} s"
    return (
        f"{text}; {current.compute_s:.3g} s of computation ({current.native_s:.3g} s without projection), "
        f"and {busy} of {bus} of {speeds} (ZeRO: {zeros})"
    )


def _values(chosen: Request) -> str:
    return (
        f"nonzeros: {chosen.method.nonzeros} is the most of {', '.join(map(str, NONZEROS))} with projectors of at most "
        f"{SHARE:.0%} of the weights ({NONZEROS[0]} from a subspace of {USUAL} on)"
    )


def _unhidden(ratio: float) -> str:
    if ratio <= 1:
        return "extra work and transfers take less than the weight gradients that are saved, even if nothing is hidden"
    return f"extra work and transfers make a step {ratio - 1:.0%} longer even if nothing is hidden"


def _with(request: Request, **settings: Any) -> Request:
    return replace(request, method=request.method.model_copy(update=settings))


def _dicts(costs: dict[str, Cost]) -> dict[str, Any]:
    return {name: asdict(entry) for name, entry in costs.items()}
