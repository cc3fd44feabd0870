"""Checkpoints that also read images: text trains, adapters fit the whole, and no other tower changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    BertConfig,
    BertModel,
    ElectraConfig,
    ElectraModel,
)

import ondevice
from ondevice.core.errors import ModelError
from ondevice.models import load_model, load_tokenizer, read_dims
from ondevice.models.families.configuration import quiet_transformers
from ondevice.models.tiny import tiny_tokenizer
from ondevice.training.fuse import fuse
from tests.cli.command import write_rows
from tests.models.checkpoints import CHECKPOINTS, TOWERS, save_checkpoint

ROWS = [{"prompt": f"{n} and {n}?", "completion": f" {2 * n} it is"} for n in range(4)]
IDS = torch.arange(1, 10)[None] * 11 % 250


def logits(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits.numpy()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_trains_three_steps_loads_in_peft_and_is_fused_whole(
    name: str, tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path / "model", name)
    rows = write_rows(tmp_path / "rows.jsonl", ROWS)
    run = ondevice.train(
        str(folder), str(rows), method="lora", steps=3, out=tmp_path / "run", learning_rate=0.01,
        batch_size=2, backend="torch",
    )  # fmt: skip
    assert np.isfinite(run.result.final_loss)

    kind: Any = AutoModelForMultimodalLM if name in TOWERS else AutoModelForCausalLM
    with quiet_transformers():
        whole = kind.from_pretrained(folder, dtype=torch.float32).eval()
    before = logits(whole)
    with_adapter = peft.PeftModel.from_pretrained(whole, str(tmp_path / "run" / "adapter")).eval()
    adapted = logits(with_adapter)
    pairs = {n for n, _ in with_adapter.named_modules() if n.endswith("lora_A")}
    stored = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert pairs == {key.removesuffix(".weight") for key in stored if key.endswith("A.weight")}
    assert not np.array_equal(before, adapted)

    fuse(str(folder), tmp_path / "run", tmp_path / "fused")
    with quiet_transformers():
        fused = kind.from_pretrained(tmp_path / "fused", dtype=torch.float32).eval()
    scale = float(np.abs(adapted).max())
    np.testing.assert_allclose(logits(fused), adapted, atol=5e-5 * max(1.0, scale))
    own, written = (
        load_file(place / "model.safetensors") for place in (folder, tmp_path / "fused")
    )
    assert own.keys() == written.keys()
    changed = {key for key in own if own[key].tobytes() != written[key].tobytes()}
    assert len(changed) == len(stored) // 2
    assert not [key for key in changed if "vision" in key or "visual" in key]


def test_the_sizes_of_a_text_model_that_the_file_leaves_out_are_those_of_transformers(
    tmp_path: Path,
) -> None:
    folder = save_checkpoint(tmp_path / "model", "gemma-3-4b-it")
    config = json.loads((folder / "config.json").read_text())
    written = config["text_config"]
    rows = written.pop("vocab_size")
    for key in ("head_dim", "num_attention_heads"):
        written.pop(key)
    (folder / "config.json").write_text(json.dumps(config))
    whole = {"vocab_size": 262208, "head_dim": 256, "num_attention_heads": 8}
    dims = read_dims(str(folder))
    assert (dims.vocab, dims.head_dim, dims.heads) == tuple(whole.values())
    assert rows != dims.vocab
    assert load_tokenizer(str(folder)).vocab_size <= dims.vocab  # which has 260 tokens


def test_weights_without_the_tower_of_images_are_named(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", "SmolVLM2-2.2B-Instruct")
    tensors = load_file(folder / "model.safetensors")
    text = {key: value for key, value in tensors.items() if "vision" not in key}
    save_file(text, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError) as caught:
        load_model(str(folder))
    assert "other towers" in str(caught.value) and "model_type llama" in caught.value.hint
    del text["model.text_model.norm.weight"]
    save_file(text, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError) as caught:
        load_model(str(folder))
    assert "lack a tensor" in str(caught.value)


def test_an_encoder_says_that_it_is_one_and_what_takes_it(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "vocab_size": 260, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 32, "embedding_size": 16,
    }  # fmt: skip
    BertModel(BertConfig(**sizes)).save_pretrained(tmp_path / "bert")
    ElectraModel(ElectraConfig(**sizes)).save_pretrained(tmp_path / "electra")
    for name in ("bert", "electra"):
        tiny_tokenizer().save_pretrained(tmp_path / name)
    with pytest.raises(ModelError) as caught:
        load_model(str(tmp_path / "bert"))
    assert "encoder without a classification head" in str(caught.value)
    assert "--classes" in caught.value.expected
    with pytest.raises(ModelError) as caught:
        read_dims(str(tmp_path / "electra"))
    assert "electra models are encoders" in str(caught.value) and "bert" in caught.value.expected


def test_a_model_with_an_encoder_of_text_is_refused_as_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5gemma2"}))
    with pytest.raises(ModelError) as caught:
        read_dims(str(tmp_path))
    assert "read text in an encoder" in str(caught.value)
