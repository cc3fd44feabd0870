"""Goals without a gradient: accuracy, F1, or the scores that a program of the user's prints.

A zeroth-order method needs a number for each moved copy of the parameters, and nothing else: it moves towards the
copies with the better scores. A score of few rows has few values, so a step wants more rows than one on the loss.
"""

from __future__ import annotations

import json
import math
import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ondevice.core.errors import ConfigError, TrainingError
from ondevice.core.session import Scoring, require
from ondevice.data.pictures import as_marks
from ondevice.data.tasks.scoring import first_line
from ondevice.generation.generator import continue_ids
from ondevice.training.evaluate import evaluate_dataset

if TYPE_CHECKING:
    from ondevice.core.config import TrainConfig
    from ondevice.core.session import Session
    from ondevice.data import Dataset

ANSWER_TOKENS = 32
"""Tokens of a generated answer at most."""
TIMEOUT_S = 300
"""Seconds that a scoring program may take for the rows of one step."""


def unscored(objective: str, dataset: Dataset) -> ConfigError:
    """Build the error for rows that never have the score."""
    needs = "rows of questions and answers"
    if objective == "accuracy":
        needs = "rows with candidates"
    return ConfigError(
        f"train.objective {objective} needs {needs}",
        expected=needs,
        received=f"rows of format {dataset.format}",
        hint="--set train.objective=loss goes with any rows",
    )


@dataclass(frozen=True)
class Score:
    """A score of the session's weights as they are, on some rows of a data set; higher is better, 1 is best."""

    settings: TrainConfig
    session: Session
    dataset: Dataset
    pad: int

    def __call__(self, rows: Sequence[int]) -> float:
        """Return the mean score of the rows of these numbers.

        Raises:
            ConfigError: the rows are not of a kind that has this score.
            TrainingError: the program failed, or did not print a number for each row.
        """
        part = replace(self.dataset, items=[self.dataset.items[row] for row in rows])
        if self.settings.objective == "command":
            return self._run(part)
        write = None
        if self.settings.objective == "f1":
            write = self._write()
        result = evaluate_dataset(self.session, part, self.pad, generate=write)
        value = None if result is None else getattr(result, self.settings.objective)
        if value is None:
            raise unscored(self.settings.objective, self.dataset)
        return float(value)

    def _write(self) -> Callable[[Sequence[int]], str]:
        return partial(
            continue_ids, require(self.session, Scoring).whole_model(), max_new_tokens=ANSWER_TOKENS
        )

    def _run(self, part: Dataset) -> float:
        write = self._write()
        lines = []
        tokenizer: Any = require(self.session, Scoring).whole_model().tokenizer
        for item in part.items:
            prompt = item.example.ids[: item.prompt_tokens]
            right = item.example.ids[item.prompt_tokens :]
            accepted = item.answers or (
                str(tokenizer.decode(list(right), skip_special_tokens=True)).strip(),
            )
            row: dict[str, Any] = {
                "line": item.line,
                "prompt": tokenizer.decode(as_marks(prompt, tokenizer), skip_special_tokens=True),
            }
            row |= {"answer": first_line(write(prompt)), "answers": list(accepted)}
            lines.append(json.dumps(row, ensure_ascii=False))
        words = printed_words(self.settings.objective_command or "", lines)
        try:
            scores = [float(word) for word in words]
        except ValueError:
            scores = [math.nan]
        if not all(map(math.isfinite, scores)):
            raise _unprinted(len(lines), " ".join(words)[:200])
        return math.fsum(scores) / len(scores)


def printed_words(program: str, lines: Sequence[str]) -> list[str]:
    """Run a program on lines of JSON; return the word that it prints for each, a number's if it is
    right.

    Raises:
        TrainingError: it failed, or did not print a word for each line.
    """
    command = shlex.split(program)
    try:
        done = subprocess.run(
            command,
            input="\n".join(lines) + "\n",
            capture_output=True,
            encoding="utf-8",
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise TrainingError(
            f"train.objective_command could not be run: {error}", received=command[0]
        ) from None
    if done.returncode:
        raise TrainingError(
            "train.objective_command failed",
            expected="exit code 0",
            received=f"exit code {done.returncode}: {done.stderr.strip()[-500:]}",
        )
    words = done.stdout.split()
    if len(words) != len(lines):
        raise _unprinted(len(lines), repr(done.stdout[:200]))
    return words


def _unprinted(rows: int, received: str) -> TrainingError:
    return TrainingError(
        "train.objective_command did not print a score for each row",
        expected=f"{rows} finite numbers, one a line",
        received=received,
        hint="it reads one JSON object a line, with `prompt`, `answer` and `answers`",
    )
