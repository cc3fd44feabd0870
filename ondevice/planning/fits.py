"""Refuse a plan that does not fit, before anything is loaded, and say what would help. And keep a run within a limit of
memory while it goes on.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ondevice.core.config import size_text
from ondevice.core.errors import DoesNotFitError, OndeviceError
from ondevice.core.registry import methods, spec_of
from ondevice.planning.estimate import BASELINE_BYTES, plan_request, plan_run
from ondevice.planning.limit import own_memory, status_bytes, was_refused

if TYPE_CHECKING:
    from ondevice.api.runfile import RunConfig
    from ondevice.core.dims import ModelDims
    from ondevice.core.method import Placement, Reduction
    from ondevice.planning.estimate import Plan, Request

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
            return None if changed is None else replace(request, method=changed)

        return reduction.words.replace("{config.", "{0.method."), change

    method = request.method
    return [*CHANGES, *map(own, spec_of(method).memory().reductions)]


def alternatives(plan: Plan) -> list[tuple[str, Plan]]:
    """List changes that need less memory: those that fit first, then the smallest.

    Each change is alone; if none of them fits alone, all of them together come first.
    """
    options, together, words_of_all = [], plan.request, []
    for template, change in _changes(plan.request):
        changed = change(plan.request)
        if changed is None:
            continue
        other, words = plan_request(plan.model, changed), template.format(changed)
        if other.total_bytes < plan.total_bytes:
            options.append((words, other))
            together = change(together) or together
            words_of_all.append(words)
    options.sort(key=lambda item: (not item[1].fits, item[1].total_bytes))
    if len(options) > 1 and not options[0][1].fits:
        options.insert(0, (", ".join(words_of_all), plan_request(plan.model, together)))
    return options


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
            hint=f"{spec_of(plan.request.method).memory().host_hint}, --force to run anyway",
        )
    raise DoesNotFitError(
        f"{plan.model} with {plan.request.method.name} does not fit "
        f"{'the memory limit' if limited else device.name}; {'' if limited else 'biggest '}parts: {listed}",
        expected=f"at most {size_text(plan.usable_bytes)} ({device.rule})",
        received=size_text(plan.total_bytes),
        hint="; ".join(
            [*options, "a higher --memory-limit" if limited else "--force to run anyway"]
        ),
    )


def parts_text(parts: dict[str, int], count: int) -> str:
    """List the biggest parts of a plan, in words."""
    biggest = sorted(parts.items(), key=lambda item: -item[1])[:count]
    return ", ".join(f"{part} {size_text(size)}" for part, size in biggest)


log = logging.getLogger("ondevice.planning")
CONTEXT_BYTES = BASELINE_BYTES["torch", "cuda"]
"""Memory that CUDA takes outside PyTorch's allocator."""


@contextmanager
def plan_within(
    config: RunConfig,
    placement: Placement,
    force: bool = False,
    dims: ModelDims | None = None,
    decided: RunConfig | None = None,
) -> Iterator[Plan]:
    """Plan the run of a run file, refuse one that does not fit, and keep it within its memory limit in the block. Where
    the method leaves something to the machine, and that has a GPU, its rates are measured first (some seconds).

    Args:
        decided: the same run with a placement that was decided before; it is kept if it still fits.

    Raises:
        DoesNotFitError: as `ensure_fits`, and as `memory_limit`.
    """
    estimate = plan_run(decided or config, placement, dims)
    if decided is not None and not estimate.fits:
        log.warning("the placement that this run began with no longer fits: it is decided again")
        decided, estimate = None, plan_run(config, placement, dims)
    if (
        decided is None
        and estimate.request.method != config.method
        and placement.device == "cuda"
        and placement.world == 1
    ):
        from ondevice.planning.advice import measure

        estimate = plan_run(config, placement, dims, measure(estimate))
    ensure_fits(estimate, force)
    with memory_limit(config.train.memory_limit_bytes, estimate):
        yield estimate


@contextmanager
def memory_limit(limit_bytes: int | None, plan: Plan) -> Iterator[None]:
    """Limit this process to `limit_bytes` within the block; None is no limit. An allocation beyond it fails here, with
    the plan, before the system ends the process.

    On a CPU the kernel counts private writable memory (RLIMIT_DATA). What libraries had mapped without touching it,
    before the limit was set, is added to it. On a GPU, PyTorch's allocator has the cap; where CPU and GPU share their
    memory, both hold, and what this process takes on the CPU's side is taken from the GPU's. In MLX the limit holds in
    the plan alone, and a warning says so: its allocator does not look whether memory was refused, and the process would
    end by a signal. `ondevice serve` puts a job into a cgroup besides, where it may make one.

    Raises:
        DoesNotFitError: an allocation was refused; says what was planned, part by part.
    """
    if limit_bytes is None:
        yield
        return
    if plan.request.runtime == "mlx":
        log.warning(
            "--memory-limit was held against the plan; nothing holds MLX to it while it runs (a cgroup can)"
        )
        yield
        return
    on_cpu = plan.request.device.torch_device == "cpu" or shared()
    capped = plan.request.device.torch_device == "cuda" and _cap_gpu(limit_bytes)
    try:
        with own_memory(limit_bytes if on_cpu else None):
            yield
    except (OndeviceError, MemoryError, RuntimeError, OSError) as raised:
        # A method may have raised DoesNotFitError already, without the plan: its cause is the refused allocation.
        error = raised.__cause__ if isinstance(raised, DoesNotFitError) else raised
        if not isinstance(error, (MemoryError, RuntimeError, OSError)) or not was_refused(error):
            raise
        raise DoesNotFitError(
            f"an allocation beyond the memory limit was refused; planned: {parts_text(plan.parts, len(plan.parts))}",
            expected=f"at most {size_text(limit_bytes)} (--memory-limit)",
            received=str(error).strip().splitlines()[0][:200]
            if str(error).strip()
            else type(error).__name__,
            hint="a smaller batch or shorter rows, a higher --memory-limit; the run's last checkpoint is unharmed",
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


def _cap_gpu(limit_bytes: int) -> bool:
    import torch

    total = torch.cuda.get_device_properties(0).total_memory
    room = limit_bytes - CONTEXT_BYTES - (status_bytes("RssAnon") if shared() else 0)
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, room / total)), 0)
    return True


def _uncap_gpu() -> None:
    import torch

    torch.cuda.set_per_process_memory_fraction(1.0, 0)
