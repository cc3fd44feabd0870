"""Every stored tensor is held against base plus adapter: heads, vectors, blocks of a quantised row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ondevice.artifact.adapter import save_adapter
from ondevice.core.errors import ModelError, VerificationError
from ondevice.exits import convert, gguf, mlx_model
from ondevice.exits.check import Rounding
from ondevice.gguf.names import gguf_parts
from ondevice.models import load_model, save_tiny
from tests.exits.conftest import random_adapter

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def with_own_head(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, torch.Tensor]:
    """A model whose config.json ties its head to the embedding, and whose file has another one."""
    folder = tmp_path_factory.mktemp("head")
    model = save_tiny(folder / "model", "llama", vocab=288, tied=True)
    weights = load_file(model / "model.safetensors")
    torch.manual_seed(0)
    head = torch.randn_like(weights[EMBEDDING]) * 0.05
    save_file({**weights, HEAD: head}, model / "model.safetensors", {"format": "pt"})
    assert json.loads((model / "config.json").read_text())["tie_word_embeddings"] is True
    save_adapter(random_adapter(load_model(str(model))), folder / "adapter")
    return model, folder / "adapter", head


@pytest.mark.parametrize(("form", "dtype"), [("safetensors", None), ("gguf", "float32"),
                                             ("gguf", "q8_0"), ("mlx-model", "8bit")])  # fmt: skip
def test_a_head_that_the_config_calls_tied_is_written(
    form: str, dtype: str | None, with_own_head: tuple[Path, Path, torch.Tensor], tmp_path: Path
) -> None:
    model, adapter, head = with_own_head
    out = tmp_path / "out"
    convert(adapter, form, out, model=str(model), dtype=dtype)
    limit = {None: 0.0, "float32": 0.0, "q8_0": 0.5 / 127 + 1e-3, "8bit": 3 / 255}[dtype]
    if form == "gguf":
        from gguf import GGUFReader, dequantize

        stored = {one.name: one for one in GGUFReader(out).tensors}
        assert {"output.weight", "token_embd.weight"} <= stored.keys()
        one = stored["output.weight"]
        found = torch.from_numpy(np.array(dequantize(one.data, one.tensor_type)))
    else:
        assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
        if form == "mlx-model":
            mx: Any = pytest.importorskip("mlx.core")
            from mlx_lm.utils import load_model as load_mlx

            part = load_mlx(out)[0].lm_head
            values = mx.dequantize(part.weight, part.scales, part.biases, group_size=64, bits=8)
            found = torch.from_numpy(np.array(values.astype(mx.float32)))
        else:
            found = load_file(out / "model.safetensors")[HEAD]
    assert float((found - head).abs().max()) <= limit * float(head.abs().max())


@pytest.mark.parametrize(("form", "reader"), [("mlx", "mlx-lm"), ("vllm", "vLLM")])
def test_a_reader_that_would_tie_the_head_of_the_base_is_refused(
    form: str, reader: str, with_own_head: tuple[Path, Path, torch.Tensor], tmp_path: Path
) -> None:
    model, adapter, _ = with_own_head
    with pytest.raises(ModelError) as caught:
        convert(adapter, form, tmp_path / "out", model=str(model))
    assert f"{reader} would not read the output head" in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "left_out", [HEAD, "model.norm.weight", "model.layers.1.mlp.up_proj.weight"]
)
def test_a_gguf_file_without_one_of_the_tensors_gets_no_name(
    left_out: str, with_own_head: tuple[Path, Path, torch.Tensor], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    model, adapter, _ = with_own_head

    def less(*arguments: Any) -> dict[str, tuple[str, ...]]:
        names = gguf_parts(*arguments)
        return {name: parts for name, parts in names.items() if name != left_out}

    monkeypatch.setattr(gguf, "gguf_parts", less)
    monkeypatch.setattr(gguf, "_kept", lambda *arguments: 1.0)
    with pytest.raises(VerificationError) as caught:
        convert(adapter, "gguf", tmp_path / "out.gguf", model=str(model))
    assert left_out in str(caught.value)
    assert not (tmp_path / "out.gguf").exists()


def test_an_mlx_folder_that_mlx_lm_reads_without_a_head_gets_no_name(
    with_own_head: tuple[Path, Path, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlx_lm")
    model, adapter, _ = with_own_head
    describe = mlx_model.save_description

    def tied(folder: Path, dtype: Any, loaded: Any) -> None:
        describe(folder, dtype, loaded)
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": True}))

    monkeypatch.setattr(mlx_model, "save_description", tied)
    with pytest.raises((ModelError, VerificationError)) as caught:
        convert(adapter, "mlx-model", tmp_path / "out", model=str(model))
    assert "lm_head" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_fault_in_one_block_is_found_that_the_tensors_largest_number_would_hide() -> None:
    """A vector of small numbers in a matrix that has a large one: each block has its own bound."""
    wanted = torch.full((2, 64), 1e-3)
    wanted[1, 40] = 10.0
    found = wanted.clone()
    found[0, 3] = 2e-3
    assert Rounding(0.01).excess(found, wanted) is None
    assert Rounding(0.01, 32).excess(found, wanted) is not None
    assert Rounding(0.01, 32).excess(wanted, wanted) is None
    found[0, 3] = float("nan")
    assert Rounding(0.01).excess(found, wanted) is not None
