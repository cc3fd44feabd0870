"""Choices that follow the machine: backend, device, kernels, threads and precision.

A run takes them when it begins, and its log has them (`identity`). A resumed run takes the same,
whatever this machine would choose now; what this machine no longer has is chosen again, and said.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from ondevice.core.capabilities import HalfOnGpu, OwnPrecision, Ranked
from ondevice.core.errors import ConfigError, Need, OndeviceError
from ondevice.core.method import Placement, has_liger, has_triton
from ondevice.core.process import described
from ondevice.core.registry import backend_for, spec_of
from ondevice.offload.config import check_rows, launched
from ondevice.planning.devices import cores

if TYPE_CHECKING:
    from ondevice.api.runfile import RunConfig
    from ondevice.core.config import ModelConfig, TrainConfig
    from ondevice.core.method import MethodSpec

log = logging.getLogger(__name__)
BACKEND = "train.backend"
DEVICE = "model.device"
DTYPE = "model.dtype"
PLACEMENT = "placement."
"""Prefix of settings that the run file leaves as `auto`. They do not change results, so they are
not in an identity."""
KERNELS = f"{PLACEMENT}kernels"
THREADS = "threads"
"""Keys of a run's decisions."""
FAST = {"triton": lambda device: has_triton(device), "liger": lambda device: has_liger(device)}
"""Kernels beyond PyTorch's, and whether a device can use them."""
NAMED_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables with which a user names the number of threads."""
BFLOAT16_UNITS = ("amx_bf16", "avx512_bf16", "avx10_2", "bf16", "sve_bf16")
"""Names of a CPU's bfloat16 instructions in `torch.cpu.get_capabilities`, on x86-64 and on ARM."""


def place(method: Any, train: TrainConfig, device: str) -> Placement:
    """Decide the device placement of a run from the sections of its run file and `model.device`.

    Raises:
        ConfigError: the backend does not have the method, the device does not exist, or the method
            or the batch cannot be divided among the ranks.
    """
    spec = spec_of(method)
    backend = backend_for(method, train.backend)
    device = "cpu" if backend == "mlx" else resolve_device(device)
    if "WORLD_SIZE" not in os.environ:
        return Placement(spec, backend, device)

    rank, world = launched()
    if world > 1 and spec.capability(Ranked) is None:
        raise ConfigError(
            f"method {spec.name} trains in one process",
            expected="one process, or a method that trains in several",
            received=f"{world} processes of torchrun",
            hint="run `ondevice train` without torchrun",
            needs=Need.RANKS,
        )
    check_rows(train.batch_size, world)
    return Placement(spec, backend, device, rank, world)


def resolve_device(name: str) -> str:
    """Resolve `auto` to `cuda` if there is one, else `cpu`.

    Raises:
        ConfigError: the name is `cuda`, and the machine has no CUDA device.
    """
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "model.device is cuda, and there is no CUDA device",
            hint="`ondevice doctor` tells why; or use cpu",
        )
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def usable(recorded: Mapping[str, Any], config: RunConfig) -> dict[str, Any]:
    """Return recorded choices without a backend or device that this machine does not have."""
    kept = dict(recorded)
    checks = {
        BACKEND: lambda value: backend_for(config.method, value),
        DEVICE: resolve_device,
    }
    for key, check in checks.items():
        try:
            if key in kept:
                check(kept[key])
        except OndeviceError as error:
            log.warning("this run began with %s %s: %s", key, kept.pop(key), error.message)
    return kept


def machine_choices(backend: str, device: str, placement: Placement) -> dict[str, Any]:
    """Return the backend and the device that a run file leaves open, as this run takes them."""
    taken = {}
    if backend == "auto":
        taken[BACKEND] = placement.backend
    if device == "auto" and placement.backend == "torch":
        taken[DEVICE] = placement.device
    return taken


def kernels_of(method: Any, placement: Placement, recorded: Mapping[str, Any]) -> str | None:
    """Return the kernels that a method's `auto` takes; None if it leaves nothing open."""
    if getattr(method, "kernels", None) != "auto" or placement.backend != "torch":
        return None
    possible = {"torch": True, **{name: has(placement.device) for name, has in FAST.items()}}
    offered = [name for name in FAST if name in kernel_names(method)]
    taken = recorded.get(KERNELS)
    if taken in offered and not possible[taken]:
        log.warning("this run began with %s, which cannot be used here: torch's kernels", taken)
    elif taken in (*offered, "torch"):
        return taken
    return next((name for name in offered if possible[name]), "torch")


def kernel_names(method: Any) -> tuple[str, ...]:
    """Return the values of a method's setting `kernels`."""
    return get_args(type(method).model_fields["kernels"].annotation)


@contextmanager
def threads(placement: Placement, recorded: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Compute with as many threads as the run began with; yield the number for its log.

    A number that the user names stays, and so does this machine's if it has fewer cores.
    """
    if placement.backend != "torch":
        yield {}
        return
    import torch

    before = torch.get_num_threads()
    number = before
    is_named = any(name in os.environ for name in NAMED_THREADS)
    if THREADS in recorded and not is_named and int(recorded[THREADS]) <= cores():
        number = int(recorded[THREADS])
    torch.set_num_threads(number)
    log.info("%d threads, which wait: %s", number, described())
    try:
        yield {THREADS: number}
    finally:
        torch.set_num_threads(before)


class Precision(NamedTuple):
    """Settings with a precision that the machine has units for.

    Attributes:
        notes: sentences about it.
        decided: what the run file left open, by dotted key.
    """

    model: ModelConfig
    method: Any
    notes: list[str]
    decided: dict[str, Any]


def precision_of(model: ModelConfig, method: Any, placement: Placement) -> Precision:
    """Choose a run's precision; one that the run file or a flag names is kept."""
    spec = placement.spec
    decided: dict[str, Any] = {}
    notes = list[str]()
    if precision_is_open(model, spec):
        model = half_on_gpu(model, spec, placement.device)
        decided[DTYPE] = model.dtype
    dtype = model.dtype
    if own := spec.capability(OwnPrecision):
        key = own.setting
        dtype = getattr(method, key)
        if key not in method.model_fields_set:
            if dtype == "bfloat16" and placement.device == "cpu" and not has_bfloat16_units():
                dtype = "float32"
                method = method.model_copy(update={key: dtype})
                notes.append(
                    f"this CPU has no bfloat16 units: --set method.{key}=bfloat16 asks for it anyway"
                )
            decided[f"method.{key}"] = dtype
    return Precision(model, method, [*placement.precision(dtype), *notes], decided)


def precision_is_open(model: ModelConfig, spec: MethodSpec) -> bool:
    """Return whether `model.dtype` is the method's to choose."""
    return spec.capability(HalfOnGpu) is not None and "dtype" not in model.model_fields_set


def half_on_gpu(model: ModelConfig, spec: MethodSpec, device: str) -> ModelConfig:
    """Return the model's settings with bfloat16 if its method takes that on this device."""
    if device != "cuda" or not precision_is_open(model, spec):
        return model
    return model.model_copy(update={"dtype": "bfloat16"})


def has_bfloat16_units() -> bool:
    """Return whether this CPU multiplies in bfloat16 itself, by its flags.

    Timing does not tell: on one machine the ratio to float32 was 0.36 to 145 between starts.
    """
    import torch

    capabilities = getattr(torch.cpu, "get_capabilities", None)
    if capabilities is None:  # PyTorch before 2.13
        return torch.cpu._is_avx512_bf16_supported()
    flags = capabilities()
    return any(flags.get(name, False) for name in BFLOAT16_UNITS)
