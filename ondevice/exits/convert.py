"""Convert what was trained to another program's form: find it, refuse early, write, check, and only
then name it."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.artifact.adapter import load_adapter
from ondevice.artifact.files import atomic_directory, atomic_file, storage_errors
from ondevice.artifact.manifest import MANIFEST_NAME, read_manifest
from ondevice.core.errors import (
    ArtifactError,
    ConfigError,
    MissingPackageError,
    OndeviceError,
    StorageError,
)
from ondevice.core.near import nearest_value
from ondevice.data.tasks.trained import read_trained_task
from ondevice.exits.base import Form, Request, form_names, form_of
from ondevice.exits.task import write_texts
from ondevice.models import check_files, read_dims
from ondevice.models.registry import family_for
from ondevice.models.sources.resolve import TINY_PREFIX, resolve
from ondevice.training.trained import adapter_folder, check_base, task_of_adapter

if TYPE_CHECKING:
    from ondevice.artifact.adapter import Adapter

_log = logging.getLogger(__name__)
_EXACT = ("", "float32", "float16", "bfloat16")
"""Types of written weights that keep rounded ones, about."""


@dataclass(frozen=True)
class ConvertReport:
    """The written form, and the result of reading it back.

    Attributes:
        out: the file or folder; `bytes` of all its files, 0 for a dry run.
        form: its name; `reader` the program that reads it.
        adapter: the folder that was converted, with its `rank`, `alpha` and number of `linears`.
        model: the base model's source; None if omitted, for a form that needs none.
        dtype: of the weights, if the form has a choice.
        max_abs_difference_from_base, max_abs_difference_from_adapter, max_abs_logit: of the logits
        on a few prompts;
            None without a model.
        kept: share of the adapter's change of the weights that rounding left.
        notes: one sentence each.
    """

    out: str
    form: str
    reader: str
    adapter: str
    model: str | None
    dtype: str | None
    rank: int
    alpha: float
    linears: int
    bytes: int
    max_abs_difference_from_base: float | None = None
    max_abs_difference_from_adapter: float | None = None
    max_abs_logit: float | None = None
    kept: float | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return asdict(self)


def convert(
    source: str | Path,
    to: str,
    out: str | Path,
    *,
    model: str | None = None,
    revision: str | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
) -> ConvertReport:
    """Write an adapter, or base plus adapter, in the form `to`, checked before it has its name.

    Args:
        source: an adapter's folder (PEFT's or mlx-lm's), a run's, or an artifact's that holds one.
        to: a form of `ondevice.exits.form_names()`: executorch, gguf, gguf-lora, gguf-pair, mlx,
            mlx-model, mlx-pair, ollama, peft, safetensors, vllm.
        out: the file or folder to write.
        model: the base model, or an artifact made of it; None takes the one that the adapter names.
        dtype: of the weights, if the form has a choice.
        overwrite: replace what this form wrote there before.
        dry_run: check what can be checked without the weights, and write nothing.

    Raises:
        ConfigError: an unknown form or dtype, no model for a form that needs one, or a rank beyond
            the reader's limit.
        ArtifactError: the adapter is damaged, or not of that model.
        ModelError: the model cannot be read, or its family has no such form.
        VerificationError: the adapter changes nothing, or what was written is not base plus
            adapter.
        StorageError: the disk is full, or `out` holds something else. Nothing is left behind then.
    """
    form = form_of(to)
    target = Path(out)
    folder = adapter_folder(source)
    adapter = load_adapter(folder)
    if dtype is None:
        dtype = form.rounds.get(adapter.base_weights)
    dtype = _dtype(form, dtype)
    _check_adapter(form, adapter, folder)
    asked, revision = _base(model, revision)
    if asked is None and form.needs_model:
        asked = adapter.base_model or None
        if asked is None:
            raise ConfigError(
                f"{folder} does not name its model", expected="--model", received="none"
            )
    if asked is not None:
        check_model(adapter, asked, revision)
        _check_base(folder, asked, revision)
    _check_free(form, target, (folder, Path(asked or folder)), overwrite)
    task = read_trained_task(folder)
    request = Request(adapter, folder, asked, revision, dtype, target, task)
    report = ConvertReport(str(target), form.name, form.reader, str(folder), asked, dtype or None,
                           adapter.rank, adapter.alpha, len(adapter.linears), 0)  # fmt: skip
    with storage_errors(target):  # llama.cpp is asked by a file in the temporary folder
        _check_form(form, request)
    if dry_run:
        if asked is not None:
            check_files(asked, revision)
        return report
    _log.info("writing %s for %s", target, form.reader)
    place = (
        atomic_file(target) if form.marker is None else atomic_directory(target, marker=form.marker)
    )
    with place as partial:
        checked = form.write(form.request(request), partial)
        if form.marker is not None:
            write_texts(partial, form.name, task)
        size = sum(path.stat().st_size for path in [partial, *partial.rglob("*")] if path.is_file())
    return replace(
        report,
        bytes=size,
        max_abs_difference_from_base=checked.from_base,
        max_abs_difference_from_adapter=checked.from_adapter,
        max_abs_logit=checked.largest,
        kept=checked.kept,
        notes=(*checked.notes, *_base_notes(form, request)),
    )


def _base_notes(form: Form, request: Request) -> tuple[str, ...]:
    """Say that an adapter's base was rounded in the training, if what is written has other weights."""
    kind = request.adapter.base_weights
    exact = form.rounds.get(kind) == request.dtype
    if form.merged and request.dtype in _EXACT:
        exact = True
    if not kind or exact:
        return ()
    ways = [
        f"--to {name} --dtype {dtype}"
        for name in form_names()
        if (dtype := form_of(name).rounds.get(kind))
    ]
    return (
        f"the adapter was trained on weights rounded to {kind}, which {' or '.join(ways)} writes",
    )


def _check_form(form: Form, request: Request) -> None:
    """Refuse a model of which there is no such form; the hint names forms that there are."""
    try:
        form.check(form.request(request))
    except MissingPackageError:
        raise
    except OndeviceError as error:
        ways = [name for name in form_names() if name != form.name and _takes(name, request)]
        error.hint = f"--to {' or --to '.join(ways)}"
        raise


def _takes(name: str, request: Request) -> bool:
    form = form_of(name)
    try:
        _check_adapter(form, request.adapter, request.folder)
        if request.model is not None:
            form.check(form.request(replace(request, dtype=_dtype(form, None))))
    except OndeviceError:
        return False
    return request.model is not None or not form.needs_model


def _check_base(adapter: Path, model: str, revision: str | None) -> None:
    """Refuse a model that is not the one that the adapter was trained on, by its digest."""
    task = task_of_adapter(adapter)
    is_its_own = task is None or model == task.base_model.source
    if not is_its_own and not model.startswith(TINY_PREFIX):
        check_base(task, resolve(model, revision), adapter)


def check_model(adapter: Adapter, model: str, revision: str | None = None) -> None:
    """Refuse an adapter of another model, by its tensors' names and shapes; no weight is read.

    Raises:
        ArtifactError: names the tensor: it is missing in the model, has another shape, or is not a
            linear layer.
    """
    dims = read_dims(model, revision)
    # A family that is not described here has other names in its files: a layer is then known by
    # its position in a block.
    family = family_for(dims.family, model)
    stored = {} if dims.whole else family.weight_shapes(dims)
    listed = (*dims.linear_list, *dims.expert_list)
    places = {
        f"{linear.layer}.{linear.target}": (linear.outputs, linear.inputs) for linear in listed
    }
    names = {linear.target.rpartition(".")[2] for linear in listed}
    experts = adapter.expert_parameters
    for linear in adapter.linears:
        (rank, inputs), (outputs, _) = (side.shape for side in adapter.pair(linear))
        if linear.rpartition(".")[2] not in names:
            head = ""
            if dims.tied and "lm_head" in linear:
                head = " (the output head is tied to the embedding)"
            raise ArtifactError(
                f"the adapter changes '{linear}', which is not a linear layer of a block{head}",
                expected=", ".join(dims.linear_shapes),
                received=linear,
                hint="train it only on linear layers of the blocks",
            )
        shape = (
            stored.get(linear, ())[1:] or None
            if linear in experts
            else stored.get(f"{linear}.weight")
        )
        if shape and family.stores_inputs_first:
            shape = shape[::-1]
        if dims.whole:
            shape = next(
                (size for place, size in places.items() if linear.endswith(f".{place}")), None
            )
        if shape != (outputs, inputs):
            raise ArtifactError(
                f"the adapter is not of {model}: '{linear}'",
                expected="no such layer"
                if shape is None
                else f"{shape[1]} inputs and {shape[0]} outputs",
                received=f"{inputs} inputs and {outputs} outputs, rank {rank}",
                hint=f"it was trained on {adapter.base_model or 'an unnamed model'}",
            )


def _check_adapter(form: Form, adapter: Adapter, folder: Path) -> None:
    adapter.check_changes(folder)
    if adapter.expert_parameters and not form.experts:
        able = [name for name in form_names() if form_of(name).experts]
        raise ConfigError(
            f"an adapter with pairs for experts' matrices cannot be written for {form.reader}",
            expected=f"--to {' or '.join(able)}",
            received=f"--to {form.name}, {adapter.expert_parameters[0]}",
            hint="merge it (--to safetensors), and convert the model with the reader's own tool",
        )
    if form.max_rank is not None and adapter.rank > form.max_rank:
        raise ConfigError(
            f"{form.reader} does not take an adapter of that rank",
            expected=f"rank {form.max_rank} or less",
            received=f"rank {adapter.rank}",
            hint="merge it instead: --to safetensors",
        )


def _base(model: str | None, revision: str | None) -> tuple[str | None, str | None]:
    """Return the source of the base model; an artifact names its own."""
    if model is None or not (Path(model) / MANIFEST_NAME).is_file():
        return model, revision
    exported = read_manifest(Path(model), check_files=False).model
    return exported.source, exported.revision


def _dtype(form: Form, dtype: str | None) -> str:
    if dtype is None:
        if form.dtypes:
            return form.dtypes[0]
        return ""
    if dtype not in form.dtypes:
        expected = ", ".join(filter(None, form.dtypes)) or "none: the numbers stay as they are"
        near = nearest_value(dtype, form.dtypes)
        raise ConfigError(
            f"--dtype for {form.name}",
            expected=expected,
            received=dtype,
            hint=near and f"did you mean '{near}'?",
        )
    return dtype


def _check_free(form: Form, target: Path, sources: tuple[Path, ...], overwrite: bool) -> None:
    """Refuse an existing target before minutes of work; sources are never replaced."""
    if any(os.path.realpath(target) == os.path.realpath(source) for source in sources):
        raise StorageError(
            f"{target} is the adapter or model itself",
            expected="another path",
            hint="choose another name",
        )
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if form.marker is None and target.is_dir():
        raise StorageError(
            f"{target} is a folder", expected="a file's name", hint=f"{target / 'adapter.gguf'}"
        )
    if not overwrite:
        raise StorageError(
            f"{target} exists", expected="a free name", hint="--overwrite replaces it"
        )
    if form.marker is None and not _is_gguf(target):
        raise StorageError(
            f"{target} is not a GGUF file and would be replaced", hint="choose another name"
        )


def _is_gguf(path: Path) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"GGUF"
