"""Families beside those of the table, as GGUF: llama.cpp computes what PEFT's merged model computes, and the file read
here again, and by transformers where it reads such files, is the model it was written of, tensor by tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ondevice.artifact.adapter import save_adapter
from ondevice.core.errors import ModelError
from ondevice.exits import convert, mlx_model
from ondevice.models import load_model, save_tiny, tiny_model
from tests.exits.conftest import IDS, Case, log_probabilities, random_adapter
from tests.exits.llama_cpp import LlamaCpp, base_gguf, check_zeros_change_nothing
from tests.exits.table import MORE

LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 300,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3_text": ("gemma3_text", {"layers": 3, "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
                                    "query_pre_attn_scalar": 24}),
    "gemma4_text": ("gemma4_text", {"layers": 4}),
    "gemma4_text, keys are values": ("gemma4_text", {
        "layers": 4, "num_kv_shared_layers": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
    }),
    "granite": ("granite", {"tied": False}),
    "granitemoe": ("granitemoe", {"tied": False, "attention_bias": False}),
    "lfm2": ("lfm2", {"layers": 3, "conv_L_cache": 4}),
    "lfm2_moe": ("lfm2_moe", {"layers": 4, "num_dense_layers": 2}),
    "llama, 3.2's rotary embedding": ("llama", {"rope_parameters": LLAMA3}),
    "olmo2": ("olmo2", {"tied": False}),
    "phi3": ("phi3", {"tied": False}),
    "phi3, longrope": (
        "phi3", {"rope_parameters": LONGROPE, "max_positions": 600, "original_max_position_embeddings": 300},
    ),
    "qwen3": ("qwen3", {"rope_parameters": YARN, "head_dim": 128}),
    "qwen3_5_text": ("qwen3_5_text", {"layers": 3, "tied": False}),
    "qwen3_moe": ("qwen3_moe", {"tied": False, "moe_intermediate_size": 768}),
    "smollm3": ("smollm3", {"layers": 4, "no_rope_layer_interval": 4}),
}  # fmt: skip
assert {family for family, _ in FORMS.values()} >= set(MORE)
TRANSFORMERS_READS = ("gemma3_text", "phi3", "qwen3", "qwen3_moe")
"""Of these, at its own defaults of what it does not read (head size, width of an expert); it drops scalings of the
rotary embedding, so its tensors alone are compared."""


def add_merge(path: Path) -> None:
    """Let the tiny tokenizer merge two letters: transformers reads no GGUF tokenizer that merges none."""
    rules = json.loads(path.read_text())
    rules["model"]["vocab"]["ab"], rules["model"]["merges"] = (
        256,
        [["a", "b"]],
    )  # the special ones move up
    rules["pre_tokenizer"]["use_regex"] = True  # GPT-2's way
    path.write_text(json.dumps(rules))


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("form", FORMS)
def test_a_gguf_file_is_the_model(form: str, tmp_path: Path) -> None:
    from peft import PeftModel

    family, sizes = FORMS[form]
    folder = save_tiny(tmp_path / "model", family, 3, vocab=288, **sizes)
    add_merge(folder / "tokenizer.json")
    loaded = load_model(str(folder))
    save_adapter(random_adapter(loaded), tmp_path / "adapter")
    base, lora = log_probabilities(loaded.model), tmp_path / "lora.gguf"
    merged = PeftModel.from_pretrained(loaded.model, tmp_path / "adapter").merge_and_unload()
    expected, path = log_probabilities(merged), tmp_path / "model.gguf"
    convert(tmp_path / "adapter", "gguf", path, model=str(folder), dtype="float32")
    found = LlamaCpp(path).log_probabilities(IDS, 288)
    # llama.cpp looks tanh-GELU up in a table of float16.
    error = 5e-3 if family.startswith("gemma") else 1e-3
    np.testing.assert_allclose(found, expected, rtol=0, atol=error)
    assert np.abs(found - base).max() > 0.1
    case = Case(folder, tmp_path / "adapter", base, expected)
    convert(case.adapter, "gguf-lora", lora, model=str(folder))
    beside = LlamaCpp(base_gguf(case), lora).log_probabilities(IDS, 288)
    np.testing.assert_allclose(beside, expected, rtol=0, atol=error)
    check_zeros_change_nothing(case, tmp_path)

    again = load_model(str(path))
    assert again.dims == loaded.dims
    wanted, state = merged.state_dict(), again.model.state_dict()
    assert state.keys() == wanted.keys()
    for name, value in state.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-6, atol=1e-6, msg=name)
    np.testing.assert_allclose(log_probabilities(again.model), expected, rtol=0, atol=1e-5)
    if family in TRANSFORMERS_READS:
        theirs = AutoModelForCausalLM.from_pretrained(
            tmp_path, gguf_file=path.name, dtype=torch.float32
        ).state_dict()
        assert theirs.keys() == state.keys()
        for name, value in theirs.items():
            assert torch.equal(value, state[name]), name


@pytest.mark.parametrize("form", [one for one in FORMS if one.startswith("gemma4_text")])
def test_llama_cpp_writes_the_greedy_tokens_of_base_plus_adapter(form: str, tmp_path: Path) -> None:
    """Over rows longer than a window, so that its caches are read and dropped as transformers' are.

    The head is separate: with a tied one a random model repeats its last token.
    """
    from peft import PeftModel

    family, sizes = FORMS[form]
    folder = save_tiny(tmp_path / "model", family, 13, vocab=288, tied=False, **sizes)
    add_merge(folder / "tokenizer.json")
    loaded = load_model(str(folder))
    save_adapter(random_adapter(loaded), tmp_path / "adapter")
    merged = PeftModel.from_pretrained(loaded.model, tmp_path / "adapter").merge_and_unload()
    expected: list[int] = []
    for _ in range(14):
        found = log_probabilities(merged, [*IDS, *expected])
        *_, second, first = np.sort(found)
        # Each of the two may be wrong by what the test of the file allows.
        assert first - second > 2 * 5e-3, "choose another seed: rounding may choose another token"
        expected.append(int(found.argmax()))
    assert len({*expected}) > 10
    path = tmp_path / "model.gguf"
    convert(tmp_path / "adapter", "gguf", path, model=str(folder), dtype="float32")
    assert LlamaCpp(path).greedy(IDS, 14) == expected
    path = tmp_path / "lora.gguf"
    convert(tmp_path / "adapter", "gguf-lora", path, model=str(folder))
    case = Case(folder, tmp_path / "adapter", found, found)
    assert LlamaCpp(base_gguf(case), path).greedy(IDS, 14) == expected


@pytest.mark.parametrize("form", [one for one in FORMS if one.startswith("gemma4_text")])
def test_mlx_lm_writes_the_greedy_tokens_of_base_plus_adapter(form: str, tmp_path: Path) -> None:
    """Against the rounded weights in transformers: of fields that mlx-lm reads and transformers does
    not write, such as the second head size."""
    mx = pytest.importorskip("mlx.core")
    from mlx_lm.utils import load_model as load_mlx
    from peft import PeftModel

    family, sizes = FORMS[form]
    folder = save_tiny(tmp_path / "model", family, 3, **sizes)
    loaded = load_model(str(folder))
    save_adapter(random_adapter(loaded), tmp_path / "adapter")
    merged = PeftModel.from_pretrained(loaded.model, tmp_path / "adapter").merge_and_unload()
    out = tmp_path / "mlx"
    report = convert(tmp_path / "adapter", "mlx-model", out, model=str(folder), dtype="8bit")
    assert report.kept == pytest.approx(1.0, abs=0.05)
    packed, _ = load_mlx(out)
    packed.set_dtype(mx.float32)
    state = merged.state_dict()
    for name, value in mlx_model.read_tensors(out, loaded.family.weight_shapes(loaded.dims), 8):
        state[name].copy_(torch.from_numpy(value))
    written = [*IDS]
    for _ in range(12):
        with torch.no_grad():
            logits = merged(torch.tensor([written])).logits[0, -1].double().numpy()
        found = np.array(packed(mx.array([written])).astype(mx.float32))[0, -1]
        np.testing.assert_allclose(found, logits, rtol=0, atol=0.05)  # float16 scales
        written.append(int(logits.argmax()))
        assert int(found.argmax()) == written[-1]


UNKNOWN = {
    "smollm3": ({}, "each fourth"),
    "gemma3_text": ({"query_pre_attn_scalar": 20}, "size of a head"),
    "olmo2": ({}, "output head of its own"),
    "lfm2_moe": ({"routed_scaling_factor": 2.0}, "normalises the weights"),
    "qwen3_moe": ({"norm_topk_prob": False}, "normalises the weights"),
    "qwen2_moe": ({"layers": 2, "mlp_only_layers": [1]}, "experts in every layer"),
}


@pytest.mark.parametrize("family", UNKNOWN)
def test_what_llama_cpp_computes_in_another_way_is_refused(family: str, tmp_path: Path) -> None:
    sizes, words = UNKNOWN[family]
    folder = save_tiny(tmp_path / "model", family, **sizes)
    save_adapter(random_adapter(tiny_model(family, **sizes)), tmp_path / "adapter")
    with pytest.raises(ModelError) as caught:
        convert(tmp_path / "adapter", "gguf", tmp_path / "m.gguf", model=str(folder))
    assert words in str(caught.value)
    assert not (tmp_path / "m.gguf").exists()
