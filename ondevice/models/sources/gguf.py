"""A GGUF file as a model: its sizes, and its conversion to a folder that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ondevice.artifact.files import sha256_file
from ondevice.core.dims import ModelDims
from ondevice.gguf.config import TOKEN_IDS, read_config
from ondevice.gguf.metadata import Metadata
from ondevice.gguf.read import open_gguf, write_safetensors
from ondevice.gguf.read_tokenizer import write_tokenizer
from ondevice.models.families.base import Family
from ondevice.models.families.configuration import dims_of
from ondevice.models.registry import family_for_gguf
from ondevice.models.sources.cache import progress


def read_gguf_dims(path: Path) -> tuple[ModelDims, type[Family]]:
    """Read the dimensions in a GGUF file's metadata, and its family; no tensor is read.

    Raises:
        ModelError: the file is damaged, is not a GGUF file, or is of an unsupported family.
    """
    data = Metadata(open_gguf(path), path)
    family = family_for_gguf(data.architecture, path.name)
    return dims_of(family, read_config(data, family), str(path)), family


def convert_gguf(path: Path, folder: Path) -> dict[str, Any]:
    """Write configuration, `model.safetensors` (float32) and tokenizer of a GGUF file to `folder`.

    Returns:
        The record's origin: file name, bytes, SHA-256 and licence.

    Raises:
        ModelError: as `read_gguf_dims`; or a tensor is missing, or has a wrong shape or an unknown
            type.
    """
    reader = open_gguf(path)
    data = Metadata(reader, path)
    family = family_for_gguf(data.architecture, path.name)
    config = read_config(data, family)
    dims = dims_of(family, config, str(path))
    _write_json(folder / "config.json", config)
    ids: dict[str, Any] = {key: config[key] for key in TOKEN_IDS if key in config}
    ends = [data.optional(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ends = [end for end in dict.fromkeys(ends) if end is not None]
    if len(ends) > 1:
        ids["eos_token_id"] = ends
    _write_json(folder / "generation_config.json", ids)
    with progress(f"converting {path.name} to float32", 4 * dims.parameters) as advance:
        write_safetensors(reader, family, dims, path, folder / "model.safetensors", advance)
    write_tokenizer(data, config, folder)
    origin = {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256_file(path)}
    if licence := data.optional("general.license"):
        origin["license"] = licence
    return origin


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
