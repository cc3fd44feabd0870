"""An adapter of the store converted over the API, downloaded, and read by the program it is for."""

from __future__ import annotations

import json
import subprocess
import threading
import time
import zipfile
from collections.abc import Iterator
from typing import Any

import pytest

from ondevice.artifact.adapter import load_adapter
from ondevice.server.adapters import copy_adapter, insert_adapter
from ondevice.server.client import RefusedError
from ondevice.server.conversions import KEPT_S, ConversionRequest, Conversions
from ondevice.server.convert import convert
from tests.server.running import refused, wait_for

MODEL = "tiny:llama"


def test_a_conversion_is_what_the_command_line_writes(served, tmp_path, warm) -> None:
    """One file and a zip of a folder; the store keeps it until it is forgotten."""
    client, adapter, store = served.client, served.job["id"], served.daemon.store
    others = {row["id"] for row in client.conversions()}
    begun = client.convert(adapter, "gguf-lora")
    assert begun["state"] in ("waiting", "running") and begun["model"] == MODEL
    done = client.wait_for_conversion(begun["id"])
    assert done["report"]["max_abs_difference_from_base"] > 0
    file = client.download_conversion(done["id"], tmp_path / "a b" / done["file"])
    own = tmp_path / "own.gguf"
    command = [
        "convert",
        str(store / "adapters" / adapter),
        "--to",
        "gguf-lora",
        "--model",
        MODEL,
        "--out",
        str(own),
    ]
    subprocess.run([str(warm.ondevice), *command], check=True, capture_output=True)
    # Names in the metadata are of the file; the tensors lie behind them.
    assert (
        file.stat().st_size == done["bytes"]
        and file.read_bytes()[-4096:] == own.read_bytes()[-4096:]
    )
    assert str(store) not in str(done)

    command = [
        "jobs",
        "adapters",
        "convert",
        adapter,
        "--to",
        "peft",
        "--out",
        str(tmp_path / "peft.zip"),
        "--json",
    ]
    command += ["--url", served.daemon.address]
    shown = subprocess.run([str(warm.ondevice), *command], check=True, capture_output=True)
    assert json.loads(shown.stdout)["reader"] == "PEFT"
    zipfile.ZipFile(tmp_path / "peft.zip").extractall(tmp_path / "peft")
    written, trained = load_adapter(tmp_path / "peft"), load_adapter(store / "adapters" / adapter)
    assert all((written.tensors[name] == value).all() for name, value in trained.tensors.items())
    client.delete_conversion(done["id"])
    assert {
        row["id"] for row in client.conversions()
    } == others  # the command has forgotten its own
    assert {folder.name for folder in (store / "exits").iterdir()} <= others


def test_each_stage_is_in_the_row_while_it_lasts(served, store, monkeypatch) -> None:
    copy_adapter(store, served.daemon.store / "adapters" / served.job["id"], "job-1")
    insert_adapter(store, "job-1", "first", None)
    values = ("exit-1", "job-1", "gguf-lora", MODEL, "waiting", time.time())
    store.connection.execute(
        "INSERT INTO conversions (id, adapter, form, model, state, created_s) VALUES (?, ?, ?, ?, ?, ?)",
        values,
    )
    conversions, seen = Conversions(store, lambda: None), []

    def stages(verb: str, **arguments: Any) -> Iterator[dict[str, str]]:
        parts = convert(**arguments)
        while True:
            try:
                stage = next(parts)
            except StopIteration as end:
                return end.value
            yield stage
            seen.append(conversions.get("exit-1")["stage"])

    monkeypatch.setattr(conversions.helper, "stream", stages)
    conversions._convert(dict(store.row("SELECT * FROM conversions")))
    conversions.helper.close()
    # Over the API a client that asks now and then misses short ones.
    assert seen == [
        "writing job-1-gguf-lora.gguf for llama.cpp",
        f"loading {MODEL}",
        "comparing its answers",
    ]
    assert conversions.get("exit-1")["state"] == "done"


def test_what_fails_or_is_ended_says_why_and_leaves_nothing(served, tmp_path) -> None:
    client, adapter, store = served.client, served.job["id"], served.daemon.store
    with refused(422):
        client.convert(adapter, "exe")
    with refused(422):
        client.convert(adapter, "gguf", dtype="int3")
    with refused(404):
        client.convert("none", "gguf")
    other = client.convert(adapter, "gguf-lora", model="tiny:qwen3")
    with pytest.raises(RefusedError) as caught:
        client.wait_for_conversion(other["id"])
    assert caught.value.expected and str(store) not in str(caught.value)
    assert not (store / "exits" / other["id"]).exists()  # at once, before the daemon tidies up
    with refused(409):
        client.download_conversion(other["id"], tmp_path / "none")
    begun = client.convert(adapter, "safetensors")["id"]
    wait_for(
        lambda: client.ask("GET", f"/v1/conversions/{begun}")["state"] != "waiting",
        "the conversion's start",
    )
    client.delete_conversion(begun)
    assert client.health()["status"] == "ok"
    wait_for(lambda: not (store / "exits" / begun).exists(), "its folder's end")
    listed = {row["id"] for row in client.conversions()}
    assert begun not in listed and other["id"] in listed
    client.delete_conversion(other["id"])


def test_one_that_is_forgotten_before_its_process_is_there_ends_all_the_same(
    served, store, monkeypatch
) -> None:
    copy_adapter(store, served.daemon.store / "adapters" / served.job["id"], "job-1")
    insert_adapter(store, "job-1", "first", None)
    asked, go_on, stages = threading.Event(), threading.Event(), []

    def running_job() -> (
        None
    ):  # asked for when the row says that it runs, and before the process is started
        asked.set()
        assert go_on.wait(120)

    conversions = Conversions(store, running_job)
    stream = conversions.helper.stream

    def noted(*words: str, **arguments: Any) -> Iterator[Any]:
        parts = stream(*words, **arguments)
        while True:
            stages.append(part := next(parts))
            yield part

    monkeypatch.setattr(conversions.helper, "stream", noted)
    conversions.start()
    try:
        name = conversions.create(ConversionRequest(adapter="job-1", to="gguf-lora", model=MODEL))[
            "id"
        ]
        assert asked.wait(120)
        conversions.remove(name)
        assert store.path("exits", name).is_dir()
        go_on.set()
        wait_for(lambda: not store.path("exits", name).exists(), "its folder's end")
        assert len(stages) == 1 and not conversions.page(10)[0]  # of three
    finally:
        conversions.stop()


def test_a_daemon_that_ended_leaves_no_folder(store, tmp_path) -> None:
    """What ran is noted as failed, what is done stays for a day."""
    for name, state, age_s in (
        ("exit-1", "running", 0),
        ("exit-2", "done", 0),
        ("exit-3", "done", KEPT_S + 1),
    ):
        store.connection.execute(
            "INSERT INTO conversions (id, adapter, form, state, created_s) VALUES (?, 'a', 'peft', ?, 0)",
            (name, state),
        )
        store.connection.execute(
            "INSERT INTO ages VALUES (?, ?)", (f"exits/{name}", store.clock.now() - age_s)
        )
        store.path("exits", name).mkdir()
    conversions = Conversions(store, lambda: None)
    conversions.start()
    try:
        assert [row["state"] for row in conversions.page(10)[0]] == ["done", "failed"]
        assert "the daemon ended" in conversions.get("exit-1")["error"]["message"]
        assert [folder.name for folder in (store.root / "exits").iterdir()] == ["exit-2"]
    finally:
        conversions.stop()


def test_beside_a_job_it_must_fit(tmp_path, monkeypatch) -> None:
    from dataclasses import replace

    from ondevice.core.errors import BusyError
    from ondevice.planning.devices import find_device

    small = replace(find_device("this-cpu"), usable_bytes=3 << 20)
    monkeypatch.setattr("ondevice.server.room.find_device", lambda name: small)
    monkeypatch.setattr("ondevice.server.room.job_wants", lambda device, job: 3 << 20)
    job = {"id": "job-1"}
    with pytest.raises(BusyError) as caught:
        next(convert(str(tmp_path), "gguf", str(tmp_path / "a.gguf"), MODEL, None, job))
    assert "job-1" in caught.value.message
