"""Will a run fit, and how long does a step take: from dimensions alone, before any weight is loaded."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ondevice.errors import ConfigError
from ondevice.exporters.base import ExportConfig
from ondevice.methods.lsp.memory import kept_bytes
from ondevice.methods.registry import MODULES, OFFLOADING
from ondevice.plan.cost import step_cost, step_seconds
from ondevice.plan.devices import Device, find_device
from ondevice.plan.weights import DTYPE_BYTES, PACKED, Placement, in_executorch, in_npu, in_torch, weight_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from ondevice.models import ModelDims

Runtime = Literal["torch", "mlx", "executorch"]
RUNTIMES = ("torch", "mlx", "executorch")
MIB = 1 << 20
TOKENIZER_BYTES = 1000
"""A token of the vocabulary in the tokenizer (measured: 48 MB for SmolLM2's 49,152)."""
RETAINED_BYTES = 64 * MIB
"""What glibc keeps of freed memory at most (its trim threshold, once large blocks have been freed)."""

BASELINE_BYTES = {
    ("torch", "cpu"): 500 * MIB,
    ("torch", "cuda"): 600 * MIB,
    ("mlx", "cpu"): 150 * MIB,
    ("executorch", "python"): 420 * MIB,
    ("executorch", "app"): 150 * MIB,
}
"""The process before a model is loaded. Measured as anonymous memory on Linux x86-64: Python with torch 2.13,
transformers and peft; Python with MLX, transformers' tokenizers and this package; Python with ExecuTorch 1.4. On CUDA:
the context and the libraries' workspaces on the GPU. The app's is an assumption: a plain Android app."""

HOME = {
    "slideformer": "the model is in host memory; the accelerator holds a window of its layers",
    "lsp": "AdamW's moments are in host memory; the weights are where method.weights says",
    "mesp": "block inputs wait in pinned host memory",
    "revffn": "the bits beside the streams wait in pinned host memory",
}


@dataclass(frozen=True)
class Request:
    """What was planned, kept so that a variation can be planned too."""

    dims: ModelDims
    method: Any
    batch_size: int
    length_tokens: int
    dtype: str
    export: ExportConfig | None
    runtime: Runtime
    device: Device
    evaluates: bool


@dataclass(frozen=True)
class Plan:
    """Memory of a run by part, and the time of a step.

    Attributes:
        parts: bytes by part, in the order of the table; their sum is `total_bytes`.
        usable_bytes: what the device lets one process use.
        host_parts: the same of host memory, where a method keeps the model there beside an accelerator;
            `host_usable_bytes` is None where the host is not this machine.
        file_bytes: of the program on disk, 0 for eager PyTorch; its pages can be dropped and read again.
        step_s: estimated seconds a step, None where the device's rates are not known; `step_basis` says how.
        flops: floating-point operations a step.
    """

    model: str
    parts: dict[str, int]
    total_bytes: int
    usable_bytes: int
    file_bytes: int
    flops: float
    step_s: float | None
    step_basis: str
    notes: tuple[str, ...]
    request: Request = field(repr=False)
    host_parts: dict[str, int] = field(default_factory=dict)
    host_usable_bytes: int | None = None

    @property
    def fits(self) -> bool:
        host = self.host_usable_bytes is None or self.host_total_bytes <= self.host_usable_bytes
        return host and self.total_bytes <= self.usable_bytes

    @property
    def host_total_bytes(self) -> int:
        return sum(self.host_parts.values())

    @property
    def margin_bytes(self) -> int:
        """Usable bytes that are left; negative where the plan does not fit."""
        return self.usable_bytes - self.total_bytes

    def to_dict(self) -> dict[str, Any]:
        """The plan as `ondevice plan --json` prints it."""
        request = self.request
        return {
            "model": self.model,
            "method": request.method.model_dump(mode="json"),
            "batch_size": request.batch_size,
            "length_tokens": request.length_tokens,
            "dtype": request.dtype,
            "runtime": request.runtime,
            "quantize": request.export.quantize if request.export else "none",
            "device": request.device.to_dict(),
            "parts_bytes": dict(self.parts),
            "total_bytes": self.total_bytes,
            "usable_bytes": self.usable_bytes,
            "margin_bytes": self.margin_bytes,
            "host_parts_bytes": dict(self.host_parts),
            "host_total_bytes": self.host_total_bytes,
            "host_usable_bytes": self.host_usable_bytes,
            "fits": self.fits,
            "file_bytes": self.file_bytes,
            "flops": self.flops,
            "step_s_estimate": self.step_s,
            "step_basis": self.step_basis,
            "notes": list(self.notes),
        }


def plan(
    model_source: str | ModelDims,
    method_config: Any,
    *,
    batch_size: int,
    length_tokens: int,
    dtype: str = "float32",
    export: ExportConfig | None = None,
    runtime: Runtime = "torch",
    device: str | Device = "this",
    device_file: Path | str | None = None,
    revision: str | None = None,
    evaluates: bool = True,
    memory_limit_bytes: int | None = None,
) -> Plan:
    """Estimate memory by part and time of a training step; no weights are loaded.

    Args:
        model_source: as for `ondevice.models.read_dims`, or dimensions.
        method_config: settings of a method.
        batch_size: rows of data a step.
        length_tokens: tokens a row; for a program with several buckets, the longest.
        dtype: precision of frozen weights and activations in eager PyTorch; programs are float32.
        export: how the program is exported; its quantisation counts in both runtimes.
        runtime: `torch`, `mlx` or `executorch`.
        device: a name of the device table or a `Device`.
        device_file: YAML with more devices.
        evaluates: the run also evaluates; ExecuTorch then holds a second method's packed weights.
        memory_limit_bytes: what the run may take at most, where that is less than the device allows.

    Raises:
        ConfigError: for an unknown device, dtype or runtime, or sizes below 1.
        ModelError: if the model cannot be found or read.
    """
    if runtime not in RUNTIMES:
        raise ConfigError("unknown runtime", expected=", ".join(RUNTIMES), received=runtime)
    for name, value in (("batch_size", batch_size), ("length_tokens", length_tokens)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1", expected=">= 1", received=value)
    if isinstance(model_source, str):
        from ondevice.models import read_dims

        name, dims = model_source, read_dims(model_source, revision)
    else:
        name, dims = model_source.family, model_source
    found = find_device(device, device_file) if isinstance(device, str) else device
    if runtime == "executorch":
        export, dtype = export or ExportConfig(lengths_tokens=(max(8, length_tokens),)), "float32"
        if found.torch_device == "cuda" and isinstance(device, str) and device == "this":
            found = find_device("this-cpu")
    found = found.within(memory_limit_bytes)
    request = Request(dims, method_config, batch_size, length_tokens, dtype, export, runtime, found, evaluates)
    return plan_request(name, request)


def plan_request(name: str, request: Request) -> Plan:
    """The plan of `request`; `name` is the model's."""
    dims, method, device, export = request.dims, request.method, request.device, request.export
    quantize = export.quantize if export else "none"
    weights = weight_bytes(dims, request.dtype, quantize)
    package = MODULES[method.name].split(".")[0]
    module = importlib.import_module(f"ondevice.methods.{package}.memory")
    working = module.memory(dims, method, request.batch_size, request.length_tokens, DTYPE_BYTES[request.dtype])
    notes: list[str] = []
    host, host_usable = {}, None
    if request.runtime == "executorch" and export is not None:
        npu = export.target == "android-npu"
        methods = 1 if npu else len(export.lengths_tokens) * (2 if request.evaluates else 1)
        if hasattr(module, "program_memory"):  # on the runtime's own kernels: the mapped file and the arena are all
            place = Placement(weights.total, 0, 0, weights.total)
            working = module.program_memory(dims, method, request.batch_size, request.length_tokens)
        else:
            place = in_npu(weights, export) if npu else in_executorch(dims, weights, export, method.loss_tiles, methods)
        baseline = BASELINE_BYTES["executorch", "app" if device.kind == "phone" else "python"]
        if npu:
            notes.append("packed weights are the NPU's own copy; its scratch memory is not counted")
        if place.packed and methods > 1:
            notes.append(f"XNNPACK packs the linears once for each of {methods} loaded methods")
        if quantize == "q4" or export.uses_ops:
            notes.append("the program needs this project's ops in the runtime")
    else:
        place = in_torch(weights)
        if quantize in PACKED:
            largest = max(inputs * outputs for inputs, outputs in dims.linear_shapes.values())
            working = {**working, "dense matrix": largest * DTYPE_BYTES[request.dtype]}
        elif hasattr(module, "weights"):  # the method streams or quantises them itself
            place = Placement(module.weights(dims, method, DTYPE_BYTES[request.dtype], request.runtime), 0, 0, 0)
        baseline = BASELINE_BYTES["mlx", "cpu"]
        if request.runtime == "torch":
            baseline = BASELINE_BYTES["torch", device.torch_device]
        if hasattr(module, "host_memory"):
            item = DTYPE_BYTES[request.dtype]
            host = module.host_memory(dims, method, request.batch_size, request.length_tokens, item)
            if device.torch_device == "cpu":
                working, host = working | host, {}
            elif host:
                notes.append(HOME[method.name])
                host_usable = find_device("this-cpu").usable_bytes if device.name.startswith("this") else None
        if method.name in OFFLOADING:
            place = Placement(0, 0, 0, 0)
            if host:
                host["runtime"] = BASELINE_BYTES["torch", "cpu"]
    if method.name == "lsp" and (more := kept_bytes(dims, method)):
        notes.append(f"each time that all projectors are replaced, {more / MIB:,.0f} MiB more stay on the accelerator")
    parts = {
        "weights": place.resident,
        "packed weights": place.packed,
        **working,
        "head tiles": place.arena,
        "allocator": _retained(request, working),
        "tokenizer": 0 if host and method.name in OFFLOADING else dims.vocab * TOKENIZER_BYTES,
        "runtime": baseline,
    }
    parts = {part: size for part, size in parts.items() if size}
    cost = step_cost(dims, method, request.batch_size, request.length_tokens, weights.total)
    computed = getattr(method, "compute", request.dtype)
    seconds, basis = step_seconds(cost, device, computed if computed in device.flops_s else request.dtype)
    return Plan(
        model=name,
        parts=parts,
        total_bytes=sum(parts.values()),
        usable_bytes=device.usable_bytes,
        file_bytes=place.file,
        flops=cost.flops,
        step_s=seconds,
        step_basis=basis,
        notes=tuple(notes),
        request=request,
        host_parts=host,
        host_usable_bytes=host_usable,
    )


def _retained(request: Request, working: dict[str, int]) -> int:
    """Freed memory that the allocator holds back; a program's arena is planned and has none."""
    if request.runtime != "torch":
        return 0
    return min(RETAINED_BYTES, sum(working.get(part, 0) for part in ("noise", "activations", "logits")))
