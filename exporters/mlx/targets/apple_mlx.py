"""MeSP as a program for MLX: a Mac, an iPhone, or MLX's CPU backend."""

from __future__ import annotations

import importlib.util
import json
import logging
import time
from dataclasses import asdict
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ondevice.artifact.adapter import save_adapter
from ondevice.artifact.files import atomic_directory
from ondevice.artifact.manifest import MANIFEST_NAME, GeneratorInfo, Manifest, ModelInfo, write_manifest
from ondevice.errors import ConfigError, OndeviceError, VerificationError
from ondevice.exporters.base import ExportJob, ExportReport, check_free
from ondevice.methods.mesp.config import MespConfig

if TYPE_CHECKING:
    from ondevice.methods.mesp.mlx.session import MlxSession

log = logging.getLogger("ondevice.exporters")
PROGRAM = "program.json"


class Target:
    """`apple-mlx`."""

    name = "apple-mlx"
    socs: ClassVar[dict[str, str]] = {}
    perturbation_scale: ClassVar[float | None] = None

    def check(self, job: ExportJob) -> list[str]:
        """Every reason why `job` cannot be exported; no weights are loaded."""
        from ondevice.models import open_model

        problems, method = [], job.method
        if importlib.util.find_spec("mlx") is None:
            problems.append("mlx is not installed: pip install 'ondevice-train[mlx]'")
        if not isinstance(method, MespConfig):
            return [*problems, f"method {method.name} does not export to {self.name}: use --method mesp"]
        if method.gradients != "manual":
            problems.append(f"gradients: {method.gradients} is a baseline: export gradients: manual")
        if method.micro_batch_size is not None:
            problems.append("micro_batch_size: a program computes export.batch_size rows at once")
        if job.export.quantize != "none":
            problems.append(f"quantize {job.export.quantize} is not MLX's: --set method.bits=4 packs the weights")
        if job.export.form != "functional":
            problems.append(f"form {job.export.form}: MLX programs are functional")
        try:
            files = open_model(job.model.source, revision=job.model.revision, dtype=job.model.dtype, packed=True)
            if not problems:
                from ondevice.methods.mesp.mlx.session import check_config, settings_of

                check_config(method)
                settings_of(files, method)
        except OndeviceError as error:
            return [*problems, str(error)]
        if max(job.export.lengths_tokens) > files.dims.max_positions:
            longest = max(job.export.lengths_tokens)
            problems.append(f"lengths_tokens {longest} exceeds the model's {files.dims.max_positions} positions")
        return problems

    def export(self, job: ExportJob, out: Path) -> ExportReport:
        """Record, export, write, check through the imported functions; see `Exporter.export`."""
        problems = self.check(job)
        if problems:
            raise ConfigError("cannot export: " + "; ".join(problems))
        out = Path(out)
        check_free(out, job.overwrite)
        from ondevice.exporters.mlx.check import compare
        from ondevice.methods.mesp.mlx.session import open_session
        from ondevice.models import open_model
        from ondevice.runtime.mlx import MlxProgramSession

        log.info("loading %s", job.model.source)
        files = open_model(job.model.source, revision=job.model.revision, dtype=job.model.dtype, packed=True)
        session = open_session(files, job.method, job.seed)
        began = time.monotonic()
        with atomic_directory(out, marker=MANIFEST_NAME) as folder:
            manifest, made = self._write(job, files, session, folder)
            seconds = time.monotonic() - began
            write_manifest(manifest, folder)
            log.info("exported in %.0f s; checking the functions against Python", seconds)
            program = MlxProgramSession(folder, manifest)
            rate = job.method.learning_rate
            check = compare(program, session, files.dims.vocab, job.export.check_steps, rate)
            program.close()
            if not check["ok"]:
                raise VerificationError(
                    "the exported functions do not do what Python's stages do; nothing was written",
                    received=json.dumps(check),
                )
            manifest = manifest.model_copy(update={"check": check})
            write_manifest(manifest, folder)
            size = sum(path.stat().st_size for path in (folder / made).iterdir())
        peak = _step_bytes(job, files.dims)
        return ExportReport(
            path=out, target=self.name, program_bytes=size, lowering_s=seconds, planned_bytes={"train_step": peak},
            custom_ops=(), check=check, warnings=manifest.caveats, partition={"train_step": ()},
        )  # fmt: skip

    def _write(self, job: ExportJob, files: Any, session: MlxSession, folder: Path) -> tuple[Manifest, str]:
        """Everything but `manifest.json`; gives the folder of the functions for this machine's device, too."""
        import mlx.core as mx

        from ondevice.exporters.mlx import functions, retarget
        from ondevice.exporters.mlx.program import program
        from ondevice.methods.mesp.mlx.load import Source, write_weights
        from ondevice.models import save_tokenizer
        from ondevice.runtime.mlx import FUNCTIONS

        lengths, caveats = tuple(sorted(job.export.lengths_tokens)), ()
        made = FUNCTIONS["gpu" if mx.default_device().type == mx.DeviceType.gpu else "cpu"]
        recording = functions.record(session.model, job.method, job.export.batch_size, lengths)
        listed = functions.export_functions(recording, folder / made)
        if made == FUNCTIONS["cpu"]:
            (folder / FUNCTIONS["gpu"]).mkdir()
            for path in (folder / made).iterdir():
                (folder / FUNCTIONS["gpu"] / path.name).write_bytes(retarget.retarget(path.read_bytes()))
            caveats = (retarget.CAVEAT,)
        (folder / "weights").mkdir()
        source = Source(files.folder, session.model.settings, files.family.linear_parents)
        write_weights(source, folder / "weights")
        source.close()
        save_adapter(session.adapter(), folder / "adapter")
        save_tokenizer(files, folder / "tokenizer")
        described = program(session.model, job.method, session.pairs, listed, job.export.batch_size, lengths,
                            version("mlx"))  # fmt: skip
        (folder / PROGRAM).write_text(json.dumps(described) + "\n", encoding="utf-8")
        manifest = self._manifest(job, files, session, functions.ports(recording), caveats)
        (folder / "README.md").write_text(readme(manifest, made), encoding="utf-8")
        return manifest, made

    def _manifest(self, job: ExportJob, files: Any, session: MlxSession, ports: Any, caveats: Any) -> Manifest:
        template = getattr(files.tokenizer, "chat_template", None)
        backend = files.tokenizer.backend_tokenizer.to_str()
        return Manifest(
            ondevice_version=version("ondevice-train"),
            runtime=f"mlx {version('mlx')}",
            target=self.name,
            method=job.method.model_dump(mode="json"),
            model=ModelInfo(source=job.model.source, revision=job.model.revision, sha256=files.source.sha256,
                            dims=asdict(files.dims)),
            program=PROGRAM,
            form="functional",
            quantize=f"q{session.model.settings.bits}" if session.model.settings.bits else "none",
            loss="tiled",
            methods=ports,
            lengths_tokens=tuple(sorted(job.export.lengths_tokens)),
            batch_size=job.export.batch_size,
            eval_batch_size=job.export.batch_size,
            generator=GeneratorInfo(distribution="none", lowering="none", seed=job.seed),
            adapter_size=sum(pair.count for pair in session.pairs),
            adapter=(),
            tokenizer_sha256=sha256(backend.encode()).hexdigest(),
            chat_template_sha256=sha256(template.encode()).hexdigest() if template else None,
            task=job.task,
            caveats=caveats,
        )  # fmt: skip


def _step_bytes(job: ExportJob, dims: Any) -> int:
    """What a step of the longest bucket needs beside weights and adapter."""
    from ondevice.methods.mesp.memory import memory

    parts = memory(dims, job.method, job.export.batch_size, max(job.export.lengths_tokens))
    return sum(size for part, size in parts.items() if part not in ("adapter", "optimizer"))


def readme(manifest: Manifest, made: str) -> str:
    """The artifact's README; `made` is the folder of the functions that MLX exported."""
    places = {
        "functions": "the CPU, shared by all layers, weights are inputs; `functions-gpu/`: for Metal.",
        "functions-gpu": "Metal, shared by all layers, weights are inputs; for the CPU there is none.",
    }[made]
    lengths = ", ".join(map(str, manifest.lengths_tokens))
    caveats = "".join(f"\n**{caveat}.**\n" for caveat in manifest.caveats)
    return f"""# {manifest.model.source}, trained by {manifest.method["name"]} in MLX

Exact LoRA gradients of batches of {manifest.batch_size} rows, padded on the right to {lengths} tokens.
Runtime: {manifest.runtime}.
{caveats}
    ondevice run DIR --data rows.jsonl --out runs/mine     trains here
    ondevice verify DIR                                    holds the functions against Python
    exporters/mlx/host                                     a C++ program that trains without Python
    exporters/mlx/swift                                    a Swift package for apps

- `program.json`: functions, and the order in which they are called for a block, forward and backward, with what may be
  freed after each call.
- `{made}/`: one `.mlxfn` a stage for {places}
- `weights/`: one file a block, so that weights can be read a block at a time; `table.safetensors` is the embedding.
- `adapter/`: A and B as training starts, in PEFT's layout. `manifest.json`: what functions take and give, hashes.
"""
