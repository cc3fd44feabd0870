"""Lists in pages, requests that are sent twice, a method by the model, and streams whose token is revoked."""

from __future__ import annotations

import threading
import time

import pytest

pytest.importorskip("fastapi", reason="the serve extra is not installed")

from ondevice.core.errors import ConfigError
from ondevice.server import client as client_module
from ondevice.server import security
from ondevice.server.client import Client, RefusedError
from ondevice.server.queue import KEY_S, Queue
from ondevice.server.store import Store
from tests.server.running import DaemonProcess, rows, settings, wait_for


def test_a_list_comes_in_pages(served, tmp_path, monkeypatch) -> None:
    ids = [served.client.upload("dataset", rows(tmp_path / f"{n}.jsonl", 2 + n))["id"] for n in range(3)]
    whole = [one["id"] for one in served.client.datasets()]
    assert set(ids) < set(whole)
    monkeypatch.setattr(client_module, "PAGE", 2)
    assert [one["id"] for one in served.client.datasets()] == whole
    assert [one["id"] for one in served.client.ask("GET", "/v1/datasets", query={"limit": 1, "after": whole[0]})] == [
        whole[1]
    ]
    assert served.client.ask("GET", "/v1/jobs", query={"limit": 1, "after": served.client.jobs()[-1]["id"]}) == []
    for path in ("/v1/jobs", "/v1/adapters", "/v1/datasets"):
        with pytest.raises(RefusedError, match="is not in this list"):
            served.client.ask("GET", path, query={"after": "gone"})
        with pytest.raises(RefusedError, match="limit"):
            served.client.ask("GET", path, query={"limit": 0})
    with served.client._answer("GET", "/v1/datasets", query={"limit": 2}) as answer:
        assert answer.headers["Link"] == f'</v1/datasets?limit=2&after={whole[1]}>; rel="next"'


def test_a_job_that_is_sent_twice_is_made_once(served) -> None:
    job = {"model": "tiny:llama", "dataset": served.dataset, "config": settings(), "window": not_now()}
    twice = [served.client.ask("POST", "/v1/jobs", job, headers={"Idempotency-Key": "mine"}) for _ in range(2)]
    other = served.client.create_job(**job)
    assert twice[0]["id"] == twice[1]["id"] != other["id"]
    with pytest.raises(RefusedError, match="was used for another job"):
        served.client.ask("POST", "/v1/jobs", {**job, "name": "else"}, headers={"Idempotency-Key": "mine"})
    for name in (twice[0]["id"], other["id"]):
        served.client.cancel(name)


def not_now() -> dict[str, str]:
    """A window that opens in half a day."""
    opens = time.time() + 12 * 3600
    return {name: time.strftime("%H:%M", time.localtime(opens + more)) for name, more in (("start", 0), ("end", 60))}


def test_a_key_is_forgotten_after_a_day(store: Store) -> None:
    now = [1000.0]
    queue = Queue(store, elapsed=lambda: now[0])
    first = queue.create({}, key=("k", "one"))
    assert queue.create({}, key=("k", "one")).id == first.id
    with pytest.raises(ConfigError, match="used for another job"):
        queue.create({}, key=("k", "two"))
    now[0] += KEY_S + 1
    queue.create({}, key=("another", "one"))
    assert queue.create({}, key=("k", "two")).id != first.id


def test_a_method_that_is_not_named_is_chosen_by_the_model(served) -> None:
    short = {"train": {"steps": 1}, "data": {"max_length_tokens": 32}}
    for model, method in (("tiny:llama", "mesp"), ("tiny:gpt2", "lora")):
        job = {"model": model, "dataset": served.dataset, "config": short}
        assert served.client.plan(**job)["config"]["method"]["name"] == method
        made = served.client.create_job(**job, window=not_now())
        assert made["method"] == method and made["config"]["method"] == {"name": method}
        served.client.cancel(made["id"])


def test_a_revoked_token_ends_its_streams(tmp_path, monkeypatch, warm) -> None:
    store = Store(tmp_path / "store")
    secret = security.create_token(store, "one")
    with DaemonProcess(tmp_path / "store", token=secret, python=warm.python) as daemon:
        client: Client = daemon.client
        dataset = client.upload("dataset", rows(tmp_path / "rows.jsonl"))["id"]
        job = client.create_job(
            model="tiny:llama", dataset=dataset, config=settings(steps=1_000_000, checkpoint_every=1_000_000)
        )
        seen, ended = [], threading.Event()

        def read() -> None:
            try:
                for event in client.events(job["id"]):
                    seen.append(event)
            except RefusedError:  # it asked what has become of the job, without its token
                ended.set()

        threading.Thread(target=read, daemon=True).start()
        wait_for(lambda: len(seen) >= 20, "some events")
        assert not ended.is_set()
        (token,) = security.list_tokens(store)
        other = security.create_token(store, "two")
        security.revoke(store, token["id"])
        assert ended.wait(120), "the stream goes on without its token"
        with pytest.raises(RefusedError, match="not known"):
            client.job(job["id"])
        again = Client(daemon.address, other)
        assert again.job(job["id"])["state"] == "running"
        again.cancel(job["id"])
    store.close()
