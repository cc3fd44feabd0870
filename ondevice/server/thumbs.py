"""Ratings of replies, thumbs up or down, in the store: training data for learning from feedback.

A line of the export is a row of the format `thumbs` of `ondevice.data`, with model and adapter. A
job whose data set is `thumbs` trains on the ratings as they are when it is made.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ondevice.core.errors import ConfigError
from ondevice.server import uploads
from ondevice.server.jobs import THUMBS
from ondevice.server.store import MissingError, Store

PAGE_ROWS = 500
"""Rows per read from the store."""
KEPT_BACK = 5
"""One prompt in so many is evaluated on, of each kind of rating."""
MOST_BYTES = 256 << 20
"""Longest texts of all ratings that a job takes: they are in memory at once."""


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


def count(store: Store) -> dict[str, int]:
    """Return the number of ratings of each kind: `up`, `down`."""
    rows = store.rows("SELECT liked, COUNT(*) AS number FROM thumbs GROUP BY liked")
    counts = {bool(row["liked"]): row["number"] for row in rows}
    return {"up": counts.get(True, 0), "down": counts.get(False, 0)}


@contextmanager
def frozen(
    store: Store,
    check: uploads.Check,
    dataset: str,
    eval_dataset: str | None = None,
    keep: bool = True,
) -> Iterator[dict[str, str | None]]:
    """Give the ids `dataset` and `eval_dataset`; for `thumbs`, of a data set of the ratings as they are now.

    If both are `thumbs`, every fifth rating of each kind is kept back, and ratings of one prompt stay
    together. The data sets are deleted again if the block fails, or without `keep`.

    Raises:
        ConfigError: there are not ratings of both kinds to train on, or their texts are too long.
    """
    ids: dict[str, str | None] = {"dataset": dataset, "eval_dataset": eval_dataset}
    wanted = [side for side, name in ids.items() if name == THUMBS]
    stays = False
    try:
        if wanted:
            rows = _sides(store, wanted)
            for side in wanted:
                ids[side] = _freeze(store, check, rows[side])
        yield ids
        stays = keep
    finally:
        for name in [ids[side] for side in wanted if ids[side] != THUMBS and not stays]:
            with store.transaction(frees=True) as db:
                db.execute("DELETE FROM datasets WHERE id = ?", (name,))
            store.discard("datasets", str(name))


def _sides(store: Store, wanted: list[str]) -> dict[str, list[bytes]]:
    """Return the lines of each side.

    Raises:
        ConfigError: see `frozen`.
    """
    size = store.row("SELECT COALESCE(SUM(LENGTH(prompt) + LENGTH(answer)), 0) FROM thumbs")
    assert size is not None  # noqa: S101  it is a sum
    if size[0] > MOST_BYTES:
        raise ConfigError(
            "the ratings are too long for a job",
            expected=f"at most {MOST_BYTES >> 20} MiB of text",
            received=f"{size[0] / 2**20:,.0f} MiB",
            hint="download GET /v1/thumbs/export, and upload the rows to train on",
        )
    rows: dict[str, list[bytes]] = {side: [] for side in wanted}
    kinds: dict[str, list[bool]] = {side: [] for side in wanted}
    seen = {True: 0, False: 0}
    side_of: dict[str, str] = {}
    for line in lines(store):
        row = json.loads(line)
        prompt = json.dumps(row["prompt"])
        if prompt not in side_of:
            seen[row["label"]] += 1
            is_kept_back = seen[row["label"]] % KEPT_BACK == 2
            side_of[prompt] = wanted[-1] if is_kept_back else wanted[0]
        rows[side_of[prompt]].append(line)
        kinds[side_of[prompt]].append(row["label"])
    for side in wanted:
        up = sum(kinds[side])
        down = len(kinds[side]) - up
        if (side == "dataset" and not (up and down)) or not rows[side]:
            purpose = "train on" if side == "dataset" else "evaluate on"
            raise ConfigError(
                f"there are too few ratings to {purpose}",
                expected="thumbs up and thumbs down",
                received=f"{up} up, {down} down",
                hint="rate more replies on the page under Try, or with POST /v1/thumbs",
            )
    return rows


def _freeze(store: Store, check: uploads.Check, rows: list[bytes]) -> str:
    """Make a data set of rows; return its id."""
    content = b"".join(rows)
    # An upload like any other: whatever a client has stored is checked as a file from outside.
    request = uploads.UploadRequest(kind="dataset", name=f"{THUMBS}.jsonl", bytes=len(content))
    upload = uploads.create(store, request)["id"]
    try:
        uploads.write(store, upload, 0, content)
        return str(uploads.finish(store, upload, check)["id"])
    except BaseException:
        uploads.remove(store, upload)
        raise


def _row(row: Any) -> dict[str, Any]:
    values = dict(row) | {"prompt": json.loads(row["prompt"]), "liked": bool(row["liked"])}
    del values["number"]
    return values


def _whole(text: str) -> str:
    """Replace half a surrogate pair, which no file can hold, by a question mark."""
    return text.encode("utf-8", "replace").decode()
