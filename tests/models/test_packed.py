"""A folder of packed weights: read back to the bits, read by transformers, and refused where it is not whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("bitsandbytes")

from safetensors.torch import load_file, save_file

from ondevice.core.errors import ArtifactError
from ondevice.models.load import tiny_model
from ondevice.models.packed import load_packed, save_packed
from ondevice.nn.packed import pack_model

IDS = torch.arange(24).view(2, 12)


def write(
    folder: Path,
    family: str = "llama",
    kind: str = "nf4",
    dtype: torch.dtype = torch.float32,
    **sizes: bool,
):
    """A packed tiny model in `folder`, and its logits."""
    loaded = tiny_model(family, **sizes)
    for parameter in loaded.model.parameters():
        parameter.data = parameter.data.to(dtype)
    if kind != "none":
        pack_model(loaded.family, kind)
    save_packed(loaded, kind, folder)
    with torch.no_grad():
        return loaded, loaded.model(IDS).logits


def read(folder: Path, loaded):
    return load_packed(folder, "cpu", loaded.tokenizer, loaded.source)


@settings(deadline=None, max_examples=12)
@given(
    family=st.sampled_from(["llama", "qwen2", "mistral"]),
    kind=st.sampled_from(["nf4", "int8", "none"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    tied=st.booleans(),
)
def test_what_was_written_is_read_to_the_bits(tmp_path_factory, family, kind, dtype, tied) -> None:
    folder = tmp_path_factory.mktemp("packed") / "model"
    loaded, logits = write(folder, family, kind, dtype, tied=tied)
    answer = read(folder, loaded)
    with torch.no_grad():
        assert torch.equal(answer.model(IDS).logits, logits)
    assert answer.dims == loaded.dims and not any(
        p.requires_grad for p in answer.model.parameters()
    )
    assert (answer.family.head_weight is answer.family.embedding.weight) == tied


def test_transformers_reads_the_folder_too(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    _, logits = write(tmp_path / "model")
    received = AutoModelForCausalLM.from_pretrained(tmp_path / "model")(
        IDS
    ).logits  # no_grad: a bfloat16 kernel
    torch.testing.assert_close(received, logits, rtol=1e-5, atol=1e-5)


def change(folder: Path, edit) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), "lack a tensor"),
        (lambda t: t.pop("model.layers.0.mlp.up_proj.weight.absmax"), "up_proj are not whole"),
        (lambda t: t.update({"model.norm.weight": torch.ones(3)}), "model.norm has another shape"),
        (
            lambda t: t.update({"model.layers.9.mlp.up_proj.weight": torch.ones(3)}),
            "belongs to no part",
        ),
    ],
)
def test_a_folder_that_is_not_whole_says_what_is_wrong(tmp_path: Path, edit, words) -> None:
    loaded, _ = write(tmp_path / "model")
    change(tmp_path / "model", edit)
    with pytest.raises(ArtifactError) as caught:
        read(tmp_path / "model", loaded)
    assert words in str(caught.value)


def test_a_truncated_file_and_another_packing_are_refused(tmp_path: Path) -> None:
    loaded, _ = write(tmp_path / "model")
    config, weights = tmp_path / "model" / "config.json", tmp_path / "model" / "model.safetensors"
    whole, values = weights.read_bytes(), json.loads(config.read_text())
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ArtifactError):
        read(tmp_path / "model", loaded)
    weights.write_bytes(whole)
    config.write_text(json.dumps({**values, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ArtifactError) as caught:
        read(tmp_path / "model", loaded)
    assert "gptq" in str(caught.value.received)
    config.write_text(json.dumps({**values, "dtype": "float8"}))
    with pytest.raises(ArtifactError) as caught:
        read(tmp_path / "model", loaded)
    assert "float8" in str(caught.value)
