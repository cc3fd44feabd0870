"""Jobs on rewards: they name only code that the daemon's owner has allowed, by its exact words."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")
pytest.importorskip("fastapi", reason="the serve extra is not installed")

from ondevice.cli.app import app
from ondevice.core.errors import ConfigError
from ondevice.server import jobs, supervisor, uploads, worker
from ondevice.server.store import Store
from ondevice.training.events import FILE_NAME, read_log

ROWS = [{"prompt": f"Say {number}:", "completion": f" {number}"} for number in range(12)]
FUNCTION = "def vowels(prompt, answer, row):\n    return sum(c in 'aeiou' for c in answer) / 10\n"
PROGRAM = "import sys\nfor line in sys.stdin:\n    print(len(line) / 1000)\n"


@pytest.fixture
def dataset(store: Store) -> str:
    data = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
    request = uploads.UploadRequest(kind="dataset", name="rows.jsonl", bytes=len(data))
    name = uploads.create(store, request)["id"]
    uploads.write(store, name, 0, data)
    found = {"problems": [], "rows": 12, "format": "completion"}
    return uploads.finish(store, name, lambda *_, **__: found)["id"]


def asked(dataset: str, **train: Any) -> jobs.JobSpec:
    settings = {"objective": "grpo", "group_size": 2, "answer_tokens": 6, "steps": 2, **train}
    config = {"train": {**settings, "batch_size": 2}, "method": {"name": "lora"}}
    return jobs.JobSpec(model="tiny:llama", dataset=dataset, config=config)


@pytest.mark.parametrize("kind", ["reward", "objective_command"])
def test_an_allowed_reward_trains_a_job_until_it_is_allowed_no_more(
    kind: str, store: Store, dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "owners_rewards.py").write_text(FUNCTION)
    (tmp_path / "code" / "program.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path / "code")
    name = "owners_rewards:vowels"
    if kind == "objective_command":
        name = f"{sys.executable} {tmp_path / 'code' / 'program.py'}"
    store.rewards = frozenset({name})
    folder = tmp_path / "job"
    folder.mkdir()
    spec = asked(dataset, **{kind: name})
    run = jobs.resolve(spec, store, folder / worker.RUN)
    values = supervisor.job_values(SimpleNamespace(attempt=1), spec, run, store)  # type: ignore[arg-type]
    (folder / worker.JOB).write_text(json.dumps(values))
    assert worker.run(folder) == 0
    entries = read_log(folder / worker.RUN / FILE_NAME).entries
    steps = [entry.event for entry in entries if entry.event.kind == "step"]
    assert len(steps) == 2 and all("reward" in step.preferences for step in steps)
    store.rewards = frozenset()  # the supervisor resolves a job again when it starts
    with pytest.raises(ConfigError, match="has not allowed"):
        jobs.resolve(spec, store, folder / worker.RUN)


OTHERS = [
    "os:system",
    "owners_rewards:vowels ",
    "owners_rewards:vowel",
    "",
    ["owners_rewards:vowels"],
]


@pytest.mark.parametrize("key", ["reward", "objective_command"])
@pytest.mark.parametrize("value", OTHERS)
@pytest.mark.parametrize("artifact", [False, True])
def test_a_client_of_the_daemon_cannot_name_other_code(
    key: str, value: Any, artifact: bool, store: Store, dataset: str, tmp_path: Path
) -> None:
    store.rewards = frozenset({"owners_rewards:vowels"})
    spec = asked(dataset, **{key: value})
    if artifact:
        spec = spec.model_copy(update={"model": None, "artifact": "anything"})
    with pytest.raises(ConfigError) as caught:
        jobs.resolve(spec, store, tmp_path)
    assert caught.value.expected == "owners_rewards:vowels"
    assert "--allow-reward" in str(caught.value.hint)
    store.rewards = frozenset()
    with pytest.raises(ConfigError) as caught:
        jobs.resolve(asked(dataset, **{key: "owners_rewards:vowels"}), store, tmp_path)
    assert "none is allowed" in str(caught.value.expected)


def test_the_unit_of_an_installed_daemon_allows_what_was_named() -> None:
    words = ["serve", "install", "--print", "--allow-reward", "a:b", "--allow-reward", "score it"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "--allow-reward a:b --allow-reward 'score it'" in done.output
