"""`executorch`: base plus adapter as a program that answers on a phone's CPU, for `ondevice chat`
and ExecuTorch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.artifact.files import storage_errors
from ondevice.core.errors import ModelError, VerificationError
from ondevice.exits.base import Checked, Form, Request
from ondevice.exits.check import KEPT, merge
from ondevice.models.save import save_tokenizer
from ondevice.models.text_model import text_dims
from ondevice.training.fuse import PROMPTS, distance

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS = {"8da8w": "8da8w", "8da4w": "8da4w", "float32": "none"}
CONTEXT_TOKENS = 1024
"""Most tokens of a conversation, if the model takes so many."""


def check(request: Request) -> None:
    """Refuse a model whose blocks the program cannot compute with ModelError."""
    from ondevice.exporters.executorch.answer_model import problems

    dims, _ = text_dims(str(request.model), request.revision)
    if found := problems(dims, _context(request)):
        raise ModelError("; ".join(found))


def _context(request: Request) -> int:
    dims, _ = text_dims(str(request.model), request.revision)
    return min(CONTEXT_TOKENS, dims.max_positions or CONTEXT_TOKENS)


def write(request: Request, folder: Path) -> Checked:
    """Merge in float32, lower with packed weights, run the program in its runtime and compare."""
    from ondevice.exporters.executorch.answers import check_answers, write_answers
    from ondevice.exporters.executorch.packed import PackedModel

    assert request.model is not None  # noqa: S101 - `convert` refuses
    context = _context(request)
    merged = merge(request)
    form = WEIGHTS[request.dtype]
    with storage_errors(request.out):
        model, described = write_answers(folder, merged.loaded, form, context)
        save_tokenizer(merged.loaded, folder / "tokenizer")
    values = check_answers(folder, model, described, merged.loaded)
    program = PackedModel(folder)
    found_logits = []
    for prompt in PROMPTS:
        program.use(None)
        found_logits.append(_tensor(program.feed(merged.loaded.tokenizer(prompt)["input_ids"])))
    program.close()
    base, expected = ([logits[-1:] for logits in every] for every in (merged.base, merged.expected))
    from_base = distance(found_logits, base)
    from_adapter = distance(found_logits, expected)
    effect = distance(expected, base)
    largest = max(float(logits.abs().max()) for logits in expected)
    kept = 1.0 if form == "none" else _kept(request, merged.loaded)
    if not KEPT[0] <= kept <= KEPT[1] or not from_base:
        raise VerificationError(
            f"{request.dtype} rounds the adapter away; {request.out} was not written",
            expected=f"{KEPT[0]:.0%} to {KEPT[1]:.0%} of its change of the weights left",
            received=f"{kept:.0%}",
            hint="train longer, or choose a finer --dtype",
        )
    if form == "none" and not from_adapter < max(effect, 1e-30):
        raise VerificationError(
            f"the adapter changes nothing that float32 can hold; {request.out} was not written",
            expected=f"an effect on the logits above the rounding error, {from_adapter:.3g}",
            received=f"{effect:.3g}",
            hint="train longer",
        )
    notes = [
        f"against eager PyTorch over the same weights: {values['max_rel_logit_error']:.2g} of the largest logit"
    ]
    if from_adapter >= effect:
        notes.append(
            f"rounding to {request.dtype} moves the logits by up to {from_adapter:.3g}, the adapter by up to "
            f"{effect:.3g}: compare answers before you use it, or choose a finer --dtype"
        )
    return Checked(from_base, from_adapter, largest, kept, tuple(notes))


def _tensor(logits: np.ndarray) -> Tensor:
    import torch

    return torch.from_numpy(logits)[None]


def _kept(request: Request, loaded: Any) -> float:
    """Return which share of the adapter's change the rounding left, as for GGUF files."""
    import torch

    from ondevice.exporters.executorch.answers import rounded

    found = 0.0
    exact = 0.0
    four = WEIGHTS[request.dtype] == "8da4w"
    for linear in request.adapter.linears:
        merged = loaded.family.module(linear).weight.detach().float()
        a, b = request.adapter.pair(linear)
        change = torch.from_numpy(request.adapter.alpha / request.adapter.rank * (b @ a))
        found += float(((rounded(merged, four) - rounded(merged - change, four)) * change).sum())
        exact += float((change * change).sum())
    return found / exact


FORM = Form(
    "executorch",
    "ExecuTorch",
    write,
    marker="answers.json",
    check=check,
    dtypes=tuple(WEIGHTS),
    merged=True,
)
