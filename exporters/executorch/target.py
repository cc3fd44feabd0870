"""The order of an export to ExecuTorch: look for problems, load, build, lower, write, and check in
the runtime."""

from __future__ import annotations

import importlib.util
import logging
import tempfile
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.artifact.adapter import load_adapter, save_adapter
from ondevice.artifact.files import atomic_directory
from ondevice.artifact.manifest import ANSWERS, MANIFEST_NAME, write_manifest
from ondevice.artifact.weights import WEIGHTS_NAME, MappedWeights, write_weights
from ondevice.core.config import ExportConfig
from ondevice.core.errors import ConfigError, OndeviceError, VerificationError
from ondevice.core.manifest import GeneratorInfo, Manifest, ProgramMethod, ProgramSpec
from ondevice.core.program import FUSED
from ondevice.core.registry import method_config
from ondevice.exporters.base import (
    Exporter,
    ExportJob,
    ExportReport,
    VerifyRequest,
    check_free,
    check_model,
    describe,
    size_problems,
    write_task,
)
from ondevice.exporters.executorch.layers import LAYER_PROGRAM, write_layers
from ondevice.exporters.executorch.readme import readme
from ondevice.models import save_tokenizer
from ondevice.models.text_model import load_text_model, text_dims

if TYPE_CHECKING:
    from ondevice.artifact.adapter import Adapter
    from ondevice.core.dims import ModelDims
    from ondevice.core.program import BuiltProgram, GraphProgram
    from ondevice.exporters.executorch.lower import Lowered
    from ondevice.exporters.executorch.session import ExecutorchSession
    from ondevice.models import LoadedModel

CALIBRATION_ROWS = 64
"""Rows of the task that 4-bit levels are chosen on."""
ROUNDING_ROWS = "rounding_rows"
"""Their number in the manifest's check."""
log = logging.getLogger("ondevice.exporters")
FIRST, FROZEN = "state_first.safetensors", "frozen_a.safetensors"
"""Files of a program's state: what a run starts from, and the A matrices that are not trained."""


class ExecutorchTarget(Exporter):
    """An export in order; a subclass says what its target takes, lowers, and checks."""

    @abstractmethod
    def problems(self, job: ExportJob, dims: ModelDims) -> list[str]:
        """Return settings that only this target minds."""

    @abstractmethod
    def lower(
        self, job: ExportJob, built: BuiltProgram, folder: Path
    ) -> tuple[BuiltProgram, Lowered]:
        """Return the built program with all its modules, and what they came to; files next to
        `program.pte` go into `folder`."""

    @abstractmethod
    def check_program(
        self, session: ExecutorchSession, program: GraphProgram, built: BuiltProgram, job: ExportJob
    ) -> tuple[dict[str, Any], list[str]]:
        """Return measured values and warnings.

        Raises:
            VerificationError: the program is wrong.
        """

    @abstractmethod
    def open(self, folder: Path, manifest: Manifest) -> ExecutorchSession:
        """See `Exporter.open`."""

    def check(self, job: ExportJob) -> list[str]:
        """See `Exporter.check`."""
        problems = []
        if importlib.util.find_spec("executorch") is None:
            problems.append("executorch is not installed: pip install 'ondevice-train[executorch]'")
        if importlib.util.find_spec("torch") is None:
            return problems  # nothing of a program can be asked
        program: GraphProgram | None = self.program(job.method)
        if program is None:
            return [*problems, self.no_program(job.method)]
        try:
            dims, _ = text_dims(job.model.source, job.model.revision)
        except OndeviceError as error:
            return [*problems, error.reason]
        try:
            if dims.whole:
                raise dims.unknown("lowering a step")
            if not dims.gated:
                dims.linear_shape(job.method.target_modules[0])  # refuses, in the family's words
            dims.adapted(job.method)
        except OndeviceError as error:
            problems.append(error.reason)
        problems += program.problems(job.method, job.export, dims)
        problems += _rounding_problems(job, program)
        if context := job.export.packed_context:
            from ondevice.exporters.executorch import answer_model

            problems += answer_model.problems(dims, context)
            if importlib.util.find_spec("torchao") is None and job.export.quantize != "none":
                problems.append(
                    "torchao is not installed: pip install 'ondevice-train[executorch]'"
                )
        return [*problems, *size_problems(job, dims), *self.problems(job, dims)]

    def export(self, job: ExportJob, out: Path) -> ExportReport:
        """See `Exporter.export`."""
        if problems := self.check(job):
            raise ConfigError("cannot export: " + "; ".join(problems))
        out = Path(out)
        program = self.program(job.method)
        check_free(out, job.overwrite)
        log.info("loading %s", job.model.source)
        loaded = load_text_model(
            job.model.source, revision=job.model.revision, dtype="float32", device="cpu"
        )
        first: Mapping[str, np.ndarray] = {}
        if job.rows is not None and program.calibrate is not None:
            if found := program.calibrate(loaded, job.method, job.rows, job.seed):
                method, first = found
                job = replace(job, method=method)
        chosen = choose_levels(job, program, loaded)
        built = program.build(loaded, job.method, job.export, job.seed)
        built = replace(built, first={**built.first, **first})
        with atomic_directory(out, marker=MANIFEST_NAME) as folder:
            built, lowered = self.lower(job, built, folder)
            manifest = self.write(job, loaded, built, lowered, folder)
            log.info("lowered in %.0f s; checking the program against eager", lowered.seconds)
            # Inside the block: a program that fails its check raises here, and nothing is written.
            session = self.open(folder, manifest)
            check, warnings = self.check_program(session, program, built, job)
            if chosen:
                check |= {ROUNDING_ROWS: chosen}
            check_round_trip(session)
            if job.export.packed_context:
                check |= self.write_answers(job, session.adapter(), folder / ANSWERS)
            session.close()
            manifest = manifest.model_copy(update={"check": {**check, "adapter_round_trip": True}})
            write_manifest(manifest, folder)
            program_bytes = sum(path.stat().st_size for path in folder.rglob("*.pte"))
        return ExportReport(
            path=out,
            target=self.spec.name,
            program_bytes=program_bytes,
            lowering_s=lowered.seconds,
            planned_bytes=lowered.planned_bytes,
            custom_ops=manifest.custom_ops,
            check=manifest.check,
            warnings=tuple(warnings),
            partition=lowered.partition,
        )

    def write(
        self,
        job: ExportJob,
        loaded: LoadedModel,
        built: BuiltProgram,
        lowered: Lowered,
        folder: Path,
    ) -> Manifest:
        """Write program, weights, state and tokenizer; the manifest is not written, as its check is
        still to come."""
        (folder / "program.pte").write_bytes(lowered.buffer)
        save_tokenizer(loaded, folder / "tokenizer")
        write_task(job, loaded, folder)
        _save_state(built, folder)
        if lowered.of_layers and built.constants_of_layers is not None:
            write_layers(folder, lowered.of_layers, built.kinds, built.constants_of_layers)
        if built.weights:
            write_weights(folder / WEIGHTS_NAME, built.weights)
        manifest = self._describe(job, loaded, built, lowered)
        (folder / "README.md").write_text(readme(manifest), encoding="utf-8")
        return manifest

    def write_answers(self, job: ExportJob, adapter: Adapter, folder: Path) -> dict[str, float]:
        """Write the program that answers with packed weights, of the model as it was before
        anything was rounded, and return what its check found, under an adapter of the run's shape.
        """
        from ondevice.exporters.executorch.answers import (
            FORMS,
            check_answers,
            trial_adapter,
            write_answers,
        )

        loaded = load_text_model(
            job.model.source, revision=job.model.revision, dtype="float32", device="cpu"
        )
        form = FORMS[job.export.quantize]
        context = job.export.packed_context or 0
        model, described = write_answers(
            folder, loaded, form, context, adapter.linears, adapter.rank
        )
        tried = check_answers(folder, model, described, loaded, trial_adapter(described))
        return {f"answers_{name}": value for name, value in tried.items()}

    def _describe(
        self, job: ExportJob, loaded: LoadedModel, built: BuiltProgram, lowered: Lowered
    ) -> Manifest:
        """The manifest, without its check and its files' hashes."""
        noise = built.noise != "none"
        uses_ops = self.program(job.method).uses_ops(job.export)
        export = job.export
        if not uses_ops:
            export = export.model_copy(update={"quantize": "none"})
        export = export.resolved()
        ops = sorted(
            {
                op
                for name, listed in lowered.ops.items()
                for op in listed
                if op.startswith("ondevice::") and not name.startswith(FUSED)
            }
        )
        step = built.modules[0]
        (adapter,) = (tensor for tensor in built.state if tensor.role == "adapter")
        state = []
        for tensor in built.state:
            if tensor.name in built.first:
                tensor = tensor.model_copy(update={"first": FIRST})
            state.append(tensor)
        program = ProgramSpec(
            shape=built.shape,
            layers=built.layers,
            kinds=built.kinds,
            loss_scale=built.loss_scale,
            weights=WEIGHTS_NAME if built.weights else None,
            vocab=loaded.dims.vocab if built.shape == "blocks" else 0,
            methods={
                module.name: ProgramMethod(
                    inputs=module.inputs,
                    outputs=module.outputs,
                    planned_bytes=lowered.planned_bytes[module.name],
                    ops=tuple(lowered.ops[module.name]),
                    delegates=lowered.delegates[module.name],
                    instructions=lowered.graph_sizes[module.name],
                    program=LAYER_PROGRAM if module.per_layer else None,
                )
                for module in built.modules
            },
            state=tuple(state),
            counters=built.counters,
            constants=built.constants,
            batch_copies=built.batch_copies,
            evaluates_with=built.evaluates_with,
            frozen=FROZEN if built.frozen else None,
            layout=built.layout,
            adapter_size=adapter.shape[0],
            rank=built.rank,
            alpha=built.alpha,
        )
        # A compiled graph has one method's name, so an NPU's training step evaluates too, with its
        # own rows.
        rows = {}
        if built.eval_batch_size is not None:
            rows = {"eval_batch_size": built.eval_batch_size}
        elif built.evaluates_with == step.name:
            rows = {"eval_batch_size": step.inputs[0].shape[0]}
        return describe(
            self.spec,
            job,
            loaded,
            "executorch",
            program_spec=program,
            loss=export.loss,
            soc=export.soc[0] if self.spec.socs else None,
            partition=lowered.partition,
            generator=GeneratorInfo(
                distribution=built.noise,
                lowering=export.generator if noise else "none",
                seed=job.seed,
            ),
            custom_ops=tuple(ops),
            **rows,
        )

    def rebuild(
        self, folder: Path, manifest: Manifest, request: VerifyRequest
    ) -> tuple[GraphProgram, BuiltProgram]:
        """Return the artifact's method, and its program over the model in eager, with the
        artifact's own levels if they were chosen on rows.

        Raises:
            ArtifactError: the model is not the one that was exported.
        """
        source = request.model or manifest.model.source
        loaded = load_text_model(
            source, revision=manifest.model.revision, dtype="float32", device="cpu"
        )
        check_model(loaded, source, manifest)
        lowering = manifest.generator.lowering
        export = ExportConfig.parse(
            {
                "quantize": manifest.quantize,
                "loss": manifest.loss,
                "generator": "auto" if lowering == "none" else lowering,
                "lengths_tokens": manifest.lengths_tokens,
                "batch_size": manifest.batch_size,
                "eval_batch_size": manifest.eval_batch_size,
                "kernels": "stock",  # the program is not made again, only what it is compared with
            },
            "manifest.json",
        )
        method = method_config(manifest.method["name"], manifest.method)
        program: GraphProgram | None = self.program(method)
        if program is None:
            raise ConfigError(self.no_program(method))
        if manifest.check.get(ROUNDING_ROWS) and program.restore is not None:
            weights = MappedWeights(folder / WEIGHTS_NAME)
            program.restore(loaded, {name: weights.whole(name) for name in weights})
        return program, program.build(loaded, method, export, manifest.generator.seed)


def _rounding_problems(job: ExportJob, program: GraphProgram) -> list[str]:
    if job.export.rounding != "rows":
        return []
    if job.export.quantize not in program.chosen:
        return ["export.rounding is rows: it is for --method mesp --quantize q4, q4dq or 8da4w"]
    if job.rows is None:
        return ["export.rounding is rows: name rows of the task (--data)"]
    return []


def choose_levels(job: ExportJob, program: GraphProgram, loaded: LoadedModel) -> int:
    """Choose 4-bit levels on rows of the task, in place; return how many rows, 0 if the nearest
    levels are taken."""
    if job.export.rounding != "rows" or job.rows is None or program.choose is None:
        return 0
    order = np.random.default_rng(job.seed).permutation(len(job.rows.items))[:CALIBRATION_ROWS]
    rows = [list(job.rows.items[number].example.ids) for number in order]
    log.info("choosing the levels of %s on %d rows of the data", job.export.quantize, len(rows))
    program.choose(loaded, rows, job.export.quantize)
    return len(rows)


def _save_state(built: BuiltProgram, folder: Path) -> None:
    from safetensors.numpy import save_file

    for name, tensors in ((FIRST, built.first), (FROZEN, built.frozen)):
        if tensors:
            save_file(
                {key: np.ascontiguousarray(value, np.float32) for key, value in tensors.items()},
                folder / name,
            )


def check_round_trip(session: ExecutorchSession) -> None:
    """Save the session's adapter and load it again.

    Raises:
        VerificationError: a number of it changed.
    """
    before = session.adapter()
    with tempfile.TemporaryDirectory() as temporary:
        save_adapter(before, Path(temporary) / "adapter")
        session.load_adapter(load_adapter(Path(temporary) / "adapter"))
    after = session.adapter().tensors
    if any(after[name].tobytes() != value.tobytes() for name, value in before.tensors.items()):
        raise VerificationError(
            "the adapter does not survive saving and loading; nothing was written"
        )
