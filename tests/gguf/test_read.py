"""GGUF files: equal to the model they were made of and to transformers' own reading, or refused by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ondevice.core.errors import ModelError
from ondevice.gguf.metadata import Metadata
from ondevice.gguf.read_tokenizer import write_tokenizer
from ondevice.models import find_cached, load_model, read_dims, tiny_model
from ondevice.models.sources import cache
from tests.gguf.writing import write_gguf

pytestmark = pytest.mark.usefixtures("own_cache")
WIDE = {"hidden": 64, "heads": 4, "kv_heads": 2, "intermediate": 96, "vocab": 320}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_float32_gguf_is_the_model(family: str, tied: bool, tmp_path: Path) -> None:
    built = tiny_model(family, 1, tied=tied, **WIDE)
    path = write_gguf(tmp_path / "tiny.gguf", built)
    assert read_dims(str(path)) == built.dims
    assert find_cached(str(path)) is None
    loaded = load_model(str(path), verify=True)
    assert loaded.dims == built.dims
    for name, tensor in built.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], tensor), name
    assert loaded.tokenizer("xab\n")["input_ids"] == [120, 260, 10]
    assert loaded.source.path == find_cached(str(path))
    assert loaded.source.sha256 == load_model(str(loaded.source.path)).source.sha256


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16"])
def test_quantised_gguf_is_what_transformers_reads(kind: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(**WIDE), kind)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    ).state_dict()
    ours = load_model(str(path)).model.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor), name


def test_every_kind_that_the_package_reads_is_what_transformers_reads(tmp_path: Path) -> None:
    """Each matrix of four layers is of another kind."""
    from gguf import GGMLQuantizationType
    from gguf.quants import _type_traits

    kinds = ["F16", *(GGMLQuantizationType(kind).name for kind in sorted(_type_traits))]
    assert {"Q4_K", "Q6_K", "IQ4_XS", "IQ2_XXS", "TQ1_0", "MXFP4", "BF16"} <= {*kinds} and len(
        kinds
    ) <= 28
    sizes = {
        "hidden": 256,
        "heads": 4,
        "kv_heads": 4,
        "intermediate": 256,
        "vocab": 320,
        "layers": 4,
    }
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(**sizes), kinds)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32
    ).state_dict()
    ours = load_model(str(path)).model.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=0, equal_nan=True, msg=name)


def test_what_another_version_converted_is_converted_again(tmp_path: Path) -> None:
    """Versions of transformers made different tokenizers, which the cache would keep."""
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(**WIDE))
    loaded = load_model(str(path))
    assert (
        loaded.source.path is not None
        and cache.read_record(loaded.source.path).origin["conversion"]
    )
    rules = loaded.source.path / "tokenizer.json"
    right = rules.read_bytes()
    rules.write_bytes(right.replace(b'"BPE"', b'"Unigram"'))
    cache.write_record(loaded.source.path, str(path), {"file": path.name})
    assert find_cached(str(path)) is None
    assert load_model(str(path), verify=True).tokenizer("xab\n")["input_ids"] == [120, 260, 10]
    assert rules.read_bytes() == right


BROKEN_TOKENIZERS = {
    "way of cutting": ({"pre": "viking"}, "viking"),
    "kind": ({"model": "t5"}, "t5"),
    "twice": ({"tokens": ["a", "b", "a"]}, "'a'"),
    "kinds": ({"token_type": [1, 1]}, "tokenizer.ggml.token_type"),
    "scores": ({"model": "llama", "scores": [0.0]}, "tokenizer.ggml.scores"),
    "no scores": ({"model": "llama"}, "tokenizer.ggml.scores"),
    "no merges": ({"merges": None}, "tokenizer.ggml.merges"),
}


@pytest.mark.parametrize("case", BROKEN_TOKENIZERS)
def test_tokenizer_that_cannot_be_read(case: str, tmp_path: Path) -> None:
    changes, named = BROKEN_TOKENIZERS[case]
    keys = {
        "model": "gpt2",
        "pre": "default",
        "tokens": ["a", "b", "ab"],
        "token_type": None,
        "merges": ["a b"],
    }
    keys = {
        f"tokenizer.ggml.{key}": value
        for key, value in (keys | changes).items()
        if value is not None
    }
    with pytest.raises(ModelError) as caught:
        write_tokenizer(Keys(keys, tmp_path / "a.gguf"), {}, tmp_path)
    assert named in str(caught.value)
    assert not list(tmp_path.iterdir())


class Keys(Metadata):
    """The metadata of a file by its keys."""

    def __init__(self, keys: dict[str, Any], path: Path) -> None:
        self.keys, self.path = keys, path

    def optional(self, key: str) -> Any:
        return self.keys.get(key)


BROKEN = {
    "other architecture": ({"arch": "bloom"}, "bloom"),
    "no size": ({"embedding_length": None}, "embedding_length"),
    "experts": ({"expert_count": 4}, "experts"),
    "half rotation": ({"rope.dimension_count": 8, "attention.key_length": 16}, "rotates"),
    "rope scaling": ({"rope.scaling.type": "longrope"}, "longrope"),
    "rope by hand": (
        {"tensors": {"rope_freqs.weight": np.linspace(1, 3, 8, dtype=np.float32)}},
        "rope_freqs",
    ),
    "unknown tensor": (
        {"tensors": {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}},
        "attn_q_norm",
    ),
    "too few tensors": ({"block_count": 3}, "model.layers.2"),
    "other shape": ({"feed_forward_length": 128}, "ffn_"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_gguf_that_cannot_be_used(case: str, tmp_path: Path, own_cache: Path) -> None:
    changes, named = BROKEN[case]
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(**WIDE), **changes)
    with pytest.raises(ModelError) as caught:
        load_model(str(path))
    assert named in str(caught.value)
    assert not list(own_cache.glob("models/gguf/*"))


@pytest.mark.parametrize("content", [b"", b"not a gguf file at all", None])
def test_a_damaged_gguf_is_refused_with_a_reason(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    if content is None:
        content = write_gguf(path, tiny_model(**WIDE)).read_bytes()[:-5000]
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        load_model(str(path))
    assert caught.value.expected == "GGUF version 2 or 3"


def test_linear_and_yarn_scaling_arrive(tmp_path: Path) -> None:
    scaling = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 128,
    }
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(**WIDE), **scaling)
    loaded = load_model(str(path))
    assert loaded.dims.rope_type == "yarn"
    rope = loaded.model.config.rope_parameters
    assert (rope["factor"], rope["original_max_position_embeddings"]) == (4.0, 128)


def test_a_replaced_file_is_converted_again(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", tiny_model(seed=1, **WIDE))
    first = load_model(str(path))
    write_gguf(path, tiny_model(seed=2, **WIDE))
    os.utime(path, ns=(1, 1))
    assert load_model(str(path)).source.sha256 != first.source.sha256


def test_a_changed_cache_is_noticed(tmp_path: Path, own_cache: Path) -> None:
    path = str(write_gguf(tmp_path / "tiny.gguf", tiny_model(**WIDE)))
    weights = load_model(path).source.path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    load_model(path)
    with pytest.raises(ModelError) as caught:
        load_model(path, verify=True)
    assert f"delete {weights.parent}" in caught.value.hint
    weights.write_bytes(data[:-1])
    with pytest.raises(ModelError) as caught:
        load_model(path)
    assert caught.value.received.endswith("bytes")
    (weights.parent / "ondevice-model.json").write_text("{}")
    with pytest.raises(ModelError) as caught:
        load_model(path)
    assert "ondevice-model.json" in str(caught.value)
