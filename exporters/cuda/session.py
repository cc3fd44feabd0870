"""A session of an artifact for CUDA: its packed weights and its method in PyTorch, on a GPU or on
the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.core.errors import ArtifactError, MissingPackageError
from ondevice.core.session import (
    Preparing,
    ProgramSession,
    Replaying,
    Scoring,
    Weighing,
    Writing,
    require,
)
from ondevice.core.untrusted import read_object, well_formed

try:
    import torch
except ImportError:
    raise MissingPackageError(
        "torch is not installed", hint="pip install 'ondevice-train[cuda]'"
    ) from None

from ondevice.core.registry import method_config, open_session, spec_of
from ondevice.models.load import artifact_tokenizer
from ondevice.models.packed import load_packed
from ondevice.models.sources.resolve import SourceInfo

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import numpy as np

    from ondevice.artifact.adapter import Adapter
    from ondevice.core.manifest import Manifest
    from ondevice.core.session import StepResult, Weigh
    from ondevice.models import LoadedModel

FORMAT = 1


class TorchProgramSession(ProgramSession):
    """Runs an artifact; batches are int64 [batch_size, one of lengths_tokens], evaluations any
    number of rows.

    Args:
        folder: the artifact.
        manifest: its checked manifest.
        device: to compute on; None is CUDA if there is a device, else the CPU.

    Raises:
        ArtifactError: the program is of another version, or its weights are incomplete.
        MissingPackageError: bitsandbytes is needed and not installed.
    """

    def __init__(self, folder: Path, manifest: Manifest, device: str | None = None) -> None:
        folder = Path(folder)
        program = read_object(
            folder / manifest.program, ArtifactError, hint="copy the artifact again"
        )
        if program.get("format") != FORMAT:
            raise ArtifactError(
                f"{folder / manifest.program} is of another version", expected=FORMAT, received=program.get("format"),
                hint="export the model again",
            )  # fmt: skip
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.manifest = manifest
        self.seed = manifest.generator.seed
        with well_formed(folder / manifest.program, ArtifactError, hint="copy the artifact again"):
            self.dtype = program["dtype"]
        self.config = method_config(manifest.method["name"], manifest.method)
        tokenizer = artifact_tokenizer(folder)
        model = manifest.model
        info = SourceInfo(model.source, folder / "model", model.revision, known_sha256=model.sha256)
        self.loaded = load_packed(folder / "model", self.device, tokenizer, info)
        self.session = self._open()
        self.backend = self.session.backend
        self.generator_backend = self.session.generator_backend
        self.batch_size = manifest.batch_size
        self.eval_batch_size = manifest.eval_batch_size
        self.lengths_tokens = tuple(sorted(manifest.lengths_tokens))

    def _open(self) -> Any:
        """The method's session; on a GPU the one for fixed shapes, if it has one."""
        program = spec_of(self.config).program("torch")
        if self.device.type == "cuda" and program is not None and program.open_fixed is not None:
            return program.open_fixed(self.loaded, self.config, self.seed)
        return open_session(self.loaded, self.config, self.seed, str(self.device))

    def step(
        self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float
    ) -> StepResult:
        """Run one optimizer step; see `Session.step`."""
        self._check_batch(ids)
        return self.session.step(ids, labels, step, learning_rate)

    def weighted_step(
        self, ids: np.ndarray, labels: np.ndarray, weigh: Weigh, step: int, learning_rate: float
    ) -> StepResult:
        """Run one optimizer step on weighted rows; see `Weighing.weighted_step`."""
        self._check_batch(ids)
        weighing = require(self.session, Weighing)
        return weighing.weighted_step(ids, labels, weigh, step, learning_rate)

    def writing(self) -> AbstractContextManager[LoadedModel]:
        """Give the model with what was trained in place; see `Writing`."""
        return require(self.session, Writing).writing()

    def before_step(self, step: int, batch_at: Callable[[int], Any], folder: Path) -> Path | None:
        """Let the method prepare its state; see `Preparing.before_step`."""
        if not isinstance(self.session, Preparing):
            return None
        return self.session.before_step(step, batch_at, folder)

    def before_replay(self, step: int, folder: Path) -> None:
        """Let the method take back its preparation; see `Preparing.before_replay`."""
        if isinstance(self.session, Preparing):
            self.session.before_replay(step, folder)

    def score_step(self, score: Callable[[], float], step: int, learning_rate: float) -> StepResult:
        """Run one step towards better scores; see `Scoring.score_step`."""
        return require(self.session, Scoring).score_step(score, step, learning_rate)

    def whole_model(self) -> LoadedModel:
        """Return the model with its trained parameters; see `Scoring.whole_model`."""
        return require(self.session, Scoring).whole_model()

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compute row losses and token counts; see `Session.evaluate`."""
        self._bucket(ids)
        return self.session.evaluate(ids, labels)

    def _check_batch(self, ids: np.ndarray) -> None:
        """Refuse a step's batch of other sizes than the program's."""
        self._bucket(ids)
        if ids.shape[0] != self.batch_size:
            raise ArtifactError(
                f"the program's train_step takes {self.batch_size} rows",
                expected=self.batch_size,
                received=ids.shape[0],
            )

    def _bucket(self, ids: np.ndarray) -> None:
        if ids.shape[1] not in self.lengths_tokens:
            raise ArtifactError(
                f"the program has no step for {ids.shape[1]} tokens",
                expected=f"a length among {self.lengths_tokens}",
                received=ids.shape[1],
            )

    def apply_update(
        self, projected_gradients: tuple[float, ...], step: int, learning_rate: float
    ) -> None:
        """Apply only the update; see `Replaying.apply_update`."""
        require(self.session, Replaying).apply_update(projected_gradients, step, learning_rate)

    def state(self) -> dict[str, np.ndarray]:
        """Return the arrays that a resume needs; the same as the method's in memory."""
        return self.session.state()

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Take back what `state` gave."""
        self.session.load_state(state)

    def adapter(self) -> Adapter:
        """Return the trained adapter in PEFT's layout."""
        return self.session.adapter()

    def load_adapter(self, adapter: Adapter) -> None:
        """Start from `adapter`."""
        self.session.load_adapter(adapter)

    def close(self) -> None:
        """Release the method."""
        self.session.close()
