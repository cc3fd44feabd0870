"""Uploads and the disk: room for each part, and names that are on it."""

from __future__ import annotations

import inspect
import os
import shutil
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the serve extra is not installed")

from ondevice.core.errors import (
    ArtifactError,
    BusyError,
    ConfigError,
    DeviceError,
    OndeviceError,
    StorageError,
    TrainingError,
)
from ondevice.server import adapters, clock, jobs, placing, uploads
from ondevice.server.daemon import sweep
from ondevice.server.routes import system
from ondevice.server.store import MissingError, Store
from ondevice.server.unpack import unpack
from tests.server.running import DaemonProcess, wait_for


def test_each_part_leaves_room_on_the_disk(store: Store, monkeypatch) -> None:
    name = uploads.create(
        store, uploads.UploadRequest(kind="dataset", name="rows.jsonl", bytes=20)
    )["id"]
    assert uploads.write(store, name, 0, b"x" * 10)["received_bytes"] == 10
    usage = SimpleNamespace(free=uploads.SPARE_BYTES + 9)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StorageError):
        uploads.write(store, name, 10, b"x" * 10)
    assert uploads.get(store, name)["received_bytes"] == 10
    usage.free += 1
    assert uploads.write(store, name, 10, b"x" * 10)["received_bytes"] == 20


def finished(store: Store, **options: Any) -> str:
    """A data set of one row, checked by a helper that finds nothing wrong."""
    request = uploads.UploadRequest(kind="dataset", name="rows.jsonl", bytes=2, **options)
    name = uploads.create(store, request)["id"]
    uploads.write(store, name, 0, b"{}")
    return uploads.finish(store, name, nothing_wrong)["id"]


def test_a_job_trains_with_the_task_that_its_rows_were_uploaded_with(store: Store) -> None:
    dataset = finished(store, task="sst2", columns={"text": "review"})
    config = jobs.resolve(jobs.JobSpec(model="tiny:llama", dataset=dataset), store, Path("run"))
    assert config.data.task == "sst2" and config.data.columns == {"text": "review"}
    own = jobs.JobSpec(model="tiny:llama", dataset=dataset, config={"data": {"task": "rte"}})
    assert jobs.resolve(own, store, Path("run")).data.task == "rte"


def begun(store: Store, content: bytes = b"{}", **options: Any) -> str:
    request = uploads.UploadRequest(
        **{"kind": "dataset", "name": "rows.jsonl", "bytes": len(content), **options}
    )
    name = uploads.create(store, request)["id"]
    uploads.write(store, name, 0, content)
    return name


def nothing_wrong(*_: Any, **__: Any) -> dict[str, Any]:
    return {"problems": [], "rows": 1, "format": "text"}


class Killed(BaseException):
    """The process ends here: nothing that Python would tidy up is tidied up."""


@pytest.mark.parametrize("moment", ["validate", "fsync_tree", "fsync_folder"])
@pytest.mark.parametrize("links", [True, False])
def test_an_upload_whose_check_is_killed_can_be_finished_after_the_next_start(
    moment: str, links: bool, store: Store, monkeypatch
) -> None:
    name = begun(store)

    def die(*_: Any, **__: Any) -> Any:
        raise Killed

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no links here")

    with monkeypatch.context() as patch:
        if not links:
            patch.setattr(os, "link", refuse)
        patch.setattr(uploads, "_forget", lambda *_: None)
        if moment != "validate":
            patch.setattr(placing, moment, die)
        with pytest.raises(Killed):
            uploads.finish(store, name, die if moment == "validate" else nothing_wrong)
    sweep(store)
    if (
        moment == "fsync_folder" and not links
    ):  # in its place, without a second name: kept with what was lost
        assert [path.name for path in (store.root / "lost" / "datasets").glob("*/rows.jsonl")] == [
            "rows.jsonl"
        ]
        return
    assert uploads.get(store, name)["received_bytes"] == 2
    assert uploads.finish(store, name, nothing_wrong)["kind"] == "dataset"
    assert list((store.root / "uploads").iterdir()) == []


def test_a_daemon_that_is_killed_while_it_checks_has_the_upload_after_its_start(tmp_path) -> None:
    content = b'{"prompt": "a", "completion": "b"}\n' * 200_000
    store = tmp_path / "store"
    with DaemonProcess(store) as daemon:
        client, size = daemon.client, len(content)
        name = client.ask(
            "POST", "/v1/uploads", {"kind": "dataset", "name": "a.jsonl", "bytes": size}
        )["id"]
        client.ask("PUT", f"/v1/uploads/{name}", content, query={"offset": 0})

        def finish() -> None:
            with pytest.raises(DeviceError):
                client.ask("POST", f"/v1/uploads/{name}/finish")

        asking = threading.Thread(target=finish)
        asking.start()
        wait_for(lambda: (store / "uploads" / f".{name}.taken" / "made").is_dir(), "the check")
        daemon.kill()
        asking.join(60)
        assert (store / "uploads" / f".{name}.taken").is_dir(), "it was killed in the check"
    with DaemonProcess(store) as daemon:
        client = daemon.client
        assert client.ask("GET", f"/v1/uploads/{name}")["received_bytes"] == size
        placed = client.ask("POST", f"/v1/uploads/{name}/finish")["id"]
        assert client.ask("GET", f"/v1/datasets/{placed}")["rows"] == 200_000
        assert list((store / "uploads").iterdir()) == []


@pytest.mark.parametrize("error", [BusyError("busy"), TrainingError("died"), StorageError("full")])
def test_an_upload_that_cannot_be_checked_now_stays(error: OndeviceError, store: Store) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    name = begun(store)
    with pytest.raises(type(error)):
        uploads.finish(store, name, fail)
    assert uploads.get(store, name)["received_bytes"] == 2
    assert uploads.finish(store, name, nothing_wrong)["kind"] == "dataset"


def test_a_part_that_comes_while_the_upload_is_checked_is_refused(store: Store) -> None:
    def late(*_: Any, **__: Any) -> dict[str, Any]:
        assert uploads.get(store, name)["received_bytes"] == 2
        with pytest.raises(ConfigError) as longer:
            uploads.write(store, name, 2, b"x")
        assert longer.value.received == 1
        with pytest.raises(BusyError):
            uploads.write(store, name, 0, b"x")
        return nothing_wrong()

    name = begun(store)
    uploads.finish(store, name, late)


def test_an_upload_is_forgotten_after_a_day_without_a_part_and_not_by_a_clock_that_jumps(
    store: Store, monkeypatch
) -> None:
    began, hours = clock.uptime_s(), [0.0]
    monkeypatch.setattr(clock, "uptime_s", lambda: began + hours[0] * 3600.0)
    left = begun(store)
    monkeypatch.setattr(time, "time", lambda: 4e9)
    request = uploads.UploadRequest(kind="dataset", name="a.txt", bytes=100)
    growing = uploads.create(store, request)["id"]
    for hour in range(60):
        hours[0] += 1
        uploads.expire(store)
        uploads.write(store, growing, hour, b"x")
    assert uploads.get(store, growing)["received_bytes"] == 60
    with pytest.raises(MissingError):
        uploads.get(store, left)
    assert [path.name for path in (store.root / "uploads").iterdir()] == [growing]


def test_an_upload_that_is_being_checked_is_not_forgotten(store: Store, monkeypatch) -> None:
    began, hours = clock.uptime_s(), [0.0]
    monkeypatch.setattr(clock, "uptime_s", lambda: began + hours[0] * 3600.0)

    def slow(*_: Any, **__: Any) -> dict[str, Any]:
        for _hour in range(50):
            hours[0] += 1
            uploads.expire(store)
        return nothing_wrong()

    name = begun(store)
    assert uploads.finish(store, name, slow)["kind"] == "dataset"
    assert list((store.root / "uploads").iterdir()) == []


def zipped(path: Path, names: list[str]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, b"{}")
    return path


def test_what_systems_put_into_a_zip_is_left_out(tmp_path) -> None:
    names = [
        "model/config.json",
        "model/.DS_Store",
        "__MACOSX/model/._config.json",
        "model/LICENSE",
    ]
    assert unpack(zipped(tmp_path / "a.zip", names), tmp_path / "a", limit_bytes=100) == [
        "config.json"
    ]


def test_a_zip_is_refused_before_its_list_is_read_or_the_disk_is_full(
    tmp_path, monkeypatch
) -> None:
    many = zipped(
        tmp_path / "many.zip", [f"{number:06d}{'x' * 150}.json" for number in range(12_000)]
    )
    monkeypatch.setattr(
        zipfile.ZipFile, "__init__", lambda *_, **__: pytest.fail("the list was read")
    )
    with pytest.raises(ArtifactError):
        unpack(many, tmp_path / "many", limit_bytes=1 << 30)
    monkeypatch.undo()
    with pytest.raises(StorageError):
        unpack(
            zipped(tmp_path / "b.zip", ["config.json"]),
            tmp_path / "b",
            limit_bytes=100,
            room_bytes=1,
        )
    assert not (tmp_path / "b").exists()


def test_a_name_is_on_the_disk_before_it_is_told(store: Store, tmp_path, monkeypatch) -> None:
    flushed: list[Path] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)

    name = begun(store)
    uploads.finish(store, name, nothing_wrong)
    assert flushed.index(store.root / "uploads" / f".{name}.taken" / "made") < flushed.index(
        store.root / "datasets"
    )
    (tmp_path / "model").mkdir()
    placing.in_place(store, "model", "mine", tmp_path / "model")
    assert flushed[-1] == store.root / "models" and store.path("models", "mine").is_dir()


def test_an_adapter_is_zipped_a_piece_at_a_time_into_a_file(tmp_path) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(bytes(range(256)) * 20_000)
    first, second = (adapters.zipped(folder, tmp_path) for _ in range(2))
    assert first.read_bytes() == second.read_bytes() and first != second
    with zipfile.ZipFile(first) as archive:
        assert archive.testzip() is None and archive.namelist() == sorted(
            path.name for path in folder.iterdir()
        )


def test_health_answers_while_every_thread_waits() -> None:
    """Forty questions that wait for a model must not keep a watchdog waiting."""
    assert inspect.iscoroutinefunction(system.health)
