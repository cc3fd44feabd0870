"""Thumbs up and down: kept once an answer, listed, and exported as rows that `ondevice data` reads."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from ondevice.server.client import RefusedError
from tests.server.running import refused

TURNS = [
    {"role": "system", "content": "Kurz, bitte."},
    {"role": "user", "content": "漢字?"},
    {"role": "assistant", "content": "Ja."},
    {"role": "user", "content": "Warum 🙂?"},
]


def test_judged_answers_leave_as_rows_that_are_read_again(served, tmp_path) -> None:
    from ondevice.data import read_rows

    client, adapter = served.client, served.job["id"]
    for row in client.thumbs(limit=1000):  # of other tests of this daemon
        client.delete_thumb(row["id"])
    down = client.judge("a text\n", "goes on", False, model="tiny:llama")
    up = client.judge(TURNS, "Darum.", True, model="tiny:llama", adapter=adapter)
    assert (
        client.judge("a text\n", "goes on", True, model="tiny:llama")["id"]
        == down["id"]
        != up["id"]
    )
    client.judge("a text\n", "goes on", False, model="tiny:llama")
    listed = {row["id"]: row for row in client.thumbs()}
    assert listed[up["id"]]["prompt"] == TURNS and listed[up["id"]]["adapter"] == adapter
    assert [row["id"] for row in client.thumbs(limit=1)] == [down["id"]]  # judged last
    # The command line writes the file; each line says who answered.
    file = tmp_path / "my thumbs.jsonl"
    verb = [
        "jobs",
        "thumbs",
        "export",
        "--out",
        str(file),
        "--json",
        "--url",
        served.daemon.address,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "ondevice", *verb], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)["rows"] == 2
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [(line["model"], line["adapter"]) for line in lines] == [
        ("tiny:llama", None),
        ("tiny:llama", adapter),
    ]
    rows = read_rows(file)
    assert (
        rows.format == "thumbs"
        and not rows.problems
        and [row.label for row in rows.items] == ["down", "up"]
    )
    assert [turn[:2] for turn in rows.items[1].messages] == [
        *((turn["role"], turn["content"]) for turn in TURNS), ("assistant", "Darum."),
    ]  # fmt: skip
    for thumb in (down["id"], up["id"]):
        client.delete_thumb(thumb)
    assert client.thumbs() == []
    with refused(404):
        client.delete_thumb(up["id"])
    with refused(422):
        client.judge("a", "", True, model="tiny:llama")
    half = client.judge(
        "\ud800", "b", True, model="m"
    )  # half a surrogate pair, which no file can hold
    assert half["prompt"] == "?"
    client.delete_thumb(half["id"])


def test_an_adapter_over_a_named_model_answers_as_over_its_own(served) -> None:
    ask = {"messages": TURNS[1:], "temperature": 0, "max_tokens": 8}
    own = served.client.ask("POST", "/v1/chat/completions", {"model": served.job["id"], **ask})
    over = served.client.ask(
        "POST", "/v1/chat/completions", {"model": "tiny:llama", "adapter": served.job["id"], **ask}
    )
    assert over["choices"] == own["choices"]
    for wrong, words in (
        ({"model": served.job["id"]}, f"adapter {served.job['id']}"),
        ({"model": "artifact:none"}, "no such artifact: none"),
    ):
        with pytest.raises(RefusedError) as caught:
            served.client.ask(
                "POST", "/v1/chat/completions", {"adapter": served.job["id"], **ask, **wrong}
            )
        assert words in str(caught.value)
