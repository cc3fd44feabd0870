"""The peculiarities of `mistral` (the sliding window) and of `gpt2` (positions, Conv1D), and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ondevice.artifact.adapter import Adapter, save_adapter
from ondevice.core.config import ExportConfig, ModelConfig
from ondevice.core.errors import ConfigError, ModelError, Need
from ondevice.core.registry import method_config, open_session, target
from ondevice.core.traits import check_length
from ondevice.exporters.base import ExportJob
from ondevice.models import LoadedModel, load_model, read_dims, save_tiny, tiny_model
from ondevice.models.families.gpt2 import Gpt2
from ondevice.models.registry import family_for_gguf
from ondevice.nn.quantized import quantize_q4_model
from ondevice.planning.estimate import plan
from ondevice.planning.fits import alternatives
from ondevice.training.fuse import fuse


def ids_of(length: int) -> torch.Tensor:
    return torch.arange(2 * length).reshape(2, length) % 251


def logits(loaded: LoadedModel, ids: torch.Tensor) -> torch.Tensor:
    return loaded.family.hidden(ids) @ loaded.family.head_weight.T


def change(folder: Path, **fields: object) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return folder


@torch.no_grad()
def test_within_the_window_and_beyond_it_is_transformers_own() -> None:
    loaded = tiny_model("mistral", sliding_window=16, layers=3)
    assert loaded.dims.traits.windows == (16, 16, 16)
    free = tiny_model("mistral", sliding_window=None, layers=3)
    assert (
        free.dims.traits.windows
        == tiny_model("mistral", sliding_window=512).dims.traits.windows
        == ()
    )
    for model in (loaded, free):
        for length in (16, 17, 40):
            expected = model.model(ids_of(length)).logits
            torch.testing.assert_close(
                logits(model, ids_of(length)), expected, atol=1e-5, rtol=1e-4
            )
    same, far = free.model(ids_of(17)).logits, loaded.model(ids_of(17)).logits
    assert (
        same[:, 16] - far[:, 16]
    ).abs().max() > 1e-3  # the first token that the window hides something from
    with pytest.raises(ModelError) as caught:
        check_length(loaded.dims, 17)
    assert (caught.value.expected, caught.value.received) == ("at most 16 tokens", "17 tokens")
    check_length(loaded.dims, 16)


@pytest.mark.parametrize(("window", "expected"), [(..., 4096), (None, 0), (128, 128), (65536, 0)])
def test_the_window_is_read_as_transformers_reads_it(
    window: Any, expected: int, tmp_path: Path
) -> None:
    folder = change(
        save_tiny(tmp_path / "m", "mistral", max_positions=32768), sliding_window=window
    )
    assert read_dims(str(folder)) == load_model(str(folder)).dims
    assert read_dims(str(folder)).traits.window(1) == expected


@torch.no_grad()
def test_positions_end_where_the_table_ends() -> None:
    loaded = tiny_model("gpt2", max_positions=24)
    assert torch.equal(logits(loaded, ids_of(24)), loaded.model(ids_of(24)).logits)
    with pytest.raises(ModelError) as caught:
        logits(loaded, ids_of(25))
    assert caught.value.received == "25 tokens"
    assert loaded.family.positions(24, "cpu", torch.float32)[0].shape == (1, 24, 0)


def test_dropout_of_the_configuration_is_off() -> None:
    loaded = tiny_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    session = open_session(loaded, method_config("full"), 0)
    ids = ids_of(12).numpy()
    assert session.step(ids, ids, 0, 0.0) == session.step(ids, ids, 1, 0.0)
    assert not any(module.training for module in loaded.model.modules())


@torch.no_grad()
def test_gpt2_as_the_hub_has_it(tmp_path: Path) -> None:
    """Names without the prefix, masks as buffers, and a configuration that says nothing of tying or the MLP."""
    built = tiny_model("gpt2", 4, intermediate=256)
    folder = change(
        save_tiny(tmp_path / "m", "gpt2", 4, intermediate=256),
        tie_word_embeddings=...,
        n_inner=None,
    )
    tensors = {
        n.removeprefix("transformer."): t
        for n, t in load_file(folder / "model.safetensors").items()
    }
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 512, 512).tril()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    loaded = load_model(str(folder))
    assert loaded.dims == built.dims == read_dims(str(folder))
    assert torch.equal(logits(loaded, ids_of(9)), logits(built, ids_of(9)))


REFUSED = {
    "no size": ({"n_layer": ...}, "'n_layer'"),
    "heads": ({"n_head": 5}, "'n_head'"),
    "cross attention": ({"add_cross_attention": True}, "'add_cross_attention'"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_gpt2_that_the_block_does_not_do_is_refused(case: str, tmp_path: Path) -> None:
    fields, words = REFUSED[case]
    folder = change(save_tiny(tmp_path / "m", "gpt2"), **fields)
    with pytest.raises(ModelError) as caught:
        read_dims(str(folder))
    assert words in str(caught.value)


def test_packed_weights_on_gpt2_are_refused_with_what_does_work() -> None:
    loaded = tiny_model("gpt2")
    before = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    with pytest.raises(ModelError) as caught:
        quantize_q4_model(loaded.family)
    assert caught.value.needs is Need.ANY_DECODER
    after = loaded.model.state_dict()
    assert after.keys() == before.keys() and all(
        torch.equal(after[name], before[name]) for name in before
    )


def test_an_adapter_is_fused_into_a_conv1d(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    name = "transformer.h.0.attn.c_attn"
    pair = {
        f"{name}.lora_A.weight": rng.standard_normal((2, 64)).astype("f4"),
        f"{name}.lora_B.weight": rng.standard_normal((192, 2)).astype("f4"),
    }
    save_adapter(Adapter(pair, 2, 2.0, ("c_attn",), ""), tmp_path / "adapter")
    report = fuse(str(save_tiny(tmp_path / "m", "gpt2")), tmp_path / "adapter", tmp_path / "fused")
    assert report.ok and report.max_abs_difference_from_base > 1e-2


def test_a_gpt2_that_does_not_fit_is_told_of_methods_that_take_it() -> None:
    sizes = {"n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257, "n_positions": 1024}
    dims = Gpt2.dims_from_config(sizes)
    assert dims.parameters == 124_439_808
    planned = plan(dims, method_config("full"), batch_size=4, length_tokens=128)
    assert "--method prge" in [words for words, _ in alternatives(planned)]


def test_an_export_of_gpt2_is_refused_before_weights_are_loaded(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "m", "gpt2")
    (folder / "model.safetensors").unlink()
    job = ExportJob(ModelConfig(source=str(folder)), method_config("prge"), ExportConfig())
    assert any("no program of a step" in problem for problem in target("android-cpu").check(job))
    with pytest.raises(ConfigError):
        target("android-cpu").export(job, tmp_path / "out")


@pytest.mark.parametrize("architecture", ["gpt2", "mistral"])
def test_gguf_files_of_these_are_refused_by_name(architecture: str) -> None:
    with pytest.raises(ModelError) as caught:
        family_for_gguf(architecture, "x.gguf")
    assert caught.value.received == architecture
    assert caught.value.expected.startswith("gemma3, gemma4, granite, granitemoe, lfm2, lfm2moe")
