"""Artifacts whose program runs in ExecuTorch answer as their model does: texts one at a time, rows
in turns."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the serve extra is not installed")
pytest.importorskip("executorch.exir")

from benchmarks.serve.clients import complete, get, request
from ondevice.artifact.adapter import Adapter, save_adapter
from ondevice.artifact.manifest import read_manifest
from ondevice.core.errors import BusyError
from ondevice.data.tasks.trained import TASK_NAME, TrainedTask, to_text
from ondevice.planning.devices import find_device
from ondevice.server.engine import model
from tests.programs import program
from tests.server.asked import Asked
from tests.server.running import DaemonProcess, refused

NAME = "blocks"
"""A program of two layers with room for 288 tokens; it reads a prompt in pieces of 32."""
PROMPTS = ("A question", [40 + number % 60 for number in range(200)])
PROGRAM = "artifact:board"
SST2 = {"task": "sst2", "rows": [{"sentence": "ok"}, {"other": "a"}, {"sentence": "no"}]}
"""Short: the program scores rows of at most 24 tokens, and the rest of a longer one is cut."""
SQUAD = {"title": "a", "context": "the sky is blue", "question": "what is blue?"}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, warm: Any) -> Any:
    """A daemon with the program and, as `base`, the model that it was made from."""
    store = tmp_path_factory.mktemp("programs") / "store"
    shutil.copytree(program(NAME), store / "artifacts" / "board")
    source = read_manifest(program(NAME)).model.source
    shutil.copytree(source, store / "models" / "base")
    with DaemonProcess(store, python=warm.python) as running:
        yield running


def ask(daemon: DaemonProcess, path: str, name: str, **body: Any) -> dict[str, Any]:
    return daemon.client.ask("POST", f"/v1/{path}", {"model": name, **body})


def both(daemon: DaemonProcess, path: str, **body: Any) -> list[dict[str, Any]]:
    """Ask the program and then its model."""
    return [ask(daemon, path, name, **body) for name in (PROGRAM, "base")]


def adapter_of(folder: Path) -> Adapter:
    """Return a random adapter that a program takes."""
    spec = read_manifest(folder).program_spec
    numbers = np.random.default_rng(0)
    tensors = {}
    for entry in spec.layout:
        sides = {"A": (entry.rank, entry.inputs), "B": (entry.outputs, entry.rank)}
        for side, shape in sides.items():
            values = numbers.normal(size=shape).astype(np.float32)
            tensors[f"{entry.linear}.lora_{side}.weight"] = values / 4
    targets = tuple(sorted({entry.target for entry in spec.layout}))
    return Adapter(tensors, spec.rank, spec.alpha, targets, "tiny:llama")


def test_texts_and_probabilities_are_those_of_the_model(daemon: DaemonProcess) -> None:
    models = {one["id"]: one for one in daemon.client.ask("GET", "/v1/models")["data"]}
    assert models[PROGRAM]["kind"] == "artifact"
    body = {"prompt": [list(PROMPTS[1]), [7]], "max_tokens": 12, "temperature": 0, "n": 2}
    found, expected = both(daemon, "completions", **body, logprobs=3)
    assert found["usage"] == expected["usage"] and len(found["choices"]) == 4
    for one, other in zip(found["choices"], expected["choices"], strict=True):
        assert one["text"] == other["text"] and one["finish_reason"] == other["finish_reason"]
        assert one["logprobs"]["token_logprobs"] == pytest.approx(
            other["logprobs"]["token_logprobs"], abs=1e-4
        )
    body = {"prompt": PROMPTS[0], "max_tokens": 0, "echo": True, "logprobs": 1}
    found, expected = both(daemon, "completions", **body)
    logprobs, others = (one["choices"][0]["logprobs"] for one in (found, expected))
    assert found["choices"][0]["text"] == PROMPTS[0]
    assert logprobs["token_logprobs"][0] is None and len(logprobs["tokens"]) == 10
    assert logprobs["token_logprobs"][1:] == pytest.approx(others["token_logprobs"][1:], abs=1e-4)


def test_a_chat_is_framed_and_sampled_as_with_the_model(daemon: DaemonProcess) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    body = {"messages": messages, "max_tokens": 8, "seed": 3, "temperature": 1.0}
    found, expected = both(daemon, "chat/completions", **body)
    assert found["choices"] == expected["choices"] and found["usage"] == expected["usage"]


def test_an_adapter_takes_part_and_comes_off_again(daemon: DaemonProcess, tmp_path: Path) -> None:
    save_adapter(adapter_of(program(NAME)), tmp_path / "adapter")
    name = daemon.client.upload("adapter", tmp_path / "adapter")["id"]
    body = {"prompt": [9, 8, 7], "max_tokens": 8, "temperature": 0}
    plain, expected = both(daemon, "completions", **body)
    found, changed = both(daemon, "completions", **body, adapter=name)
    assert found["choices"] == changed["choices"] != plain["choices"] == expected["choices"]
    said = daemon.client.generate(None, "abc", artifact="board", adapter=name, max_new_tokens=4)
    other = daemon.client.generate("base", "abc", adapter=name, max_new_tokens=4)
    assert said == other
    rows = [
        [ask(daemon, "predict", model, **SST2, adapter=one) for one in (name, None)]
        for model in (PROGRAM, "base")
    ]
    for found, expected in zip(*rows, strict=True):
        check_rows(found, expected)
    assert rows[0][0]["data"] != rows[0][1]["data"]


def test_a_chat_with_an_adapter_that_picks_labels_has_the_label_of_the_model(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    task = TrainedTask(format="classification", labels={"a": "yes", "b": "no"})
    save_adapter(adapter_of(program(NAME)), tmp_path / "adapter", {TASK_NAME: to_text(task)})
    name = daemon.client.upload("adapter", tmp_path / "adapter")["id"]
    messages = [{"role": "user", "content": "Hello"}]
    found, expected = both(daemon, "chat/completions", messages=messages, adapter=name)
    assert found["choices"] == expected["choices"] and found["usage"] == expected["usage"]
    assert found["choices"][0]["message"]["content"] in ("yes", "no")


def check_rows(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Labels and their probabilities are those of the model."""
    for row, other in zip(found["data"], expected["data"], strict=True):
        assert (row["prediction"], row["reason"]) == (other["prediction"], other["reason"])
        for label, probability in row["probabilities"].items():
            assert probability == pytest.approx(other["probabilities"][label], abs=1e-4)


def test_labels_and_answers_of_rows_are_those_of_the_model(daemon: DaemonProcess) -> None:
    check_rows(*both(daemon, "predict", **SST2))
    body = {"task": "squad", "rows": [SQUAD, SQUAD | {"question": "who?"}], "max_new_tokens": 6}
    found, expected = both(daemon, "predict", **body)
    assert found["data"] == expected["data"]


@pytest.mark.parametrize(("body", "words"), [
    ({"prompt": [7] * 280, "max_tokens": 9}, "at most 288 tokens"),
    ({"prompt": [260]}, "token ids from 0 to 259"),
])  # fmt: skip
def test_what_the_program_cannot_read_is_refused(
    daemon: DaemonProcess, body: dict[str, Any], words: str
) -> None:
    with refused(422) as caught:
        ask(daemon, "completions", PROGRAM, **body)
    assert words in str(caught.value.expected)


def test_clients_take_turns_and_those_who_leave_delay_nobody(daemon: DaemonProcess) -> None:
    """A program writes one text at a time: the others wait in the daemon's queue."""
    long = {"model": PROGRAM, "prompt": "a", "max_tokens": 200, "n": 100, "ignore_eos": True}

    async def figures() -> dict[str, int]:
        return (await get(daemon.address, "/v1/metrics"))["answers"]

    async def work() -> None:
        async with request(daemon.address, "/v1/completions", long, "one"):
            while (now := await figures())["running"] == 0:
                await asyncio.sleep(0.02)
            assert now["running"] == 1 and now["waiting"] > 50
            answer = await complete(daemon.address, PROGRAM, "two", prompt="b", max_tokens=2)
            assert answer["status"] == 200
            assert (await figures())["waiting"] > 50, (
                "the second client waited for all of the first"
            )
        while (await figures()) != {"waiting": 0, "running": 0}:
            await asyncio.sleep(0.02)

    asyncio.run(asyncio.wait_for(work(), 120))


def test_a_request_ends_between_two_pieces_of_its_prompt() -> None:
    """What runs next is what it is alone."""
    asked = Asked()
    place = {"artifact": str(program(NAME)), "temperature": 0.0, "max_new_tokens": 5}
    expected = asked.parts(prompt=[9, 8, 7], **place)
    asked.begin(5, prompt=PROMPTS[1], **place)
    asked.work.step()
    (row,) = asked.work.opened.batch._rows
    assert 0 < row.read == asked.work.opened.framing.model.piece_tokens < len(row.prompt)
    asked.begin(6, prompt=[9, 8, 7], **place)
    asked.work.take({"cancel": 5})
    asked.finish()
    assert asked.sent[5][-1] == {"id": 5, "value": None}
    assert [reply["part"] for reply in asked.sent[6][:-1]] == expected


def test_next_to_a_job_a_program_that_does_not_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dataclasses import replace

    device = replace(find_device("this-cpu"), usable_bytes=1 << 10)
    monkeypatch.setattr("ondevice.server.room.find_device", lambda name: device)
    plan = {"device": {"kind": "computer", "torch_device": "cpu"}, "total_bytes": 0}
    monkeypatch.setattr("ondevice.server.room._planned", {"job-1": plan})
    job = {"id": "job-1", "config": {}, "artifact": None, "memory_bytes": 0, "peak_device_bytes": 0}
    asked = Asked()
    for call in ({"prompt": "a"}, {"call": "predict", "name": "m", "folder": None, **SST2}):
        asked.begin(len(asked.sent), artifact=str(program(NAME)), job=job, **call)
        error = asked.error(len(asked.sent) - 1)
        assert isinstance(error, BusyError) and "program and weights" in error.message
        assert not model._loaded
