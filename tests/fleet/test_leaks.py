"""Nothing but numbers and codes leaves a device: planted words in its rows, files, settings and errors never come back.

ONDEVICE_FUZZ is the number of messages, 500 by default.
"""

from __future__ import annotations

import base64
import builtins
import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.core import errors
from ondevice.fleet.asking import ask
from ondevice.fleet.averaging.arrays import to_bytes
from ondevice.fleet.averaging.charter import AdapterCharter
from ondevice.fleet.averaging.rules import Averaging
from ondevice.fleet.charter import Charter
from ondevice.fleet.codes import Code, Refusal
from ondevice.fleet.device import Device, DeviceSettings, answering
from ondevice.fleet.member import Member
from ondevice.fleet.replies import reply_of
from ondevice.fleet.rounds import Rounds
from tests.fleet.fleets import charter
from tests.fleet.mutations import mutated
from tests.fleet.quadratic import Quadratic, QuadraticRows

CANARY = "kanarienvogel"
COUNT = int(os.environ.get("ONDEVICE_FUZZ", "500"))
FORMS = [CANARY.encode(), CANARY.encode("utf-16-le"), CANARY.encode().hex().encode()]
FORMS += [base64.b64encode(b"-" * shift + CANARY.encode())[4:-4] for shift in range(3)]


class Nest:
    """A folder, an environment and rows that are full of the planted word."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / CANARY
        self.folder.mkdir()
        self.secret = self.folder / "secret.yaml"
        self.secret.write_text(f"password: {CANARY}\nprompt: '{{{CANARY}}}'\n")
        self.rows = {
            "label": self._rows("label", [{"sentence": "a good film", "label": CANARY}] * 3),
            "columns": self._rows("columns", [{CANARY: CANARY}]),
            "text": self._rows("text", [{"sentence": [CANARY], "label": 1}]),
            "json": self._rows("json", CANARY),
            "gone": self.folder / f"{CANARY}.jsonl",
        }
        self.model = self.folder / "model"
        self.model.mkdir()
        (self.model / "config.json").write_text(f'{{"model_type": "{CANARY}"')

    def _rows(self, name: str, rows: Any) -> Path:
        path = self.folder / f"{name}.jsonl"
        path.write_text(rows if isinstance(rows, str) else "\n".join(map(json.dumps, rows)))
        return path


@pytest.fixture
def nest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nest:
    monkeypatch.setenv("ONDEVICE_SECRET", CANARY)
    monkeypatch.setenv(CANARY, CANARY)
    nest = Nest(tmp_path)
    monkeypatch.chdir(nest.folder)
    return nest


def found_in(reply: dict[str, Any]) -> list[bytes]:
    """The planted word's forms that a reply has."""
    text = repr(reply).encode() + b"".join(
        value for value in reply.values() if isinstance(value, bytes)
    )
    return [form for form in FORMS if form.lower() in text.lower()]


def hostile_charters(nest: Nest) -> Iterator[Charter]:
    """Charters that name files of the device, in every field that could."""
    good = charter()
    for task in (
        str(nest.secret),
        "secret.yaml",
        "secret.yml",
        f"../{CANARY}/secret.yaml",
        CANARY,
        7,
        [CANARY],
        "~",
    ):
        yield good.model_copy(update={"data": {"task": task}})
    for source in (str(nest.model), "model", "./model", "..", "~", str(nest.secret), "secret.yaml", CANARY,
                   f"package:../{CANARY}", f"tiny:{CANARY}", f"{CANARY}.gguf"):  # fmt: skip
        yield good.model_copy(update={"model_source": source})
    for method in ({"name": "prge", "factors": str(nest.secret)}, {"name": CANARY}, {"name": "prge", "rank": CANARY},
                   {}, {"name": ["prge"]}):  # fmt: skip
        yield good.model_copy(update={"method": method})


def test_a_charter_opens_no_file_of_a_device(nest: Nest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a charter names: nothing of the device's own is opened, and one code says so."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    watched = (str(nest.secret), str(nest.model))
    real, opened = builtins.open, []

    def watching(file: Any, *more: Any, **options: Any) -> Any:
        opened.extend(name for name in watched if str(Path(str(file)).absolute()).startswith(name))
        return real(file, *more, **options)

    monkeypatch.setattr(builtins, "open", watching)
    monkeypatch.setattr("io.open", watching)  # pathlib's
    codes = Counter()
    for place, fleet in enumerate(hostile_charters(nest)):
        folder = nest.folder / f"device {place}"
        device = Device(DeviceSettings(folder=str(folder), data=str(nest.rows["label"])))
        assert device.reply({"charter": fleet.to_bytes()}, 1) == {"place": 0}
        task = Rounds(fleet).begin([1]).tasks[1].to_bytes()
        reply = device.reply({"events": [], "task": task}, 1)
        assert reply.keys() == {"error"}, fleet
        assert not found_in(reply)
        codes[reply["error"]] += 1
    assert not opened
    assert codes["name"] == 14
    assert set(codes) <= {"name", "data", "model"}


def test_a_path_that_exists_and_one_that_does_not_give_one_code(nest: Nest) -> None:
    replies = []
    for place, source in enumerate(
        (str(nest.model), f"{nest.model} is not here", str(nest.secret))
    ):
        fleet = charter().model_copy(update={"model_source": source})
        device = Device(
            DeviceSettings(folder=str(nest.folder / f"{place}"), data=str(nest.rows["label"]))
        )
        device.reply({"charter": fleet.to_bytes()}, 1)
        replies.append(device.reply({"task": Rounds(fleet).begin([1]).tasks[1].to_bytes()}, 1))
    assert replies == [{"error": "name"}] * 3


@pytest.mark.parametrize("rows", ["label", "columns", "text", "json", "gone"])
def test_a_bad_row_never_comes_back(
    nest: Nest, rows: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A real model, rows of the device that cannot be read: the device's own log has the row, and the reply a code."""
    from ondevice.models import load_model

    source = load_model("tiny:llama").source
    fleet = charter().model_copy(update={"model_sha256": source.sha256})
    device = Device(DeviceSettings(folder=str(nest.folder / "device"), data=str(nest.rows[rows])))
    device.reply({"charter": fleet.to_bytes()}, 1)
    reply = device.reply({"task": Rounds(fleet).begin([1]).tasks[1].to_bytes()}, 1)
    assert reply == {"error": "data"}
    assert CANARY in caplog.text


def raisers() -> Iterator[Exception]:
    """Every kind of error that a device may meet, with the planted word in its text."""
    for name in dir(errors):
        kind = getattr(errors, name)
        if isinstance(kind, type) and issubclass(kind, errors.OndeviceError):
            yield kind(CANARY, expected=CANARY, received=CANARY, hint=CANARY)
    for kind in (KeyError, ValueError, TypeError, OSError, RuntimeError, MemoryError, RecursionError, AssertionError,
                 UnicodeError, ZeroDivisionError, AttributeError, IndexError):  # fmt: skip
        yield kind(CANARY)
    yield FileNotFoundError(2, CANARY, CANARY)
    for code in Code:
        yield Refusal(code, CANARY, about=7)


def test_no_error_of_a_device_leaves_it_as_text(nest: Nest) -> None:
    for place, error in enumerate(raisers()):
        fleet = charter()
        device = Device(DeviceSettings(folder=str(nest.folder / f"{place}"), data=""))
        device.reply({"charter": fleet.to_bytes()}, 1)

        def broken(*more: Any, error: Exception = error) -> Member:
            raise error

        device._open = broken  # type: ignore[method-assign]
        reply = device.reply({"task": Rounds(fleet).begin([1]).tasks[1].to_bytes()}, 1)
        assert set(reply) <= {"error", "about"}, error
        assert reply["error"] in set(Code)
        assert not found_in(reply)


def test_a_reply_with_a_field_too_many_does_not_leave_a_device(
    nest: Nest, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(DeviceSettings(folder=str(nest.folder / "device"), data=""))
    for more in ({"note": CANARY}, {"place": CANARY}, {"error": CANARY}, {"digest": CANARY}):
        monkeypatch.setattr(device, "take", lambda content, number, more=more: {"place": 0} | more)
        assert device.reply({}, 1) == {"error": "malformed"}


def genuine(fleet: Charter, secure: Charter) -> list[dict[str, Any]]:
    """One of every message that a server sends."""
    server = Rounds(fleet)
    task = server.begin([1]).tasks[1].to_bytes()
    adapters = AdapterCharter(
        model_source=CANARY, model_sha256="0" * 64, method={"name": "lora"}, data={"task": "secret.yaml"}, seed=1,
        learning_rate=1e-3, local_steps=1, averaging=Averaging(),
    )  # fmt: skip
    adapter = {
        "charter": adapters.to_bytes(),
        "adapter": to_bytes({"a": np.zeros(3, np.float32)}),
        "round": 0,
    }
    return [
        {"charter": fleet.to_bytes()},
        {"charter": secure.to_bytes()},
        {"charter": fleet.to_bytes(), "events": [], "task": task},
        {"events": [server.close(0).to_bytes()]},
        {"events": [], "task": task},
        {"events": [], "subspace": True},
        {"events": [], "task": task, "secure": b'{"stage": "keys"}'},
        {"events": [], "task": task, "secure": b'{"stage": "shares", "peers": {}}'},
        {**adapter, "last": False},
        {**adapter, "last": True},
    ]


def test_planted_words_are_in_no_reply_to_damaged_and_hostile_messages(nest: Nest) -> None:
    draw = np.random.default_rng(20261125)
    fleets = [charter(), charter(secure=True, clip_norm=9.0), *hostile_charters(nest)]
    seen: Counter[str] = Counter()
    devices: list[Device] = []
    for place in range(COUNT):
        if place % 25 == 0:  # a device that has seen too much tells little
            fleet = fleets[int(draw.integers(len(fleets)))]
            settings = DeviceSettings(
                folder=str(nest.folder / f"device {place}"),
                data=str(list(nest.rows.values())[int(draw.integers(len(nest.rows)))]),
                columns={CANARY: "label"} if draw.random() < 0.3 else None,
                model=str(nest.model) if draw.random() < 0.3 else None,
                key=str(nest.secret),
            )
            devices = [Device(settings)]
            if (
                fleet.model_source == "tiny:llama" and draw.random() < 0.7
            ):  # one that answers, without a model
                session = Quadratic(fleet.size, fleet.seed, fleet.queries)
                devices[0]._member = Member(fleet, session, QuadraticRowsBatches(), 1)
            messages = genuine(fleet, fleets[1])
        message = mutated(messages[int(draw.integers(len(messages)))], draw, CANARY)
        reply = devices[0].reply(message, int(draw.integers(1, 3)))
        assert not found_in(reply), (message, reply)
        reply_of(reply)  # of a closed shape
        seen[str(reply.get("error", next(iter(reply))))] += 1
    assert seen["answer"] and len(seen) >= 8, seen


def QuadraticRowsBatches() -> Any:
    """Batches of rows that say nothing."""
    from ondevice.data import Batches

    return Batches(QuadraticRows(3).train, 1, None, 0, 0)


def test_a_broken_socket_says_a_code(nest: Nest) -> None:
    settings = DeviceSettings(
        folder=str(nest.folder / "device"), data=str(nest.rows["label"]), task=str(nest.secret)
    )
    with answering(settings) as file:
        for content in itertools.chain(
            [{}, {"task": CANARY.encode()}], genuine(charter(), charter())
        ):
            assert not found_in(ask(file, content, 3))
        socket = file.read_text()
    file.write_text(socket)
    assert ask(file, {}, 3) == {"error": "no_process"}
    file.write_text(CANARY)
    assert ask(file, {}, 3) == {"error": "no_process"}
