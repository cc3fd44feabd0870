"""OpenAI's client uploads conversations, makes a job, waits for it, and asks the model it names."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai", reason="a development package")

from ondevice.core.errors import ConfigError  # noqa: E402
from ondevice.server.forms import FormReader  # noqa: E402
from ondevice.server.security import create_token  # noqa: E402
from ondevice.server.store import Store  # noqa: E402
from tests.server.running import DaemonProcess, settings  # noqa: E402
from tests.warm import Warm  # noqa: E402

MODEL = "tiny:llama"


def conversations(path: Path, count: int = 8) -> Path:
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"Straße {number}?"},
                {"role": "assistant", "content": "yes" if number % 2 else "no"},
            ]
        }
        for number in range(count)
    ]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def client(served) -> Any:
    return openai.OpenAI(
        base_url=f"{served.daemon.address}/v1", api_key="unused", max_retries=0, timeout=60
    )


def ended(client: Any, job: str) -> Any:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        row = client.fine_tuning.jobs.retrieve(job)
        if row.status in ("succeeded", "failed", "cancelled"):
            return row
        time.sleep(0.2)
    pytest.fail(f"{job} is {row.status}")


def test_a_file_becomes_a_job_and_the_job_a_model_that_answers(client, tmp_path) -> None:
    path = conversations(tmp_path / "Straße und mehr.jsonl")
    with path.open("rb") as content:
        file = client.files.create(file=content, purpose="fine-tune")
    assert (file.filename, file.bytes) == (path.name, path.stat().st_size)
    assert client.files.content(file.id).read() == path.read_bytes()
    assert client.files.retrieve(file.id) == file
    assert file.id in [one.id for one in client.files.list()]
    job = client.fine_tuning.jobs.create(
        model=MODEL,
        training_file=file.id,
        validation_file=file.id,
        suffix="streets",
        seed=5,
        metadata={"mine": "Größe"},
        method={
            "type": "supervised",
            "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": 2}},
        },
        extra_body={"config": {"method": settings()["method"]}},
    )
    assert job.object == "fine_tuning.job" and job.fine_tuned_model is None
    assert job.hyperparameters.n_epochs == 2 and job.metadata == {"mine": "Größe"}
    job = ended(client, job.id)
    assert (job.status, job.error, job.seed) == ("succeeded", None, 5)
    assert job.finished_at >= job.created_at and job.training_file == file.id
    assert job.id in [one.id for one in client.fine_tuning.jobs.list()]
    events = list(client.fine_tuning.jobs.list_events(job.id, limit=5))
    assert len({event.id for event in events}) == len(events) > 8  # several pages
    assert "done" in events[0].message and "queued" in events[-1].message
    assert [event.data["step"] for event in events if event.type == "metrics"][-1] == 0
    answer = client.chat.completions.create(
        model=job.fine_tuned_model,
        messages=[{"role": "user", "content": "Straße 1?"}],
        temperature=0,
        max_tokens=4,
    )
    assert answer.model == job.fine_tuned_model and answer.usage.completion_tokens > 0
    again = client.fine_tuning.jobs.create(
        model=job.fine_tuned_model,
        training_file=file.id,
        hyperparameters={"learning_rate_multiplier": 2.0},
        extra_body={"config": {"method": {"name": "prge", "rank": 2, "queries": 2}}},
    )
    assert again.hyperparameters.learning_rate_multiplier == 2.0
    client.fine_tuning.jobs.cancel(again.id)
    assert ended(client, again.id).status == "cancelled"
    with pytest.raises(openai.ConflictError) as caught:
        client.fine_tuning.jobs.cancel(job.id)
    assert re.search(r"done|succeeded", str(caught.value))
    deleted = client.files.delete(file.id)
    assert deleted.deleted and deleted.id == file.id
    with pytest.raises(openai.NotFoundError) as caught:
        client.files.retrieve(file.id)
    assert re.search("no such file", str(caught.value))


def test_wrong_lines_are_named_at_once(client, tmp_path) -> None:
    path = conversations(tmp_path / "rows.jsonl")
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[2] = '{"messages": [{"role": "user"}]}'
    lines[5] = "{not json"
    path.write_text("\n".join(lines), encoding="utf-8")
    before = len(list(client.files.list()))
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        client.files.create(file=path, purpose="fine-tune")
    assert re.search(r"rows\.jsonl, line 3", str(caught.value))
    assert [problem["line"] for problem in caught.value.body["problems"]] == [3, 6]
    assert "received: 2 bad rows" in caught.value.message
    assert len(list(client.files.list())) == before


@pytest.mark.parametrize(("file", "purpose", "words"), [
    (("rows.jsonl", b'{"text": "a", "label": "b"}\n'), "fine-tune", "not conversations"),
    (("rows.csv", b"text,label\na,b\n"), "fine-tune", "JSON lines"),
    (("rows.jsonl", b""), "fine-tune", "no rows|empty|at least"),
    (("rows.jsonl", b'{"messages": []}\n'), "batch", "'purpose' is not supported; expected: fine-"),
])  # fmt: skip
def test_other_files_are_refused_in_words(client, served, file, purpose, words) -> None:
    uploads = served.daemon.store / "uploads"
    before = set(uploads.iterdir())
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        client.files.create(file=file, purpose=purpose)
    assert re.search(words, str(caught.value))
    assert set(uploads.iterdir()) == before


@pytest.mark.parametrize(("values", "status", "words"), [
    ({"model": "no-such"}, 404, "no such model"),
    ({"training_file": "file-ABC"}, 404, "no such file: file-ABC"),
    ({"method": {"type": "dpo"}}, 422, "'method.type' is not supported; expected: supervised"),
    ({"integrations": [{"type": "wandb"}]}, 422, "'integrations' is not supported"),
    ({"hyperparameters": {"n_epochs": 0}}, 422, "n_epochs"),
    ({"extra_body": {"config": {"method": {"name": "full"}}}}, 422, "trains the whole model"),
])  # fmt: skip
def test_a_job_that_cannot_be_made_is_refused_in_words(
    client, tmp_path, values, status, words
) -> None:
    file = client.files.create(file=conversations(tmp_path / "a.jsonl"), purpose="fine-tune")
    asked = {"model": MODEL, "training_file": file.id, **values}
    with pytest.raises(openai.APIStatusError) as caught:
        client.fine_tuning.jobs.create(**asked)
    assert caught.value.status_code == status and words in caught.value.body["message"]


def test_paths_that_are_missing_say_what_to_use(client) -> None:
    calls = {
        "chat/completions": lambda: client.responses.create(model=MODEL, input="a"),
        "predict": lambda: client.embeddings.create(model=MODEL, input="a"),
    }
    for instead, call in calls.items():
        with pytest.raises(openai.NotFoundError) as caught:
            call()
        assert re.search("is not supported here", str(caught.value))
        assert f"POST /v1/{instead}" in caught.value.message
        assert caught.value.code == "not_supported"


def test_files_and_jobs_need_the_token_of_the_daemon(tmp_path, warm: Warm) -> None:
    store = Store(tmp_path / "store")
    token = create_token(store)
    store.close()
    path = conversations(tmp_path / "a.jsonl")
    with DaemonProcess(tmp_path / "store", token=token, python=warm.python) as daemon:
        asked = {"base_url": f"{daemon.address}/v1", "max_retries": 0}
        stranger = openai.OpenAI(api_key="wrong", **asked)
        for call in (
            lambda: stranger.files.create(file=path, purpose="fine-tune"),
            stranger.files.list,
            stranger.fine_tuning.jobs.list,
        ):
            with pytest.raises(openai.AuthenticationError) as caught:
                call()
            assert re.search("unknown token", str(caught.value))
        assert list((tmp_path / "store" / "uploads").iterdir()) == []
        friend = openai.OpenAI(api_key=token, **asked)
        assert friend.files.create(file=path, purpose="fine-tune").status == "processed"


def test_a_form_of_another_page_is_refused(served) -> None:
    """It has no Authorization header, which a page cannot add to a form."""
    import http.client
    from urllib.parse import urlsplit

    connection = http.client.HTTPConnection(urlsplit(served.daemon.address).netloc, timeout=60)
    body = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n--b--\r\n'
    statuses = []
    for more in ({}, {"Authorization": "Bearer any"}):
        headers = {"Content-Type": "multipart/form-data; boundary=b", **more}
        connection.request("POST", "/v1/files", body, headers)
        answer = connection.getresponse()
        statuses.append((answer.status, json.loads(answer.read())["error"]["message"]))
    connection.request("POST", "/v1/jobs", body, headers)
    assert connection.getresponse().status == 415
    assert statuses[0][0] == 403 and "Authorization" in statuses[0][1]
    assert statuses[1][0] == 422 and "has no file" in statuses[1][1]


FORM = (
    b'ignored\r\n--b c\r\nContent-Disposition: form-data; name="one"\r\n\r\n\r\n--b c\r\n'
    b'Content-Disposition: form-data; name="file"; filename="Stra\xc3\x9fe \\"1\\".jsonl"\r\n'
    b"Content-Type: application/octet-stream\r\n\r\n{\r\n--b \r\n}\r\n\r\n--b c--\r\nignored"
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000])
def test_a_form_is_read_in_pieces_of_any_size(size: int) -> None:
    reader = FormReader('multipart/form-data; boundary="b c"')
    fields: dict[tuple[str, str | None], bytes] = {}
    for start in range(0, len(FORM), size):
        for piece in reader.feed(FORM[start : start + size]):
            key = (piece.name, piece.filename)
            fields[key] = fields.get(key, b"") + piece.content
    assert reader.ended
    assert fields == {("one", None): b"", ("file", 'Straße "1".jsonl'): b"{\r\n--b \r\n}\r\n"}


def test_a_damaged_form_is_refused() -> None:
    for content in (b"--b!\r\n", b"--b\r\n" + b"x" * 9000, b"--b\r\nA: b\r\n\r\n"):
        with pytest.raises(ConfigError):
            list(FormReader("multipart/form-data; boundary=b").feed(content))
    with pytest.raises(ConfigError):
        FormReader("application/json")
