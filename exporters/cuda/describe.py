"""The texts of an artifact for CUDA: manifest, program, launcher and README."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ondevice.core.manifest import (
    GeneratorInfo,
    Manifest,
    ProgramMethod,
    ProgramSpec,
    port,
    token_ports,
)
from ondevice.exporters.base import describe, step_bytes

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims
    from ondevice.core.program import TorchProgram
    from ondevice.core.target import TargetSpec
    from ondevice.exporters.base import ExportJob
    from ondevice.models import LoadedModel

FORMAT = 1
WORDS = {
    "nf4": "NF4 by bitsandbytes: 4 bits a weight in groups of 64, their scales in 8 bits",
    "int8": "INT8: 8 bits a weight, one scale a row",
    "none": "full precision",
}


def program(job: ExportJob, dtype: str, weights_sha256: str) -> str:
    """Describe in `program.json` the method, how the weights are kept, and which weights these are."""
    described = {
        "format": FORMAT,
        "method": job.method.model_dump(mode="json"),
        "quantize": job.export.quantize,
        "dtype": dtype,
        "seed": job.seed,
        "weights": "model/model.safetensors",
        "weights_sha256": weights_sha256,
    }
    return json.dumps(described, indent=2) + "\n"


def manifest(
    spec: TargetSpec, job: ExportJob, loaded: LoadedModel, program: TorchProgram
) -> Manifest:
    """Return the manifest, without its check and its files' hashes."""
    method = job.method
    lengths = sorted(job.export.lengths_tokens)
    planned = step_bytes(loaded.dims, method, job.export.batch_size, lengths[-1], 2)
    noise = getattr(method, "noise", "none")
    return describe(
        spec,
        job,
        loaded,
        "torch",
        program="program.json",
        program_spec=ProgramSpec(
            methods={
                **{
                    f"train_step_{length}": _method(job, length, planned) for length in lengths[:-1]
                },
                "train_step": _method(job, lengths[-1], planned),
            },
            adapter_size=trained_numbers(loaded.dims, method, program.trains_a(method)),
            rank=method.rank,
            alpha=method.alpha,
        ),
        loss="tiled",
        generator=GeneratorInfo(
            distribution=noise, lowering="none" if noise == "none" else "op", seed=job.seed
        ),
        caveats=spec.data.caveats,
    )


def trained_numbers(dims: ModelDims, method: Any, trains_a: bool) -> int:
    """Return numbers that training changes."""
    first = dims.layers - min(dims.layers, getattr(method, "top_layers", None) or dims.layers)
    return method.rank * sum(
        one.outputs + one.inputs * trains_a for one in dims.adapted(method, first)
    )


def _method(job: ExportJob, length: int, planned_bytes: int) -> ProgramMethod:
    losses = port(
        "losses", "losses", (getattr(job.method, "copies", 1),), unit="nats a labelled token"
    )
    return ProgramMethod(
        inputs=token_ports(job.export.batch_size, length), outputs=(losses,), planned_bytes=planned_bytes,
        ops=(), delegates=0, instructions=0,
    )  # fmt: skip


def launcher(memory_limit: str | int | None) -> str:
    """Return `run.sh`: `ondevice run` on the folder that it lies in."""
    guard = ""
    if memory_limit:
        limit = f'    set -- --memory-limit "${{ONDEVICE_MEMORY_LIMIT:-{memory_limit}}}" "$@"\n'
        guard = f'case " $* " in\n*" --memory-limit "*) ;;\n*)\n{limit}    ;;\nesac\n'
    return f"""#!/bin/sh
# Fine-tunes with this artifact:   ./run.sh --data rows.jsonl --steps 100 --out runs/mine
set -eu
here=$(cd "$(dirname "$0")" && pwd)
export TOKENIZERS_PARALLELISM=false
{guard}exec ondevice run "$here" "$@"
"""


def readme(manifest: Manifest, dtype: str, files: tuple[str, ...]) -> str:
    """Return the artifact's README."""
    method = manifest.method
    lengths = ", ".join(map(str, manifest.lengths_tokens))
    caveats = "".join(f"\n**{caveat}.**\n" for caveat in manifest.caveats)
    listed = ", ".join(f"`{name}`" for name in files)
    return f"""# {manifest.model.source}, trained by {method["name"]} on an NVIDIA GPU

Weights: {WORDS[manifest.quantize]}.
Activations, embedding and head in {dtype}. Batches of {manifest.batch_size} rows, padded on the right to {lengths}
tokens. Exported with {manifest.runtime}; it runs on CUDA if there is a device, else on the CPU.
{caveats}
    ondevice doctor --target {manifest.target}
    ./run.sh --data rows.jsonl --out runs/mine
    ondevice eval DIR --data rows.jsonl --adapter runs/mine/adapter
    ondevice verify DIR
    ondevice fuse DIR runs/mine/adapter --out merged

They say whether this machine works (a real NF4 kernel), train here (`run.sh` takes the flags of `ondevice run`),
evaluate, hold the artifact against the model that it was made from, and put the adapter into that model's weights.

- {listed}: what to install, pinned, with the commands at their head.
- `model/`: a checkpoint in transformers' form; `transformers.AutoModelForCausalLM.from_pretrained` loads it too.
- `program.json`: method and settings. `manifest.json`: shapes, hashes, and what the check measured.
"""
