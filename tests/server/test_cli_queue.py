"""`ondevice jobs` beyond the first run: changing and deleting jobs, adapters, and what a dry run leaves behind."""

from __future__ import annotations

import pytest

from tests.cli.command import CommandLine
from tests.server.running import rows

TINY = (
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


def test_priority_window_and_limits_are_changed_and_the_rest_stays(ondevice, served) -> None:
    make = (
        "jobs",
        "create",
        *TINY,
        "--data",
        served.dataset,
        "--steps",
        9999999,
        "--time-limit",
        0.5,
        "--json",
    )
    job = ondevice(*make, "--memory-limit", "8GiB").json["id"]
    assert served.client.wait(job, 120)["state"] == "failed"
    changed = ondevice(
        "jobs", "change", job, "--time-limit", 9000, "--window", "00:00-23:59", "--json"
    ).json
    assert (
        changed["limits"] == {"memory_bytes": 8 << 30, "time_s": 9000, "retries": 3}
        and changed["priority"] == 0
    )
    patched = served.client.ask("PATCH", f"/v1/jobs/{job}", {"limits": {"retries": 4}})
    assert patched["limits"] == {"memory_bytes": 8 << 30, "time_s": 9000, "retries": 4}
    shown = ondevice("jobs", "resume", job, "--json").json
    assert shown["state"] in ("queued", "running")
    changed = ondevice("jobs", "change", job, "--priority", 7, "--window", "none", "--memory-limit", "none",
                       "--time-limit", "none", "--retries", 1, "--json").json  # fmt: skip
    assert changed["priority"] == 7 and changed["window"] is None
    assert changed["limits"] == {"memory_bytes": None, "time_s": None, "retries": 1}
    assert "failed" not in ondevice("jobs", "change", job, "--priority", 8).out
    for flags, words in (
        ((), "nothing to change"),
        (("--time-limit", "soon"), "cannot be read"),
    ):
        refused = ondevice("jobs", "change", job, *flags)
        assert refused.code == 2 and words in refused.err, refused.err
    assert ondevice("jobs", "delete", job).code == 7
    ondevice("jobs", "cancel", job)
    served.client.wait(job, 120)
    assert ondevice("jobs", "delete", job, "--json").json == {"deleted": job}
    assert ondevice("jobs", "show", job).code == 2


def test_a_dry_run_or_a_refused_job_leaves_no_upload(ondevice, served, tmp_path) -> None:
    before = {row["id"] for row in served.client.datasets()}
    data, other = rows(tmp_path / "rows.jsonl"), rows(tmp_path / "other.jsonl")
    create = ("jobs", "create", *TINY, "--data", data, "--eval-data", other)
    assert ondevice(*create, "--dry-run", "--json").json["plan"]["fits"]
    assert ondevice(*create, "--set", "train.setps=1").code == 2
    assert ondevice("jobs", "create", *TINY, "--data", data, "--eval-data", "no-such").code == 2
    assert {row["id"] for row in served.client.datasets()} == before
    job = ondevice(*create, "--steps", 1, "--json").json
    served.client.wait(job["id"], 120)
    assert {row["id"] for row in served.client.datasets()} == before | {
        job["dataset"],
        job["eval_dataset"],
    }
    # A file that the daemon has is not sent again, and the flags of training are those of a job.
    flags = ("--queries", 3, "--backend", "torch", "--schedule", "linear", "--rank", 4)
    again = ondevice(*create, *flags, "--steps", 1, "--json").json
    assert (again["dataset"], again["eval_dataset"]) == (job["dataset"], job["eval_dataset"])
    assert again["config"]["method"]["queries"] == 3 and again["config"]["method"]["rank"] == 4
    assert (
        again["config"]["train"]["backend"] == "torch"
        and again["config"]["train"]["schedule"] == "linear"
    )
    served.client.wait(again["id"], 120)


def test_adapters_are_listed_downloaded_sent_used_and_deleted(
    ondevice, served, tmp_path, monkeypatch
) -> None:
    first, adapters = served.job["id"], ("jobs", "adapters")
    assert ondevice(*adapters, "download", first, "--out", tmp_path / "a", "--json").json[
        "folder"
    ] == str(tmp_path / "a")
    assert {path.name for path in (tmp_path / "a").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "ondevice_task.json",
    }
    monkeypatch.chdir(tmp_path)
    assert (
        ondevice(*adapters, "download", first).code == 0
        and (tmp_path / first / "adapter_config.json").is_file()
    )
    second = ondevice(
        "jobs", "upload", "adapter", tmp_path / "a", "--name", "again", "--json"
    ).json["id"]
    assert {one["id"] for one in ondevice(*adapters, "list", "--json").json["adapters"]} >= {
        first,
        second,
    }
    assert ondevice(*adapters, "activate", first, "--json").json == {"active": first}
    assert first in ondevice(*adapters, "activate", first).out
    lines = ondevice(*adapters, "list").out.splitlines()
    assert [line.split()[0] for line in lines if line.endswith("active")] == [first]
    assert ondevice(*adapters, "delete", first).code == 7
    assert (
        ondevice(*adapters, "rollback", "--json").json["active"] is None
        or ondevice(*adapters, "rollback").code == 0
    )
    assert ondevice(*adapters, "delete", second, "--json").json == {"deleted": second}
    assert ondevice(*adapters, "delete", second).code == 2
