"""What to do about a plan that does not fit: stop before anything is loaded, and say what would help."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from ondevice.errors import DoesNotFitError
from ondevice.methods.registry import OFFLOADING, method_config
from ondevice.plan.estimate import plan_request

if TYPE_CHECKING:
    from ondevice.plan.estimate import Plan, Request

Change = Callable[["Request"], "Request | None"]
"""A request to one that needs less; None where the change does not apply."""
SHORTEST_TOKENS = 16


def _shorter(request: Request) -> Request | None:
    length = request.length_tokens // 2
    if length < SHORTEST_TOKENS:
        return None
    export = request.export
    if export is not None:
        export = export.model_copy(update={"lengths_tokens": (length,)})
    return replace(request, length_tokens=length, export=export)


def _fewer_rows(request: Request) -> Request | None:
    return replace(request, batch_size=request.batch_size // 2) if request.batch_size > 1 else None


def _fewer_queries(request: Request) -> Request | None:
    method = request.method
    if method.name != "prge" or method.queries < 2 or method.estimator != "central":
        return None
    return replace(request, method=method.model_copy(update={"queries": 1}))


def _forward_only(request: Request) -> Request | None:
    if request.method.name not in ("full", "lora", "lora-fa", "revffn", *OFFLOADING):
        return None
    prge = method_config("prge")
    adapts = all(target in request.dims.linear_shapes for target in prge.targets)
    return replace(request, method=prge if adapts else method_config("mezo"))


def _half_precision(request: Request) -> Request | None:
    if request.runtime != "torch" or request.dtype != "float32":
        return None
    return replace(request, dtype="bfloat16")


def _quantized(request: Request) -> Request | None:
    export = request.export
    if request.runtime != "executorch" or export is None or export.quantize != "none":
        return None
    return replace(request, export=export.model_copy(update={"quantize": "q4"}))


def _eight_bit_moments(request: Request) -> Request | None:
    if getattr(request.method, "moments", "int8") == "int8":
        return None
    return replace(request, method=request.method.model_copy(update={"moments": "int8"}))


def _less_optimizer_state(request: Request) -> Request | None:
    method = request.method
    if method.name != "revffn" or method.optimizer in ("adafactor", "sgd"):
        return None
    return replace(request, method=method.model_copy(update={"optimizer": "adafactor"}))


def _smaller_parts(request: Request) -> Request | None:
    method = request.method
    if method.name != "revffn" or request.batch_size == 1 or method.micro_batch_size == 1:
        return None
    return replace(request, method=method.model_copy(update={"micro_batch_size": 1}))


def _smaller_weights(request: Request) -> Request | None:
    method = request.method
    if method.name != "lsp" or not method.project or method.weights not in ("compute", "float32"):
        return None
    return replace(request, method=method.model_copy(update={"weights": "nf4"}))


def _weights_on_the_host(request: Request) -> Request | None:
    method = request.method
    if method.name != "lsp" or not method.project or method.weights == "host":
        return None
    return replace(request, method=method.model_copy(update={"weights": "host"}))


CHANGES: tuple[tuple[str, Change], ...] = (
    ("rows of {0.length_tokens} tokens", _shorter),
    ("a batch of {0.batch_size}", _fewer_rows),
    ("{0.method.queries} query a step", _fewer_queries),
    ("--method {0.method.name}", _forward_only),
    ("--dtype bfloat16", _half_precision),
    ("--quantize q4", _quantized),
    ("method.moments: int8", _eight_bit_moments),
    ("method.optimizer: adafactor", _less_optimizer_state),
    ("method.micro_batch_size: 1", _smaller_parts),
    ("method.weights: nf4", _smaller_weights),
    ("method.weights: host", _weights_on_the_host),
)
HOST_HINTS = {
    "slideformer": "method.moments: bfloat16 or int8, method.disk_fraction: 1",
    "lsp": "method.weights: compute or nf4, method.activations: device, a smaller method.subspace",
}


def alternatives(plan: Plan) -> list[tuple[str, Plan]]:
    """Changes that need less memory: those that fit first, then the smallest.

    Each change is alone; if none of them fits alone, all of them together come first.
    """
    found, together, words_of_all = [], plan.request, []
    for template, change in CHANGES:
        changed = change(plan.request)
        if changed is None:
            continue
        other, words = plan_request(plan.model, changed), template.format(changed)
        if other.total_bytes < plan.total_bytes:
            found.append((words, other))
            together = change(together) or together
            words_of_all.append(words)
    found.sort(key=lambda item: (not item[1].fits, item[1].total_bytes))
    if len(found) > 1 and not found[0][1].fits:
        found.insert(0, (", ".join(words_of_all), plan_request(plan.model, together)))
    return found


def ensure_fits(plan: Plan, force: bool = False) -> None:
    """Stop a run that would not fit, before it loads anything.

    Raises:
        DoesNotFitError: with the biggest parts and what to change; never with `force`.
    """
    if plan.fits or force:
        return
    limited = plan.request.device.limited
    listed = parts_text(plan.parts, len(plan.parts) if limited else 3)
    options = [
        f"{words} ({size_text(other.total_bytes)}, {'fits' if other.fits else 'too much'})"
        for words, other in alternatives(plan)[:3]
    ]
    device = plan.request.device
    if plan.total_bytes <= plan.usable_bytes and plan.host_usable_bytes is not None:
        listed = parts_text(plan.host_parts, 3)
        raise DoesNotFitError(
            f"{plan.model} with {plan.request.method.name} does not fit the host's memory; biggest parts: {listed}",
            expected=f"at most {size_text(plan.host_usable_bytes)}",
            received=size_text(plan.host_total_bytes),
            hint=f"{HOST_HINTS[plan.request.method.name]}, --force to run anyway",
        )
    raise DoesNotFitError(
        f"{plan.model} with {plan.request.method.name} does not fit "
        f"{'the memory limit' if limited else device.name}; {'' if limited else 'biggest '}parts: {listed}",
        expected=f"at most {size_text(plan.usable_bytes)} ({device.rule})",
        received=size_text(plan.total_bytes),
        hint="; ".join([*options, "a higher --memory-limit" if limited else "--force to run anyway"]),
    )


def parts_text(parts: dict[str, int], count: int) -> str:
    """The biggest parts of a plan, in words."""
    biggest = sorted(parts.items(), key=lambda item: -item[1])[:count]
    return ", ".join(f"{part} {size_text(size)}" for part, size in biggest)


def size_text(size: float) -> str:
    """Bytes for people, in powers of 1024."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit != "MiB" or abs(size) >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
