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


def forget_all(client) -> None:
    for row in client.thumbs(limit=1000):
        client.delete_thumb(row["id"])


def rated(client, count: int = 8) -> None:
    """Store ratings, every second one thumbs up."""
    forget_all(client)
    for number in range(count):
        client.judge(
            f"Frage {number} 漢字?", f"Antwort {number}", number % 2 == 0, model="tiny:llama"
        )


JOB = {
    "model": "tiny:llama",
    "dataset": "thumbs",
    "config": {
        "method": {"name": "lora", "rank": 2},
        "train": {"steps": 2, "batch_size": 2},
        "data": {"max_length_tokens": 64, "validation_split": 0.25},
    },
}


def test_a_job_trains_on_the_ratings_as_they_were_when_it_was_made(served) -> None:
    client = served.client
    rated(client)
    assert client.ask("GET", "/v1/thumbs/counts") == {"up": 4, "down": 4}
    before = client.datasets()
    plan = client.plan(**JOB)
    assert plan["config"]["train"]["objective"] == "loss" and plan["plan"]["total_bytes"] > 0
    shown = client.preview("thumbs", "tiny:llama")
    assert shown["format"] == "thumbs" and shown["rows"] == 8
    assert client.datasets() == before  # neither keeps a data set
    job = client.create_job(**JOB)
    forget_all(client)  # what the job trains on stays
    done = client.wait(job["id"], 120)
    assert done["state"] == "done", done["error"]
    kept = next(one for one in client.datasets() if one["id"] == job["dataset"])
    assert (kept["name"], kept["format"], kept["rows"]) == ("thumbs.jsonl", "thumbs", 8)
    evaluation = done["progress"]["evaluation"]
    assert evaluation["rows"] == 2 and "kl" in evaluation["preferences"]


def test_every_fifth_prompt_of_each_kind_is_kept_back(served) -> None:
    client = served.client
    rated(client, 14)
    client.judge("Frage 2 漢字?", "another answer", False, model="tiny:llama")  # the second liked
    sections = {**JOB["config"], "data": {"max_length_tokens": 64}}
    both = {**JOB, "config": sections, "eval_dataset": "thumbs"}
    before = client.datasets()
    client.plan(**both)
    assert client.datasets() == before
    job = client.create_job(**both)
    done = client.wait(job["id"], 120)
    assert done["state"] == "done", done["error"]
    files = {}
    for side in ("dataset", "eval_dataset"):
        folder = served.daemon.store / "datasets" / job[side]
        lines = (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()
        files[side] = [json.loads(line)["prompt"] for line in lines]
    kept = [f"Frage {number} 漢字?" for number in (2, 3, 12, 13, 2)]
    assert files["eval_dataset"] == kept
    assert len(files["dataset"]) == 10 and not set(kept) & set(files["dataset"])
    rated(client, 2)  # nothing is left to evaluate on
    with pytest.raises(RefusedError, match="too few ratings to evaluate on"):
        client.create_job(**both)
    forget_all(client)


@pytest.mark.parametrize("ratings", [[], [True, True]])
def test_ratings_of_one_kind_make_no_job_and_leave_no_data_set(served, ratings) -> None:
    client = served.client
    forget_all(client)
    for number, liked in enumerate(ratings):
        client.judge("a", f"b{number}", liked, model="tiny:llama")
    before = client.datasets()
    for ask in (client.plan, client.create_job):
        with pytest.raises(RefusedError) as caught:
            ask(**JOB)
        assert f"{len(ratings)} up, 0 down" in str(caught.value)
    rated(client)
    with pytest.raises(RefusedError) as caught:
        client.create_job(**{**JOB, "model": "tiny:none"})
    assert client.datasets() == before
    with pytest.raises(RefusedError) as caught:  # what the run refuses, the plan refuses
        client.plan(**{**JOB, "config": {"method": {"name": "lora", "loss": "answers"}}})
    assert "does not go with preferences" in str(caught.value)
    forget_all(client)


def test_an_answer_is_rated_by_the_id_of_its_response(served) -> None:
    client = served.client
    forget_all(client)
    chat = {"model": served.job["id"], "messages": TURNS, "max_tokens": 8, "n": 2, "seed": 1}
    said = client.ask("POST", "/v1/chat/completions", {**chat, "temperature": 1})
    made = client.rate(said["id"], "down", index=1)
    assert made["answer"] == said["choices"][1]["message"]["content"]
    assert (made["prompt"], made["liked"]) == (TURNS, False)
    assert (made["model"], made["adapter"]) == ("tiny:llama", served.job["id"])
    assert client.rate(said["id"], "up", index=1)["id"] == made["id"]
    openai = pytest.importorskip("openai", reason="a development package")
    theirs = openai.OpenAI(base_url=f"{served.daemon.address}/v1", api_key="unused")
    pieces = [
        *theirs.completions.create(model="tiny:llama", prompt="漢", stream=True, max_tokens=8)
    ]
    stored = theirs.post("/feedback", cast_to=object, body={"id": pieces[0].id, "rating": "up"})
    assert stored["answer"] == "".join(piece.choices[0].text for piece in pieces)
    with pytest.raises(openai.NotFoundError, match="POST /v1/thumbs"):
        theirs.post("/feedback", cast_to=object, body={"id": "cmpl-0", "rating": "up"})
    empty = [{"role": "user", "content": ""}]
    asked = {"model": "tiny:llama", "messages": empty, "max_tokens": 8}
    wordless = client.ask("POST", "/v1/chat/completions", asked)
    ids = client.ask(
        "POST", "/v1/completions", {"model": "tiny:llama", "prompt": [5, 6, 7], "max_tokens": 4}
    )
    for body in (
        {"id": ids["id"], "rating": "up"},
        {"id": wordless["id"], "rating": "up"},
        {"id": said["id"], "rating": "sideways"},
        {"id": said["id"], "rating": "up", "index": 128},
        {"id": said["id"], "rating": "up", "more": 1},
    ):
        with refused(422):
            client.ask("POST", "/v1/feedback", body)
    with refused(404):
        client.rate(said["id"], "up", index=2)
    forget_all(client)


def test_old_answers_are_forgotten_first() -> None:
    from ondevice.server import recent
    from ondevice.server.store import MissingError

    kept = recent.Recent()
    for number in range(recent.MOST + 1):
        kept.add(f"cmpl-{number}", 0, recent.Remembered("p", "a", "m", None))
    with pytest.raises(MissingError):
        kept.get("cmpl-0", 0)
    assert kept.get("cmpl-1", 0).answer == "a"
    long = recent.Remembered(
        [{"role": "user", "content": "p" * recent.MOST_CHARACTERS}], "", "m", None
    )
    kept.add("cmpl-long", 0, long)
    assert kept.get("cmpl-long", 0) is long
    kept.add("cmpl-next", 0, long)
    with pytest.raises(MissingError):
        kept.get("cmpl-long", 0)
