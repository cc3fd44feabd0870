"""Uploads and the disk: room for each part, and names that are on it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the serve extra is not installed")

from ondevice.core.errors import StorageError
from ondevice.server import uploads
from ondevice.server.store import Store


def test_each_part_leaves_room_on_the_disk(store: Store, monkeypatch) -> None:
    name = uploads.create(store, uploads.UploadRequest(kind="dataset", name="rows.jsonl", bytes=20))["id"]
    assert uploads.write(store, name, 0, b"x" * 10)["received_bytes"] == 10
    usage = SimpleNamespace(free=uploads.SPARE_BYTES + 9)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StorageError, match="not enough room"):
        uploads.write(store, name, 10, b"x" * 10)
    assert uploads.get(store, name)["received_bytes"] == 10
    usage.free += 1
    assert uploads.write(store, name, 10, b"x" * 10)["received_bytes"] == 20


def test_a_name_is_on_the_disk_before_it_is_told(store: Store, tmp_path, monkeypatch) -> None:
    flushed: list[Path] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)

    def helper(what: str, **_: Any) -> dict[str, Any]:
        return {"problems": [], "rows": 1, "format": "text"}

    name = uploads.create(store, uploads.UploadRequest(kind="dataset", name="rows.txt", bytes=1))["id"]
    uploads.write(store, name, 0, b"x")
    placed = uploads.finish(store, name, helper)["id"]  # type: ignore[arg-type]
    assert flushed.index(store.path("datasets", placed)) < flushed.index(store.root / "datasets")
    (tmp_path / "model").mkdir()
    uploads._in_place(store, "model", "mine", tmp_path / "model")
    assert flushed[-1] == store.root / "models" and store.path("models", "mine").is_dir()
