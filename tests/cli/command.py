"""The command line in this process, as tests call it, and the files that they give it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ondevice.cli.app import run


@dataclass(frozen=True)
class Done:
    """A command's exit code and output."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The one JSON object, which is all of standard output."""
        (line,) = self.out.splitlines()
        return json.loads(line)


class CommandLine:
    """Calls `ondevice ARGUMENTS`; prepend-able options make runs with the tiny model short to write."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *arguments: object) -> Done:
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            run([str(argument) for argument in arguments])
        captured = self.capsys.readouterr()
        return Done(int(caught.value.code or 0), captured.out, captured.err)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    """JSON lines."""
    path.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    return path


def classes(path: Path, count: int = 12) -> Path:
    """Rows of a classification by label that a program of 16 tokens takes."""
    return write_rows(
        path, [{"text": f"{'ab'[i % 2]}{i}", "label": ["no", "yes"][i % 2]} for i in range(count)]
    )


def tiny(method: str = "prge", *more: object, model: str = "tiny:llama") -> list[object]:
    """Options of a short run of the tiny model."""
    sizes = ["--set", "method.rank=2"] if method in ("prge", "lora", "lora-fa") else []
    queries = ["--queries", "2"] if method in ("prge", "mezo") else []
    return [
        "--model",
        model,
        "--method",
        method,
        *sizes,
        *queries,
        "--batch-size",
        "2",
        "--seed",
        "3",
        *more,
    ]
