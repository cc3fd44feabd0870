"""Ratings of replies, thumbs up or down, in the store: training data for learning from feedback.

A line of the export is a row of the format `thumbs` of `ondevice.data`, with model and adapter.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from typing import Any

from ondevice.server.store import MissingError, Store

PAGE_ROWS = 500
"""Rows per read from the store."""


def judge(
    store: Store,
    prompt: str | list[dict[str, str]],
    answer: str,
    liked: bool,
    model: str,
    adapter: str | None,
) -> dict[str, Any]:
    """Store a rating; return its row. Rating the same reply again updates the row."""
    kept = _whole(json.dumps(prompt, ensure_ascii=False))
    answer = _whole(answer)
    model = _whole(model)
    adapter = None if adapter is None else _whole(adapter)
    same = json.dumps([kept, answer, model, adapter]).encode()
    name = f"thumb-{hashlib.sha256(same).hexdigest()[:16]}"
    with store.transaction() as db:
        db.execute(
            "INSERT INTO thumbs (id, prompt, answer, liked, model, adapter, created_s) VALUES (?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (id) DO UPDATE SET liked = excluded.liked, created_s = excluded.created_s",
            (name, kept, answer, liked, model, adapter, time.time()),
        )
    return _row(store.row("SELECT * FROM thumbs WHERE id = ?", name))


def list_thumbs(
    store: Store, limit: int, after: str | None = None
) -> tuple[list[dict[str, Any]], bool]:
    """Return up to `limit` ratings after `after`, the newest first, and whether there are more.

    Raises:
        ConfigError: `after` is not in the list.
    """
    rows, more = store.page("thumbs", "-created_s, -number", limit, after)
    return [_row(row) for row in rows], more


def remove(store: Store, name: str) -> None:
    """Delete a rating; raise MissingError if it does not exist."""
    with store.transaction(frees=True) as db:
        if not db.execute("DELETE FROM thumbs WHERE id = ?", (name,)).rowcount:
            raise MissingError(f"no such thumb: {name}", hint="GET /v1/thumbs lists them")


def lines(store: Store) -> Iterator[bytes]:
    """Yield all ratings as JSON lines, in the order of their creation.

    Keys: `prompt` (text, or turns with role and content), `completion`, `label` (true for thumbs
    up), `model`, `adapter`."""
    last = 0
    while rows := store.rows(
        "SELECT * FROM thumbs WHERE number > ? ORDER BY number LIMIT ?", last, PAGE_ROWS
    ):
        for row in rows:
            values = {
                "prompt": json.loads(row["prompt"]),
                "completion": row["answer"],
                "label": bool(row["liked"]),
            }
            values |= {"model": row["model"], "adapter": row["adapter"]}
            yield json.dumps(values, ensure_ascii=False).encode() + b"\n"
        last = rows[-1]["number"]


def _row(row: Any) -> dict[str, Any]:
    values = dict(row) | {"prompt": json.loads(row["prompt"]), "liked": bool(row["liked"])}
    del values["number"]
    return values


def _whole(text: str) -> str:
    """Replace half a surrogate pair, which no file can hold, by a question mark."""
    return text.encode("utf-8", "replace").decode()
