"""The example notebook runs as it stands, and its committed outputs are those of a run."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

import nbformat

from tests.docs.notebook import NOTEBOOK, run
from tests.warm import Warm

MOST_LINES = 6
"""From a Dataset to predictions."""
PNG = b"\x89PNG\r\n\x1a\n"


def outputs_of(book: Any) -> dict[str, list[Any]]:
    """Return the outputs of each code cell by its source."""
    return {cell.source: list(cell.outputs) for cell in book.cells if cell.cell_type == "code"}


def text_of(outputs: list[Any]) -> str:
    """Return everything that a cell shows as text."""
    parts = [one.get("text") or one.get("data", {}).get("text/plain", "") for one in outputs]
    return "\n".join(parts)


def check(book: Any) -> None:
    """Check what a reader sees: the run, its picture, short texts, and errors in words."""
    cells = outputs_of(book)
    assert all(cells.values()), "a cell without output"
    assert not [one for each in cells.values() for one in each if one.output_type == "error"]
    (trains,) = (source for source in cells if "steps=32" in source)
    shown = next(one.data for one in cells[trains] if "text/html" in one.get("data", {}))
    assert '<progress value="32" max="32"' in shown["text/html"]
    for line in (
        r"method mesp: .*others: ",
        "120 sequences, 1 rows left out",
        "1 left out: text: is empty",
    ):
        assert re.search(line, shown["text/plain"])
    (picture,) = (one.data["image/png"] for one in cells["run.plot()"])
    data = base64.b64decode(picture)
    assert data.startswith(PNG) and len(data) > 10_000
    for source in ("run", "run.history", "answers[0]"):
        assert 10 < len(text_of(cells[source])) < 200
    assert "did you mean 'float16'?" in text_of(cells[list(cells)[-1]])
    assert "Warning" not in str(cells) and "W1" not in text_of(cells[trains])[:2]


def test_the_committed_notebook_shows_a_run_with_its_picture() -> None:
    book = nbformat.read(NOTEBOOK, as_version=4)
    check(book)
    (trains,) = (source for source in outputs_of(book) if "steps=32" in source)
    lines = [line for line in trains.splitlines() if line.strip()]
    assert len(lines) <= MOST_LINES and "predict(" in trains
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert not re.search(r"/(home|root|tmp|work|Users)/", text)


@pytest.mark.timeout(1000)
def test_every_cell_runs_and_nothing_is_written_into_the_repository(
    tmp_path: Path, warm: Warm
) -> None:
    """With a tiny model; what the real one shows is in the committed outputs."""
    pytest.importorskip("datasets")
    before = {path: path.stat().st_mtime_ns for path in NOTEBOOK.parent.rglob("*")}
    check(run(tmp_path, "tiny:llama", warm.python))
    after = {path: path.stat().st_mtime_ns for path in NOTEBOOK.parent.rglob("*")}
    assert before == after
    assert (tmp_path / "work" / "runs").is_dir()
