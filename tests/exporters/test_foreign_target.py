"""A target in another package, found by its entry point: it exports, opens and verifies; no file of
ours is touched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ondevice.api import export as artifacts
from ondevice.api.runfile import RunConfig
from ondevice.api.train import run_artifact
from ondevice.api.verify import verify
from ondevice.core import registry
from ondevice.core.errors import ArtifactError, ConfigError
from ondevice.models import save_tiny
from ondevice.planning.doctor import checks_by_target

PACKAGE = """
from ondevice.core.target import TargetSpec


def exporter():
    from .exporter import Notebook

    return Notebook


TARGET = TargetSpec(name="notebook", summary="A weight file, PyTorch on the CPU", kind="torch",
                    runtime="torch", exporter=exporter, needs=("torch-cpu",))
"""
EXPORTER = """
from ondevice.artifact.files import atomic_directory
from ondevice.artifact.manifest import MANIFEST_NAME, write_manifest
from ondevice.core.manifest import GeneratorInfo, ProgramMethod, ProgramSpec, port, token_ports
from ondevice.core.errors import ConfigError
from ondevice.core.program import Agreement
from ondevice.core.registry import method_config, open_session
from ondevice.core.session import ProgramSession
from ondevice.exporters.base import (Exporter, ExportReport, beyond, check_free, check_model, describe, random_batches)
from ondevice.models import load_model, save_tokenizer

TOLERANCE = {"loss": 1e-6}


class Session(ProgramSession):
    def __init__(self, folder, manifest):
        loaded = load_model(manifest.model.source, dtype="float32", device="cpu")
        self.config = method_config(manifest.method["name"], manifest.method)
        self.inner = open_session(loaded, self.config, manifest.generator.seed)
        self.manifest, self.seed, self.backend = manifest, manifest.generator.seed, self.inner.backend
        self.batch_size = self.eval_batch_size = manifest.batch_size
        self.lengths_tokens = manifest.lengths_tokens
        for name in ("step", "evaluate", "state", "load_state", "adapter", "load_adapter"):
            setattr(self, name, getattr(self.inner, name))

    def step(self): ...
    def evaluate(self): ...
    def state(self): ...
    def load_state(self): ...


def compare(session, other, batches, rate):
    losses = [(session.step(*batch, n, rate).loss, other.step(*batch, n, rate).loss) for n, batch in enumerate(batches)]
    error = max(abs(a - b) / abs(b) for a, b in losses)
    return Agreement({"steps": len(losses), "max_rel_loss_error": error}, {"loss": error})


class Notebook(Exporter):
    def check(self, job):
        return [] if self.program(job.method) is not None else [self.no_program(job.method)]

    def export(self, job, out):
        if problems := self.check(job):
            raise ConfigError("cannot export: " + "; ".join(problems))
        check_free(out, job.overwrite)
        loaded = load_model(job.model.source, dtype="float32", device="cpu")
        step = ProgramMethod(inputs=token_ports(job.export.batch_size, 16), outputs=(port("losses", "losses", (1,)),),
                             planned_bytes=0, ops=(), delegates=0, instructions=0)
        with atomic_directory(out, marker=MANIFEST_NAME) as folder:
            (folder / "program.json").write_text("{}")
            save_tokenizer(loaded, folder / "tokenizer")
            manifest = describe(self.spec, job, loaded, "torch", program="program.json", loss="tiled",
                                program_spec=ProgramSpec(methods={"train_step": step}),
                                generator=GeneratorInfo(distribution="none", lowering="none", seed=job.seed))
            write_manifest(manifest, folder)
        return ExportReport(out, self.spec.name, 2, 0.0, {"train_step": 0}, (), {"max_rel_loss_error_replayed": 0.0,
                            "max_abs_adapter_error": 0.0}, (), {"train_step": ()})

    def open(self, folder, manifest):
        return Session(folder, manifest)

    def verify(self, folder, manifest, request):
        session, source = self.open(folder, manifest), request.model or manifest.model.source
        loaded = load_model(source, dtype="float32", device="cpu")
        check_model(loaded, source, manifest)
        batches = request.batches(session, loaded.tokenizer, request.steps or 2)
        agreement = compare(session, open_session(loaded, session.config, session.seed), batches, 1e-2)
        return {**agreement.values, "backend": session.backend, "ok": not beyond(agreement, TOLERANCE)}
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The package installed, beside what is installed here."""
    site = tmp_path / "site"
    (site / "notebook_target").mkdir(parents=True)
    (site / "notebook_target" / "__init__.py").write_text(PACKAGE)
    (site / "notebook_target" / "exporter.py").write_text(EXPORTER)
    info = site / "notebook_target-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: notebook-target\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[ondevice.targets]\nnotebook = notebook_target:TARGET\n"
    )
    monkeypatch.syspath_prepend(str(site))
    _forget()
    yield site
    monkeypatch.undo()
    _forget()


def _forget() -> None:
    """Look for targets again."""
    for name in [name for name in sys.modules if name.startswith("notebook_target")]:
        del sys.modules[name]
    registry._target_places.cache_clear()
    registry.target.cache_clear()


def test_it_is_listed_exports_runs_and_verifies(site, tmp_path: Path) -> None:
    source, folder = save_tiny(tmp_path / "model", "llama"), tmp_path / "artifact"
    assert "notebook" in registry.target_names()
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "ondevice", "export", "--list", "--json"]
    listed = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=True
    ).stdout
    assert json.loads(listed)["notebook"] == "A weight file, PyTorch on the CPU"
    assert "notebook" in checks_by_target()

    values = {
        "model.source": str(source),
        "export.target": "notebook",
        "export.lengths_tokens": [16],
    }
    lora = RunConfig.load(None, {**values, "export.batch_size": 2, "method.name": "lora"})
    assert artifacts.export(lora, folder).target == "notebook"
    with pytest.raises(ConfigError, match="mezo does not export to notebook"):
        artifacts.export(
            RunConfig.load(None, {**values, "method.name": "mezo"}), tmp_path / "never"
        )

    result = verify(folder, steps=2)
    assert result["ok"] and result["steps"] == 2 and result["backend"] == "torch-cpu"
    other = save_tiny(tmp_path / "other", "llama", 1)
    with pytest.raises(ArtifactError) as error:
        verify(folder, steps=1, model=str(other))
    assert error.value.expected != error.value.received is not None
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": f"row {n} of some text"}) + "\n" for n in range(4)))
    given = {"data.path": str(rows), "train.out": str(tmp_path / "run"), "train.steps": 2}
    trained = run_artifact(folder, artifacts.run_config(folder, None, given))
    assert trained.adapter is not None and trained.result.steps == 2


def test_without_its_package_an_artifact_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        registry.target("notebook")
    assert error.value.received == "notebook"


def test_one_that_cannot_be_imported_is_named_and_left_out(site: Path, caplog) -> None:
    (site / "notebook_target" / "__init__.py").write_text("import a_package_that_is_not_there\n")
    assert (
        "notebook" not in {spec.name for spec in registry.targets()}
        and "a_package_that_is_not" in caplog.text
    )
    with pytest.raises(ConfigError, match="target 'notebook' cannot be imported"):
        registry.target("notebook")
