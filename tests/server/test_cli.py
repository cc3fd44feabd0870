"""`ondevice serve ...` and `ondevice jobs ...`, as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ondevice.server import security
from ondevice.server.store import Store
from tests.cli.command import CommandLine
from tests.server.running import rows

TINY = (
    "--model",
    "tiny:llama",
    "--method",
    "prge",
    "--set",
    "method.rank=2",
    "--batch-size",
    2,
    "--max-length",
    32,
)


@pytest.fixture
def ondevice(capsys, served, monkeypatch) -> CommandLine:
    monkeypatch.setenv("ONDEVICE_URL", served.daemon.address)
    return CommandLine(capsys)


def test_a_job_from_the_command_line(ondevice, tmp_path) -> None:
    data = rows(tmp_path / "rows.jsonl")
    planned = ondevice("jobs", "create", *TINY, "--data", data, "--dry-run")
    assert planned.code == 0 and "fits" in planned.out, planned.err
    created = ondevice("jobs", "create", *TINY, "--data", data, "--steps", 6, "--name", "mine", "--priority", 3,
                    "--window", "00:00-23:59", "--memory-limit", "2GiB", "--retries", 1, "--json").json  # fmt: skip
    assert created["priority"] == 3 and created["window"] == {"start": "00:00", "end": "23:59"}
    assert created["limits"] == {"memory_bytes": 2 << 30, "time_s": None, "retries": 1}
    watched = ondevice("jobs", "watch", created["id"])
    assert watched.code == 0 and "step 6/6" in watched.err and "done" in watched.err, watched.err
    events = [
        json.loads(line)
        for line in ondevice("jobs", "watch", created["id"], "--json").out.splitlines()
    ]
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(6))
    shown = ondevice("jobs", "show", created["id"])
    assert "6 of 6" in shown.out and "mine" in shown.out
    listed = ondevice("jobs", "list", "--state", "done", "--json").json["jobs"]
    assert created["id"] in [job["id"] for job in listed]
    assert created["id"] in ondevice("jobs", "list").out
    assert ondevice("jobs", "log", created["id"]).code == 0


def test_pause_resume_and_cancel(ondevice, served) -> None:
    job = ondevice(
        "jobs", "create", *TINY, "--data", served.dataset, "--steps", 9999999, "--json"
    ).json
    assert ondevice("jobs", "pause", job["id"], "--json").json["state"] in ("paused", "pausing")
    served.client.ask("POST", f"/v1/jobs/{job['id']}/cancel")
    assert ondevice("jobs", "cancel", job["id"], "--json").json["state"] in (
        "cancelled",
        "cancelling",
    )
    served.client.wait(job["id"], 120)
    refused = ondevice("jobs", "resume", job["id"])
    assert refused.code == 7 and "cannot resume" in refused.err
    watched = ondevice("jobs", "watch", job["id"], "--quiet")
    assert watched.code == 9 and "cancelled" in watched.err


def test_a_run_file_becomes_a_job(ondevice, served, tmp_path) -> None:
    data, path = rows(tmp_path / "rows.jsonl"), tmp_path / "run.yaml"
    path.write_text(
        f"model: {{source: 'tiny:llama'}}\nmethod: {{name: prge, rank: 2}}\ndata: {{path: '{data}', "
        "max_length_tokens: 32}\ntrain: {steps: 3, out: runs/x, batch_size: 2}\n"
    )
    job = ondevice("jobs", "create", "--config", path, "--steps", 400_000, "--json").json
    assert job["model"] == "tiny:llama" and job["config"]["train"] == {
        "steps": 400_000,
        "batch_size": 2,
    }
    served.client.cancel(job["id"])


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        ((), 2, "no data is given"),
        (("--data", "no-such"), 2, "no such data set"),
        (("--window", "soon", "--data", "x"), 2, "22:00-06:00"),
        (("--memory-limit", "lots", "--data", "x"), 2, "6GiB"),
        (("--set", "train.setps=1", "--data", "DATASET"), 2, "did you mean 'steps'"),
        (("--url", "http://127.0.0.1:9", "--data", "x"), 13, "does not respond"),
    ],
)
def test_mistakes_are_told(ondevice, served, flags: tuple[str, ...], code: int, words: str) -> None:
    given = [served.dataset if flag == "DATASET" else flag for flag in flags]
    done = ondevice("jobs", "create", *TINY, *given)
    assert done.code == code and words in done.err and "Traceback" not in done.err, done.err


def test_bad_rows_end_with_the_exit_code_of_data(ondevice, tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "x", "label": "no"}\n{"text": 3, "label": "no"}\n')
    done = ondevice("jobs", "create", *TINY, "--data", path)
    assert done.code == 3 and "rows.jsonl, line 2: 'text'" in done.err


def test_tokens_are_made_listed_and_revoked(ondevice, tmp_path) -> None:
    where = ("--store", tmp_path / "store")
    secret = ondevice("serve", "token", *where, "--name", "phone", "--json").json["token"]
    plain = ondevice("serve", "token", *where).out.strip()
    store = Store(tmp_path / "store")
    assert security.check(store, secret) and security.check(store, plain)
    actual = ondevice("serve", "token", *where, "--list", "--json").json["tokens"]
    assert [token["name"] for token in actual] == ["phone", ""] and secret not in json.dumps(actual)
    assert actual[0]["id"] in ondevice("serve", "token", *where, "--list").out
    left = ondevice("serve", "token", *where, "--revoke", actual[0]["id"], "--json").json["tokens"]
    assert [token["id"] for token in left] == [actual[1]["id"]] and not security.check(
        store, secret
    )
    assert ondevice("serve", "token", *where, "--revoke", "none").code == 2
    store.close()


def test_install_prints_or_writes_the_unit(ondevice, tmp_path) -> None:
    printed = ondevice("serve", "install", "--print", "--port", 9000, "--offline").out
    assert "--port 9000" in printed and "IPAddressDeny=any" in printed
    done = ondevice("serve", "install", "--folder", tmp_path, "--port", 9000)
    assert done.code == 0 and "systemctl enable" in done.out
    assert "--port 9000" in (tmp_path / "ondevice.service").read_text()


def test_serve_refuses_what_is_unsafe_or_impossible(ondevice, served, tmp_path) -> None:
    done = ondevice("serve", "--store", tmp_path / "store", "--host", "0.0.0.0")
    assert done.code == 2 and "ondevice serve token" in done.err
    busy = ondevice("serve", "--store", served.daemon.store)
    assert busy.code == 7 and "another daemon" in busy.err
    port = served.daemon.address.rpartition(":")[2]
    taken = ondevice("serve", "--store", tmp_path / "other", "--port", port)
    assert taken.code == 2 and "taken" in taken.err
    Path(tmp_path / "file").touch()
    assert ondevice("serve", "--store", tmp_path / "file").code == 11
