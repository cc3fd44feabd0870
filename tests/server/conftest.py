"""One daemon for the tests that only talk to it, with a data set and a job that has run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the serve extra is not installed")

from ondevice.server.client import Client, RefusedError
from tests.server.running import DaemonProcess, rows, settings
from tests.warm import Warm


@dataclass(frozen=True)
class Served:
    """The daemon, its data set, and its finished job."""

    daemon: DaemonProcess
    client: Client
    dataset: str
    job: dict[str, Any]


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    with DaemonProcess(folder / "store", python=warm.python) as daemon:
        client = daemon.client
        dataset = client.upload("dataset", rows(folder / "rows.jsonl"))["id"]
        job = client.create_job(
            model="tiny:llama", dataset=dataset, config=settings(), name="first"
        )
        yield Served(daemon, client, dataset, client.wait(job["id"], 120))


@pytest.fixture(autouse=True)
def no_job_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that fails leaves its job behind; the jobs of the next would wait for it for ever."""
    if "served" not in request.fixturenames:
        yield
        return
    client = request.getfixturevalue("served").client
    yield
    for job in client.jobs("queued", "running", "pausing", "paused"):
        try:
            client.cancel(job["id"])
        except RefusedError:  # it has just ended
            continue


@pytest.fixture
def store(tmp_path: Path) -> Any:
    from ondevice.server.store import Store

    opened = Store(tmp_path / "store")
    yield opened
    opened.close()
