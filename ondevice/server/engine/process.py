"""The process of the engine, which holds the model: it generates the texts of several requests
together.

`python -m ondevice.server.engine.process DAEMON_PID` reads `{"id", "call", "arguments"}` or
`{"cancel": id}` a line. For each request it writes any number of `{"id", "part"}`, and at its end
`{"id", "value"}` or `{"id", "error"}`; a cancelled one ends too. Requests that arrive together name
the same model and adapter.
"""

from __future__ import annotations

import json
import sys
import threading
from collections import deque
from collections.abc import Generator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from ondevice.artifact.adapter import load_adapter
from ondevice.generation.batch import Batch
from ondevice.generation.generator import Generator as Framing
from ondevice.models import LoadedModel
from ondevice.nn.adapters import adapted
from ondevice.server.channel import Channel, as_error
from ondevice.server.engine.answer import PLACE
from ondevice.server.engine.complete import Completion
from ondevice.server.engine.model import hold, trained_generator
from ondevice.server.predict import predict
from ondevice.server.room import cache_bytes, job_wants, usable_bytes


@dataclass(frozen=True)
class Opened:
    """A model that answers, with its adapter in place."""

    place: tuple[Any, ...]
    loaded: LoadedModel
    framing: Framing
    batch: Batch


class Work:
    """The requests that this process has, and what runs of them."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.opened: Opened | None = None
        self.applied = ExitStack()
        self.completions: dict[int, Completion] = {}
        self.waiting: deque[tuple[int, dict[str, Any] | None]] = deque()
        """Completions that wait for memory, each with the job next to which it must fit."""
        self.predictions: dict[int, Generator[None, None, dict[str, Any]]] = {}

    @property
    def is_idle(self) -> bool:
        """True if there is nothing to do but to wait for a request."""
        return not self.completions and not self.predictions

    def take(self, message: dict[str, Any]) -> None:
        """Begin a request, or cancel one."""
        if "cancel" in message:
            self._cancel(message["cancel"])
            return
        number, arguments = message["id"], message["arguments"]
        try:
            if message["call"] == "predict":
                self._close()
                self.predictions[number] = predict(**arguments)
            else:
                self._complete(number, arguments)
        except Exception as error:
            self._fail(number, message["call"], error)

    def step(self) -> None:
        """Do a little of everything that runs."""
        for number, rows in [*self.predictions.items()]:
            self._predict(number, rows)
        self._admit()
        if self.opened is None or not len(self.opened.batch):
            return
        try:
            steps = self.opened.batch.step()
        except Exception as error:
            self._close()
            for number in [*self.completions]:
                self._fail(number, "complete", error)
            return
        rows = {id(one.row): number for number, one in self.completions.items()}
        for step in steps:
            number = rows[id(step.row)]
            completion = self.completions[number]
            for part in completion.take(step):
                self.channel.send({"id": number, "part": part})
            if completion.text.is_done:
                self._end(number, completion.end())

    def _complete(self, number: int, arguments: dict[str, Any]) -> None:
        """Queue a completion for the batch."""
        place = {name: arguments.pop(name, None) for name in PLACE}
        job = arguments.pop("job")
        longest = len(str(arguments["prompt"])) + (arguments.get("max_new_tokens") or 0)
        opened = self._open(longest, job, **place)
        completion = Completion(opened.loaded, opened.framing, **arguments)
        self.channel.send({"id": number, "part": completion.first()})
        self.completions[number] = completion
        self.waiting.append((number, job))

    def _open(
        self, tokens: int, job: dict[str, Any] | None, model: str | None, artifact: str | None,
        adapter: str | None, precise: bool | None,
    ) -> Opened:  # fmt: skip
        """Return the model with its adapter; one that answers is not opened again."""
        place = (model, artifact, adapter, precise)
        opened = self.opened
        if opened is not None and opened.place == place and self.completions:
            return opened
        self._close()
        loaded = hold(model, artifact, tokens, job, precise=bool(precise))
        folder = adapter or artifact or model
        framing = trained_generator(loaded, None if folder is None else Path(folder))
        if adapter is not None:
            self.applied.enter_context(adapted(loaded, load_adapter(Path(adapter))))
        self.opened = Opened(place, loaded, framing, Batch(loaded))
        return self.opened

    def _close(self) -> None:
        """Take the adapter off; the model stays loaded until another one is needed."""
        self.opened = None
        self.waiting.clear()
        self.applied.close()

    def _admit(self) -> None:
        """Begin the completions that wait, if there is memory; the only one always begins."""
        opened = self.opened
        while opened is not None and self.waiting:
            number, job = self.waiting[0]
            if len(opened.batch) and not self._has_room(opened, self.completions[number], job):
                return
            self.waiting.popleft()
            opened.batch.add(self.completions[number].row)

    def _has_room(self, opened: Opened, completion: Completion, job: dict[str, Any] | None) -> bool:
        """Return True if the keys and values to come fit, with those of one more completion.

        All are kept at the length of the longest.
        """
        waiting = {number for number, _ in self.waiting}
        running = [one for number, one in self.completions.items() if number not in waiting]
        longest = max(one.tokens for one in [completion, *running])
        tokens = longest * (len(running) + 1) - sum(one.row.read for one in running)
        head = opened.loaded.family.head_weight
        need = tokens * cache_bytes(opened.loaded.dims, head.element_size())
        device = head.device.type
        return need <= usable_bytes(device) - job_wants(device, job)

    def _predict(self, number: int, rows: Generator[None, None, dict[str, Any]]) -> None:
        try:
            next(rows)
            self.channel.send({"id": number, "part": {}})
        except StopIteration as end:
            self._end(number, end.value)
        except Exception as error:
            self._fail(number, "predict", error)

    def _cancel(self, number: int) -> None:
        if number in self.completions or number in self.predictions:
            self._end(number, None)

    def _end(self, number: int, value: Any) -> None:
        self._forget(number)
        self.channel.send({"id": number, "value": value})

    def _fail(self, number: int, call: str, error: Exception) -> None:
        self._forget(number)
        self.channel.send({"id": number, "error": as_error(call, error).to_dict()})

    def _forget(self, number: int) -> None:
        completion = self.completions.pop(number, None)
        if completion is not None and self.opened is not None:
            self.opened.batch.remove(completion.row)
        self.waiting = deque(each for each in self.waiting if each[0] != number)
        rows = self.predictions.pop(number, None)
        if rows is not None:
            rows.close()


def main(arguments: list[str]) -> int:
    """Run the process until the daemon closes the pipe."""
    work = Work(Channel(int(arguments[0])))
    inbox: SimpleQueue[dict[str, Any] | None] = SimpleQueue()

    def listen() -> None:
        for line in sys.stdin.buffer:
            inbox.put(json.loads(line))
        inbox.put(None)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        try:
            while (message := inbox.get(block=work.is_idle)) is not None:
                work.take(message)
            return 0
        except Empty:
            work.step()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
