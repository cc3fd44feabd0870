"""The memory of a run and the time of a step, from dimensions, before any weight is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.core.capabilities import DecidesFromMemory, Offloads
from ondevice.core.config import ExportConfig
from ondevice.core.errors import ConfigError
from ondevice.core.registry import spec_of, target
from ondevice.core.target import Runtime, WeightBytes, WeightPlacement
from ondevice.models import read_dims
from ondevice.models.text_model import text_dims
from ondevice.objectives import OBJECTIVES, objective
from ondevice.planning.devices import Device, find_device
from ondevice.planning.request import Request, StepTime, step_time
from ondevice.planning.runtime import runtime_of

if TYPE_CHECKING:
    from ondevice.api.runfile import RunConfig
    from ondevice.core.config import TrainConfig
    from ondevice.core.dims import ModelDims
    from ondevice.core.method import Placement
    from ondevice.data.lengths import RowSizes
    from ondevice.offload.config import Rates

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
Q4_BITS = 5.0
"""4 bits a weight, and a float16 scale and minimum for each 32."""
Q4_DOUBLE_BITS = 4.5
"""The same with scales and minima of 8 bits; two float16 a row are counted apart."""
W4_BITS = 4.5
"""8da4w: 4 bits a weight and a 16-bit scale for each 32."""
NF4_BITS = 4 + 8 / 64 + 32 / (64 * 256)
"""4 bits a weight, an 8-bit scale for each 64, and a float32 scale for each 256 of these."""
PACKED = ("nf4", "int8")
"""Weights that PyTorch makes dense a matrix at a time; other tensors keep the model's precision."""


def weight_bytes(
    dims: ModelDims, dtype: str = "float32", quantize: str = "none", by_rows: bool = False
) -> WeightBytes:
    """Count the bytes of a model's weights in `dtype`, or quantised as `ExportConfig.quantize` says.

    Args:
        by_rows: for a block program, whose tables are in 8 bits with a scale a row; it has integers
            that are multiplied directly (8da8w) twice, once transposed.

    Raises:
        ConfigError: for a dtype or quantisation that is not known.
    """
    if dtype not in DTYPE_BYTES:
        raise ConfigError("unknown dtype", expected=", ".join(DTYPE_BYTES), received=dtype)
    linears = dims.matrices
    table = dims.vocab * dims.hidden
    item = DTYPE_BYTES[dtype]
    heads = int(not dims.tied)  # tables in addition to the embedding
    vectors = dims.parameters - linears - table * (1 + heads)
    if quantize == "none":
        return WeightBytes(linears * item, table * item, heads * table * item, vectors * item)
    rows = table + dims.vocab * 4
    bits = {"int8": 8, "q4": Q4_BITS, "q4dq": Q4_DOUBLE_BITS, "8da8w": 16, "8da4w": Q4_BITS}
    if by_rows and quantize in bits:
        outputs = dims.linear_outputs
        packed = int(linears * bits[quantize] / 8)
        if bits[quantize] != Q4_BITS:
            packed += 4 * outputs
        return WeightBytes(packed, rows, heads * rows, vectors * 4)
    if quantize in PACKED:
        packed = linears + dims.linear_outputs * 8
        if quantize == "nf4":
            packed = int(linears * NF4_BITS / 8)
        return WeightBytes(packed, table * item, heads * table * item, vectors * item)
    if quantize == "q4":
        return WeightBytes(int(linears * Q4_BITS / 8), rows, heads * rows, vectors * 4)
    if quantize == "8da4w":
        return WeightBytes(int(linears * W4_BITS / 8), rows, int(table * W4_BITS / 8), vectors * 4)
    if quantize == "w8":
        scales = 4 * dims.linear_outputs
        return WeightBytes(linears + scales, table * 4, heads * table * 4, vectors * 4)
    raise ConfigError(
        "unknown quantisation",
        expected="none, int8, q4, q4dq, 8da4w, 8da8w, w8, nf4",
        received=quantize,
    )


def in_torch(weights: WeightBytes) -> WeightPlacement:
    """Place weights for eager PyTorch, which keeps one copy of everything."""
    return WeightPlacement(sum(weights), 0, 0, 0)


RUNTIMES = ("torch", "mlx", "executorch")
MIB = 1 << 20
TOKENIZER_BYTES = 1000
"""A token of the vocabulary in the tokenizer (measured: 48 MB for SmolLM2's 49,152)."""
RETAINED_BYTES = 64 * MIB
"""Freed memory that glibc keeps at most (its trim threshold, once large blocks have been freed)."""

BASELINE_BYTES = {
    ("torch", "cpu"): 760 * MIB,
    ("torch", "cuda"): 600 * MIB,
    ("mlx", "cpu"): 150 * MIB,
    ("executorch", "python"): 420 * MIB,
    ("executorch", "app"): 150 * MIB,
}
"""The process before a model is loaded, measured on Linux x86-64: resident memory of Python with
torch 2.13 and transformers, if this machine has measured none (`runtime.py`); anonymous memory of
Python with MLX, transformers' tokenizers and this package, and of Python with ExecuTorch 1.4. On
CUDA it is the context and the libraries' workspaces on the GPU. The app's is an assumption for a
plain Android app."""


@dataclass(frozen=True)
class Plan:
    """Memory of a run by part, and the time of a step.

    Attributes:
        parts: bytes by part, in the order of the table; their sum is `total_bytes`.
        usable_bytes: memory that the device lets one process use.
        host_parts: the same for host memory, if a method holds the model there and computes on an
            accelerator; `host_usable_bytes` is None if the host is not this machine.
        file_bytes: the program on disk, 0 for eager PyTorch; pages can be dropped and read again.
        weight_bytes: bytes that one pass over the model reads.
    """

    model: str
    parts: dict[str, int]
    total_bytes: int
    usable_bytes: int
    file_bytes: int
    weight_bytes: int
    notes: tuple[str, ...]
    request: Request = field(repr=False)
    host_parts: dict[str, int] = field(default_factory=dict)
    host_usable_bytes: int | None = None

    @property
    def fits(self) -> bool:
        host = self.host_usable_bytes is None or self.host_total_bytes <= self.host_usable_bytes
        return host and self.total_bytes <= self.usable_bytes

    @cached_property
    def _time(self) -> StepTime:
        # Computed on demand: a run only needs its memory.
        return step_time(self.request, self.weight_bytes)

    @property
    def flops(self) -> float:
        """Floating-point operations of a step."""
        return self._time.flops

    @property
    def step_s(self) -> float | None:
        """Estimated seconds of a step; None where the device's rates are not known."""
        return self._time.seconds

    @property
    def step_basis(self) -> str:
        """The basis of `step_s`, in words."""
        return self._time.basis

    @property
    def host_total_bytes(self) -> int:
        return sum(self.host_parts.values())

    @property
    def margin_bytes(self) -> int:
        """Usable bytes that are left; negative if the plan does not fit."""
        return self.usable_bytes - self.total_bytes

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as `ondevice plan --json` prints it."""
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
    rates: Rates | None = None,
    world: int = 1,
    sizes: RowSizes | None = None,
) -> Plan:
    """Estimate memory by part and time of a training step; no weights are loaded.

    Args:
        model_source: as for `ondevice.models.read_dims`, or dimensions.
        method_config: settings of a method.
        batch_size: rows of data a step.
        length_tokens: tokens a row; for a program with several buckets, the longest.
        dtype: precision of frozen weights and activations in eager PyTorch; programs are float32.
        export: settings of the program's export; its quantisation counts in both runtimes.
        runtime: `torch`, `mlx` or `executorch`.
        device: a name of the device table or a `Device`.
        device_file: YAML with more devices.
        evaluates: the run also evaluates; ExecuTorch then holds a second method's packed weights.
        memory_limit_bytes: the run's limit, if that is less than the device allows.
        rates: of this machine, measured; they decide settings that are `auto`.
        world: processes that train together; `batch_size` is one's.
        sizes: of the rows, for the time of a step.

    Raises:
        ConfigError: for an unknown device, dtype or runtime, or sizes below 1.
        ModelError: if the model cannot be found or read.
    """
    if runtime not in RUNTIMES:
        raise ConfigError("unknown runtime", expected=", ".join(RUNTIMES), received=runtime)
    for name, value in (("batch_size", batch_size), ("length_tokens", length_tokens)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1", expected=">= 1", received=value)
    if isinstance(model_source, str | Path):
        name = str(model_source)
        if export is not None or runtime == "executorch":  # programs have the language model only
            dims, _ = text_dims(str(model_source), revision)
        else:
            dims = read_dims(str(model_source), revision)
    elif not hasattr(model_source, "family"):
        raise ConfigError(
            "a model of the wrong type",
            expected="a hub id, a path, package:NAME, or a model's `dims`",
            received=type(model_source).__name__,
        )
    else:
        name = model_source.family
        dims = model_source
    target = find_device(device, device_file) if isinstance(device, str) else device
    if runtime == "executorch":
        export = export or ExportConfig(lengths_tokens=(max(8, length_tokens),))
        dtype = "float32"
        if target.torch_device == "cuda" and isinstance(device, str) and device == "this":
            target = find_device("this-cpu")  # ExecuTorch computes on the CPU here
    target = target.within(memory_limit_bytes)
    request = Request(
        dims,
        method_config,
        batch_size,
        length_tokens,
        dtype,
        export,
        runtime,
        target,
        evaluates,
        world,
        sizes=sizes,
    )
    return plan_request(name, request, rates)


PLAN_LENGTH_TOKENS = 128
"""Length of a plan if neither the run file nor its data names one."""


def plan_run(
    config: RunConfig,
    placement: Placement,
    dims: ModelDims | None = None,
    rates: Rates | None = None,
    sizes: RowSizes | None = None,
) -> Plan:
    """Estimate a run file's run on this machine; under `torchrun`, one rank of it.

    Args:
        dims: of the model, if it is already loaded.
        rates: of this machine, if they were measured.
        sizes: of the rows; without them a step takes the time of the longest, all labelled.

    Raises:
        ConfigError, ModelError: as `plan`.
    """
    config = config.for_training()
    if config.data.packing:
        sizes = None
    return plan(
        dims or config.model.source,
        config.method,
        batch_size=sequences_of(config.train) // placement.world,
        length_tokens=config.data.max_length_tokens or PLAN_LENGTH_TOKENS,
        dtype=config.model.dtype,
        runtime=placement.backend,
        device=f"this-{placement.device}",
        revision=config.model.revision,
        memory_limit_bytes=config.train.memory_limit_bytes,
        rates=rates,
        world=placement.world,
        sizes=sizes,
    )


def sequences_of(train: TrainConfig) -> int:
    """Return the sequences of a step: its rows, two texts of each preference pair, or the answers
    that are written to each."""
    if train.objective == "grpo":
        return train.group_size * train.batch_size
    if train.objective in OBJECTIVES:
        return objective(train.objective).texts * train.batch_size
    return train.batch_size


def resolved(request: Request, rates: Rates | None = None) -> tuple[Any, str]:
    """Return the method's settings with `auto` decided for the device, and the reason; see
    `DecidesFromMemory`."""
    spec = spec_of(request.method)
    decides = spec.capability(DecidesFromMemory)
    if decides is None or request.runtime != "torch":
        return request.method, ""
    return decides.resolve(request, rates, _host_bytes(request.device, request.method))


def _host_bytes(device: Device, method: Any) -> int | None:
    """Return the usable bytes of the device's host, at most the method's `host_memory_bytes`; None
    if it is not this machine and nothing is set."""
    limit = getattr(method, "host_memory_bytes", None)
    if not device.name.startswith("this"):
        return limit
    usable = find_device("this-cpu").usable_bytes
    return usable if limit is None else min(usable, limit)


def plan_request(name: str, request: Request, rates: Rates | None = None) -> Plan:
    """Estimate memory and time of `request`; `name` is the model's."""
    method, why = resolved(request, rates)
    request = replace(request, method=method, why=why or request.why, rates=rates or request.rates)
    dims, device, export = request.dims, request.device, request.export
    spec, rows, length = spec_of(method), request.batch_size, request.length_tokens
    spec.check_model(dims)
    offloads = spec.capability(Offloads) is not None
    quantize = export.quantize if export else "none"
    # The memory of a step in addition to the weights, from the method.
    weights = weight_bytes(dims, request.dtype, quantize, by_rows=_in_blocks(request))
    memory = spec.memory()
    item = DTYPE_BYTES[request.dtype]
    working = memory.step(dims, method, rows, length, item)
    if request.world > 1 and memory.ranked is not None:
        working = memory.ranked(working, dims, method, request.world)
    host: dict[str, int] = {}
    host_usable = None
    notes = [*dims.notes]
    if request.why:
        notes.append(request.why)
    if (targets := dims.resolve_targets(method)) and targets != tuple(method.target_modules):
        notes.append(f"method.target_modules: {', '.join(targets)}, as this model names its layers")
    # The placement of the weights, and the process around them, by runtime.
    if request.runtime == "executorch" and export is not None:
        place, working, baseline = _as_program(request, weights, working, notes)
    else:
        place = in_torch(weights)
        if quantize in PACKED:
            largest = max(inputs * outputs for inputs, outputs in dims.linear_shapes.values())
            working = {**working, "dense matrix": largest * item}
        elif memory.weights is not None:  # the method streams, quantises or moves them itself
            place = WeightPlacement(memory.weights(dims, method, item, request.runtime), 0, 0, 0)
        baseline = BASELINE_BYTES["mlx", "cpu"]
        if request.runtime == "torch":
            baseline = _torch_bytes(request)
        if memory.host is not None:
            host = memory.host(dims, method, rows, length, item)
            if device.torch_device == "cpu":  # host and device are one memory
                working = working | host
                host = {}
            elif host:
                notes.append(memory.host_note)
                host_usable = _host_bytes(device, method)
        if offloads and host:
            host["runtime"] = BASELINE_BYTES["torch", "cpu"]
    if memory.notes is not None:
        notes += memory.notes(dims, method)
    # The parts, in the order of the table; empty ones are left out.
    parts = {
        "weights": place.resident,
        "packed weights": place.packed,
        **working,
        "head tiles": place.arena,
        "allocator": _retained(request, working),
        "tokenizer": 0 if host and offloads else dims.vocab * TOKENIZER_BYTES,
        "runtime": baseline,
    }
    parts = {part: size for part, size in parts.items() if size}
    return Plan(
        model=name,
        parts=parts,
        total_bytes=sum(parts.values()),
        usable_bytes=device.usable_bytes,
        file_bytes=place.file,
        weight_bytes=sum(weights),
        notes=tuple(notes),
        request=request,
        host_parts=host,
        host_usable_bytes=host_usable,
    )


def _torch_bytes(request: Request) -> int:
    """Return the process around a model in eager PyTorch: this machine's is measured."""
    device = request.device
    if device.torch_device == "cpu" and device.is_this_cpu:
        measured = runtime_of(request.method.name)
        if measured is not None:
            return measured.resident_bytes
    return BASELINE_BYTES["torch", device.torch_device]


def _in_blocks(request: Request) -> bool:
    """Return whether this is an ExecuTorch program of functions of one block."""
    if request.runtime != "executorch" or request.export is None:
        return False
    return spec_of(request.method).memory().blocks is not None


def _as_program(
    request: Request, weights: WeightBytes, working: dict[str, int], notes: list[str]
) -> tuple[WeightPlacement, dict[str, int], int]:
    """Return weights, working memory and the process' bytes of an exported ExecuTorch program; adds to `notes`."""
    dims, method, export = request.dims, request.method, request.export
    assert export is not None  # noqa: S101  the caller has checked it
    memory = spec_of(method).memory()
    # The runtime's own kernels need only the mapped file and the arenas.
    if memory.blocks is not None and _in_blocks(request):
        working = memory.blocks(
            dims, method, request.batch_size, request.length_tokens, export.quantize
        )
        packed, tiles = (working.pop(part) for part in ("packed weights", "head tiles"))
        place = WeightPlacement(sum(weights), packed, tiles, sum(weights))
        notes.append("weights are mapped: the system may drop their pages and read them again")
    else:
        place = target(export.target).place(
            dims, weights, export, method.loss_tiles, request.evaluates
        )
    notes += place.notes
    if export.uses_ops and memory.blocks is None:
        notes.append("the program needs this project's ops in the runtime")
    process = "app" if request.device.kind == "phone" else "python"
    return place, working, BASELINE_BYTES["executorch", process]


def _retained(request: Request, working: dict[str, int]) -> int:
    """Estimate freed memory that the allocator keeps; a program's arena is planned and has none."""
    if request.runtime != "torch":
        return 0
    return min(
        RETAINED_BYTES, sum(working.get(part, 0) for part in ("noise", "activations", "logits"))
    )
