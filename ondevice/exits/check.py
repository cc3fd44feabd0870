"""Every exit's check: what was written, read back, is not the base and is base plus adapter.

An adapter that changes nothing without a word is the field's commonest complaint. A layout that is
wrong by a permutation, a scale that is left out, a rounding that swallows the change: each shows
here, before the file has its name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ondevice.core.errors import ModelError, VerificationError
from ondevice.core.untrusted import read_object
from ondevice.exits.base import Checked, Request
from ondevice.models import LoadedModel, load_model
from ondevice.models.rounded import round_weights
from ondevice.models.sources.resolve import TINY_PREFIX, read_config, resolve
from ondevice.models.text_model import text_model
from ondevice.nn.adapters import adapted, apply_adapter, fuse_in_place
from ondevice.training.fuse import PROMPTS, distance, prompt_logits

if TYPE_CHECKING:
    from torch import Tensor

    from ondevice.artifact.adapter import Adapter

_log = logging.getLogger(__name__)
SCALE_ERROR = 1e-6
"""Largest relative difference of alpha / rank: a form may keep it in float32."""
LOGIT_ERROR = {"float32": 1e-5, "float16": 1e-2}
"""Largest difference of the logits, as a fraction of the largest, if every weight is rounded on its
own."""
KEPT = (0.5, 1.5)
"""The range of the adapter's change of the weights that rounding may leave, as a share of it."""


def check_adapter(request: Request, written: Adapter) -> Checked:
    """Compare an adapter that was read back with the one it was written from, tensor by tensor and
    on the model.

    Raises:
        VerificationError: a tensor or the scale differs, or the model's answers are the base's.
        ArtifactError, ModelError: the adapter is not of that model, or the model cannot be read.
    """
    wanted = request.adapter
    scales = (wanted.alpha / wanted.rank, written.alpha / written.rank)
    if abs(scales[0] - scales[1]) > SCALE_ERROR * abs(scales[0]):
        raise _different(request, "the scale alpha / rank", scales[0], scales[1])
    if written.linears != wanted.linears:
        raise _different(request, "the linear layers", len(wanted.linears), len(written.linears))
    for linear in wanted.linears:
        for side, left, right in zip("AB", wanted.pair(linear), written.pair(linear)):
            if not np.array_equal(left, right):
                raise _different(request, f"{side} of {linear}", "the same numbers", "others")
    if request.model is None:
        return Checked(None, None, None)
    loaded = open_base(request)
    _log.info("comparing its answers")
    base = prompt_logits(loaded, PROMPTS)
    with adapted(loaded, wanted):
        expected = prompt_logits(loaded, PROMPTS)
    with adapted(loaded, written):
        found = prompt_logits(loaded, PROMPTS)
    largest = max(float(logits.abs().max()) for logits in expected)
    checked = Checked(distance(found, base), distance(found, expected), largest)
    return _accept(request, checked, distance(expected, base), LOGIT_ERROR["float32"])


@dataclass(frozen=True)
class Merge:
    """Base plus adapter as one model in float32.

    Attributes:
        loaded: the merged model.
        base, expected: float32 logits on `PROMPTS` of the base, and of base plus adapter before
            they were merged.
    """

    loaded: LoadedModel
    base: list[Tensor]
    expected: list[Tensor]


def open_base(request: Request, rounded: bool = True) -> LoadedModel:
    """Load the base model in float32 on the CPU, with the weights that the adapter was trained on,
    or as they were before their rounding."""
    assert request.model is not None  # noqa: S101 - `convert` refuses a form that needs one without
    _log.info("loading %s", request.model)
    loaded = load_model(request.model, revision=request.revision, dtype="float32")
    if request.text:
        loaded = text_model(loaded)
    if rounded and request.adapter.base_weights:
        round_weights(loaded, request.adapter.base_weights)
    return loaded


def merge(request: Request) -> Merge:
    """Load the base model and merge the adapter into it, in float32."""
    loaded = open_base(request)
    base = prompt_logits(loaded, PROMPTS)
    apply_adapter(loaded, request.adapter)
    expected = prompt_logits(loaded, PROMPTS)
    fuse_in_place(loaded)
    return Merge(loaded, base, expected)


@dataclass(frozen=True)
class Rounding:
    """The largest error that a type explains.

    Attributes:
        share: of an element, as a fraction of the largest of its block.
        block: elements of a row that share a scale; 0 for all of a tensor.
        floor: the same error in absolute numbers, where the type's scale is no longer exact.
    """

    share: float
    block: int = 0
    floor: float = 0.0

    def excess(self, found: Tensor, wanted: Tensor) -> tuple[float, float] | None:
        """Return the limit and the error of the worst block; None if every error is explained."""
        error = (found - wanted).abs()
        largest = wanted.abs()
        if self.block and wanted.ndim > 1 and wanted.shape[-1] % self.block == 0:
            blocks = (*wanted.shape[:-1], -1, self.block)
            error = error.view(blocks).amax(-1)
            largest = largest.view(blocks).amax(-1)
        else:
            error = error.max()
            largest = largest.max()
        limit = self.share * largest + self.floor
        beyond = error - limit
        if bool((beyond <= 0).all()):
            return None
        at = int(beyond.nan_to_num(nan=float("inf")).argmax())
        return float(limit.reshape(-1)[at]), float(error.reshape(-1)[at])


def check_merged(
    request: Request,
    merged: Merge,
    written: Iterable[tuple[str, np.ndarray]],
    limits: dict[str, Rounding],
    kept: float,
) -> Checked:
    """Compare a merged model that was read back with the one in memory; its weights are replaced by
    what was read.

    Args:
        written: transformers' name and float32 value of every tensor, in its own shape.
        limits: what each tensor's type may round.
        kept: share of the adapter's change that the rounding left.

    Raises:
        VerificationError: a tensor is missing, more rounded than its type explains, or the answers
            are the base's.
    """
    _log.info("reading it back")
    read_back(request, merged.loaded, written, limits)
    found = prompt_logits(merged.loaded, PROMPTS)
    largest = max(float(logits.abs().max()) for logits in merged.expected)
    checked = Checked(distance(found, merged.base), distance(found, merged.expected), largest, kept)
    if not KEPT[0] <= kept <= KEPT[1]:
        raise VerificationError(
            f"{request.dtype} rounds the adapter away; {request.out} was not written",
            expected=f"{KEPT[0]:.0%} to {KEPT[1]:.0%} of its change of the weights left",
            received=f"{kept:.0%}",
            hint="train longer, or choose a finer --dtype",
        )
    return _accept(
        request, checked, distance(merged.expected, merged.base), LOGIT_ERROR.get(request.dtype)
    )


def check_beside(
    request: Request,
    base: LoadedModel,
    written: Iterable[tuple[str, np.ndarray]],
    limits: dict[str, Rounding],
) -> Checked:
    """Compare a base model that was read back, with the adapter next to it, with base plus adapter;
    arguments and errors are those of `check_merged`."""
    with adapted(base, request.adapter):
        expected = prompt_logits(base, PROMPTS)
    _log.info("reading it back")
    read_back(request, base, written, limits)
    stored = prompt_logits(base, PROMPTS)
    with adapted(base, replace(request.adapter, base_weights="")):
        found = prompt_logits(base, PROMPTS)
    largest = max(float(logits.abs().max()) for logits in expected)
    checked = Checked(distance(found, stored), distance(found, expected), largest)
    return _accept(request, checked, distance(found, stored), LOGIT_ERROR.get(request.dtype))


def read_back(
    request: Request,
    loaded: LoadedModel,
    written: Iterable[tuple[str, np.ndarray]],
    limits: dict[str, Rounding],
) -> None:
    """Compare the tensors of a written model with those in memory, and put them in their place;
    arguments and errors are those of `check_merged`."""
    import torch

    weights = _distinct(loaded.model.state_dict(), limits)
    for name, value in written:
        if name not in weights:
            raise _different(request, "the tensors", "those of the model", f"{name}, too")
        weight = weights.pop(name)
        found = torch.from_numpy(np.ascontiguousarray(value, dtype=np.float32))
        if found.shape != weight.shape:
            raise _different(request, name, tuple(weight.shape), tuple(found.shape))
        if excess := limits[name].excess(found, weight):
            raise _different(request, name, f"within {excess[0]:.3g}", f"{excess[1]:.3g}")
        weight.copy_(found)
    if weights:
        raise _different(
            request, "the tensors", "all of the model's", f"without {next(iter(weights))}"
        )


def _distinct(state: dict[str, Tensor], limits: dict[str, Rounding]) -> dict[str, Tensor]:
    """Return a model's tensors, those of one memory once, by the name that `limits` has."""
    taken = {state[name].data_ptr() for name in limits}
    return {
        name: value
        for name, value in state.items()
        if name in limits or value.data_ptr() not in taken
    }


def _accept(request: Request, checked: Checked, effect: float, limit: float | None) -> Checked:
    """Refuse a result that is not base plus adapter; without a limit, note large rounding."""
    assert checked.from_adapter is not None and checked.largest is not None  # noqa: S101
    if limit is not None and not checked.from_adapter <= limit * max(1.0, checked.largest):
        allowed = limit * max(1.0, checked.largest)
        raise _different(
            request, "the logits", f"within {allowed:.3g}", f"{checked.from_adapter:.3g}"
        )
    if not checked.from_base or not np.isfinite(checked.from_adapter):
        raise _different(
            request,
            "the logits",
            "another answer than the base's",
            f"difference {checked.from_base}",
        )
    if effect > checked.from_adapter:
        return checked
    if limit is not None:
        raise VerificationError(
            f"the adapter changes nothing that {request.dtype or 'float32'} can hold; {request.out} was not written",
            expected=f"an effect on the logits above the rounding error, {checked.from_adapter:.3g}",
            received=f"{effect:.3g}",
            hint="train longer, or choose a finer --dtype",
        )
    note = (
        f"rounding to {request.dtype} moves the logits by up to {checked.from_adapter:.3g}, the adapter by up to "
        f"{effect:.3g}: compare answers before you use it, or choose a finer --dtype"
    )
    return Checked(checked.from_base, checked.from_adapter, checked.largest, checked.kept, (note,))


def refuse_own_head(request: Request, reader: str) -> None:
    """Refuse a base whose head the reader would leave out, because `config.json` ties it.

    Raises:
        ModelError: the weights have a head that differs from the embedding.
    """
    if request.model is None or request.model.startswith(TINY_PREFIX):
        return
    folder = resolve(request.model, request.revision).path
    if folder is None:
        return
    said = read_object(folder / "config.json", ModelError).get("tie_word_embeddings")
    if read_config(folder).get("tie_word_embeddings") is False and said is not False:
        raise ModelError(
            f"{reader} would not read the output head of {request.model}: config.json ties it to"
            " the embedding, from which it differs",
            expected="tie_word_embeddings: false",
            received=said,
            hint="correct config.json, or merge the model: --to safetensors, mlx-model or gguf",
        )


def _different(
    request: Request, what: str, expected: object, received: object
) -> VerificationError:
    return VerificationError(
        f"read back, {what} of {request.out} is not base plus adapter; nothing was written",
        expected=str(expected),
        received=str(received),
        hint="please report this with the model and the adapter",
    )
