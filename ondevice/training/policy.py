"""Runs on rewards: answers that the model writes itself, several of each prompt, and their rewards.

A step writes answers to the prompts of its rows, asks for their rewards, and moves towards the
better ones of each prompt (`ondevice.objectives.grpo`). What it draws depends on the run's seed,
the step and the weights only, so a resumed run writes the same answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.core.errors import ConfigError, DataError
from ondevice.core.session import IGNORE, Answering, StepResult, Weighing, Writing, require
from ondevice.data.batching import Batch, InOrder, collate
from ondevice.data.examples import Example, Item
from ondevice.generation.prompt import end_tokens, model_end_tokens
from ondevice.generation.sample import PlainSampler
from ondevice.objectives import Answers, Graded, Grpo
from ondevice.training.evaluate import EvalResult, Prediction
from ondevice.training.preferences import text_likelihoods
from ondevice.training.rewards import Records, Reward, Written, reward_of

if TYPE_CHECKING:
    from pathlib import Path

    from ondevice.core.config import TrainConfig
    from ondevice.core.session import Adapter, Session
    from ondevice.data import Batches, Dataset
    from ondevice.models import LoadedModel
    from ondevice.training.rows import RunRows

GRPO_SETTINGS = ("reward", "group_size", "answer_tokens", "temperature", "clip", "updates", "beta")
"""Settings of `train` that a resumed run must have in common with the run."""
AT_ONCE = 64
"""Most answers that are written together."""
_STREAM = 3
"""Of the numbers that a run draws: its rows' order and its held-out rows have others."""


def grpo_of(settings: TrainConfig) -> Grpo:
    """Return the objective with the run's settings; those that are None are its own."""
    given = {"beta": settings.beta, "clip": settings.clip}
    return Grpo(**{key: value for key, value in given.items() if value is not None})


def check_policy(settings: TrainConfig, rows: RunRows, most_tokens: int) -> None:
    """Refuse what a run on rewards would refuse.

    Args:
        most_tokens: positions of the model; 0 for no limit.

    Raises:
        ConfigError: the reward cannot be found.
        DataError: see `check_prompts`.
    """
    reward_of(settings)
    for part in (rows.train, rows.evaluation):
        if part is not None:
            check_prompts(part, settings, most_tokens)


def check_prompts(dataset: Dataset, settings: TrainConfig, most_tokens: int) -> None:
    """Refuse rows without a prompt, and prompts that leave no room for an answer.

    Args:
        most_tokens: positions of the model; 0 for no limit.

    Raises:
        DataError: with the line of the first one.
    """
    for item in dataset.items:
        if not item.prompt_tokens:
            raise DataError(
                f"{dataset.place(item)}: there is no prompt to answer",
                expected="rows with a prompt for train.objective grpo",
                received=f"format {dataset.format}",
                hint="`ondevice data FILE` shows how the rows are read",
            )
        length = item.prompt_tokens + settings.answer_tokens
        if most_tokens and length > most_tokens:
            raise DataError(
                f"{dataset.place(item)}: the prompt and an answer are longer than the model takes",
                expected=f"at most {most_tokens} tokens",
                received=f"{item.prompt_tokens} of the prompt, {settings.answer_tokens} of the answer",
                hint="a smaller --max-length or --answer-tokens",
            )


def seed_of(seed: int, step: int, number: int) -> int:
    """Return the seed of an answer's draws: a number of the step from 0, below 2^63."""
    words = np.random.SeedSequence((seed, step, number, _STREAM)).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))


def prompt_of(item: Item) -> tuple[int, ...]:
    """Return the tokens of a row up to its answer."""
    return tuple(item.example.ids[: item.prompt_tokens])


class Policy:
    """Trains and evaluates a session on the rewards of its own answers.

    It has the methods of `Preferences` that a run calls.

    Args:
        records: the columns of the rows to train on, and of the held-out ones.
        tokenizer: of the rows; only a session that is `Writing` does without.
    """

    def __init__(
        self,
        settings: TrainConfig,
        train: Dataset,
        held_out: Dataset | None,
        pad: int,
        records: tuple[Records, Records] = ({}, {}),
        tokenizer: Any = None,
    ) -> None:
        self.settings = settings
        self.objective = grpo_of(settings)
        self.reward: Reward = reward_of(settings)
        self.train = train
        self.held_out = held_out
        self.pad = pad
        self.records = records
        self.tokenizer = tokenizer
        self.before: Adapter | None = None

    def begin(
        self,
        session: Session,
        folder: Path,
        resumes: bool = False,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Note the model before training, which the KL term compares with; nothing is stored."""
        require(session, Weighing)
        if not isinstance(session, Answering):
            require(session, Writing)
        if self.objective.beta:
            self.before = session.adapter()

    def step(
        self, session: Session, batch: Batch, step: int, rate: float
    ) -> tuple[StepResult, dict[str, float]]:
        """Write answers, grade them, and update with them; return the last update's result and
        the answers' figures."""
        assert batch.rows_of_data is not None  # noqa: S101  it is of `PromptBatches`
        size = self.settings.group_size
        items = [self.train.items[row] for row in batch.rows_of_data for _ in range(size)]
        seeds = [seed_of(self.settings.seed, step, number) for number in range(len(items))]
        texts, written = self.write(session, items, self.settings.temperature, seeds, 0)
        rewards = np.array(self.reward(written))
        answers = collate(texts, session.lengths_tokens, self.pad)
        tokens = np.array([text.trained_tokens for text in texts], dtype=np.int64)
        reference = self._reference(session, texts, [item.line for item in items])
        old: list[np.ndarray] = []
        grades: list[Graded] = []

        def weigh(nll: np.ndarray) -> tuple[float, np.ndarray]:
            likelihoods = -nll.astype(np.float64)
            old.append(likelihoods)
            sampled = Answers(likelihoods, old[0], reference, tokens, rewards, size)
            grades.append(self.objective.grade(sampled))
            return grades[-1].loss, -grades[-1].coefficients

        trains = require(session, Weighing)
        result = trains.weighted_step(answers.ids, answers.labels, weigh, step, rate)
        for _ in range(1, self.settings.updates):
            result = trains.weighted_step(answers.ids, answers.labels, weigh, step, rate)
        figures = grades[-1].figures | {"tokens": float(answers.ids.size)}
        figures["answer_tokens"] = float(tokens.mean())
        return result, figures

    def write(
        self,
        session: Session,
        items: Sequence[Item],
        temperature: float,
        seeds: Sequence[int],
        part: int,
    ) -> tuple[list[Example], list[Written]]:
        """Write an answer to each item; return the texts with labelled answers, and their words.

        Args:
            part: 0 for rows to train on, 1 for held-out ones.
        """
        if isinstance(session, Answering):
            tokenizer: Any = self.tokenizer
            ends = end_tokens(tokenizer)
            drawn = self._drawn(
                items, [PlainSampler(temperature, seed, ends) for seed in seeds], session
            )
        else:
            with require(session, Writing).writing() as loaded:
                tokenizer = loaded.tokenizer
                ends = model_end_tokens(loaded) | end_tokens(tokenizer)
                samplers = [PlainSampler(temperature, seed, ends) for seed in seeds]
                drawn = self._drawn_together(items, samplers, loaded)
        dataset = self.train if part == 0 else self.held_out or self.train
        texts: list[Example] = []
        written: list[Written] = []
        for item, ids in zip(items, drawn, strict=True):
            prompt = prompt_of(item)
            words = [token for token in ids if token not in ends]
            gold = item.example.ids[item.prompt_tokens :]
            texts.append(Example((*prompt, *ids), (IGNORE,) * len(prompt) + ids))
            written.append(
                Written(
                    item,
                    dataset.place(item),
                    str(tokenizer.decode(list(prompt), skip_special_tokens=True)),
                    str(tokenizer.decode(words, skip_special_tokens=True)),
                    item.answers
                    or (str(tokenizer.decode(list(gold), skip_special_tokens=True)).strip(),),
                    self.records[part].get((item.file, item.line), {}),
                )
            )
        return texts, written

    def _drawn(
        self, items: Sequence[Item], samplers: Sequence[PlainSampler], session: Answering
    ) -> list[tuple[int, ...]]:
        """Return an answer's tokens for each item; those of one prompt are written together."""
        drawn: list[tuple[int, ...]] = []
        for prompt, numbers in groupby(range(len(items)), lambda number: prompt_of(items[number])):
            some = [samplers[number] for number in numbers]
            drawn += map(tuple, session.answer_prompt(prompt, some, self.settings.answer_tokens))
        return drawn

    def _drawn_together(
        self, items: Sequence[Item], samplers: Sequence[PlainSampler], loaded: LoadedModel
    ) -> list[tuple[int, ...]]:
        """Return an answer's tokens for each item; up to `AT_ONCE` are written together in torch."""
        # Imports torch, which a run in MLX does without.
        from ondevice.generation import batch

        most = self.settings.answer_tokens
        rows = [
            batch.Row(prompt_of(item), sampler, most)
            for item, sampler in zip(items, samplers, strict=True)
        ]
        for first in range(0, len(rows), AT_ONCE):
            together = batch.Batch(loaded, AT_ONCE)
            heads: dict[tuple[int, ...], batch.Row] = {}
            for row in rows[first : first + AT_ONCE]:
                head = heads.setdefault(tuple(row.prompt), row)
                if head is row:
                    together.add(row)
                else:  # its prompt is read once
                    head.others.append(row)
            while len(together):
                together.step()
        return [tuple(row.drawn) for row in rows]

    def evaluate(
        self, session: Session, rows: int | None, should_stop: Callable[[], bool]
    ) -> EvalResult | None:
        """Return the mean reward of the likeliest answers to held-out prompts, or None if stopped."""
        items = (self.held_out or self.train).items[:rows]
        predictions: list[Prediction] = []
        tokens = 0
        for first in range(0, len(items), AT_ONCE):
            if should_stop():
                return None
            part = items[first : first + AT_ONCE]
            side = 0 if self.held_out is None else 1
            texts, written = self.write(session, part, 0.0, [0] * len(part), side)
            for one, reward in zip(written, self.reward(written), strict=True):
                predictions.append(
                    Prediction(one.item.line, None, None, None, (reward,), text=one.answer)
                )
            tokens += sum(text.trained_tokens for text in texts)
        mean = float(np.mean([one.scores[0] for one in predictions]))
        return EvalResult(
            loss=-mean,
            accuracy=None,
            f1=None,
            exact_match=None,
            majority_share=None,
            rows=len(predictions),
            tokens=tokens,
            seconds_s=0.0,
            predictions=tuple(predictions),
            metric="reward",
            metric_value=mean,
        )

    def _reference(
        self, session: Session, texts: Sequence[Example], lines: Sequence[int]
    ) -> np.ndarray | None:
        """Return the answers' log likelihoods before training, float64 [n]; None without a KL term."""
        if not self.objective.beta:
            return None
        now = session.adapter()
        if now is None or self.before is None:
            raise ConfigError(
                "the KL term compares with the model before training, which this method overwrites",
                expected="a method that trains an adapter, or --set train.beta=0",
                received=f"method {session.config.name}",
            )
        session.load_adapter(self.before)
        try:
            return text_likelihoods(session, texts, lines, self.pad)
        finally:
            session.load_adapter(now)


@dataclass(frozen=True)
class PromptBatches(InOrder):
    """The prompts of a step's rows; the order of the rows is that of `Batches`."""

    policy: Policy
    order: Batches

    def at(self, step: int) -> Batch:
        """Return a step's rows, with one sequence for each."""
        rows = self.rows_at(step)
        examples = [self.policy.train.items[row].example for row in rows]
        return replace(collate(examples, None, self.policy.pad), rows_of_data=rows)
