"""What no tokenizer takes is refused in words."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers", reason="the torch extra is not installed")

from ondevice.core.errors import ConfigError
from ondevice.generation.prompt import prompt_ids
from ondevice.models.tiny import tiny_tokenizer

HALF = "a\ud83d b"


@pytest.mark.parametrize(
    "prompt",
    [
        HALF,
        [{"role": "user", "content": HALF}],
        [{"role": "system", "content": HALF}, {"role": "user", "content": "a"}],
    ],
    ids=["text", "question", "system"],
)
def test_half_a_surrogate_pair_is_refused(prompt: Any) -> None:
    with pytest.raises(ConfigError) as refusal:
        prompt_ids(tiny_tokenizer(), prompt, "a model")
    assert "surrogate" in str(refusal.value) and "\\ud83d" in str(refusal.value)
