"""`vllm`: PEFT's layout within the rules that vLLM documents, with the command that serves it."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

from ondevice.artifact.adapter import CONFIG_NAME, load_adapter, save_adapter
from ondevice.artifact.files import atomic_write
from ondevice.artifact.mlx_lm_files import GPT2_BLOCKS
from ondevice.core.errors import ConfigError, ModelError
from ondevice.exits.base import Checked, Form, Request
from ondevice.exits.check import check_adapter, refuse_own_head
from ondevice.models.sources import resolve as sources

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that `--max-lora-rank` takes; an adapter may have any rank up to it."""
COMMAND_NAME = "serve.sh"


def check(request: Request) -> None:
    """Refuse GPT-2, whose layers vLLM gives no adapter, with ModelError, and a model without files
    with ConfigError."""
    if (request.model or "").startswith(sources.TINY_PREFIX):
        raise ConfigError(
            f"{request.model} has no files that vLLM could load",
            expected="a model with files",
            received=request.model,
            hint="--to safetensors writes base and adapter as one model",
        )
    linear = request.adapter.linears[0]
    if linear.startswith(GPT2_BLOCKS):
        raise ModelError("vLLM takes no LoRA adapter of a GPT-2 model", received=linear)


def write(request: Request, folder: Path) -> Checked:
    """Write the adapter, and a shell script with the command that serves it."""
    refuse_own_head(request, "vLLM")
    base = _served(request)
    save_adapter(replace(request.adapter, base_model=base), folder)
    checked = check_adapter(request, load_adapter(folder))
    _check_rules(folder)
    command = launch(base, request, request.out.resolve())
    # The folder may be moved, or sent to another machine: the script names its own place.
    script = launch(base, request, place=None)
    here = 'here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)'
    atomic_write(folder / COMMAND_NAME, f"#!/bin/sh\n{here}\nexec {script}\n")
    (folder / COMMAND_NAME).chmod(0o755)
    return replace(checked, notes=(*checked.notes, command))


def launch(base: str, request: Request, place: Path | None) -> str:
    """Return the command that serves base and adapter, the adapter under the name of its folder;
    without a place, that is the shell's variable `here`."""
    rank = next(value for value in RANKS if value >= request.adapter.rank)
    words = ["vllm", "serve", base, "--enable-lora", "--max-lora-rank", str(rank), "--lora-modules"]
    module = f"{request.out.name}={place or ''}"
    return shlex.join([*words, module]) + ("" if place else '"$here"')


def _served(request: Request) -> str:
    """Return what vLLM loads as the base model: a hub id as it is, else the folder of safetensors
    files."""
    model = request.model or ""
    if sources.find_cached(model) is None and not model.startswith(sources.PACKAGE_PREFIX):
        return model  # a hub id: vLLM fetches it itself
    path = sources.resolve(model, request.revision).path
    assert path is not None  # noqa: S101 - `check` has refused a model without files
    return str(path.resolve())


def _check_rules(folder: Path) -> None:
    """Hold the written configuration against what vLLM refuses: kinds of LoRA, extra trained
    modules, biases."""
    config = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    wanted = {
        "peft_type": "LORA",
        "bias": "none",
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }
    for field, value in wanted.items():
        if config.get(field) != value:
            raise ConfigError(
                f"vLLM refuses field '{field}'", expected=str(value), received=config.get(field)
            )


FORM = Form("vllm", "vLLM", write, marker=CONFIG_NAME, max_rank=RANKS[-1], check=check, whole=True)
