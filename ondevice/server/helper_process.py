"""A helper process of the daemon: it runs one call after another that needs a framework.

`python -m ondevice.server.helper_process DAEMON_PID` reads a call a line and writes its replies;
the daemon's end of the pipe is `server.helper`.

A call that reads an uploaded file has a memory limit, which the kernel enforces. A file that needs
more is refused with an error, and the process ends, so that the next call starts with a small one.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

from ondevice.artifact.manifest import read_manifest
from ondevice.core.errors import DataError, was_refused
from ondevice.data import preview_rows
from ondevice.data.readers.files import read_records
from ondevice.data.readers.source import FROM_OUTSIDE
from ondevice.data.reading import check_rows, open_reading
from ondevice.data.tasks.columns import parse_columns
from ondevice.data.tasks.looking import look_at
from ondevice.data.writing import check_suffix, write_records
from ondevice.models import load_tokenizer, read_dims
from ondevice.models.choice import choose_method
from ondevice.models.load import artifact_tokenizer, dims_and_family
from ondevice.models.sources.resolve import check_folder, check_weights
from ondevice.planning.limit import own_memory, status_bytes
from ondevice.server.channel import Channel, as_error
from ondevice.server.convert import convert
from ondevice.server.room import plan

PREVIEW_ROWS = 20_000
"""Most rows that a preview reads: tokenizing a large file takes minutes."""
PROBLEMS = 100
"""Most bad rows that a response names."""


def validate(file: str, task: str | None, columns: dict[str, str] | None = None) -> dict[str, Any]:
    """Check every row; return format, counts, and line, field and reason of the first bad rows."""
    checked = check_rows(
        file, task=task, columns=columns, limits=FROM_OUTSIDE, most_problems=PROBLEMS, alive=_alive
    )
    name = Path(file).name
    problems = [problem.to_dict() | {"file": name} for problem in checked.problems]
    return {
        "format": checked.format,
        "rows": checked.rows,
        "bad_rows": checked.bad_rows,
        "problems": problems,
    }


def preview(
    file: str,
    model: str | None,
    task: str | None,
    max_length_tokens: int | None,
    train_on_prompt: bool,
    rows: int,
    artifact: str | None = None,
    columns: list[str] | None = None,
    strict_columns: bool = False,
) -> dict[str, Any]:
    """Decode examples, with lengths and labels, by the tokenizer of the model or the artifact."""
    if artifact is None:
        tokenizer = load_tokenizer(str(model))
        vocabulary = read_dims(str(model)).vocab
    else:
        tokenizer = artifact_tokenizer(Path(artifact))
        vocabulary = read_manifest(Path(artifact)).model.dims.get("vocab")
    named = parse_columns(columns or ())
    read = open_reading(
        file, task=task, columns=named, limits=FROM_OUTSIDE, most_records=PREVIEW_ROWS, alive=_alive
    )  # fmt: skip
    shown = preview_rows(
        read,
        tokenizer,
        max_length_tokens,
        train_on_prompt,
        rows,
        PROBLEMS,
        strict_columns,
        vocabulary,
    )
    return shown.to_dict() | {"file": Path(file).name}


def look(file: str) -> dict[str, Any]:
    """Return a file's columns and first rows, and what the columns most likely hold."""
    return look_at(file, limits=FROM_OUTSIDE).to_dict()


def read_table(file: str, most: int) -> dict[str, Any]:
    """Return a table's rows, at most `most` of them, and its columns; rows of a text are its lines.

    Raises:
        DataError: the file cannot be read, a row cannot, or there are more rows.
    """
    path = Path(file)
    if path.suffix.lower() == ".txt":
        lines = path.read_text(encoding="utf-8-sig").splitlines()
        rows: list[Any] = [line for line in lines if line.strip()]
    else:
        rows = []
        for record in read_records(path, FROM_OUTSIDE).records:
            if not isinstance(record.fields, dict):
                raise DataError(
                    f"line {record.line}: {record.fields.reason}",
                    expected="only usable rows",
                    received="one that cannot be read",
                    hint="correct the line, or leave it out",
                )
            rows.append({str(key): value for key, value in record.fields.items()})
            if len(rows) > most:
                break
    if not rows or len(rows) > most:
        raise DataError(
            "the file has no rows" if not rows else "the file has too many rows",
            expected=f"1 to {most} rows",
            received="none" if not rows else f"more than {most}",
            hint="send the rows in several files",
        )
    names = dict.fromkeys(key for row in rows if isinstance(row, dict) for key in row)
    return {"columns": list(names), "rows": json.loads(json.dumps(rows, default=str))}


def write_table(
    file: str, columns: list[str], rows: list[dict[str, Any]], like: str | None = None
) -> None:
    """Write rows as the kind of table that the file's name says, in the way of the file `like`."""
    check_suffix(Path(file))
    source = None
    if like is not None:
        source = Path(file).with_name("like").with_suffix(Path(like).suffix)
    write_records(Path(file), Path(file), columns, rows, like=source)


def check_model(folder: str) -> dict[str, Any]:
    """Check a model's sizes, tokenizer and shapes of weights; raise ModelError for a bad one."""
    dims, family = dims_and_family(folder, None)
    check_folder(Path(folder))
    check_weights(Path(folder), family.weight_shapes(dims))
    load_tokenizer(folder)
    return {"layers": dims.layers, "hidden": dims.hidden, "vocab": dims.vocab}


def choose(source: str) -> dict[str, str]:
    """Choose the method of a job that names none. This may need a framework to inspect a block."""
    name, said = choose_method(source)
    return {"method": name, "said": said}


ROWS_BYTES = 400 << 20
"""Memory for checking rows; with the process and its libraries it stays below 512 MiB."""
TOKENIZER_BYTES = 2 << 30
"""Memory for a call that loads a tokenizer: transformers imports PyTorch, and both take 450 MiB."""
CALLS: dict[str, tuple[Callable[..., Any], int | None]] = {
    "plan": (plan, None),  # opens the GPU, whose driver maps more memory than any limit
    "validate": (validate, ROWS_BYTES),
    "preview": (preview, TOKENIZER_BYTES),
    "look": (look, ROWS_BYTES),
    "read_table": (read_table, ROWS_BYTES),
    "write_table": (write_table, ROWS_BYTES),
    "check_model": (check_model, TOKENIZER_BYTES),
    "choose": (choose, TOKENIZER_BYTES),
    "convert": (convert, None),  # loads a model, and checks the free memory itself
}
"""The calls, each with its limit of memory in bytes, without the files of libraries."""


def serve(source: Any, channel: Channel) -> None:
    """Run calls until the other side closes, or until a call was refused memory."""
    global _alive
    _alive = partial(channel.send, {"part": None})
    at_start_bytes = status_bytes("RssAnon")
    for line in source:
        request = json.loads(line)
        call, limit = CALLS[request["call"]]
        try:
            with own_memory(None if limit is None else at_start_bytes + limit):
                value = call(**request["arguments"])
                if isinstance(value, Generator):
                    value = _send_parts(value, channel)
                reply = {"value": value}
        except Exception as error:
            if limit is not None and was_refused(error):
                channel.send({"error": _too_large(request["call"], limit).to_dict(), "ends": True})
                return
            reply = {"error": as_error(request["call"], error).to_dict()}
        channel.send(reply)


def _alive() -> None:
    """Send a sign of life in a long call; `serve` replaces this function."""


def _too_large(call: str, limit: int) -> DataError:
    if call == "validate":
        hint = "write the rows as JSON lines, one row a line, or split the longest rows"
    else:
        hint = "a smaller file, or rows as JSON lines"
    return DataError(
        "the file needs too much memory to be read",
        expected=f"at most {limit >> 20} MiB in the helper process",
        received="more",
        hint=hint,
    )


def _send_parts(parts: Generator[Any, None, Any], channel: Channel) -> Any:
    """Write each part on a separate line, and return the final value."""
    while True:
        try:
            part = next(parts)
        except StopIteration as end:
            return end.value
        channel.send({"part": part})


def main(arguments: list[str]) -> int:
    """Run the process."""
    # Freed memory goes back to the system; pyarrow's pools would keep it, counted by the limit.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    serve(sys.stdin.buffer, Channel(int(arguments[0])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
