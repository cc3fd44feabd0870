"""Memory for a model next to a running job: what an answer needs, and what the job will still take.

It is computed in the process that loads the model, so nothing else has to be free to answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ondevice.api.plan import planned
from ondevice.api.runfile import RunConfig
from ondevice.artifact.manifest import read_manifest
from ondevice.core.dims import ModelDims
from ondevice.core.errors import BusyError, OndeviceError
from ondevice.models import LoadedModel
from ondevice.planning.artifacts import plan_artifact
from ondevice.planning.devices import find_device
from ondevice.planning.estimate import BASELINE_BYTES, DTYPE_BYTES
from ondevice.planning.render import MEANING
from ondevice.training.objective import with_objective
from ondevice.training.rows import OpenedRows

MIB = 1 << 20
_planned: dict[str, dict[str, Any]] = {}
"""The plan of the last job."""


def plan(config: dict[str, Any], artifact: str | None) -> dict[str, Any]:
    """Plan a job: memory by part and time per step, within its memory limit if it has one."""
    run = RunConfig.parse(config, "job")
    run.check_data()
    if artifact is None:
        plan_of_job = planned(run, OpenedRows(run.data))
    else:
        folder = Path(artifact)
        manifest = read_manifest(folder)
        opened = OpenedRows(run.data, task=manifest.task)
        with_objective(run.train, run.method, manifest, opened)
        plan_of_job = plan_artifact(folder, manifest, run.train.memory_limit_bytes)
    parts = plan_of_job.parts | plan_of_job.host_parts
    return plan_of_job.to_dict() | {"meaning": {part: MEANING.get(part, "") for part in parts}}


def needs(
    dims: ModelDims, weights_bytes: int, dtype: str, tokens: int, device: str
) -> dict[str, int]:
    """Estimate the bytes by part of continuing a prompt; `tokens` counts both, at most."""

    item = DTYPE_BYTES[dtype]
    tokens = min(tokens, dims.max_positions or tokens)
    widest = max(max(shape) for shape in dims.linear_shapes.values())
    return {
        "weights": weights_bytes,
        "keys and values": tokens * cache_bytes(dims, item),
        "activations": 4 * tokens * widest * item + 3 * dims.vocab * 4,
        "runtime": BASELINE_BYTES["torch", device] if device == "cuda" else 0,
    }


def cache_bytes(dims: ModelDims, item_bytes: int) -> int:
    """Return the bytes of a token's keys and values."""
    return 2 * dims.layers * dims.kv_heads * dims.head_dim * item_bytes


def check_room_here(parts: dict[str, int], device: str, job: dict[str, Any]) -> None:
    """Refuse a model that does not fit next to the running job and what that will still take.

    Args:
        job: of `server.daemon.running_job`.

    Raises:
        BusyError: with the plan's numbers.
    """
    wants, usable = job_wants(device, job), usable_bytes(device)
    need = sum(parts.values())
    left = max(0, usable - wants)
    if need <= left:
        return
    listed = ", ".join(f"{part} {size / MIB:,.0f} MiB" for part, size in parts.items() if size)
    raise BusyError(
        f"the model does not fit next to job {job['id']}, which runs: {listed}",
        expected=f"at most {left / MIB:,.0f} MiB: of {usable / MIB:,.0f} MiB that can be "
        f"used now, the job will still take {wants / MIB:,.0f} MiB",
        received=f"{need / MIB:,.0f} MiB",
        hint="pause the job or wait for its end; an artifact with packed weights (NF4) needs less "
        "than its model",
    )


def has_room(
    loaded: LoadedModel, lengths: Sequence[int], read: int, job: dict[str, Any] | None
) -> bool:
    """Return True if the keys and values of texts of these lengths fit next to a job, all kept at
    the longest one's; those of `read` tokens are there already."""
    tokens = max(lengths) * len(lengths) - read
    head = loaded.family.head_weight
    need = tokens * cache_bytes(loaded.dims, head.element_size())
    device = head.device.type
    return need <= usable_bytes(device) - job_wants(device, job)


def usable_bytes(device: str) -> int:
    """Return the bytes that can be used now on this machine's `cpu` or `cuda`."""
    return find_device(f"this-{device}").usable_bytes


def job_wants(device: str, job: dict[str, Any] | None) -> int:
    """Return the bytes that a job will still take of the memory of `device`; 0 without a job.

    Raises:
        BusyError: the job cannot be planned, so nobody can say.
    """
    if job is None:
        return 0
    if job["id"] not in _planned:
        _planned.clear()
        try:
            _planned[job["id"]] = plan(job["config"], job["artifact"])
        except OndeviceError as error:
            raise BusyError(
                f"cannot tell how much memory job {job['id']}, which runs, will still take",
                received=error.message,
                hint="pause the job or wait for its end",
            ) from error
    planned = _planned[job["id"]]
    own = planned["device"]
    # A job on a GPU with separate memory needs none of the CPU's.
    if own["torch_device"] != device and find_device(f"this-{device}").kind != "board":
        return 0
    taken = job["peak_device_bytes"]
    if own["kind"] != "gpu":
        taken += job["memory_bytes"]
    return max(0, planned["total_bytes"] - taken)
