"""`safetensors`: base plus adapter as a Hugging Face folder; what `ondevice fuse` writes."""

from __future__ import annotations

from pathlib import Path

from ondevice.exits.base import Checked, Form, Request
from ondevice.models.load import DTYPES
from ondevice.training.fuse import fuse


def write(request: Request, folder: Path) -> Checked:
    """Write configuration, weights and tokenizer; `fuse` reads them back and compares."""
    assert request.model is not None  # noqa: S101 - `convert` refuses
    report = fuse(
        request.model,
        request.folder,
        folder,
        dtype=request.dtype or None,
        revision=request.revision,
    )
    from_base = report.max_abs_difference_from_base
    from_adapter = report.max_abs_difference_from_adapter
    return Checked(from_base, from_adapter, report.max_abs_logit)


FORM = Form(
    "safetensors",
    "transformers",
    write,
    marker="config.json",
    dtypes=("", *DTYPES),
    merged=True,
    experts=True,
    whole=True,
)
