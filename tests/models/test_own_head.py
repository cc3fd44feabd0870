"""A head of its own under `tie_word_embeddings: true`: transformers' loss with every backend and after every exit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import ondevice
from ondevice.core.errors import ModelError
from ondevice.core.registry import method_config, open_session, spec_of
from ondevice.models import load_model, open_model, read_dims
from ondevice.models.sources.resolve import read_config
from ondevice.models.tiny import save_tiny
from ondevice.training.fuse import fuse
from tests.cli.command import write_rows

IDS = np.random.default_rng(0).integers(0, 256, (2, 12))


def model_with_head(
    folder: Path, *, tied: bool = True, same: bool = False, head: bool = True
) -> Path:
    """Write a model whose configuration says `tied` and whose file has a head or not."""
    save_tiny(folder)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    if head:
        random = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(5))
        tensors["lm_head.weight"] = embedding.clone() if same else 0.1 * random
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
    return folder


@torch.no_grad()
def transformers_loss(folder: Path) -> float:
    ids = torch.from_numpy(IDS)
    return float(AutoModelForCausalLM.from_pretrained(folder)(ids, labels=ids).loss)


def loss_of(folder: Path, name: str, backend: str = "torch", **settings: object) -> float:
    config = method_config(name, settings)
    needs_files = spec_of(config).reads_files(config, backend)
    loaded = open_model(str(folder)) if needs_files else load_model(str(folder))
    session = open_session(loaded, config, 0, backend=backend)
    return float(session.step(IDS, IDS.copy(), 0, 1e-6).loss)


CASES = {
    "full": ("full", "torch", {}),
    "lora": ("lora", "torch", {}),
    "mesp": ("mesp", "torch", {}),
    "mesp streamed": ("mesp", "torch", {"weight_placement": "streamed"}),
    "slideformer": ("slideformer", "torch", {"compute": "float32"}),
    "lsp": ("lsp", "torch", {"compute": "float32"}),
    "mesp in MLX": ("mesp", "mlx", {}),
    "mesp in MLX, streamed": ("mesp", "mlx", {"weight_placement": "streamed"}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("same", [False, True], ids=["own head", "a copy of the embedding"])
def test_every_backend_has_the_loss_of_transformers(case: str, same: bool, tmp_path: Path) -> None:
    name, backend, settings = CASES[case]
    if backend == "mlx":
        pytest.importorskip("mlx.core")
    folder = model_with_head(tmp_path / "model", same=same)
    assert loss_of(folder, name, backend, **settings) == pytest.approx(
        transformers_loss(folder), abs=2e-4
    )


def test_sizes_follow_the_weights(tmp_path: Path) -> None:
    own = model_with_head(tmp_path / "own")
    assert (
        not read_dims(str(own)).tied
        and read_dims(str(model_with_head(tmp_path / "copy", same=True))).tied
    )
    assert read_config(own)["tie_word_embeddings"] is False
    assert read_dims(str(own)).parameters == sum(
        t.numel() for t in load_file(own / "model.safetensors").values()
    )


@pytest.mark.parametrize("kind", ["gguf", "mlx-model", "safetensors"])
def test_what_is_written_has_the_loss_of_transformers(kind: str, tmp_path: Path) -> None:
    from ondevice.exits.convert import convert

    folder = model_with_head(tmp_path / "model")
    adapter = trained_adapter(folder, tmp_path)
    out = tmp_path / ("out.gguf" if kind == "gguf" else "out")
    convert(adapter, to=kind, model=str(folder), out=out)
    if kind != "gguf":
        assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    if kind == "mlx-model":  # packed in 4 bits, as mlx-lm reads it
        assert {"lm_head.weight", "lm_head.scales"} <= load_file(out / "model.safetensors").keys()
        return
    written = load_model(str(out))
    assert not written.dims.tied
    head = load_file(folder / "model.safetensors")["lm_head.weight"]
    torch.testing.assert_close(written.family.head_weight.float(), head, atol=1e-3, rtol=1e-2)


def test_a_fused_model_keeps_its_head(tmp_path: Path) -> None:
    folder = model_with_head(tmp_path / "model")
    fuse(str(folder), trained_adapter(folder, tmp_path), tmp_path / "fused")
    fused = load_file(tmp_path / "fused" / "model.safetensors")
    torch.testing.assert_close(
        fused["lm_head.weight"], load_file(folder / "model.safetensors")["lm_head.weight"]
    )
    assert (
        json.loads((tmp_path / "fused" / "config.json").read_text())["tie_word_embeddings"] is False
    )


def trained_adapter(folder: Path, tmp_path: Path) -> Path:
    rows = write_rows(
        tmp_path / "rows.jsonl", [{"text": f"row {number} of text"} for number in range(4)]
    )
    settings = {"model.source": str(folder), "data.path": str(rows), "train.out": str(tmp_path / "run"),
                "train.steps": 2, "train.batch_size": 2, "method.name": "lora", "model.device": "cpu",
                "method.learning_rate": 1e-2}  # fmt: skip
    trained = ondevice.train(settings)
    assert trained.adapter is not None
    return trained.adapter


@pytest.mark.parametrize("opened", [load_model, open_model], ids=["load", "open"])
def test_a_head_that_is_said_to_be_there_and_is_not_is_refused(opened, tmp_path: Path) -> None:
    folder = model_with_head(tmp_path / "model", tied=False, head=False)
    with pytest.raises(ModelError) as caught:
        opened(str(folder))
    assert "lm_head.weight" in str(caught.value)


@pytest.mark.parametrize("same", [False, True])
def test_an_untied_head_stays_what_it_is(same: bool, tmp_path: Path) -> None:
    folder = model_with_head(tmp_path / "model", tied=False, same=same)
    assert not load_model(str(folder)).dims.tied
    assert loss_of(folder, "mesp") == pytest.approx(transformers_loss(folder), abs=2e-4)


def test_a_damaged_file_is_still_refused_by_name(tmp_path: Path) -> None:
    folder = model_with_head(tmp_path / "model")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(b"\xff" * 8 + data[8:])
    with pytest.raises(ModelError) as caught:
        load_model(str(folder))
    assert "damaged" in str(caught.value)
