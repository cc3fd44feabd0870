"""Uploads and what fleets exchange: whole examples, and how a user reads them."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from pathlib import Path

import numpy as np

from tests.untrusted.files_of_runs import build_adapter

# Uploads and fleets


def build_zip(folder: Path) -> None:
    build_adapter(folder)
    with zipfile.ZipFile(folder / "upload.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted((folder / "adapter").iterdir()):
            archive.write(path, f"adapter/{path.name}")
    shutil.rmtree(folder / "adapter")


def read_zip(folder: Path) -> None:
    from ondevice.artifact.adapter import load_adapter
    from ondevice.server.unpack import unpack

    target = folder / "unpacked"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    unpack(folder / "upload.zip", target, limit_bytes=64 << 20)
    outside = [
        path
        for path in target.rglob("*")
        if not Path(os.path.realpath(path)).is_relative_to(target)
    ]
    assert not outside, outside
    load_adapter(target)


def build_messages(folder: Path) -> None:
    from ondevice.fleet.averaging.arrays import to_bytes
    from ondevice.fleet.carry import Parcel, files_of
    from ondevice.fleet.frozen import Frozen
    from tests.fleet.test_messages import VECTORS

    for message, _ in VECTORS:
        (folder / f"{type(message).__name__}.message").write_bytes(message.to_bytes())
    (file,) = files_of(Parcel(b'{"a": 1}', 3, [b"event"], b"task"))
    (folder / "parcel.message").write_bytes(file)
    (folder / "frozen.message").write_bytes(
        Frozen("subspace-00000001.safetensors", b"x").to_bytes()
    )
    (folder / "arrays.message").write_bytes(to_bytes({"a": np.ones(4, np.float32)}))


def read_messages(folder: Path) -> None:
    """Read each message, and each as every other kind of message."""
    from ondevice.core.errors import OndeviceError
    from ondevice.fleet.averaging.arrays import from_bytes
    from ondevice.fleet.carry import parcel_of
    from ondevice.fleet.frozen import Frozen
    from ondevice.fleet.messages import Outcome, Refresh, Task, TaskReply, read_event

    kinds = (Task, TaskReply, Outcome, Refresh, Frozen)
    for path in folder.glob("*.message"):
        data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        for read in (*(kind.from_bytes for kind in kinds), read_event, parcel_of, from_bytes):
            try:
                read(data)
            except OndeviceError as error:
                str(error).encode()


def build_fleet_log(folder: Path) -> None:
    from ondevice.fleet.log import log_bytes
    from ondevice.fleet.messages import HASH_BYTES, Group, Outcome
    from ondevice.fleet.numbers import Numbers
    from tests.fleet.fleets import charter

    head = charter()
    event = Outcome(
        head.id, 0, bytes(HASH_BYTES), bytes(HASH_BYTES), (Group(0, Numbers((1, 2), -30)),)
    )
    (folder / "fleet.fleetlog").write_bytes(log_bytes(head, [event.to_bytes()]))


def read_fleet_log(folder: Path) -> None:
    from ondevice.core.errors import OndeviceError
    from ondevice.fleet.log import replay
    from ondevice.fleet.store import read_file

    log = read_file(folder / "fleet.fleetlog")
    try:
        replay(log)
    except OndeviceError as error:  # the example's hashes are made up
        str(error).encode()


def build_charter(folder: Path) -> None:
    from ondevice.fleet.averaging.charter import AdapterCharter
    from ondevice.fleet.averaging.rules import Averaging
    from tests.fleet.fleets import charter

    (folder / "charter.json").write_bytes(charter().to_bytes())
    common = {
        name: getattr(charter(), name)
        for name in ("model_source", "model_sha256", "method", "data", "seed")
    }
    first_order = AdapterCharter(**common, learning_rate=0.1, local_steps=2, averaging=Averaging())
    (folder / "adapters.json").write_bytes(first_order.to_bytes())


def read_charter(folder: Path) -> None:
    from ondevice.core.errors import OndeviceError
    from ondevice.fleet.averaging.charter import AdapterCharter
    from ondevice.fleet.charter import Charter

    for kind, name in ((Charter, "charter.json"), (AdapterCharter, "adapters.json")):
        path = folder / name
        data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        try:
            _ = kind.from_bytes(data).id
        except OndeviceError as error:
            str(error).encode()


def build_seat(folder: Path) -> None:
    seat = {
        "data": "rows.jsonl",
        "host": "127.0.0.1",
        "port": 9092,
        "insecure": True,
        "columns": {"text": "t"},
    }
    (folder / "fleets").mkdir()
    (folder / "fleets" / "mine.json").write_text(json.dumps(seat))


def read_seat(folder: Path) -> None:
    from ondevice.core.config import StrictConfig
    from ondevice.core.errors import ConfigError
    from ondevice.core.untrusted import read_object
    from ondevice.server.fleets import Seat

    kind: type[StrictConfig] = Seat
    try:
        kind.parse(read_object(folder / "fleets" / "mine.json", ConfigError), "a seat")
    except FileNotFoundError:
        pass  # there is no seat
