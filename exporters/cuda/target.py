"""What both targets for CUDA do: look for problems, pack the weights, write, and check through the runtime."""

from __future__ import annotations

import importlib.util
import json
import logging
import time
from abc import ABC
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ondevice.artifact.files import atomic_directory, sha256_file
from ondevice.artifact.manifest import MANIFEST_NAME, write_manifest
from ondevice.errors import ConfigError, OndeviceError, VerificationError
from ondevice.exporters.base import ExportJob, ExportReport, check_free
from ondevice.methods.mesp.config import MespConfig
from ondevice.methods.prge.config import PrgeConfig

if TYPE_CHECKING:
    from ondevice.models import ModelDims

log = logging.getLogger("ondevice.exporters")
QUANTIZE = ("none", "nf4", "int8")
METHODS = ("prge", "mesp", "lora", "lora-fa")


class CudaTarget(ABC):
    """The order of an export; a subclass has a name, its requirements files, and what its launcher limits."""

    name: str
    socs: ClassVar[dict[str, str]] = {}
    perturbation_scale: ClassVar[float | None] = None
    requirements: ClassVar[dict[str, str]]
    """Files by name."""
    memory_limit: ClassVar[str | None] = None
    """What the launcher passes as `--memory-limit`, unless another is given."""
    caveats: ClassVar[tuple[str, ...]] = ()

    def check(self, job: ExportJob) -> list[str]:
        """Every reason why `job` cannot be exported; no weights are loaded."""
        from ondevice.models import read_dims

        problems = [
            f"{package} is not installed: pip install 'ondevice-train[cuda]'"
            for package in ("torch", "transformers", *(["bitsandbytes"] if job.export.quantize == "nf4" else []))
            if importlib.util.find_spec(package) is None
        ]
        if job.method.name not in METHODS:
            return [*problems, f"method {job.method.name} does not export to {self.name}: use {', '.join(METHODS)}"]
        problems += _settings(job)
        try:
            dims = read_dims(job.model.source, job.model.revision)
            return problems + _sizes(job, dims)
        except OndeviceError as error:
            return [*problems, str(error)]

    def export(self, job: ExportJob, out: Path) -> ExportReport:
        """Pack, write, and check against the rounded weights in plain layers; see `Exporter.export`."""
        if problems := self.check(job):
            raise ConfigError("cannot export: " + "; ".join(problems))
        out = Path(out)
        check_free(out, job.overwrite)
        from ondevice.exporters.cuda import describe
        from ondevice.models import load_model, save_tokenizer
        from ondevice.models.packed import save_packed
        from ondevice.nn.packed import pack_model

        dtype = job.export.dtype(job.model)
        log.info("loading %s", job.model.source)
        loaded = load_model(job.model.source, revision=job.model.revision, dtype=dtype, device="cpu")
        began = time.monotonic()
        if job.export.quantize != "none":
            log.info("packing the weights: %s", job.export.quantize)
            pack_model(loaded.family, job.export.quantize)
        with atomic_directory(out, marker=MANIFEST_NAME) as folder:
            save_packed(loaded, job.export.quantize, folder / "model")
            save_tokenizer(loaded, folder / "tokenizer")
            weights = sha256_file(folder / "model" / "model.safetensors")
            manifest = describe.describe(self.name, job, loaded, self.caveats)
            written = {
                **self.requirements,
                manifest.program: describe.program(job, dtype, weights),
                "run.sh": describe.launcher(job.memory_limit_bytes or self.memory_limit),
                "README.md": describe.readme(manifest, dtype, tuple(self.requirements)),
            }
            for name, text in written.items():
                (folder / name).write_text(text, encoding="utf-8")
            (folder / "run.sh").chmod(0o755)
            seconds = time.monotonic() - began
            write_manifest(manifest, folder)
            log.info("written in %.0f s; checking it against plain layers", seconds)
            check = self._hold(folder, manifest, loaded, job, dtype)
            manifest = manifest.model_copy(update={"check": check})
            write_manifest(manifest, folder)
            size = (folder / "model" / "model.safetensors").stat().st_size
        planned = {name: method.planned_bytes for name, method in manifest.methods.items()}
        return ExportReport(
            path=out, target=self.name, program_bytes=size, lowering_s=seconds, planned_bytes=planned, custom_ops=(),
            check=check, warnings=manifest.caveats, partition={"train_step": ()},
        )  # fmt: skip

    def _hold(self, folder: Path, manifest: Any, loaded: Any, job: ExportJob, dtype: str) -> dict[str, Any]:
        """Raises where the written session is not the method over the same weights."""
        from ondevice.exporters.cuda.check import compare
        from ondevice.exporters.executorch.check import random_batches
        from ondevice.methods.registry import open_session
        from ondevice.nn.packed import unpack_model
        from ondevice.runtime.torch import TorchProgramSession

        session = TorchProgramSession(folder, manifest, device="cpu")
        unpack_model(loaded.family)
        reference = open_session(loaded, job.method, job.seed)
        batches = random_batches(session, loaded.dims.vocab, job.export.check_steps)  # pyright: ignore[reportArgumentType]
        check = compare(session, reference, batches, job.method.learning_rate, dtype)
        session.close()
        if not check["ok"]:
            raise VerificationError(
                "the artifact does not do what the method does over the same weights; nothing was written",
                received=json.dumps(check),
            )
        return check


def _settings(job: ExportJob) -> list[str]:
    """What does not go together, from the settings alone."""
    problems, method, export = [], job.method, job.export
    if export.quantize not in QUANTIZE:
        problems.append(f"quantize {export.quantize} is for phones; expected {', '.join(QUANTIZE)}")
    for name, value, wanted in (
        ("form", export.form, "functional"),
        ("generator", export.generator, "auto"),
        ("loss", export.loss, "auto"),
        ("next_token", export.next_token, False),
    ):
        if value != wanted:
            problems.append(f"{name} {value} is for ExecuTorch programs: leave it out")
    if isinstance(method, PrgeConfig) and method.form != "master":
        problems.append("form copies (Algorithm 1) is an eager baseline: use form master")
    if isinstance(method, MespConfig):
        if method.weights != "resident" or method.bits is not None:
            problems.append("the artifact holds the weights: leave weights and bits out, and use --quantize nf4")
        if method.gradients != "manual":
            problems.append(f"gradients: {method.gradients} is a baseline: export gradients: manual")
    return problems


def _sizes(job: ExportJob, dims: ModelDims) -> list[str]:
    """What the model's dimensions stand against."""
    problems = []
    if not dims.gated:
        return [f"{dims.family} has no layers that this target packs: llama, mistral or qwen2"]
    for target in job.method.targets:
        dims.linear_shape(target)
    longest = max(job.export.lengths_tokens)
    if longest > dims.max_positions:
        problems.append(f"lengths_tokens {longest} exceeds the model's {dims.max_positions} positions")
    top_layers = getattr(job.method, "top_layers", None)
    if top_layers is not None and top_layers > dims.layers:
        problems.append(f"top_layers is {top_layers} and the model has {dims.layers} layers")
    return problems
