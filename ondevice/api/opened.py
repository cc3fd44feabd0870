"""Open what evaluates and predicts: a model, a network of a method's own, or an artifact."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.api.open import open_artifact
from ondevice.artifact.adapter import load_adapter
from ondevice.artifact.manifest import MANIFEST_NAME
from ondevice.core.capabilities import OpensNetwork
from ondevice.core.errors import ConfigError
from ondevice.core.process import path_of
from ondevice.core.registry import method, method_names
from ondevice.core.session import Evaluator
from ondevice.core.untrusted import read_json
from ondevice.exporters.executorch.packed import PackedModel, PackedScores, has_answers
from ondevice.generation.generator import continue_ids
from ondevice.models import load_model
from ondevice.models.load import artifact_tokenizer
from ondevice.nn.adapters import adapted, apply_adapter, without_adapter
from ondevice.training.choices import resolve_device
from ondevice.training.fit import adapter_identity
from ondevice.training.trained import (
    adapter_folder,
    check_base,
    find_trained,
    task_in_memory,
    task_of_adapter,
)

if TYPE_CHECKING:
    from ondevice.core.method import MethodSpec
    from ondevice.data.tasks.trained import TrainedTask
    from ondevice.models import LoadedModel


@dataclass(frozen=True)
class Opened:
    """An opened source: a model or an artifact that evaluates.

    Attributes:
        session: scores labelled rows.
        tokenizer: of the model.
        loaded: the model; None for an artifact.
        write: token ids and `max_new_tokens` to greedy text; None for an artifact, whose program generates none.
        artifact_task: the task that an artifact was made for; None for other sources and without a task.
        answers: label tokens that an artifact's loss knows; empty for the whole vocabulary.
        is_network: the model has a method's own architecture, and only `write` generates.
        record: what the adapter or the model was trained to do, if that was recorded.
        adapter_sha256: of the adapter's file; None without an adapter.
    """

    session: Evaluator
    tokenizer: Any
    loaded: LoadedModel | None = None
    write: Callable[..., str] | None = None
    artifact_task: str | None = None
    answers: tuple[int, ...] = ()
    is_network: bool = False
    record: TrainedTask | None = None
    adapter_sha256: str | None = None


def open_source(
    source: str | Path, adapter: Path | None, dtype: str, device: str, revision: str | None = None
) -> Opened:
    """Open a model, a network of a method's own architecture, or an artifact, and apply the adapter.

    A run's folder or an adapter opens its base model with the adapter.

    Raises:
        ConfigError: an adapter for a network that takes none, or an unknown device.
        ArtifactError, ModelError: the source or the adapter cannot be read, or they do not fit.
    """
    folder = path_of(source, "the model")
    record = digest = None
    if adapter is not None:
        adapter = adapter_folder(adapter)
        record = task_of_adapter(adapter)
    if folder.is_dir():
        trained = find_trained(source)
        if adapter is None:
            adapter = trained.adapter
            record = trained.task
        source, revision = trained.model, revision or trained.revision
        folder = Path(source)
    if adapter is not None:
        digest = adapter_identity(adapter)["adapter"]
    if has_answers(folder):
        if adapter is not None:
            raise ConfigError(
                f"{folder} takes no adapter: its own is merged", expected="none", received=adapter
            )
        scores = PackedScores(PackedModel(folder))
        return Opened(scores, artifact_tokenizer(folder), record=record)
    if (folder / MANIFEST_NAME).is_file():
        program = open_artifact(folder)
        if adapter is not None:
            check_base(record, program.manifest.model, adapter)
            program.load_adapter(load_adapter(adapter))
        opened = open_session(program, artifact_tokenizer(folder))
        return replace(opened, record=record, adapter_sha256=digest)
    if (trained_by := network_method(folder)) is not None:
        if adapter is not None:
            raise ConfigError(f"a network that method {trained_by.name} trained takes no adapter")
        network = trained_by.open_network(folder, resolve_device(device))
        return Opened(
            network.session,
            network.loaded.tokenizer,
            network.loaded,
            network.write,
            is_network=True,
            record=record,
        )
    loaded = load_model(str(source), revision=revision, dtype=dtype, device=resolve_device(device))
    if adapter is not None:
        check_base(record, loaded.source, adapter)
        apply_adapter(loaded, load_adapter(adapter))
    return replace(open_loaded(loaded), record=record, adapter_sha256=digest)


def open_session(program: Any, tokenizer: Any) -> Opened:
    """Return an artifact's session as a source, with the adapter that it has."""
    manifest = program.manifest
    answers = tuple(manifest.method.get("answers") or ())
    return Opened(program, tokenizer, artifact_task=manifest.task, answers=answers)


def open_loaded(loaded: LoadedModel) -> Opened:
    """Return a loaded model as a source; adapters that are applied to it take part."""
    # Imported here, as an artifact's runtime may do without torch and transformers.
    from ondevice.methods.model_loss import ModelSession

    session = ModelSession(loaded)
    return Opened(session, loaded.tokenizer, loaded, partial(continue_ids, loaded))


@contextmanager
def opened_in_memory(
    loaded: LoadedModel, adapter: str | os.PathLike[str] | None
) -> Iterator[Opened]:
    """Open a model in memory for the duration of a block; it is left as it was.

    Args:
        adapter: a run or an adapter in place of the one in the model; None takes the model as it
            is, with the task that a run here trained it to do.

    Raises:
        ArtifactError: the adapter cannot be read, or does not fit.
    """
    if adapter is None:
        yield replace(open_loaded(loaded), record=task_in_memory(loaded))
        return
    folder = adapter_folder(adapter)
    record = task_of_adapter(folder)
    check_base(record, loaded.source, folder)
    digest = adapter_identity(folder)["adapter"]
    with without_adapter(loaded.model), adapted(loaded, load_adapter(folder)):
        yield replace(open_loaded(loaded), record=record, adapter_sha256=digest)


class NoScores:
    """A program that generates text and scores no labels; it only has a longest sequence."""

    eval_batch_size: int | None = None
    lengths_tokens: tuple[int, ...] | None

    def __init__(self, context_tokens: int) -> None:
        self.lengths_tokens = (context_tokens or 1 << 20,)

    def evaluate(self, ids: Any, labels: Any) -> Any:
        """Refuse labels."""
        raise ConfigError("this program generates text, and scores no labels")


def network_method(folder: Path) -> MethodSpec | None:
    """Find the method whose own architecture a folder's network has, by the `model_type` of its config.json."""
    # Asked of any source that the user names: whatever is not a folder of ours is simply not one.
    try:
        name = read_json(folder / "config.json").get("model_type")
    except (OSError, ValueError, AttributeError):
        return None
    if not isinstance(name, str) or name not in method_names():
        return None
    spec = method(name)
    return spec if spec.capability(OpensNetwork) else None
