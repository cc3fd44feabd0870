"""`peft`: PEFT's own layout, which transformers, TRL, text-generation-inference and others read."""

from __future__ import annotations

from pathlib import Path

from ondevice.artifact.adapter import CONFIG_NAME, load_adapter, save_adapter
from ondevice.exits.base import Checked, Form, Request
from ondevice.exits.check import check_adapter


def write(request: Request, folder: Path) -> Checked:
    """Write `adapter_config.json` and `adapter_model.safetensors`."""
    save_adapter(request.adapter, folder)
    return check_adapter(request, load_adapter(folder))


FORM = Form("peft", "PEFT", write, marker=CONFIG_NAME, needs_model=False, experts=True, whole=True)
