"""What every ExecuTorch target does: look for problems, load, author, lower, check, and write the artifact."""

from __future__ import annotations

import importlib.util
import logging
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ondevice.artifact.adapter import load_adapter, save_adapter
from ondevice.artifact.files import atomic_directory
from ondevice.artifact.manifest import MANIFEST_NAME
from ondevice.errors import ConfigError, OndeviceError, VerificationError
from ondevice.exporters.base import ExportJob, ExportReport, check_free
from ondevice.methods.prge.config import PrgeConfig

if TYPE_CHECKING:
    from ondevice.artifact.manifest import Manifest
    from ondevice.exporters.executorch.lower import Lowered
    from ondevice.exporters.executorch.programs import MethodSpec
    from ondevice.models import LoadedModel, ModelDims

log = logging.getLogger("ondevice.exporters")


class ExecutorchTarget(ABC):
    """The order of an export; a subclass says what its target takes, lowers, and checks."""

    name: str
    socs: ClassVar[dict[str, str]] = {}
    perturbation_scale: ClassVar[float | None] = None
    methods: ClassVar[tuple[str, ...]] = ("prge",)
    """Methods whose step it takes."""

    @abstractmethod
    def problems(self, job: ExportJob, dims: ModelDims) -> list[str]:
        """What only this target minds."""

    @abstractmethod
    def build(self, job: ExportJob, loaded: LoadedModel) -> tuple[Any, list[MethodSpec], Lowered]:
        """The training program, its methods, and the lowered program."""

    @abstractmethod
    def verify(
        self, folder: Path, manifest: Manifest, program: Any, job: ExportJob
    ) -> tuple[dict[str, Any], list[str]]:
        """What the check measured, and warnings; raises if the program is wrong."""

    def check(self, job: ExportJob) -> list[str]:
        """Every reason why `job` cannot be exported; no weights are loaded."""
        from ondevice.models import read_dims

        problems = []
        if importlib.util.find_spec("executorch") is None:
            problems.append("executorch is not installed: pip install 'ondevice-train[executorch]'")
        if job.method.name not in self.methods:
            known = " or ".join(self.methods)
            return [*problems, f"method {job.method.name} does not export to {self.name}: use --method {known}"]
        if isinstance(job.method, PrgeConfig) and (
            job.method.form != "master" or not (job.method.inner_loop and job.method.outer_loop)
        ):
            problems.append(
                "an exported step has form master, inner_loop and outer_loop: the others are eager baselines"
            )
        try:
            dims = read_dims(job.model.source, job.model.revision)
        except OndeviceError as error:
            return [*problems, str(error)]
        if dims.experts:
            problems.append(f"family {dims.family} has experts that each batch chooses: a program has one way through")
        try:
            for target in job.method.targets:
                dims.linear_shape(target)
        except OndeviceError as error:
            problems.append(str(error))
        top_layers = getattr(job.method, "top_layers", None)
        if top_layers is not None and top_layers > dims.layers:
            problems.append(f"top_layers is {top_layers} and the model has {dims.layers} layers")
        if max(job.export.lengths_tokens) > dims.max_positions:
            problems.append(
                f"lengths_tokens {max(job.export.lengths_tokens)} exceeds the model's {dims.max_positions} positions"
            )
        return [*problems, *self.problems(job, dims)]

    def export(self, job: ExportJob, out: Path) -> ExportReport:
        """Load, author, lower, check against eager, and write the artifact; see `Exporter.export`."""
        problems = self.check(job)
        if problems:
            raise ConfigError("cannot export: " + "; ".join(problems))
        out = Path(out)
        check_free(out, job.overwrite)
        from ondevice.artifact.manifest import write_manifest
        from ondevice.exporters.executorch.describe import describe, readme
        from ondevice.models import load_model, save_tokenizer

        log.info("loading %s", job.model.source)
        loaded = load_model(job.model.source, revision=job.model.revision, dtype="float32", device="cpu")
        names = {
            (layer, target): loaded.family.linear_name(layer, target)
            for layer in range(loaded.dims.layers)
            for target in job.method.targets
        }
        program, methods, lowered = self.build(job, loaded)
        with atomic_directory(out, marker=MANIFEST_NAME) as folder:
            (folder / "program.pte").write_bytes(lowered.buffer)
            save_tokenizer(loaded, folder / "tokenizer")
            manifest = describe(self.name, job, loaded, program, methods, lowered, names)
            (folder / "README.md").write_text(readme(manifest), encoding="utf-8")
            log.info("lowered in %.0f s; checking the program against eager", lowered.seconds)
            check, warnings = self.verify(folder, manifest, program, job)
            manifest = manifest.model_copy(update={"check": check})
            write_manifest(manifest, folder)
        return ExportReport(
            path=out,
            target=self.name,
            program_bytes=len(lowered.buffer),
            lowering_s=lowered.seconds,
            planned_bytes=lowered.planned_bytes,
            custom_ops=manifest.custom_ops,
            check=check,
            warnings=tuple(warnings),
            partition=lowered.partition,
        )


def check_round_trip(session: Any, entries: Iterable[Any] | None = None) -> None:
    """The adapter survives saving and loading.

    Args:
        entries: where its flat vector holds numbers; None is everywhere.

    Raises:
        VerificationError: it does not.
    """
    with tempfile.TemporaryDirectory() as temporary:
        save_adapter(session.adapter(), Path(temporary) / "adapter")
        flat = session.flat().copy()
        session.load_adapter(load_adapter(Path(temporary) / "adapter"))
    used = np.full(len(flat), entries is None)
    for entry in entries or ():
        used[entry.offset : entry.offset + entry.count] = True
    if not np.array_equal(session.flat()[used], flat[used]):
        raise VerificationError("the adapter does not survive saving and loading; nothing was written")
