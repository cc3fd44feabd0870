"""`mlx`: mlx-lm's layout, for `mlx_lm.generate --adapter-path` and mlx-swift."""

from __future__ import annotations

from pathlib import Path

from ondevice.artifact.adapter import CONFIG_NAME
from ondevice.artifact.mlx_lm_files import load_mlx_lm_adapter, save_mlx_lm_adapter
from ondevice.core.errors import ModelError
from ondevice.exits.base import Checked, Form, Request
from ondevice.exits.check import check_adapter, refuse_own_head
from ondevice.models.text_model import is_in_tower


def check(request: Request) -> None:
    """Refuse a layer that mlx-lm has under another name, with ModelError."""
    if is_in_tower(request.adapter):
        raise ModelError(
            "mlx-lm has other names for the layers of a checkpoint that also reads images",
            expected="an adapter of a text model",
            received=request.adapter.linears[0],
        )


def write(request: Request, folder: Path) -> Checked:
    """Write `adapter_config.json` and `adapters.safetensors`."""
    refuse_own_head(request, "mlx-lm")
    return write_adapter(request, folder)


def write_adapter(request: Request, folder: Path) -> Checked:
    """Write the files, read them back and compare, over a base that mlx-lm reads as it is."""
    save_mlx_lm_adapter(request.adapter, folder)
    return check_adapter(request, load_mlx_lm_adapter(folder))


FORM = Form("mlx", "mlx-lm", write, marker=CONFIG_NAME, needs_model=False, check=check, whole=True)
