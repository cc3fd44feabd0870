"""Rewards of generated answers: a function of the user's, or a program."""

from __future__ import annotations

import importlib
import json
import math
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ondevice.core.errors import ConfigError, OndeviceError, TrainingError
from ondevice.data.readers.files import read_records
from ondevice.training.scores import printed_words

if TYPE_CHECKING:
    from ondevice.core.config import TrainConfig
    from ondevice.data.examples import Item
    from ondevice.data.readers.objects import PythonRows

Function = Callable[[str, str, dict[str, Any]], float]
"""(prompt, answer, row) to a reward.

The row has `line`, `file`, the accepted `answers`, and the columns of the data.
"""
Records = dict[tuple[str, int], dict[str, Any]]
"""Columns of rows by file (empty if there is one) and line."""
HINT = "correct it and go on with --resume: the last checkpoint is unharmed"


def records_of(rows: PythonRows | None, path: Path | None) -> Records:
    """Return the columns of rows from Python, or else of a file."""
    if rows is None and path is None:
        return {}
    source = rows.source() if rows is not None else read_records(str(path))
    return {
        (one.file, one.line): one.fields for one in source.records if isinstance(one.fields, dict)
    }


@dataclass(frozen=True)
class Written:
    """An answer to a row of the data."""

    item: Item
    place: str
    """The row in an error: its file and line."""
    prompt: str
    answer: str
    answers: tuple[str, ...]
    """Those that the row accepts."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Of the row as the data has them."""

    def row(self) -> dict[str, Any]:
        """Return what a reward gets of the row."""
        own = {"line": self.item.line, "file": self.item.file, "answers": list(self.answers)}
        return own | self.columns


@dataclass(frozen=True)
class Reward:
    """Gives rewards of answers.

    Attributes:
        name: `module:function`, or the program with its arguments.
        function: None for a program.
    """

    name: str
    function: Function | None = None

    def __call__(self, answers: Sequence[Written]) -> list[float]:
        """Return the reward of each answer.

        Raises:
            TrainingError: the function or the program failed, or a reward is not a finite number.
        """
        if self.function is not None:
            return [self._call(self.function, one) for one in answers]
        lines = [
            json.dumps(
                {**one.row(), "prompt": one.prompt, "answer": one.answer},
                ensure_ascii=False,
                default=str,
            )
            for one in answers
        ]
        try:
            values = printed_words(self.name, lines)
        except TrainingError as error:
            raise TrainingError(
                f"{error.message}, from the answer to {answers[0].place} on",
                expected=error.expected,
                received=error.received,
                hint=error.hint or HINT,
            ) from error
        return [self._checked(value, one) for value, one in zip(values, answers, strict=True)]

    def _call(self, function: Function, one: Written) -> float:
        try:
            value = function(one.prompt, one.answer, one.row())
        except OndeviceError:
            raise
        except Exception as error:
            raise TrainingError(
                f"the reward {self.name} failed on an answer to {one.place}",
                expected="a finite number",
                received=f"{type(error).__name__}: {error}",
                hint=HINT,
            ) from error
        return self._checked(value, one)

    def _checked(self, value: Any, one: Written) -> float:
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise TrainingError(
                f"the reward {self.name} of an answer to {one.place} is not a finite number",
                expected="a finite number",
                received=f"{value!r:.100} for the answer {one.answer!r:.200}",
                hint=HINT,
            )
        return number


def reward_of(settings: TrainConfig) -> Reward:
    """Return the reward that a run's settings name.

    A module is looked for in the current folder, too. It is the user's own code: the daemon and
    fleets take no reward from anyone else.

    Raises:
        ConfigError: the module, its function or the program cannot be found.
    """
    if settings.objective_command is not None:
        command = shlex.split(settings.objective_command)
        if not command or shutil.which(command[0]) is None:
            raise ConfigError(
                "train.objective_command names no program that can be run",
                expected="a program, with its arguments",
                received=settings.objective_command,
            )
        return Reward(settings.objective_command)
    name = settings.reward or ""
    module_name, _, attribute = name.partition(":")
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        function: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            function = getattr(function, part)
    except Exception as error:
        raise ConfigError(
            f"train.reward {name} cannot be imported",
            expected="module:function, in the current folder or installed",
            received=f"{type(error).__name__}: {error}",
        ) from error
    finally:
        sys.path.remove(folder)
    if not callable(function):
        raise ConfigError(
            f"train.reward {name} is not a function",
            expected="a function of (prompt, answer, row) that returns a number",
            received=type(function).__name__,
        )
    return Reward(name, cast("Function", function))
