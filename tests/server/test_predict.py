"""What a job has trained answers rows: labels with probabilities, or generated text."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from ondevice.api.predict import Predictor, predict
from ondevice.core.errors import DeviceError
from ondevice.data.tasks.trained import TASK_NAME, TrainedTask, read_trained_task, to_text
from ondevice.models import load_model
from ondevice.models.tiny import tiny_tokenizer
from ondevice.server.client import Client
from tests.server.asked import Asked
from tests.server.running import refused, settings


def test_an_adapter_keeps_its_task_in_the_store_its_download_and_an_upload(
    served, tmp_path: Path
) -> None:
    name = served.job["id"]
    task = read_trained_task(served.daemon.store / "adapters" / name)
    assert task is not None and set(task.labels.values()) == {"no", "yes"}
    served.client.download_adapter(name, tmp_path / "adapter")
    assert read_trained_task(tmp_path / "adapter") == task
    uploaded = served.client.upload("adapter", tmp_path / "adapter")["id"]
    assert read_trained_task(served.daemon.store / "adapters" / uploaded) == task
    (tmp_path / "adapter" / TASK_NAME).write_text(json.dumps({"version": 2}))
    with refused(422) as caught:
        served.client.upload("adapter", tmp_path / "adapter")
    assert TASK_NAME in caught.value.message


def test_an_adapter_of_another_machine_finds_its_base_by_its_record(served, tmp_path: Path) -> None:
    """PEFT's configuration names a folder that is not here; the record names the model."""
    served.client.download_adapter(served.job["id"], tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    config = {**json.loads(path.read_text()), "base_model_name_or_path": "/another/machine/model"}
    path.write_text(json.dumps(config))
    uploaded = served.client.upload("adapter", tmp_path / "adapter")["id"]
    expected = served.client.predict(served.job["id"], ["a1", "b2"])
    assert served.client.predict(uploaded, ["a1", "b2"])["data"] == expected["data"]


def test_rows_are_answered_as_the_command_answers_them(served) -> None:
    """Texts and objects alike, to the last digits, and compared with labels if they have them."""
    name = served.job["id"]
    texts = [f"{'ab'[number % 2]}{number}" for number in range(20)]
    expected = predict(served.daemon.store / "adapters" / name, [{"text": text} for text in texts])
    rows = [{"text": text, "label": "yes"} for text in texts[:10]] + texts[10:]
    answer = served.client.predict(name, rows)
    assert [row["index"] for row in answer["data"]] == list(range(20))
    assert [row["prediction"] for row in answer["data"]] == expected.texts
    for row, other in zip(answer["data"], expected, strict=True):
        assert row["probabilities"] == pytest.approx(dict(other.probabilities), abs=1e-6)
        assert row["probability"] == max(row["probabilities"].values()) and row["reason"] is None
    assert sorted(answer["labels"]) == ["no", "yes"] and answer["predicted"] == 20
    right = sum(row["prediction"] == "yes" for row in answer["data"][:10])
    assert (answer["compared"], answer["correct"]) == (10, right)
    task = served.client.ask("GET", f"/v1/adapters/{name}/task")
    assert task["inputs"] == {"text": "text"} and not task["generates"]
    assert task["labels"] == answer["labels"]


def test_a_chat_with_an_adapter_that_picks_labels_has_the_label_of_predict(served) -> None:
    """Nothing was trained to end a text behind a label: it went on to the model's last position."""
    name = served.job["id"]
    for text in ("a1", "b2"):
        (row,) = served.client.predict(name, [text])["data"]
        body = {"model": name, "messages": [{"role": "user", "content": text}]}
        for temperature in (0.0, 1.0):
            asked = {**body, "n": 2, "temperature": temperature}
            answer = served.client.ask("POST", "/v1/chat/completions", asked)
            assert [one["message"]["content"] for one in answer["choices"]] == [
                row["prediction"]
            ] * 2
            assert {one["finish_reason"] for one in answer["choices"]} == {"stop"}
    with refused(422) as caught:
        served.client.ask("POST", "/v1/chat/completions", {**body, "logprobs": True})
    assert "/v1/predict" in str(caught.value)


def test_a_message_that_gets_a_label_is_encoded_once(served, tmp_path: Path, monkeypatch) -> None:
    folder = served.client.download_adapter(served.job["id"], tmp_path / "adapter")
    encode, encoded = Predictor.asked, []
    monkeypatch.setattr(
        Predictor, "asked", lambda self, rows: encoded.append(rows) or encode(self, rows)
    )
    turns = [{"role": "user", "content": "a1"}]
    parts = Asked().parts(model="tiny:llama", adapter=str(folder), prompt=turns)
    assert parts[0]["prompt_tokens"] > 1 and parts[1]["text"] in ("yes", "no")
    assert len(encoded) == 1


def test_rows_that_cannot_be_predicted_say_why_and_the_others_are(served) -> None:
    answer = served.client.predict(served.job["id"], [{"text": "a1"}, {"text": 3}, {"other": "a"}])
    assert [row["prediction"] is None for row in answer["data"]] == [False, True, True]
    assert answer["predicted"] == 1 and [row["row"] for row in answer["not_predicted"]] == [2, 3]
    assert all(row["reason"] for row in answer["not_predicted"])


@pytest.mark.parametrize(("values", "status", "words"), [
    ({"model": "no-such"}, 404, "no such model"),
    ({"model": "tiny:llama"}, 409, "does not record its task"),
    ({"rows": []}, 422, "1 or more items"),
    ({"rows": ["a"] * 1001}, 422, "at most 1000"),
    ({"rows": ["a" * 100_001]}, 422, "rows"),
    ({"rows": [{"wrong": "a"}]}, 422, "text"),
    ({"rows": [["a"]]}, 422, "rows"),
    ({"adapter": "job-1"}, 422, "two adapters"),
    ({"surprise": 1}, 422, "surprise"),
])  # fmt: skip
def test_what_cannot_be_asked_is_refused_in_openais_form(served, values, status, words) -> None:
    body = json.dumps({"model": served.job["id"], "rows": ["a"], **values})
    request = urllib.request.Request(
        f"{served.daemon.address}/v1/predict", body.encode(), {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    error = json.loads(caught.value.read())["error"]
    assert caught.value.code == status and words in error["message"]
    assert error["type"] == "invalid_request_error" and error["code"] and "hint" in error


def test_a_body_that_is_too_large_is_refused_unread_in_openais_form(served) -> None:
    connection = http.client.HTTPConnection(urlsplit(served.daemon.address).netloc, timeout=60)
    connection.putrequest("POST", "/v1/predict")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str((1 << 20) + 1))
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == 413
    assert json.loads(answer.read())["error"]["expected"] == f"at most {1 << 20} bytes"


def test_a_chat_with_an_adapter_is_framed_and_ends_as_it_was_trained(served, tmp_path) -> None:
    folder = served.client.download_adapter(served.job["id"], tmp_path / "adapter")
    asked = {
        "model": "tiny:llama",
        "adapter": str(folder),
        "prompt": [{"role": "user", "content": "Hi"}],
        "max_new_tokens": 6,
        "top": 1,
    }
    engine = Asked()
    tokenizer = tiny_tokenizer()
    for template, count in (
        ("{{ messages[0]['content'] }}", 2),
        ("<<{{ messages[0]['content'] }}>>", 6),
    ):
        task = TrainedTask(format="chat", framing="chat template", chat_template=template)
        (folder / TASK_NAME).write_text(to_text(task))
        parts = engine.parts(**asked)
        assert parts[0] == {"prompt_tokens": count}
        first = parts[1]["tokens"][0]["token"]
        ends = tokenizer.convert_ids_to_tokens(tokenizer(first)["input_ids"])
        task = task.model_copy(update={"ends": tuple(ends)})
        (folder / TASK_NAME).write_text(to_text(task))
        assert len(parts) > 2 and engine.text(**asked) == ""


def test_a_chat_with_an_adapter_of_rows_asks_as_the_rows_did(served, tmp_path: Path) -> None:
    """The model has a chat template; what was trained has not, and the last message is its row."""
    folder = served.client.download_adapter(served.job["id"], tmp_path / "adapter")
    task = TrainedTask(format="completion", columns={"prompt": "text"})
    (folder / TASK_NAME).write_text(to_text(task))
    loaded = load_model("tiny:llama")
    expected = Predictor.of(loaded, task).asked_text("a1").prompt
    turns = [{"role": "user", "content": "a1"}]
    framed = loaded.tokenizer.apply_chat_template(turns, add_generation_prompt=True)
    asked = {"model": "tiny:llama", "adapter": str(folder), "max_new_tokens": 3, "prompt": turns}
    parts = Asked().parts(**asked)
    assert parts[0] == {"prompt_tokens": len(expected)}
    assert list(expected) != list(framed)
    assert Asked().text(**asked) == Asked().text(**asked | {"prompt": list(expected)})


def test_an_adapter_without_a_record_says_what_to_do(served, tmp_path: Path) -> None:
    folder = served.client.download_adapter(served.job["id"], tmp_path / "adapter")
    (folder / TASK_NAME).unlink()
    adapter = served.client.upload("adapter", folder)["id"]
    with refused(409) as caught:
        served.client.predict(adapter, ["a"])
    assert "name its `task`" in caught.value.hint and "train again" in caught.value.hint
    with refused(409):
        served.client.ask("GET", f"/v1/adapters/{adapter}/task")
    answer = served.client.predict(adapter, [{"sentence": "nice"}], task="sst2")
    assert set(answer["labels"]) == {"great", "terrible"}


def test_an_adapter_of_another_base_model_is_refused(served) -> None:
    with refused(422) as caught:
        served.client.predict("tiny:qwen2", ["a"], adapter=served.job["id"])
    assert "was trained on another model" in caught.value.message
    assert served.client.predict("tiny:llama", ["a"], adapter=served.job["id"])["predicted"] == 1


def test_text_is_generated_for_a_task_without_labels(served, tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path.write_text(json.dumps({"messages": turns}) + "\n")
    dataset = served.client.upload("dataset", path)["id"]
    job = served.client.create_job(
        model="tiny:llama", dataset=dataset, config=settings(steps=2), name="chats"
    )["id"]
    assert served.client.wait(job, 120)["state"] == "done"
    rows = ["a", {"messages": turns[:1]}, {"messages": turns}]
    answer = served.client.predict(job, rows, max_new_tokens=5)
    expected = predict(
        served.daemon.store / "adapters" / job, [{"messages": turns[:1]}], max_new_tokens=5
    )
    assert {row["prediction"] for row in answer["data"]} == set(expected.texts)
    assert all(row["probabilities"] == {} for row in answer["data"])
    assert served.client.ask("GET", f"/v1/adapters/{job}/task")["generates"]


def test_a_client_that_goes_leaves_the_model_to_the_next(served) -> None:
    name = served.job["id"]
    impatient = Client(served.daemon.address, timeout_s=0.5)
    with pytest.raises(DeviceError):
        impatient.predict(name, ["a" * 500] * 1000)
    began = time.monotonic()
    assert served.client.predict(name, ["a"])["predicted"] == 1
    assert time.monotonic() - began < 20
