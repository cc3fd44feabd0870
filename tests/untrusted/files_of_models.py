"""Folders of models and GGUF files: whole examples, and how a user reads them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

# Models


def build_model(folder: Path) -> None:
    from ondevice.models.tiny import save_tiny

    save_tiny(folder / "model", "llama", layers=1, hidden=32, heads=2, kv_heads=1)


def build_sharded(folder: Path) -> None:
    build_model(folder)
    path = folder / "model"
    (path / "model.safetensors").rename(path / "model-00001-of-00001.safetensors")
    from ondevice.core.untrusted import read_header

    names = read_header(path / "model-00001-of-00001.safetensors").tensors
    index = {
        "metadata": {"total_size": 1},
        "weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors"),
    }
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def read_config(folder: Path) -> None:
    """Read the sizes, and look at the shapes that they give, as a plan does."""
    from ondevice.api.opened import network_method
    from ondevice.models.load import dims_and_family
    from ondevice.models.sources.resolve import check_folder, check_weights

    network_method(folder / "model")
    check_folder(folder / "model")
    dims, family = dims_and_family(str(folder / "model"), None)
    check_weights(folder / "model", family.weight_shapes(dims))
    _ = dims.parameters


def read_weights(folder: Path) -> None:
    """Read a model's tensors with each of our own readers."""
    from ondevice.artifact.files import read_tensors
    from ondevice.core.errors import OndeviceError
    from ondevice.methods.mesp.mlx.weights import TensorFile
    from ondevice.methods.mesp.torch.streamed import Files
    from ondevice.models.sources.resolve import check_weights

    def each_by_mlx() -> None:
        file = TensorFile(folder / "model" / "model.safetensors")
        for name in file.entries:
            file.read(name)
        file.file.close()

    for read in (
        lambda: check_weights(folder / "model", {"model.norm.weight": (32,)}),
        lambda: [
            value.sum() for value in read_tensors(folder / "model" / "model.safetensors").values()
        ],
        lambda: [
            value.sum()
            for value in read_tensors(folder / "model" / "model.safetensors", mapped=True).values()
        ],
        lambda: Files(folder / "model").close(),
        each_by_mlx,
    ):
        try:
            read()
        except OndeviceError as error:
            str(error).encode()


def read_tokenizer(folder: Path) -> None:
    from ondevice.models.load import read_tokenizer as read

    read(folder / "model")("a text")


def read_index(folder: Path) -> None:
    from ondevice.models.sources.resolve import check_folder

    check_folder(folder / "model")


def build_record(folder: Path) -> None:
    from ondevice.models.sources.cache import write_record

    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"x" * 10)
    write_record(folder, "package:x", {"file": "x.gguf", "conversion": 2})


def read_record(folder: Path) -> None:
    from ondevice.models.sources.cache import read_record as read

    read(folder, full=True)


def build_gguf(folder: Path) -> None:
    from ondevice.models.load import tiny_model
    from tests.gguf.writing import write_gguf

    model = tiny_model(
        "llama", layers=1, hidden=32, heads=2, kv_heads=1, intermediate=32, vocab=270
    )
    write_gguf(folder / "tiny.gguf", model, "Q8_0")


def read_gguf(folder: Path) -> None:
    from ondevice.models.sources.gguf import convert_gguf, read_gguf_dims

    read_gguf_dims(folder / "tiny.gguf")
    out = folder / "converted"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    convert_gguf(folder / "tiny.gguf", out)


def build_gguf_adapter(folder: Path) -> None:
    from gguf import GGUFWriter

    writer = GGUFWriter(folder / "tiny.gguf", "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 4.0)
    for side, shape in (("a", (2, 8)), ("b", (8, 2))):
        writer.add_tensor(f"blk.0.attn_q.weight.lora_{side}", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_gguf_adapter(folder: Path) -> None:
    """Nobody reads adapters in this form; a user may name one as a model."""
    from ondevice.core.errors import OndeviceError
    from ondevice.models.sources.gguf import read_gguf_dims

    try:
        read_gguf_dims(folder / "tiny.gguf")
    except OndeviceError as error:
        str(error).encode()
