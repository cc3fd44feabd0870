"""An adapter applied to a model, and fused into its weights with proof that this is what was trained."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ondevice.artifact.adapter import load_adapter
from ondevice.artifact.files import atomic_directory
from ondevice.artifact.manifest import MANIFEST_NAME, read_manifest
from ondevice.core.errors import ArtifactError, StorageError, VerificationError
from ondevice.core.process import path_of
from ondevice.data.tasks.trained import TASK_NAME, read_trained_task, to_text
from ondevice.models import LoadedModel, load_model
from ondevice.models.load import DTYPES
from ondevice.models.merged import save_merged
from ondevice.models.rounded import rounded_names
from ondevice.models.save import add_ends
from ondevice.models.sources.resolve import TINY_PREFIX, config_of
from ondevice.nn.adapters import apply_adapter, fuse_in_place
from ondevice.training.trained import adapter_folder as find_adapter
from ondevice.training.trained import check_base, find_trained
from ondevice.training.usage import README_NAME, readme

if TYPE_CHECKING:
    from torch import Tensor

    from ondevice.artifact.adapter import Adapter

PROMPTS = (
    "The capital of France is",
    "Question: why is the sky blue?\nAnswer:",
    "def add(a, b):\n    return",
)
"""Texts on which the fused model is compared with base plus adapter."""
_TOLERANCE = {"float32": 5e-5, "float16": 2e-3, "bfloat16": 2e-2}
"""Largest difference allowed, as a part of the largest logit: what rounding the weights once does."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FuseReport:
    """Largest absolute differences of the logits on `PROMPTS`.

    Attributes:
        out: the folder that was written.
        dtype: of its weights.
        max_abs_difference_from_base: what fusing changed; never 0.
        max_abs_difference_from_adapter: fused weights against base plus adapter: rounding only.
        max_abs_logit: the scale of both.
        ok: always True for a report that is returned; a failed check raises.
    """

    out: str
    dtype: str
    max_abs_difference_from_base: float
    max_abs_difference_from_adapter: float
    max_abs_logit: float
    ok: bool


def fuse(
    source: str | None,
    adapter_folder: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    revision: str | None = None,
    prompts: Sequence[str] = PROMPTS,
    overwrite: bool = False,
) -> FuseReport:
    """Write base plus adapter as a Hugging Face folder (safetensors, tokenizer), checked before it is there.

    Every tensor that the adapter does not change, a vision tower's too, keeps its bits. The
    written folder is loaded again; on `prompts` its logits must differ from the base's and equal
    those of base plus adapter up to the rounding of the weights. Sums are in float32 and rounded
    once.

    Args:
        adapter_folder: of an adapter, or of the run that trained it.
        source: the base model, as for `load_model`; or an artifact, which names its base model. Packed weights
            cannot take an adapter, so the sum is in the original's. None for the one that the adapter names.
        dtype: of the written weights; None keeps the base's.
        overwrite: replace a model that is in `out`.

    Raises:
        ArtifactError: the adapter is damaged or does not fit the model.
        VerificationError: the adapter changes nothing, or the result is not base plus adapter; nothing is
            written then.
        ModelError, StorageError: as in `load_model`; `out` holds a model, or other files.
    """
    folder = find_adapter(adapter_folder)
    adapter = load_adapter(folder)
    task = read_trained_task(folder)
    exported = None
    if source is None:
        named = find_trained(folder)
        source = named.model
        revision = revision or named.revision
    if (path_of(source, "the model") / MANIFEST_NAME).is_file():
        exported = read_manifest(Path(source), check_files=False).model
        source = exported.source
        revision = exported.revision
    adapter.check_changes(adapter_folder)
    convert = dtype is not None
    dtype = dtype or _stored_dtype(source, revision)
    # The base is rounded as it will be written, then computed in float32: what remains is the adapter.
    _log.info("loading %s", source)
    loaded = load_model(source, revision=revision, dtype=dtype)
    if loaded.source.path is not None and os.path.realpath(out) == os.path.realpath(
        loaded.source.path
    ):
        raise StorageError(
            f"{out} is the base model itself", expected="another folder", hint="choose another name"
        )
    if not overwrite and (Path(out) / "config.json").exists():
        raise StorageError(
            f"{out} already holds a model", expected="a new folder", hint="--overwrite replaces it"
        )
    if exported is not None and loaded.source.sha256 != exported.sha256:
        raise ArtifactError(
            f"{source} is not the model that was exported",
            expected=exported.sha256,
            received=loaded.source.sha256,
            hint="give the model itself instead of the artifact",
        )
    check_base(task, loaded.source, folder)
    loaded.model.float()
    base = prompt_logits(loaded, prompts)
    apply_adapter(loaded, adapter)
    adapted = prompt_logits(loaded, prompts)
    fuse_in_place(loaded)
    # The written folder is checked, loaded again: a fault of saving would not show in the model in memory.
    with atomic_directory(out, marker="config.json") as partial:
        _save(loaded, adapter, dtype, partial, convert=convert)
        if task is not None:
            add_ends(partial, task.trained_ends(loaded.tokenizer))
            (partial / TASK_NAME).write_text(to_text(task), encoding="utf-8")
            (partial / README_NAME).write_text(readme(task, "model"), encoding="utf-8")
        _log.info("reading it back")
        fused = prompt_logits(load_model(str(partial), dtype="float32"), prompts)
        return _check(Path(out), dtype, base, adapted, fused)


def _stored_dtype(source: str, revision: str | None) -> str:
    if source.startswith(TINY_PREFIX):
        return "float32"
    config, _ = config_of(source, revision)
    stored = config.get("dtype") or config.get("torch_dtype")
    return stored if stored in DTYPES else "float32"


def _save(
    loaded: LoadedModel, adapter: Adapter, dtype: str, folder: Path, *, convert: bool
) -> None:
    experts = set(adapter.expert_parameters)
    changed = {name if name in experts else f"{name}.weight" for name in adapter.linears}
    if adapter.base_weights:
        changed |= rounded_names(loaded, adapter.base_weights)
    save_merged(loaded, changed, dtype, folder, convert=convert)
    for path in folder.iterdir():  # safetensors files come readable by their owner only
        path.chmod((folder / "config.json").stat().st_mode)


def prompt_logits(loaded: LoadedModel, prompts: Sequence[str]) -> list[Tensor]:
    """float32 [tokens, vocab] of each prompt."""
    import torch

    with torch.no_grad():
        return [
            loaded.model(
                torch.tensor([loaded.tokenizer(prompt)["input_ids"]]), use_cache=False
            ).logits[0]
            for prompt in prompts
        ]


def _check(
    out: Path, dtype: str, base: list[Tensor], adapted: list[Tensor], fused: list[Tensor]
) -> FuseReport:
    effect = distance(adapted, base)
    from_base = distance(fused, base)
    from_adapter = distance(fused, adapted)
    scale = max(float(x.abs().max()) for x in adapted)
    limit = _TOLERANCE[dtype] * max(1.0, scale)
    if not from_adapter <= limit:
        raise VerificationError(
            f"the model fused for {out} is not base plus adapter; nothing was written",
            expected=f"logits within {limit:.3g}",
            received=f"{from_adapter:.3g}",
            hint="please report this with the model and the adapter"
            if dtype == "float32"
            else "dtype float32",
        )
    if not from_base > 0 or not effect > from_adapter:
        raise VerificationError(
            f"the adapter changes nothing that {dtype} can hold; nothing was written",
            expected=f"an effect on the logits above the rounding error, {from_adapter:.3g}",
            received=f"{effect:.3g}",
            hint="train longer, or fuse with dtype float32",
        )
    return FuseReport(str(out), dtype, from_base, from_adapter, scale, True)


def distance(left: list[Tensor], right: list[Tensor]) -> float:
    """Largest absolute difference; NaN if there is one on either side."""
    return max(
        (float((a - b).abs().max()) for a, b in zip(left, right)),
        key=lambda x: float("inf") if x != x else x,
    )
