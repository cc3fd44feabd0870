"""How tokens are drawn: each option against the same computed by hand."""

from __future__ import annotations

import pytest
import torch

from ondevice.core.errors import ConfigError
from ondevice.generation.sample import Sampler, Sampling, draw

LOGITS = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))


def drawn(count: int = 200, **options) -> list[int]:
    """Draw from the same logits again and again, as texts of one token."""
    return [
        Sampler(Sampling(temperature=1.0, seed=seed, **options)).next(LOGITS).id
        for seed in range(count)
    ]


def test_top_k_top_p_and_min_p_leave_the_likeliest_tokens() -> None:
    assert set(drawn()) == {0, 1, 2, 3}
    assert set(drawn(top_k=1)) == {0} and set(drawn(top_k=2)) == {0, 1}
    assert set(drawn(top_p=0.6)) == {0, 1} and set(drawn(top_p=0.5)) == {0}
    assert set(drawn(min_p=0.31)) == {0, 1} and set(drawn(min_p=0.29)) == {0, 1, 2}
    assert set(drawn(min_p=1.0)) == {0}
    # Of the two that top_k leaves, the first has 0.625 of the probability.
    assert set(drawn(top_k=2, top_p=0.62)) == {0} and set(drawn(top_k=2, top_p=0.63)) == {0, 1}


def test_a_bias_moves_a_logit_and_leaves_the_reported_probability() -> None:
    token = Sampler(Sampling(logit_bias={3: 10.0}), top=1).next(LOGITS)
    assert token.id == 3 and token.log_probability == pytest.approx(float(LOGITS[3]))
    assert token.top[0][0] == 0
    assert Sampler(Sampling(logit_bias={0: -100.0})).next(LOGITS).id == 1


def test_penalties_count_the_text_and_a_repetition_the_prompt_too() -> None:
    def text(prompt: tuple[int, ...] = (), count: int = 4, **options) -> list[int]:
        sampler = Sampler(Sampling(**options), prompt)
        return [sampler.next(LOGITS).id for _ in range(count)]

    assert text() == [0, 0, 0, 0]
    assert text(presence_penalty=2.0) == [0, 1, 2, 0]  # log 0.5 - 2 is above log 0.05
    assert text(frequency_penalty=0.6) == [0, 1, 0, 1]
    assert text(prompt=(0,), presence_penalty=2.0)[0] == 0
    # Logits are negative: a repeated token's is multiplied.
    assert text(repetition_penalty=1.5) == [0, 0, 0, 0]  # 1.5 log 0.5 is above log 0.3
    assert text(prompt=(0, 1), repetition_penalty=2.8)[0] == 2
    positive = torch.tensor([3.0, 2.0, -1.0])
    assert Sampler(Sampling(repetition_penalty=1.6), (0,)).next(positive).id == 1


def test_a_generator_penalises_a_prompt_of_which_it_has_read_a_part() -> None:
    def feed(ids) -> torch.Tensor:
        return LOGITS

    options = {"max_new_tokens": 1, "repetition_penalty": 2.8}
    (token,) = draw(feed, [3], frozenset(), prompt=[0, 1, 3], **options)
    assert token.id == 2
    (token,) = draw(feed, [3], frozenset(), **options)
    assert token.id == 0


@pytest.mark.parametrize("options", [
    {"temperature": -1.0}, {"top_p": 0.0}, {"top_k": -1}, {"min_p": 1.5}, {"repetition_penalty": 0.0},
])  # fmt: skip
def test_a_number_out_of_range_is_refused(options) -> None:
    with pytest.raises(ConfigError):
        Sampling(**options)
