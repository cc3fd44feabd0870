"""An export for MLX: stage functions, their order as data, weights a block a file, and the check
through them."""

from __future__ import annotations

import importlib.util
import json
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.artifact.adapter import save_adapter
from ondevice.artifact.files import atomic_directory
from ondevice.artifact.manifest import MANIFEST_NAME, write_manifest
from ondevice.core.errors import ArtifactError, ConfigError, OndeviceError, VerificationError
from ondevice.core.manifest import GeneratorInfo, Manifest, ProgramSpec
from ondevice.core.registry import method_config, open_session, spec_of
from ondevice.core.untrusted import read_object
from ondevice.exporters.apple_mlx import retarget
from ondevice.exporters.base import (
    DEFAULT_STEPS,
    Exporter,
    ExportJob,
    ExportReport,
    VerifyRequest,
    check_free,
    check_model,
    describe,
    name_state,
    size_problems,
    step_bytes,
    write_task,
)
from ondevice.models import open_model, save_tokenizer
from ondevice.models.text_model import text_family

if TYPE_CHECKING:
    from ondevice.core.program import StagesProgram
    from ondevice.core.session import ProgramSession
    from ondevice.models import ModelFiles

log = logging.getLogger("ondevice.exporters")
LOSS_TOLERANCE = 1e-5
"""Relative error of a loss."""
ADAPTER_TOLERANCE = 1e-4
"""Largest error of a trained number."""


class AppleMlx(Exporter):
    """Programs of stage functions, with weights as their inputs."""

    def check(self, job: ExportJob) -> list[str]:
        """See `Exporter.check`."""
        problems = []
        if importlib.util.find_spec("mlx") is None:
            problems.append("mlx is not installed: pip install 'ondevice-train[mlx]'")
        if self.spec.kind not in spec_of(job.method).programs:
            return [*problems, self.no_program(job.method)]
        if problems:
            return problems  # nothing of a program can be asked
        program: StagesProgram = self.program(job.method)
        problems += program.problems(None, job.method)
        if job.export.quantize != "none":
            problems.append(
                f"quantize {job.export.quantize} is not MLX's: --set method.bits=4 packs the weights"
            )
        if job.export.context_tokens:
            problems.append(
                "context_tokens is for android-cpu: mlx-lm answers here, ondevice convert --to mlx"
            )
        if job.export.form != "functional":
            problems.append(f"form {job.export.form}: MLX programs are functional")
        try:
            files = _files(job)
            if not problems:
                program.problems(files, job.method)
            return problems + size_problems(job, files.dims)
        except OndeviceError as error:
            return [*problems, error.reason]

    def export(self, job: ExportJob, out: Path) -> ExportReport:
        """Record, export, write, check through the imported functions; see `Exporter.export`."""
        problems = self.check(job)
        if problems:
            raise ConfigError("cannot export: " + "; ".join(problems))
        out = Path(out)
        check_free(out, job.overwrite)
        log.info("loading %s", job.model.source)
        files = _files(job)
        session: Any = open_session(files, job.method, job.seed, backend="mlx")
        began = time.monotonic()
        with atomic_directory(out, marker=MANIFEST_NAME) as folder:
            manifest, functions_folder = self._write(job, files, session, folder)
            seconds = time.monotonic() - began
            write_manifest(manifest, folder)
            log.info("exported in %.0f s; checking the functions against Python", seconds)
            # Through the files, as a host reads them: what MLX exports but cannot import again
            # shows here.
            program = self.open(folder, manifest)
            rate = job.method.learning_rate
            check = compare(program, session, files.dims.vocab, job.export.check_steps, rate)
            program_spec = name_state(
                manifest.program_spec, program, "adapter/adapter_model.safetensors"
            )
            program.close()
            if not check["ok"]:
                raise VerificationError(
                    "the exported functions differ from Python's stages; nothing was written",
                    received=json.dumps(check),
                )
            manifest = manifest.model_copy(update={"check": check, "program_spec": program_spec})
            write_manifest(manifest, folder)
            size = sum(path.stat().st_size for path in (folder / functions_folder).iterdir())
        longest = max(job.export.lengths_tokens)
        peak = step_bytes(files.dims, job.method, job.export.batch_size, longest, 4)
        return ExportReport(
            path=out, target=self.spec.name, program_bytes=size, lowering_s=seconds, planned_bytes={"train_step": peak},
            custom_ops=(), check=check, warnings=manifest.caveats, partition={"train_step": ()},
        )  # fmt: skip

    def _write(
        self, job: ExportJob, files: Any, session: Any, folder: Path
    ) -> tuple[Manifest, str]:
        """Everything but `manifest.json`; gives the folder of the functions for this machine's
        device, too."""
        from ondevice.exporters.apple_mlx.functions import FUNCTIONS, device

        caveats = ()
        functions_folder = FUNCTIONS[device()]
        methods = self.program(job.method).write(
            session, files, job.method, job.export, folder, folder / functions_folder
        )
        # Operations carry the device that they were recorded on, and a Mac runs on its GPU.
        if functions_folder == FUNCTIONS["cpu"]:
            (folder / FUNCTIONS["gpu"]).mkdir()
            for path in (folder / functions_folder).iterdir():
                (folder / FUNCTIONS["gpu"] / path.name).write_bytes(
                    retarget.retarget(path.read_bytes())
                )
            caveats = (retarget.CAVEAT,)
        save_adapter(adapter := session.adapter(), folder / "adapter")
        save_tokenizer(files, folder / "tokenizer")
        write_task(job, files, folder)
        bits = session.model.settings.bits
        manifest = describe(
            self.spec,
            job,
            files,
            "mlx",
            program="program.json",
            program_spec=ProgramSpec(
                shape="stages",
                methods=methods,
                adapter_size=sum(value.size for value in adapter.tensors.values()),
                rank=adapter.rank,
                alpha=adapter.alpha,
            ),
            quantize=f"q{bits}" if bits else "none",
            loss="tiled",
            eval_batch_size=job.export.batch_size,
            generator=GeneratorInfo(distribution="none", lowering="none", seed=job.seed),
            caveats=caveats,
        )
        (folder / "README.md").write_text(readme(manifest, functions_folder), encoding="utf-8")
        return manifest, functions_folder

    def open(
        self, folder: Path, manifest: Manifest, streamed: bool | None = None
    ) -> ProgramSession:
        """Return a session on MLX's default device.

        Args:
            streamed: read the weights block by block; None: as the method's settings say.
        """
        from ondevice.exporters.apple_mlx.functions import ImportedFunctions

        listed = self._program(Path(folder), manifest)["functions"]
        program: StagesProgram = self.program(
            method_config(manifest.method["name"], manifest.method)
        )
        return program.open(
            Path(folder), manifest, ImportedFunctions(Path(folder), listed), streamed
        )

    def _program(self, folder: Path, manifest: Manifest) -> dict[str, Any]:
        """Return the program's description with the fields that are read here."""
        path = folder / manifest.program
        hint = "copy the artifact again"
        program = read_object(path, ArtifactError, hint=hint)
        if not isinstance(program.get("functions"), dict) or not isinstance(
            program.get("dtype"), str
        ):
            raise ArtifactError(
                f"{path}: fields 'functions' and 'dtype'",
                expected="an object and a name",
                hint=hint,
            )
        return program

    def verify(self, folder: Path, manifest: Manifest, request: VerifyRequest) -> dict[str, Any]:
        """Return the artifact's functions against Python's own stages over the model's own files."""
        request.refuse_directions(manifest.target)
        source = request.model or manifest.model.source
        session = self.open(folder, manifest)
        config = method_config(manifest.method["name"], manifest.method)
        dtype = self._program(folder, manifest)["dtype"]
        files = open_model(
            source, revision=manifest.model.revision, dtype=dtype, packed=True, text=text_family
        )
        check_model(files, source, manifest)
        reference = open_session(files, config, session.seed, backend="mlx")
        steps = request.steps or DEFAULT_STEPS
        batches = None
        if request.rows is not None:
            batches = request.rows(session, files.tokenizer, steps)
        result = compare(session, reference, files.dims.vocab, steps, config.learning_rate, batches)
        session.close()
        return {**result, "backend": session.backend}


def random_batch(session: Any, vocab: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a batch of the program's shape, buckets in turn; prompts are not trained on, rows end
    early."""
    random = np.random.default_rng([session.seed, step])
    length = session.lengths_tokens[step % len(session.lengths_tokens)]
    ids = random.integers(0, vocab, (session.batch_size, length))
    labels = ids.copy()
    labels[:, : length // 4] = -100
    for row in range(1, session.batch_size):
        labels[row, length - row % (length // 2) :] = -100
    return ids, labels


def compare(
    session: Any, reference: Any, vocab: int, steps: int, rate: float, batches: Any = None
) -> dict[str, Any]:
    """Run the same steps on both sides.

    Returns:
        `steps`, `max_rel_loss_error`, `max_rel_loss_error_replayed` (the same: nothing is
        replayed), `max_abs_adapter_error`, `evaluation_error`, and `ok`.
    """
    errors = []
    batch = None
    for step, batch in enumerate(
        batches or (random_batch(session, vocab, step) for step in range(steps))
    ):
        expected = reference.step(*batch, step, rate).loss
        errors.append(abs(session.step(*batch, step, rate).loss - expected) / abs(expected))
    assert batch is not None  # noqa: S101 - at least one step
    ours, count = session.evaluate(*batch)
    theirs, same = reference.evaluate(*batch)
    evaluation = np.inf
    if np.array_equal(count, same):
        evaluation = float(np.abs(ours - theirs).max() / np.abs(theirs).max())
    trained = reference.adapter().tensors
    adapter = max(
        float(np.abs(value - trained[name]).max())
        for name, value in session.adapter().tensors.items()
    )
    loss = max(errors)
    return {
        "steps": len(errors),
        "max_rel_loss_error": loss,
        "max_rel_loss_error_replayed": loss,
        "max_abs_adapter_error": adapter,
        "evaluation_error": evaluation,
        "ok": bool(max(loss, evaluation) <= LOSS_TOLERANCE and adapter <= ADAPTER_TOLERANCE),
    }


def _files(job: ExportJob) -> ModelFiles:
    model = job.model
    return open_model(
        model.source, revision=model.revision, dtype=model.dtype, packed=True, text=text_family
    )


def readme(manifest: Manifest, functions_folder: str) -> str:
    """Return the artifact's README; `functions_folder` is the folder of the functions that MLX
    exported."""
    places = {
        "functions": "the CPU, shared by all layers, weights are inputs; `functions-gpu/`: for Metal.",
        "functions-gpu": "Metal, shared by all layers, weights are inputs; for the CPU there is none.",
    }[functions_folder]
    lengths = ", ".join(map(str, manifest.lengths_tokens))
    caveats = "".join(f"\n**{caveat}.**\n" for caveat in manifest.caveats)
    return f"""# {manifest.model.source}, trained by {manifest.method["name"]} in MLX

Exact LoRA gradients of batches of {manifest.batch_size} rows, padded on the right to {lengths} tokens.
Runtime: {manifest.runtime}.
{caveats}
    ondevice run DIR --data rows.jsonl --out runs/mine     trains here
    ondevice verify DIR                                    holds the functions against Python
    exporters/apple_mlx/host                                     a C++ program that trains without Python
    exporters/apple_mlx/swift                                    a Swift package for apps

- `program.json`: functions, and the order in which they are called for a block, forward and backward, with what may be
  freed after each call.
- `{functions_folder}/`: one `.mlxfn` a stage for {places}
- `weights/`: one file a block, so that weights can be read a block at a time; `table.safetensors` is the embedding.
- `adapter/`: A and B as training starts, in PEFT's layout. `manifest.json`: what functions take and give, hashes.
"""
