"""Texts that are generated together are those that are generated one by one."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from ondevice.generation import slots
from ondevice.generation.batch import Batch, Row
from ondevice.generation.generator import generator_of
from ondevice.generation.sample import Sampler, Sampling
from ondevice.models import load_model
from ondevice.models.tiny import family_classes
from tests.models.test_any_decoder import save

LENGTHS = (1, 5, 300, 30, 64, 3, 140, 9, 17, 80)
"""Of the prompts: two are read in pieces, and more than a pass has rows."""
NEW_TOKENS = 24


def prompts() -> list[list[int]]:
    numbers = Random(1)
    return [[numbers.randrange(200) for _ in range(length)] for length in LENGTHS]


def sampling(number: int) -> dict[str, Any]:
    """Every other text is greedy; the others have a seed each."""
    return {"temperature": float(number % 2), "seed": number}


def rows(**options: Any) -> list[Row]:
    return [
        Row(prompt, Sampler(Sampling(**sampling(number)), prompt), NEW_TOKENS + number, **options)
        for number, prompt in enumerate(prompts())
    ]


def alone(loaded: Any, number: int) -> list[int]:
    generator = generator_of(loaded)
    generator.end_tokens = frozenset()
    options = {"max_new_tokens": NEW_TOKENS + number, **sampling(number)}
    return [token.id for token in generator.tokens(prompts()[number], **options)]


def run(batch: Batch) -> None:
    while len(batch):
        batch.step()


@pytest.mark.parametrize("family", sorted(family_classes()))
def test_texts_that_share_passes_are_those_of_each_alone(family: str) -> None:
    """They begin at different steps, and are of different lengths, some beyond a layer's window."""
    loaded = load_model(f"tiny:{family}")
    batch, texts = Batch(loaded), rows()
    for row in texts:
        batch.add(row)
        batch.step()
    # Layers of Gemma 4 share keys and values, so each of its texts has passes of its own.
    apart = family == "gemma4_text"
    assert bool(batch._writing) == apart and bool(batch._groups) != apart
    run(batch)
    for number, row in enumerate(texts):
        assert row.drawn == alone(loaded, number), number


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2", "qwen3_5_text"])
def test_in_passes_of_one_size_a_text_has_the_same_bits_in_any_company(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where every pass is filled up to one size."""
    monkeypatch.setattr(slots, "PADDED_DEVICES", ("cpu",))
    loaded = load_model(f"tiny:{family}")

    def probabilities(texts: list[Row]) -> list[list[float | None]]:
        batch = Batch(loaded)
        found: dict[int, list[float | None]] = {id(row): [] for row in texts}
        waiting = [*texts]
        while waiting or len(batch):
            if waiting:
                batch.add(waiting.pop(0))
            for step in batch.step():
                if step.token is not None:
                    found[id(step.row)].append(step.token.log_probability)
        return [*found.values()]

    together = probabilities(rows())
    for number, row in enumerate(rows()):
        (own,) = probabilities([row])
        assert own == together[number], number


def test_a_model_of_no_known_family_goes_on_row_by_row(tmp_path: Path) -> None:
    loaded = load_model(str(save(tmp_path / "model", "gpt_neox")))
    batch, texts = Batch(loaded), rows()
    for row in texts:
        batch.add(row)
    run(batch)
    assert [row.drawn for row in texts] == [alone(loaded, number) for number in range(len(texts))]


def test_a_text_that_is_left_changes_no_other() -> None:
    loaded = load_model("tiny:llama")
    batch, texts = Batch(loaded), rows()
    for row in texts:
        batch.add(row)
    for number in (0, 2, 7):  # one that writes, one in its prompt, one in the middle of its pass
        for _ in range(6):
            batch.step()
        batch.remove(texts[number])
        batch.remove(texts[number])
    assert len(batch) == len(texts) - 3
    run(batch)
    for number, row in enumerate(texts):
        if number not in (0, 2, 7):
            assert row.drawn == alone(loaded, number), number


def test_a_prompt_is_reported_with_the_probabilities_of_one_pass() -> None:
    loaded = load_model("tiny:llama")
    batch = Batch(loaded)
    (row,) = [row for row in rows(prompt_top=3) if len(row.prompt) == 300]
    row.max_new_tokens = 0
    batch.add(row)
    tokens = []
    while len(batch):
        tokens += [token for step in batch.step() for token in step.prompt]
    assert [token.id for token in tokens] == row.prompt and tokens[0].log_probability is None
    with torch.no_grad():
        logs = torch.log_softmax(loaded.model(torch.tensor([row.prompt])).logits[0].float(), -1)
    expected = [float(logs[place, token]) for place, token in enumerate(row.prompt[1:])]
    assert [token.log_probability for token in tokens[1:]] == pytest.approx(expected, abs=1e-4)
    assert [token.top[0][0] for token in tokens[1:]] == logs[:-1].argmax(-1).tolist()
    assert not row.drawn
