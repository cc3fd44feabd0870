"""What is committed of a result: benchmarks/results/<benchmark>/<machine>.json."""

from __future__ import annotations

import json
import os
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"


def place_of(document: dict[str, Any]) -> Path:
    """Return where a result of this benchmark on this machine is committed."""
    return RESULTS / document["benchmark"] / f"{document['machine']['name']}.json"


def write(document: dict[str, Any], path: Path | str | None = None) -> Path:
    """Write a result object atomically: whole to `path`, or `concise` to its place under
    benchmarks/results."""
    target = Path(path) if path else place_of(document)
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(target.name + ".part")
    beside.write_text(_dump(document if path else concise(document)))
    os.replace(beside, target)
    return target


def concise(document: dict[str, Any]) -> dict[str, Any]:
    """Return what is committed of a result: its tables stay what they are, raw measurements go.

    More than three repeats become [lowest, median, highest], with their number under the row's
    `repeats`. A row with `seeds` keeps its lists, because more seeds may be merged into it. Curves
    and other nested values go, floats keep ten digits. Applying it twice changes nothing.
    """
    shown = {column["key"] for column in document.get("columns", ())}
    return {**document, "rows": [_concise_row(row, shown) for row in document["rows"]]}


def _concise_row(row: dict[str, Any], shown: set[str]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    repeats = set[int]()
    for key, value in row.items():
        if isinstance(value, list) and key.endswith(("curve", "curves")):
            continue
        if isinstance(value, list) and not any(isinstance(item, list | dict) for item in value):
            if len(value) > 3 and "seeds" not in row:
                repeats.add(len(value))
                value = [min(value), median(value), max(value)]
            kept[key] = [_ten_digits(item) for item in value]
        elif not isinstance(value, list | dict) or key in shown:
            kept[key] = _ten_digits(value)
    return kept | ({"repeats": min(repeats)} if repeats else {})


def _ten_digits(value: Any) -> Any:
    return float(f"{value:.10g}") if isinstance(value, float) else value


def _dump(document: dict[str, Any]) -> str:
    """JSON with a line for each key and, in lists of objects, for each object: a changed row is a
    changed line."""
    lines = []
    for key, value in document.items():
        if isinstance(value, list) and value:
            text = "[\n" + ",\n".join(f"  {json.dumps(item)}" for item in value) + "\n ]"
        else:
            text = json.dumps(value)
        lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
