"""Result files to Markdown tables, and those tables into README.md and docs/.

    python -m benchmarks.tables            rewrite every table between its markers, and every result
                                           that was copied here whole as what is committed of it
    python -m benchmarks.tables --check    exit 1 and name the tables and results that differ
    python -m benchmarks.tables FILE ...   first take results that were measured elsewhere, with --out FILE

A table stands between `<!-- results: ROOM/NAME -->` (every machine) or `<!-- results:
ROOM/NAME/MACHINE -->` and `<!-- /results -->`. A benchmark that has no result yet shows its
command. The format of a result file is in benchmarks/results/README.md. A page that needs only some
figures names them, one line each, before the marker's end; the table then has no notes:

    <!-- results: mesp/memory
    rows: method = MeSP | checkpoint a block; tokens = 256
    columns: method, step_bytes -->
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any, TextIO

from benchmarks import committed

ROOT = Path(__file__).resolve().parents[1]
MOVED = {
    "prge_step --skip forms,programs": "prge.options",
    "executorch_step --only gradients": "prge.executorch_gradients",
    "executorch_gradients": "prge.executorch_gradients",
    "executorch_step": "prge.executorch_step",
    "generator": "runtime_ops.generator",
    "jetson_prge": "prge.jetson",
    "layer_adam": "runtime_ops.layer_adam",
    "lsp_quality": "lsp.quality",
    "lsp_step": "lsp.step",
    "mesp_cuda": "mesp.cuda",
    "mesp_memory": "mesp.memory",
    "npu_gradients": "prge.npu_gradients",
    "npu_rows": "prge.npu_rows",
    "plan_accuracy": "planning.accuracy",
    "prge_quality": "prge.quality",
    "prge_step": "prge.step",
    "prge_step_cuda": "prge.step_cuda",
    "prge_step_options": "prge.options",
    "q4_linear": "runtime_ops.q4_linear",
    "revffn_candidates": "revffn.candidates",
    "revffn_inverse": "revffn.inverse",
    "revffn_memory": "revffn.memory",
    "revffn_quality": "revffn.quality",
    "revffn_tasks": "revffn.tasks",
    "serve_readers": "serve.readers",
    "slideformer": "slideformer.step",
    "_ranks_step": "slideformer.ranks",
}
"""From the name in a recorded command, before benchmarks had rooms, to the one that runs it now; a
result keeps the command that was run."""
RECORDED = re.compile(r"-m benchmarks\.(" + "|".join(map(re.escape, MOVED)) + r")(?![\w.])")
MARKED = re.compile(
    r"(<!-- results: ([\w./-]+)((?:\n(?:rows|columns): [^\n]+?)*) -->\n)(.*?)(<!-- /results -->)",
    re.DOTALL,
)


def render(document: dict[str, Any]) -> str:
    """One result as Markdown: a line that says where it was measured, then its rows as a table."""
    rows = document["rows"]
    columns = document.get("columns") or [{"key": key} for key in rows[0]]
    titles = [column.get("title", column["key"]) for column in columns]
    numeric = [
        _is_number(next((row[c["key"]] for row in rows if row.get(c["key"]) is not None), ""))
        for c in columns
    ]
    lines = [
        caption(document),
        "",
        "| " + " | ".join(_escape(title) for title in titles) + " |",
        "|" + "|".join(" ---: " if right else " --- " for right in numeric) + "|",
    ]
    for row in rows:
        cells = [_escape(cell(row.get(column["key"]), column)) for column in columns]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [f"\n{todays(note)}" for note in document.get("notes", [])]
    return "\n".join(lines)


def caption(document: dict[str, Any]) -> str:
    """Machine, versions, date and command of a result, in one line of Markdown."""
    machine = document["machine"]
    cpu = ", ".join(filter(None, (machine["cpu"], machine.get("instructions"))))
    where = ", ".join(sorted({gpu["name"] for gpu in machine["gpus"]})) or cpu
    count = len(machine["gpus"])
    shown = {
        name: v
        for name, v in document["versions"].items()
        if name in document.get("show_versions", ("torch",))
    }
    parts = [
        f"{count} × {where}" if count > 1 else where,
        f"{machine['cores']} cores",
        f"{machine['memory_bytes'] / 2**30:.0f} GiB",
        *(f"{name} {number}" for name, number in shown.items()),
        document["date"],
        f"`{todays(document['command'])}`",
    ]
    title = f"**{document['title']}**: " if document.get("title") else ""
    return title + ", ".join(parts)


def todays(text: str) -> str:
    """Commands in `text` as they are given now."""
    return RECORDED.sub(lambda match: f"-m benchmarks.{MOVED[match[1]]}", text)


def cell(value: Any, column: dict[str, Any]) -> str:
    """A value as text; a list of repeats is its median with its range.

    `digits` of the column sets the decimals (without it: three significant figures, whole numbers
    whole), `scale` multiplies first (1e-6 shows bytes as MB).
    """
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list) and value and all(_is_number(item) for item in value):
        middle, low, high = statistics.median(value), min(value), max(value)
        if low == high:
            return _number(middle, column)
        return f"{_number(middle, column)} ({_number(low, column)} to {_number(high, column)})"
    return _number(value, column) if isinstance(value, int | float) else str(value)


def update(text: str, results: Path) -> str:
    """`text` with every marked table rendered anew.

    Raises:
        FileNotFoundError: a marker names a result that is not in `results`, and that no benchmark
            makes.
        ValueError: a marker chooses a row or a column that the result does not have.
    """

    def table(match: re.Match[str]) -> str:
        files = _files(match[2], results)
        found = [chosen(json.loads(file.read_text()), match[3]) for file in files]
        tables = [render(document) for document in found] or [unmeasured(match[2])]
        return match[1] + "\n\n".join(tables) + "\n" + match[5]

    return MARKED.sub(table, text)


def chosen(document: dict[str, Any], options: str) -> dict[str, Any]:
    """Return `document` with only the rows and columns that a marker's `options` name.

    Raises:
        ValueError: no row has a value, or no column a key, that the options name.
    """
    if not options:
        return document
    words = dict(re.findall(r"(rows|columns): (.+)", options))
    columns = document.get("columns") or [{"key": key} for key in document["rows"][0]]
    rows = document["rows"]
    for condition in words.get("rows", "").split(";"):
        key, _, values = (part.strip() for part in condition.partition("="))
        accepted = [value.strip() for value in values.split("|")]
        present = {str(row.get(key)) for row in rows}
        if key and not present.issuperset(accepted):
            raise ValueError(
                f"results: {document['benchmark']}: no row has {key} = {' or '.join(accepted)}; "
                f"it has {', '.join(sorted(present))}"
            )
        rows = [row for row in rows if not key or str(row.get(key)) in accepted]
    if "columns" in words:
        by_key = {column["key"]: column for column in columns}
        keys = [key.strip() for key in words["columns"].split(",")]
        if missing := [key for key in keys if key not in by_key]:
            raise ValueError(
                f"results: {document['benchmark']}: no column {', '.join(missing)}; "
                f"it has {', '.join(by_key)}"
            )
        columns = [by_key[key] for key in keys]
    return {**document, "rows": rows, "columns": columns, "notes": []}


def unmeasured(name: str) -> str:
    """What stands in the place of a table whose benchmark was not run so far."""
    return f"Not measured yet: `python -m benchmarks.{name.replace('/', '.')} --record`."


def documents(root: Path) -> list[Path]:
    """README.md, every Markdown file below docs/ and in develop/, and the pages of the top folders."""
    pages = [
        root / "README.md",
        *sorted((root / "docs").rglob("*.md")),
        *sorted((root / "develop").glob("*.md")),
        *sorted(root.glob("*/README.md")),
    ]
    return list(dict.fromkeys(path for path in pages if path.is_file()))


def _files(name: str, results: Path) -> list[Path]:
    files = sorted((results / name).glob("*.json")) or [
        f for f in [results / f"{name}.json"] if f.is_file()
    ]
    if not files and not (ROOT / "benchmarks" / f"{name}.py").is_file():
        raise FileNotFoundError(
            f"results: {name}: expected {results / name}/*.json or {results / name}.json"
        )
    return files


def _is_number(value: Any) -> bool:
    if isinstance(value, list):
        return bool(value) and all(_is_number(item) for item in value)
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: float, column: dict[str, Any]) -> str:
    value = value * column.get("scale", 1)
    digits = column.get("digits")
    if digits is not None:
        return f"{value:,.{digits}f}"
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main(arguments: list[str]) -> int:
    """Take results from files, rewrite the tables, or with --check only compare; returns the exit
    status."""
    files = [Path(word) for word in arguments if not word.startswith("-")]
    unknown = [word for word in arguments if word.startswith("-") and word != "--check"]
    if unknown or (files and "--check" in arguments) or not all(file.is_file() for file in files):
        print(
            f"tables: expected --check, result files or nothing, received {' '.join(arguments)}",
            file=sys.stderr,
        )
        return 2
    for file in files:
        _tell(committed.write(json.loads(file.read_text())), "written")
    check = "--check" in arguments
    stale = 0
    for path in sorted(committed.RESULTS.glob("*/*/*.json")):
        document = json.loads(path.read_text())
        if committed.concise(document) != document:
            stale += 1
            if check:
                _tell(path, "raw measurements stand in it; try: make docs", sys.stderr)
            else:
                _tell(committed.write(document), "raw measurements taken out")
    for path in documents(ROOT):
        text = path.read_text()
        if (new := update(text, committed.RESULTS)) != text:
            stale += 1
            if check:
                _tell(path, "a table differs from its results; try: make docs", sys.stderr)
            else:
                path.write_text(new)
                _tell(path, "tables rewritten")
    return int(check and stale > 0)


def _tell(path: Path, what: str, file: TextIO | None = None) -> None:
    print(f"{path.relative_to(ROOT)}: {what}", file=file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
