"""Chat with a model in PyTorch, or with an artifact in the runtime that it was made for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.api.open import open_artifact
from ondevice.artifact.manifest import ANSWERS, MANIFEST_NAME, read_manifest
from ondevice.core.errors import ArtifactError, ModelError
from ondevice.exporters.executorch.blocks_model import BlocksModel, can_generate
from ondevice.exporters.executorch.packed import PackedModel, has_answers
from ondevice.generation.generator import Generator, generator_of
from ondevice.generation.prompt import end_tokens
from ondevice.generation.sample import TokenModel
from ondevice.generation.torch_model import TorchModel
from ondevice.models import load_model
from ondevice.models.load import artifact_tokenizer
from ondevice.training.choices import resolve_device
from ondevice.training.trained import adapter_folder, check_base, find_trained, task_of_adapter

if TYPE_CHECKING:
    from ondevice.data.tasks.trained import TrainedTask


def open_chat(
    source: str,
    adapter: str | Path | None = None,
    *,
    revision: str | None = None,
    dtype: str = "float32",
) -> Generator:
    """Open a model, or an artifact that was exported with `export.context_tokens`.

    A run's folder or an adapter opens its base model with the adapter.

    Args:
        adapter: a folder; None generates without one.
        revision, dtype: of a model, as for `load_model`; an artifact has its own.

    Raises:
        ArtifactError: the artifact's program cannot generate, or the adapter does not fit.
        ModelError: the model cannot be read.
    """
    folder = Path(source)
    if folder.is_dir() and not has_answers(folder):
        trained = find_trained(source)
        adapter = adapter or trained.adapter
        source = trained.model
        revision = revision or trained.revision
        folder = Path(source)
    if (folder / MANIFEST_NAME).is_file() or has_answers(folder):
        generator = generator_of_artifact(folder)
    else:
        loaded = load_model(source, revision=revision, dtype=dtype, device=resolve_device("auto"))
        if loaded.dims.classes:
            raise ModelError(
                f"{source} classifies, and generates no text",
                hint="`ondevice predict` predicts labels, `ondevice eval` measures its accuracy",
            )
        generator = generator_of(loaded)
    if adapter is not None:
        use_adapter(generator, adapter)
    return generator


def use_adapter(generator: Generator, adapter: str | Path | None) -> TrainedTask | None:
    """Generate with an adapter, or that of a run, or without one; return the adapter's task.

    Raises:
        ArtifactError: the adapter does not fit, or was trained on another model.
    """
    if adapter is None:
        generator.use(None)
        return None
    folder = adapter_folder(adapter)
    task = task_of_adapter(folder)
    if isinstance(generator.model, TorchModel):
        check_base(task, generator.model.loaded.source, folder)
    elif (Path(generator.source) / MANIFEST_NAME).is_file():
        model = read_manifest(Path(generator.source), check_files=False).model
        check_base(task, model, folder)
    generator.use(folder)
    return task


def generator_of_artifact(folder: Path) -> Generator:
    """Return what generates text with an artifact's program.

    Raises:
        ArtifactError: the program cannot generate.
    """
    tokenizer = artifact_tokenizer(folder)
    return Generator(open_program(folder), tokenizer, end_tokens(tokenizer), str(folder))


def open_program(folder: Path) -> TokenModel:
    """Open the program of an artifact that predicts tokens.

    Raises:
        ArtifactError: the artifact is damaged, or its program cannot generate.
    """
    if has_answers(folder):
        return PackedModel(folder)
    if has_answers(folder / ANSWERS):
        read_manifest(folder)  # checks the files
        return PackedModel(folder / ANSWERS)
    session: Any = open_artifact(folder)
    if not can_generate(session):
        raise ArtifactError(
            f"{folder}: the program cannot generate",
            expected="an artifact exported with --set export.context_tokens=512 "
            "--set export.answers=packed",
            received=f"one for {session.manifest.target}",
            hint=f"chat with the model that it was made from: {session.manifest.model.source}",
        )
    return BlocksModel(session)
