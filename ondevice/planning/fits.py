"""Refuse a plan that does not fit, with changes that would help, and keep a run within its limit."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ondevice.core.config import size_text
from ondevice.core.errors import DoesNotFitError, OndeviceError, first_line, was_refused
from ondevice.core.registry import methods, spec_of
from ondevice.planning.estimate import BASELINE_BYTES, plan_request
from ondevice.planning.limit import own_memory
from ondevice.training.metrics import status_bytes

if TYPE_CHECKING:
    from ondevice.core.method import Reduction
    from ondevice.planning.estimate import Plan, Request

Change = Callable[["Request"], "Request | None"]
"""Turns a request into one that needs less memory, or None if the change does not apply."""
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
    if request.batch_size > 1:
        return replace(request, batch_size=request.batch_size // 2)
    return None


def _forward_only(request: Request) -> Request | None:
    """Switch to the first method without backward passes that trains this model as it is."""
    if spec_of(request.method).order == "zeroth":
        return None
    for spec in sorted(methods(), key=lambda spec: spec.trains):  # adapters first
        if spec.order == "zeroth":
            config = spec.config()
            try:
                spec.check_model(request.dims)
                request.dims.resolve_targets(config)
            except OndeviceError:
                continue
            return replace(request, method=config)
    return None


def _half_precision(request: Request) -> Request | None:
    if request.runtime != "torch" or request.dtype != "float32":
        return None
    return replace(request, dtype="bfloat16")


def _quantized(request: Request) -> Request | None:
    export = request.export
    if request.runtime != "executorch" or export is None or export.quantize != "none":
        return None
    return replace(request, export=export.model_copy(update={"quantize": "q4"}))


CHANGES: tuple[tuple[str, Change], ...] = (
    ("rows of {0.length_tokens} tokens", _shorter),
    ("a batch of {0.batch_size}", _fewer_rows),
    ("--method {0.method.name}", _forward_only),
    ("--dtype bfloat16", _half_precision),
    ("--quantize q4", _quantized),
)
"""Changes that any method has; those of its own settings are in its `MemoryModel`."""


def _changes(request: Request) -> list[tuple[str, Change]]:
    def own(reduction: Reduction) -> tuple[str, Change]:
        def change(request: Request) -> Request | None:
            if request.method.name != method.name:
                return None
            changed = reduction.change(request.method, request.batch_size)
            if changed is None:
                return None
            return replace(request, method=changed)

        return reduction.words.replace("{config.", "{0.method."), change

    method = request.method
    return [*CHANGES, *map(own, spec_of(method).memory().reductions)]


def alternatives(plan: Plan) -> list[tuple[str, Plan]]:
    """List changes that need less memory: those that fit first, then the smallest.

    Each is a single change; if none of them fits, all of them together come first.
    """
    options: list[tuple[str, Plan]] = []
    together = plan.request
    words_of_all: list[str] = []
    for template, change in _changes(plan.request):
        changed = change(plan.request)
        if changed is None:
            continue
        other = plan_request(plan.model, changed)
        words = template.format(changed)
        if other.total_bytes < plan.total_bytes:
            options.append((words, other))
            together = change(together) or together
            words_of_all.append(words)
    options.sort(key=lambda item: (not item[1].fits, item[1].total_bytes))
    if len(options) > 1 and not options[0][1].fits:
        options.insert(0, (", ".join(words_of_all), plan_request(plan.model, together)))
    return options


def does_not_fit(plan: Plan) -> DoesNotFitError:
    """Return the error of a plan that does not fit: the biggest parts, and what to change."""
    device = plan.request.device
    memory = device.name
    listed = f"biggest parts: {parts_text(plan.parts, 3)}"
    way_out = "--force to run anyway"
    if device.limited:
        memory = "the memory limit"
        listed = f"parts: {parts_text(plan.parts, len(plan.parts))}"
        way_out = "a higher --memory-limit"
    options = []
    for words, other in alternatives(plan)[:3]:
        verdict = "fits" if other.fits else "too much"
        options.append(f"{words} ({size_text(other.total_bytes)}, {verdict})")
    if plan.total_bytes <= plan.usable_bytes and plan.host_usable_bytes is not None:
        listed = parts_text(plan.host_parts, 3)
        return DoesNotFitError(
            f"{plan.model} with {plan.request.method.name} does not fit the host's memory; "
            f"biggest parts: {listed}",
            expected=f"at most {size_text(plan.host_usable_bytes)}",
            received=size_text(plan.host_total_bytes),
            hint=f"{spec_of(plan.request.method).memory().host_hint}, --force to run anyway",
        )
    return DoesNotFitError(
        f"{plan.model} with {plan.request.method.name} does not fit {memory}; {listed}",
        expected=f"at most {size_text(plan.usable_bytes)} ({device.rule})",
        received=size_text(plan.total_bytes),
        hint="; ".join([*options, way_out]),
    )


def parts_text(parts: dict[str, int], count: int) -> str:
    """List the biggest parts of a plan, in words."""
    biggest = sorted(parts.items(), key=lambda item: -item[1])[:count]
    return ", ".join(f"{part} {size_text(size)}" for part, size in biggest)


log = logging.getLogger("ondevice.planning")
CONTEXT_BYTES = BASELINE_BYTES["torch", "cuda"]
"""Memory that CUDA takes outside PyTorch's allocator."""


@contextmanager
def memory_limit(limit_bytes: int, plan: Plan) -> Iterator[None]:
    """Limit this process to `limit_bytes` within the block.

    An allocation beyond the limit fails here, with the plan, before the system ends the process.

    - On a CPU the kernel counts private writable memory (RLIMIT_DATA). Memory that libraries had
      mapped without touching it is added to the limit.
    - On a GPU, PyTorch's allocator has the limit. If CPU and GPU share their memory, both are
      limited, and the CPU's share of this process is subtracted from the GPU's.
    - In MLX only the plan has the limit, with a warning: its allocator does not check for refused
      memory, and a signal would end the process.

    `ondevice serve` also puts a job into a cgroup if it may create one.

    Raises:
        DoesNotFitError: an allocation was refused; lists the planned parts.
    """
    if plan.request.runtime == "mlx":
        log.warning(
            "--memory-limit was compared with the plan; only a cgroup can limit MLX while it runs"
        )
        yield
        return
    on_cpu = plan.request.device.torch_device == "cpu" or shared()
    capped = plan.request.device.torch_device == "cuda"
    if capped:
        _cap_gpu(limit_bytes)
    try:
        with own_memory(limit_bytes if on_cpu else None):
            yield
    except (OndeviceError, MemoryError, RuntimeError, OSError) as raised:
        # A method may have raised DoesNotFitError itself, with the refused allocation as its cause.
        error: BaseException | None = raised
        if isinstance(raised, DoesNotFitError):
            error = raised.__cause__
        if not isinstance(error, (MemoryError, RuntimeError, OSError)) or not was_refused(error):
            raise
        parts = parts_text(plan.parts, len(plan.parts))
        raise DoesNotFitError(
            f"an allocation beyond the memory limit was refused; planned: {parts}",
            expected=f"at most {size_text(limit_bytes)} (--memory-limit)",
            received=first_line(error),
            hint="a smaller batch or shorter rows, a higher --memory-limit; "
            "the run's last checkpoint is intact",
        ) from error
    finally:
        if capped:
            _uncap_gpu()


def shared() -> bool:
    """Return True if the first GPU has no memory of its own."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return False
    return bool(getattr(torch.cuda.get_device_properties(0), "is_integrated", False))


def _cap_gpu(limit_bytes: int) -> None:
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    room = limit_bytes - CONTEXT_BYTES - (status_bytes("RssAnon") if shared() else 0)
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, room / total)), 0)


def _uncap_gpu() -> None:
    import torch

    torch.cuda.set_per_process_memory_fraction(1.0, 0)
