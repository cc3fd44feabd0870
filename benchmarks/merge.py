"""New rows into a committed result: what other runs of a benchmark measured on a machine of the
same kind.

    python -m benchmarks.merge race.json tasks.json --key task,variant,rate,steps --sort task,-mean

Each file is what `--out` wrote. Its rows go into benchmarks/results/<benchmark>/<machine>.json,
whose title, command, versions and notes stay, and whose columns gain those that are new; a machine
without such a file gets one. Of two rows with the same key the one with more seeds stays, or the
new one. Afterwards: `python -m benchmarks.tables`.
"""

from __future__ import annotations

import argparse
import json
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks.committed import concise, place_of, write

Document = dict[str, Any]


def merged(old: Document, new: Document, key: tuple[str, ...]) -> Document:
    """Return `old` with the rows of `new`.

    Raises:
        SystemExit: they are of different benchmarks or kinds of machine.
    """
    for name, values in (
        ("benchmark", lambda d: d["benchmark"]),
        ("machine", lambda d: d["machine"]["name"]),
        ("instructions", lambda d: d["machine"].get("instructions")),
    ):
        if values(old) != values(new) and None not in (values(old), values(new)):
            raise SystemExit(f"{name}: expected {values(old)}, received {values(new)}")
    rows = {tuple(row.get(part) for part in key): row for row in old["rows"]}
    for row in concise(new)["rows"]:
        place = tuple(row.get(part) for part in key)
        if place not in rows or seeds_of(rows[place]) <= seeds_of(row):
            rows[place] = row
    document = old | {"rows": list(rows.values())}
    if "columns" in old:
        known = {column["key"] for column in old["columns"]}
        document["columns"] = old["columns"] + [
            one for one in new.get("columns", ()) if one["key"] not in known
        ]
    return document


def seeds_of(row: dict[str, Any]) -> int:
    """Return how many seeds a row is of; results give their number or name each."""
    seeds = row.get("seeds", 0)
    return len(seeds) if isinstance(seeds, list) else seeds


def in_order(rows: list[dict[str, Any]], by: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the rows sorted by these keys, the last first if a key begins with '-'."""
    for part in reversed(by):
        rows = sorted(rows, key=itemgetter(part.removeprefix("-")), reverse=part.startswith("-"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--key", required=True, help="what tells rows apart, separated by commas")
    parser.add_argument(
        "--sort", default="", help="what rows are sorted by; '-' before a name: the largest first"
    )
    args = parser.parse_args()
    key, by = (tuple(filter(None, text.split(","))) for text in (args.key, args.sort))
    for path in args.files:
        new = json.loads(path.read_text())
        place = place_of(new)
        old = json.loads(place.read_text()) if place.is_file() else new | {"rows": []}
        document = merged(old, new, key)
        document["rows"] = in_order(document["rows"], by)
        write(document)
        print(f"{place}: {len(old['rows'])} rows, now {len(document['rows'])}")


if __name__ == "__main__":
    main()
