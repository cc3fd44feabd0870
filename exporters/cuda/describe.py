"""What an artifact for CUDA says about itself: manifest, program, launcher and README."""

from __future__ import annotations

import importlib
import json
from dataclasses import asdict
from hashlib import sha256
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ondevice.artifact.manifest import GeneratorInfo, Manifest, ModelInfo, ProgramMethod, TensorPort

if TYPE_CHECKING:
    from ondevice.exporters.base import ExportJob
    from ondevice.models import LoadedModel, ModelDims

FORMAT = 1
WORDS = {
    "nf4": "NF4 by bitsandbytes: 4 bits a weight in groups of 64, their scales in 8 bits",
    "int8": "INT8: 8 bits a weight, one scale a row",
    "none": "full precision",
}


def program(job: ExportJob, dtype: str, weights_sha256: str) -> str:
    """`program.json`: the method, how the weights are kept, and which weights these are."""
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


def describe(target: str, job: ExportJob, loaded: LoadedModel, caveats: tuple[str, ...]) -> Manifest:
    """The manifest, without its check and its files' hashes."""
    template = getattr(loaded.tokenizer, "chat_template", None)
    backend: Any = getattr(loaded.tokenizer, "backend_tokenizer").to_str()  # noqa: B009 - not in its base class
    lengths, method = tuple(sorted(job.export.lengths_tokens)), job.method
    planned = step_bytes(loaded.dims, method, job.export.batch_size, max(lengths))
    return Manifest(
        ondevice_version=version("ondevice-train"),
        runtime=f"torch {version('torch')}",
        target=target,
        method=method.model_dump(mode="json"),
        model=ModelInfo(
            source=job.model.source,
            revision=job.model.revision,
            sha256=loaded.source.sha256,
            dims=asdict(loaded.dims),
        ),
        program="program.json",
        form="functional",
        quantize=job.export.quantize,
        loss="tiled",
        methods={
            "train_step" if length == max(lengths) else f"train_step_{length}": _ports(job, length, planned)
            for length in lengths
        },
        lengths_tokens=lengths,
        batch_size=job.export.batch_size,
        eval_batch_size=job.export.eval_batch_size,
        generator=GeneratorInfo(
            distribution=getattr(method, "noise", "none"),
            lowering="op" if method.name == "prge" else "none",
            seed=job.seed,
        ),
        adapter_size=trained_numbers(loaded.dims, method),
        adapter=(),
        tokenizer_sha256=sha256(backend.encode()).hexdigest(),
        chat_template_sha256=sha256(template.encode()).hexdigest() if template else None,
        task=job.task,
        caveats=caveats,
    )


def step_bytes(dims: ModelDims, method: Any, batch_size: int, length_tokens: int, activation_bytes: int = 2) -> int:
    """What a step needs beside weights and adapter."""
    package = "lora" if method.name == "lora-fa" else method.name
    module = importlib.import_module(f"ondevice.methods.{package}.memory")
    parts = module.memory(dims, method, batch_size, length_tokens, activation_bytes)
    return sum(size for part, size in parts.items() if part not in ("adapter", "optimizer"))


def trained_numbers(dims: ModelDims, method: Any) -> int:
    """Numbers that training changes."""
    layers = min(dims.layers, getattr(method, "top_layers", None) or dims.layers)
    both = method.name in ("lora", "mesp")
    shapes = [dims.linear_shape(target) for target in method.targets]
    return layers * method.rank * sum(outputs + inputs * both for inputs, outputs in shapes)


def _ports(job: ExportJob, length: int, planned_bytes: int) -> ProgramMethod:
    shape = (job.export.batch_size, length)
    inputs = tuple(TensorPort(name=name, dtype="int64", shape=shape, unit="token ids") for name in ("ids", "labels"))
    copies = getattr(job.method, "copies", 1)
    losses = TensorPort(name="losses", dtype="float32", shape=(copies,), unit="nats a labelled token")
    return ProgramMethod(
        inputs=inputs, outputs=(losses,), planned_bytes=planned_bytes, ops=(), delegates=0, instructions=0
    )


def launcher(memory_limit: str | int | None) -> str:
    """`run.sh`: `ondevice run` on the folder that it lies in."""
    limit = f'    set -- --memory-limit "${{ONDEVICE_MEMORY_LIMIT:-{memory_limit}}}" "$@"\n' if memory_limit else ""
    guard = f'case " $* " in\n*" --memory-limit "*) ;;\n*)\n{limit}    ;;\nesac\n' if limit else ""
    return f"""#!/bin/sh
# Fine-tunes with this artifact:   ./run.sh --data rows.jsonl --steps 100 --out runs/mine
set -eu
here=$(cd "$(dirname "$0")" && pwd)
export TOKENIZERS_PARALLELISM=false
{guard}exec ondevice run "$here" "$@"
"""


def readme(manifest: Manifest, dtype: str, files: tuple[str, ...]) -> str:
    """The artifact's README."""
    method = manifest.method
    lengths = ", ".join(map(str, manifest.lengths_tokens))
    caveats = "".join(f"\n**{caveat}.**\n" for caveat in manifest.caveats)
    listed = ", ".join(f"`{name}`" for name in files)
    return f"""# {manifest.model.source}, trained by {method["name"]} on an NVIDIA GPU

Weights: {WORDS[manifest.quantize]}.
Activations, embedding and head in {dtype}. Batches of {manifest.batch_size} rows, padded on the right to {lengths}
tokens. Exported with {manifest.runtime}; it runs on CUDA where there is a device, else on the CPU.
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
