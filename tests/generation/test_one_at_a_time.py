"""Texts that a program generates one after another are those that are generated together."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ondevice.generation.batch import (
    LEAST_PIECE_TOKENS,
    PIECE_TOKENS,
    Batch,
    Row,
    piece_tokens,
)
from ondevice.generation.one_at_a_time import OneAtATime
from ondevice.generation.sample import Sampler, Sampling
from ondevice.generation.torch_model import TorchModel
from ondevice.models import load_model, read_dims

PROMPTS = ([7, 8, 9, 10, 11], [3], [5] * 40)


class InPieces(TorchModel):
    """A model that reads as a program does, a few tokens in a pass."""

    def __init__(self, loaded: Any) -> None:
        super().__init__(loaded)
        self.piece_tokens = 16
        self.fed: list[int] = []

    def feed(self, ids: Any) -> Any:
        self.fed.append(len(ids))
        return super().feed(ids)


@pytest.fixture(scope="module")
def loaded() -> Any:
    return load_model("tiny:llama")


def rows(**options: Any) -> list[Row]:
    return [
        Row(
            prompt,
            Sampler(Sampling(temperature=float(number % 2), seed=number), prompt, top=2),
            6 + number,
            **options,
        )
        for number, prompt in enumerate(PROMPTS)
    ]


def run(batch: Any, texts: list[Row]) -> list[tuple[list[Any], list[Any]]]:
    """Return the reported tokens of each prompt, and the drawn ones."""
    found: dict[int, tuple[list[Any], list[Any]]] = {id(row): ([], []) for row in texts}
    for row in texts:
        batch.add(row)
    while len(batch):
        for step in batch.step():
            found[id(step.row)][0].extend(step.prompt)
            found[id(step.row)][1].extend([step.token] if step.token else [])
    return [found[id(row)] for row in texts]


@pytest.mark.parametrize("prompt_top", [None, 2])
def test_texts_and_probabilities_are_those_of_a_batch(loaded: Any, prompt_top: int | None) -> None:
    found = run(OneAtATime(InPieces(loaded)), rows(prompt_top=prompt_top))
    expected = run(Batch(loaded), rows(prompt_top=prompt_top))
    for kinds, others in zip(found, expected, strict=True):
        for tokens, wanted in zip(kinds, others, strict=True):
            assert [token.id for token in tokens] == [token.id for token in wanted]
            for token, other in zip(tokens, wanted, strict=True):
                assert token.log_probability == pytest.approx(other.log_probability, abs=1e-5)
                assert [one for one, _ in token.top] == [one for one, _ in other.top]
    assert [len(prompt) for prompt, _ in found] == [
        len(one) if prompt_top else 0 for one in PROMPTS
    ]


def test_a_prompt_is_read_in_pieces_between_which_its_text_can_be_removed(loaded: Any) -> None:
    """The next text is that of a program which has read nothing before."""
    model = InPieces(loaded)
    batch = OneAtATime(model)
    *_, long = rows()
    batch.add(long)
    other = rows()[0]
    batch.add(other)
    batch.step()
    assert model.fed == [16] and long.read == 16 and not long.drawn
    batch.remove(long)
    while len(batch):
        batch.step()
    assert model.fed == [16, 5, 1, 1, 1, 1, 1] and not long.drawn
    assert other.drawn == [token.id for token in run(Batch(loaded), rows()[:1])[0][1]]


def test_a_text_of_no_tokens_only_reads_its_prompt(loaded: Any) -> None:
    batch = OneAtATime(InPieces(loaded))
    row = Row([5] * 20, Sampler(Sampling()), 0)
    batch.add(row)
    assert [batch.step()[0].token for _ in range(2)] == [None, None]
    assert row.is_done and not len(batch) and batch.step() == []


def test_pieces_are_shorter_for_large_models_and_behind_long_prompts_on_a_cpu() -> None:
    """A piece of 1.5 billion parameters takes as long as one of 135 million."""

    def tokens(hidden: int, layers: int, read: int = 0, device: str = "cpu") -> int:
        heads = hidden // 64
        sizes = {"heads": heads, "kv_heads": heads, "head_dim": 64, "vocab": 32_000}
        dims = replace(
            read_dims("tiny:llama"),
            hidden=hidden,
            layers=layers,
            intermediate=4 * hidden,
            **sizes,
        )
        return piece_tokens(device, dims, read)

    most = PIECE_TOKENS["cpu"]
    assert tokens(576, 24) == most and tokens(2048, 24) == LEAST_PIECE_TOKENS
    assert LEAST_PIECE_TOKENS < tokens(1024, 24) < most
    assert tokens(256, 4, 10_000) == most > tokens(256, 4, 60_000) >= LEAST_PIECE_TOKENS
    assert tokens(4096, 32, 60_000, "cuda") == PIECE_TOKENS["cuda"]
