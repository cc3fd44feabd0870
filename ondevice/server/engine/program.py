"""An artifact's program in its own runtime, which answers as a model does, one row at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ondevice.api.chat import open_program
from ondevice.api.open import open_artifact
from ondevice.api.opened import open_session
from ondevice.api.predict import Predictor
from ondevice.artifact.adapter import Adapter, load_adapter
from ondevice.artifact.manifest import ANSWERS, ANSWERS_FILE, read_manifest
from ondevice.core.errors import ArtifactError
from ondevice.core.untrusted import read_object, well_formed
from ondevice.data.tasks.trained import TrainedTask
from ondevice.exporters.executorch.cache import kept_bytes
from ondevice.exporters.executorch.packed import has_answers
from ondevice.generation.generator import Generator
from ondevice.generation.prompt import end_tokens
from ondevice.generation.sample import TokenModel
from ondevice.models.load import artifact_tokenizer
from ondevice.training.trained import check_base, task_of_adapter


class Program:
    """An artifact; its program is loaded when it first generates, or first scores labels.

    Args:
        folder: the artifact.

    Attributes:
        tokenizer: of the model that it was made from.
        vocab: how many tokens that model has.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder, check_files=False)  # opening it checks them
        self.tokenizer = artifact_tokenizer(folder)
        self.vocab = int(self.manifest.model.dims["vocab"])
        self._model: TokenModel | None = None
        self._session: Any = None
        self._scores: str | None = None
        """The adapter with which the session scores labels."""

    def needs(self) -> dict[str, int]:
        """Estimate the bytes by part that the program takes, with its adapter and its texts."""
        spec = self.manifest.program_spec
        answers = self.folder / ANSWERS
        used = self.folder
        planned = max((one.planned_bytes for one in spec.methods.values()), default=0)
        cached = 0
        if has_answers(answers):
            used = answers
            described = read_object(answers / ANSWERS_FILE, ArtifactError)
            with well_formed(answers / ANSWERS_FILE, ArtifactError, hint="copy it again"):
                planned = int(described["planned_bytes"])
        else:
            cached = kept_bytes(spec)
        files = (path for path in used.rglob("*") if path.is_file())
        return {
            "program and weights": sum(path.stat().st_size for path in files),
            "keys and values": cached,
            "activations": planned,
        }

    def generator(self, adapter: str | None) -> Generator:
        """Return what generates text with an adapter, or without one.

        Raises:
            ArtifactError: the program cannot generate, or does not take the adapter.
        """
        if self._model is None:
            self._model = open_program(self.folder)
        self._model.use(self._adapter(adapter))
        ends = end_tokens(self.tokenizer)
        return Generator(self._model, self.tokenizer, ends, self.manifest.model.source)

    def predictor(self, task: TrainedTask, adapter: str | None) -> Predictor:
        """Return what predicts rows of a task with an adapter, or without one.

        Raises:
            ArtifactError: as `generator`, if the task has no labels.
        """
        if not task.has_candidates:
            return Predictor.of_program(self.generator(adapter), task)
        loaded = self._adapter(adapter)
        if self._session is None or (loaded is None and self._scores is not None):
            if self._session is not None:
                self._session.close()
            self._session = open_artifact(self.folder)
        if loaded is not None:
            self._session.load_adapter(loaded)
        self._scores = adapter
        return Predictor(open_session(self._session, self.tokenizer), task)

    def _adapter(self, folder: str | None) -> Adapter | None:
        if folder is None:
            return None
        check_base(task_of_adapter(Path(folder)), self.manifest.model, folder)
        return load_adapter(Path(folder))
