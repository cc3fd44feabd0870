"""The hub, by a server on this machine: progress, broken downloads, tokens, revisions, and what offline is missing."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ondevice.core.errors import ModelError
from ondevice.models import load_model, read_dims, save_tiny
from ondevice.models.sources import hub
from tests.models.hub_server import COMMIT, NAME, Hub

WEIGHTS = "model.safetensors"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    running = Hub(save_tiny(tmp_path / "repository", "llama"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 14)
    monkeypatch.setenv("HF_ENDPOINT", running.url)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(hub, "_asked", None)
    yield running
    running.shutdown()
    running.server_close()


def test_a_broken_download_goes_on_where_it_stopped(server: Hub, monkeypatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    server.cuts = [1 << 15, 1 << 14]
    loaded = load_model(NAME)
    assert loaded.source.path is not None and loaded.source.path.name == COMMIT
    assert (loaded.source.path / WEIGHTS).read_bytes() == (server.folder / WEIGHTS).read_bytes()
    assert server.ranges[WEIGHTS] == [None, "bytes=32768-", "bytes=49152-"]


def test_after_a_break_that_lasts_the_next_run_fetches_what_is_missing(
    server: Hub, monkeypatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    server.cuts = [0] * 20
    with pytest.raises(ModelError) as caught:
        load_model(NAME)
    assert "files that are whole stay" in str(caught.value)
    server.cuts.clear()
    server.ranges.clear()
    assert load_model(NAME).dims.layers == 2
    assert set(server.ranges) == {WEIGHTS}


def test_offline_it_says_what_is_missing(server: Hub, monkeypatch) -> None:
    assert read_dims(NAME).layers == 2  # a plan fetches the configuration alone
    assert WEIGHTS not in server.ranges
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError) as caught:
        load_model(NAME)
    assert caught.value.expected == WEIGHTS and "fetches the rest" in str(caught.value.hint)
    with pytest.raises(ModelError) as caught:
        load_model("some/other")
    assert "some/other" in str(caught.value)


def test_tokens_terms_and_revisions(server: Hub, monkeypatch) -> None:
    server.token = "secret"
    with pytest.raises(ModelError) as caught:
        read_dims(NAME)
    assert "HF_TOKEN" in str(caught.value.hint)
    server.gated = True
    with pytest.raises(ModelError) as caught:
        read_dims(NAME)
    assert caught.value.received == "no token" and "HF_TOKEN" in str(caught.value.hint)
    monkeypatch.setenv("HF_TOKEN", "secret")
    server.accepted = False  # 403: the token is known, its account has not accepted
    with pytest.raises(ModelError) as caught:
        read_dims(NAME)
    assert caught.value.received == "a token without access" and NAME in str(caught.value.hint)
    server.accepted = True
    assert load_model(NAME, revision=COMMIT).dims == read_dims(NAME)
    with pytest.raises(ModelError) as caught:
        read_dims(NAME, "v9")
    assert "'v9'" in str(caught.value)


def test_a_repository_without_safetensors_is_told_as_the_hub_s(server: Hub) -> None:
    (server.folder / WEIGHTS).rename(server.folder / "pytorch_model.bin")
    with pytest.raises(ModelError) as caught:
        load_model(NAME)
    assert caught.value.expected == "model.safetensors"


def test_the_command_line_shows_progress_to_who_looks(server: Hub, tmp_path: Path) -> None:
    """On a terminal a download has a bar, and `--json` is one object all the same."""
    os_environment = {
        key: value for key, value in os.environ.items() if key != "HF_HUB_DISABLE_PROGRESS_BARS"
    }
    environment = {
        **os_environment,
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "0",
        "TERM": "xterm",
    }
    command = [
        sys.executable,
        "-m",
        "ondevice",
        "export",
        "--model",
        NAME,
        "--method",
        "lora",
        "--target",
        "jetson",
    ]
    command += ["--out", str(tmp_path / "out"), "--set", "export.check_steps=1", "--json"]
    # script(1) gives the command a terminal; standard output goes to a file, as `--json > file` does.
    inside = f"stty cols 120 rows 40; {shlex.join(command)} > {shlex.quote(str(tmp_path / 'json'))}"
    terminal = ["script", "-qec", inside, "/dev/null"]
    seen = subprocess.run(terminal, env=environment, capture_output=True, text=True, check=False)
    assert seen.returncode == 0, seen.stdout
    assert "Fetching 6 files: 100%" in seen.stdout
    assert json.loads((tmp_path / "json").read_text())["target"] == "jetson"


def test_every_verb_that_chooses_a_model_has_its_flags(server: Hub, tmp_path: Path, capsys) -> None:
    from tests.cli.command import CommandLine

    ondevice, rows = CommandLine(capsys), tmp_path / "rows.jsonl"
    rows.write_text('{"text": "one two three"}\n', encoding="utf-8")
    for words in (
        (
            "train",
            "--method",
            "lora",
            "--data",
            str(rows),
            "--steps",
            "1",
            "--out",
            str(tmp_path / "run"),
        ),
        ("plan", "--method", "lora"),
        ("export", "--method", "lora", "--target", "jetson", "--out", str(tmp_path / "artifact")),
        ("eval", "--data", str(rows)),
        ("chat", "--prompt", "Hi"),
        ("data", str(rows)),
    ):
        done = ondevice(*words, "--model", NAME, "--revision", "v9")
        assert done.code != 0 and f"{NAME} has no revision 'v9'" in done.err, words
        if words[0] != "data":
            done = ondevice(*words, "--model", "tiny:llama", "--dtype", "float8")
            assert done.code != 0 and "bfloat16" in done.err and "float8" in done.err, words
    plans = [ondevice("plan", "--model", "tiny:llama", "--method", "lora", "--dtype", dtype, "--json").json
             for dtype in ("float32", "bfloat16")]  # fmt: skip
    assert plans[0]["parts_bytes"]["weights"] == 2 * plans[1]["parts_bytes"]["weights"]
    shown = ondevice(
        "config", "show", "--model", NAME, "--revision", "v9", "--dtype", "float16", "--json"
    ).json
    assert shown["model"]["revision"] == "v9" and shown["model"]["dtype"] == "float16"


def test_a_flag_that_is_a_key_says_so(capsys) -> None:
    from tests.cli.command import CommandLine

    done = CommandLine(capsys)("plan", "--model", "tiny:llama", "--factors", "x")
    assert done.code == 2 and "--set method.factors=VALUE" in done.err
