"""Checkpoints that also read images leave as what reads only text: their language model, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ondevice.artifact.adapter import save_adapter
from ondevice.core.errors import ModelError
from ondevice.core.registry import method_config, open_session
from ondevice.exits.convert import convert
from ondevice.models import LoadedModel, load_model
from ondevice.models.text_model import text_dims, text_model, with_text_names
from ondevice.nn.adapters import apply_adapter
from ondevice.training.fuse import PROMPTS, distance, prompt_logits
from tests.models.checkpoints import save_checkpoint, save_unknown

KNOWN = {
    "gemma-3-4b-it": "gemma3_text",
    "gemma-4-E2B-it": "gemma4_text",
    "gemma-4-26B-A4B-it": "gemma4_text",
    "LFM2.5-VL-1.6B": "lfm2",
    "Mistral-Small-3.2-24B-Instruct": "mistral",
    "Qwen2-VL-2B-Instruct": "qwen2",
    "Qwen2.5-VL-7B-Instruct": "qwen2",
    "Qwen3-VL-4B-Instruct": "qwen3",
    "Qwen3.5-0.8B": "qwen3_5_text",
    "SmolVLM2-2.2B-Instruct": "llama",
}


def trained(loaded: LoadedModel, folder: Path) -> Path:
    """Write an adapter of the checkpoint of which neither side is zero."""
    session = open_session(loaded, method_config("lora", {"rank": 2}), 0)
    adapter = session.adapter()
    session.release_model()
    assert adapter is not None
    rng = np.random.default_rng(0)
    for name, value in adapter.tensors.items():
        adapter.tensors[name] = 0.2 * rng.standard_normal(value.shape).astype(np.float32)
    adapter = type(adapter)(
        adapter.tensors,
        adapter.rank,
        adapter.alpha,
        adapter.target_modules,
        str(loaded.source.path),
    )
    save_adapter(adapter, folder)
    return folder


@pytest.mark.parametrize("name", KNOWN)
def test_the_language_model_computes_what_the_checkpoint_computes(
    name: str, tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path / "model", name)
    loaded = load_model(str(folder))
    base = prompt_logits(loaded, PROMPTS)
    text = text_model(loaded)
    assert text.family.model_type == KNOWN[name] and not text.dims.whole
    assert text_dims(str(folder))[0] == text.dims
    assert distance(prompt_logits(text, PROMPTS), base) == 0
    adapter = open_session(loaded, method_config("lora", {"rank": 2}), 0).adapter()
    assert adapter is not None
    for tensor, value in adapter.tensors.items():
        value[:] = 0.1 * np.random.default_rng(len(tensor)).standard_normal(value.shape)
    whole = load_model(str(folder))
    text = text_model(load_model(str(folder)))
    apply_adapter(whole, adapter)
    apply_adapter(text, with_text_names(adapter))
    changed = prompt_logits(whole, PROMPTS)
    assert distance(changed, base) > 0
    assert distance(prompt_logits(text, PROMPTS), changed) == 0


def test_a_text_model_and_a_tower_that_is_not_known_stay_as_they_are(tmp_path: Path) -> None:
    loaded = load_model(str(save_unknown(tmp_path / "model")))
    assert text_model(loaded) is loaded
    plain = load_model("tiny:llama")
    assert text_model(plain) is plain


def test_a_checkpoint_leaves_as_gguf_and_packed_for_mlx(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", "SmolVLM2-2.2B-Instruct")
    adapter = trained(load_model(str(folder)), tmp_path / "adapter")
    for form, out in (("gguf-lora", "lora.gguf"), ("gguf", "model.gguf"), ("mlx-model", "mlx")):
        report = convert(adapter, form, tmp_path / out, model=str(folder))
        assert report.max_abs_difference_from_base, form
    with pytest.raises(ModelError) as caught:
        convert(adapter, "mlx", tmp_path / "adapter-mlx", model=str(folder))
    assert "other names" in str(caught.value) and "--to gguf" in caught.value.hint
