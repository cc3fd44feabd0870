"""`gguf-pair`: the base model and the adapter as two files, for `llama-server -m model.gguf --lora
adapter.gguf`.

The adapter is not rounded, and an adapter that was trained on rounded weights (`method.base`)
finds the very weights: the same code rounded them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ondevice.exits import gguf, gguf_lora
from ondevice.exits.base import Checked, Form, Request
from ondevice.exits.check import check_beside, open_base

MODEL_NAME = "model.gguf"
ADAPTER_NAME = "adapter.gguf"


def check(request: Request) -> None:
    """Refuse what `gguf` and `gguf-lora` refuse."""
    gguf.check(request)
    gguf_lora.check(request)


def write(request: Request, folder: Path) -> Checked:
    """Write both files, read them back and compare."""
    gguf_lora.write(request, folder / ADAPTER_NAME)
    reading = gguf.check_texts(request)
    base = open_base(request)
    path = folder / MODEL_NAME
    written = gguf.write_model(request, base, reading, path)
    checked = check_beside(request, base, gguf.read_tensors(path, base), written.limits)
    notes = gguf.check_read(path, reading, base, request)
    return replace(checked, notes=(*checked.notes, *notes))


FORM = Form(
    "gguf-pair",
    "llama.cpp",
    write,
    marker=MODEL_NAME,
    dtypes=gguf.DTYPES,
    merged=True,
    check=check,
    rounds={"q4_0": "q4_0"},
)
