"""What an artifact says about itself: the manifest and the README."""

from __future__ import annotations

from dataclasses import asdict
from hashlib import sha256
from importlib.metadata import version
from typing import Any

from ondevice.artifact.manifest import AdapterEntry, GeneratorInfo, Manifest, ModelInfo, ProgramMethod, TensorPort
from ondevice.exporters.base import ExportJob
from ondevice.exporters.executorch.author import settle
from ondevice.exporters.executorch.mesp.job import START
from ondevice.methods.mesp.layout import Ranges


def describe(
    target: str, job: ExportJob, loaded: Any, program: Any, methods: Any, lowered: Any, names: Any
) -> Manifest:
    """The manifest of a program, without its check and its files' hashes."""

    def port(value: Any) -> TensorPort:
        return TensorPort(**asdict(value))

    lowering = settle(job.export)
    template = getattr(loaded.tokenizer, "chat_template", None)
    backend = loaded.tokenizer.backend_tokenizer.to_str()
    step = methods[0].inputs
    npu = any(port.name == "perturbation_scale" for port in step)
    ops = sorted({op for listed in lowered.ops.values() for op in listed if op.startswith("ondevice::")})
    return Manifest(
        ondevice_version=version("ondevice-train"),
        runtime=f"executorch {version('executorch')}",
        target=target,
        method=job.method.model_dump(mode="json"),
        model=ModelInfo(
            source=job.model.source,
            revision=job.model.revision,
            sha256=loaded.source.sha256,
            dims=asdict(loaded.dims),
        ),
        form=job.export.form,
        quantize=job.export.quantize,
        loss=lowering.loss,
        methods={
            method.name: ProgramMethod(
                inputs=tuple(port(value) for value in method.inputs),
                outputs=tuple(port(value) for value in method.outputs),
                planned_bytes=lowered.planned_bytes[method.name],
                ops=tuple(lowered.ops[method.name]),
                delegates=lowered.delegates[method.name],
                instructions=lowered.graph_sizes[method.name],
            )
            for method in methods
        },
        lengths_tokens=tuple(sorted(job.export.lengths_tokens)),
        batch_size=job.export.batch_size,
        eval_batch_size=step[0].shape[0] if npu else job.export.eval_batch_size,
        soc=job.export.soc[0] if npu else None,
        partition=lowered.partition,
        generator=GeneratorInfo(
            distribution=getattr(job.method, "noise", "none"),
            lowering=lowering.generator if job.method.name == "prge" else "none",
            seed=job.seed,
        ),
        adapter_size=program.layout.size,
        adapter=tuple(_entry(entry, names) for entry in program.layout.entries),
        custom_ops=tuple(ops),
        tokenizer_sha256=sha256(backend.encode()).hexdigest(),
        chat_template_sha256=sha256(template.encode()).hexdigest() if template else None,
        task=job.task,
    )


def _entry(entry: Any, names: Any) -> AdapterEntry:
    if not isinstance(entry, Ranges):
        return AdapterEntry(linear=names[(entry.layer, entry.target)], **asdict(entry))
    pair = entry.pair
    shape = {"rank": pair.rank, "inputs": pair.inputs, "outputs": pair.outputs}
    return AdapterEntry(
        linear=pair.name, layer=pair.layer, target=pair.target, offset=entry.b, a_offset=entry.a, **shape
    )


def readme(manifest: Manifest) -> str:
    """The artifact's README: what the program takes and gives, and how to run it."""
    step = manifest.methods["train_step"]
    inputs = ", ".join(f"`{port.name}` {port.dtype} {list(port.shape)}" for port in step.inputs)
    outputs = ", ".join(f"`{port.name}` {port.dtype} {list(port.shape)}" for port in step.outputs)
    ops = ", ".join(manifest.custom_ops) or "none: a stock runtime runs it"
    npu = ""
    if manifest.soc is not None:
        npu = f"""
The blocks run on the NPU of {manifest.soc} through ExecuTorch's QNN backend, everything else on the CPU. Training:
repeat the batch of {manifest.batch_size} for each of the {step.inputs[0].shape[0] // manifest.batch_size} copies, copy
after copy, and pass `perturbation_scale` {manifest.method["perturbation_scale"]:g}. Evaluation: other rows for every
copy and `perturbation_scale` 0; then `nll_sum` and `tokens` are those of the adapter itself; the rest means nothing.
"""
    state = "Feed the adapter that comes out back in, starting from zeros"
    count = "count `step` up from 0; keep `seed` as it is"
    phone = "`ondevice push DIR` puts it into the app. In an app of your own, load"
    if manifest.method["name"] == "mesp":
        moments = ", and the moments, starting from zeros" * ("exp_avg" in [port.name for port in step.inputs])
        state = f"Feed the adapter that comes out back in,\nstarting from `{START}` (float32){moments}"
        count, phone = "count `step` up from 0", "in an app of your own, load"
    if manifest.form == "stateful":
        state = (
            "The program keeps the adapter; `get_adapter` and `set_adapter` take it out and put it in.\n"
            "Load every method "
            "before `set_adapter`: loading one writes zeros into the state"
        )
    return f"""# A training program for {manifest.model.source}

`program.pte` holds whole {manifest.method["name"]} steps for {manifest.runtime}.
Made by `ondevice export --target {manifest.target}`.

- Train here: `ondevice run DIR --data train.jsonl --steps 100`
- Check here: `ondevice verify DIR`
- On a phone: {phone} `program.pte` with the ExecuTorch
  runtime and call `train_step` in a loop.

`train_step` takes {inputs} and gives {outputs}. {state};
{count}. Labels are token ids, -100 where nothing is trained.
{npu}
Kernels of this project that the runtime must link: {ops}.
`manifest.json` lists every method, tensor, kernel and checksum.
"""
