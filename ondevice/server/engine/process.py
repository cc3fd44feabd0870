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
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from ondevice.api.predict import Predictor, read_input
from ondevice.artifact.adapter import load_adapter
from ondevice.core.errors import ConfigError
from ondevice.data.tasks.trained import TrainedTask
from ondevice.generation.batch import Batch
from ondevice.generation.generator import Generator as Framing
from ondevice.generation.generator import generator_of
from ondevice.generation.one_at_a_time import OneAtATime
from ondevice.models import LoadedModel
from ondevice.nn.adapters import adapted
from ondevice.server.channel import Channel, as_error
from ondevice.server.engine.answer import PLACE
from ondevice.server.engine.complete import Completion
from ondevice.server.engine.model import as_trained, hold, hold_program, recorded_task
from ondevice.server.engine.rows import Rows
from ondevice.server.jobs import is_program
from ondevice.server.predict import as_records, task_of
from ondevice.server.room import has_room
from ondevice.training.trained import check_base


@dataclass(frozen=True)
class Opened:
    """A model that answers, with its adapter in place."""

    place: tuple[Any, ...]
    loaded: LoadedModel | None
    """None for an artifact's program."""
    framing: Framing
    vocab: int
    batch: Batch | OneAtATime
    predictor: Predictor | None
    """Frames the last message of a chat; None if the training had conversations."""

    def row_of(self, prompt: Any) -> tuple[Predictor, str] | None:
        """Return what frames the last message as the text of a row, and that text, if the training
        had rows and no conversations; None for any other prompt."""
        if self.predictor is None or not isinstance(prompt, list):
            return None
        if not prompt or not isinstance(prompt[-1], dict):
            return None
        return self.predictor, str(prompt[-1]["content"])


class Work:
    """The requests that this process has, and what runs of them."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.opened: Opened | None = None
        self.applied = ExitStack()
        self.completions: dict[int, Completion] = {}
        self.waiting: deque[tuple[int, dict[str, Any] | None]] = deque()
        """Completions that wait for memory, each with the job next to which it must fit."""
        self.rows: Rows | None = None
        """Requests for predictions; they never run next to completions."""

    @property
    def is_idle(self) -> bool:
        """True if there is nothing to do but to wait for a request."""
        return not self.completions and not self._asked_rows

    def take(self, message: dict[str, Any]) -> None:
        """Begin a request, or cancel one."""
        if "cancel" in message:
            self._cancel(message["cancel"])
            return
        number, arguments = message["id"], message["arguments"]
        try:
            if message["call"] == "predict":
                self._take_rows(number, **arguments)
            else:
                self._complete(number, arguments)
        except Exception as error:
            self._fail(number, message["call"], error)

    def step(self) -> None:
        """Do a little of everything that runs."""
        self._predict()
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
        row = opened.row_of(arguments["prompt"])
        if row is not None:
            predictor, text = row
            task = predictor.task
            if task.has_candidates:
                if opened.loaded is None:  # a program that generates scores no labels
                    program = hold_program(str(place["artifact"]), job)
                    predictor = program.predictor(task, place["adapter"])
                self._pick(number, predictor, text, arguments.get("top"))
                return
            arguments["prompt"] = list(predictor.asked_text(text).prompt)
            arguments["stop"] = [*arguments.get("stop", ()), *task.stops]
        completion = Completion(opened.framing, opened.vocab, **arguments)
        self.channel.send({"id": number, "part": completion.first()})
        self.completions[number] = completion
        self.waiting.append((number, job))

    def _pick(self, number: int, predictor: Predictor, text: str, top: int | None) -> None:
        """Reply with the likeliest label: nothing was trained to end a text behind a label."""
        if top is not None:
            raise ConfigError(
                "a label has no probabilities of its tokens",
                expected="no logprobs for a model that picks labels",
                hint="POST /v1/predict has the probability of each label",
            )
        asked = predictor.asked_text(text)
        label = str(predictor.one(asked).prediction)
        self.channel.send({"id": number, "part": {"prompt_tokens": len(asked.prompt)}})
        self.channel.send({"id": number, "part": {"text": label, "tokens": []}})
        tokens = len(predictor.tokenizer(label, add_special_tokens=False)["input_ids"])
        self._end(number, {"finish": "stop", "completion_tokens": tokens})

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
        task = recorded_task(adapter or artifact or model)
        if artifact is not None and is_program(Path(artifact)):
            self.opened = self._open_program(place, artifact, adapter, task, job)
            return self.opened
        loaded = hold(model, artifact, tokens, job, precise=bool(precise))
        framing = as_trained(generator_of(loaded), task)
        predictor = None
        if task is not None and task.framing != "chat template":
            predictor = Predictor.of(loaded, task)
        if adapter is not None:
            self.applied.enter_context(adapted(loaded, load_adapter(Path(adapter))))
        vocab = loaded.dims.vocab
        self.opened = Opened(place, loaded, framing, vocab, Batch(loaded), predictor)
        return self.opened

    def _open_program(
        self, place: tuple[Any, ...], artifact: str, adapter: str | None,
        task: TrainedTask | None, job: dict[str, Any] | None,
    ) -> Opened:  # fmt: skip
        """Return an artifact's program with its adapter."""
        program = hold_program(artifact, job)
        framing = as_trained(program.generator(adapter), task)
        predictor = None
        if task is not None and task.framing != "chat template":
            predictor = Predictor.of_program(framing, task)
        batch = OneAtATime(framing.model)
        return Opened(place, None, framing, program.vocab, batch, predictor)

    def _close(self) -> None:
        """Take the adapter off; the model stays loaded until another one is needed."""
        self.opened = None
        self.rows = None
        self.waiting.clear()
        self.applied.close()

    def _admit(self) -> None:
        """Begin the completions that wait, if there is memory; the only one always begins."""
        opened = self.opened
        while opened is not None and self.waiting:
            number, job = self.waiting[0]
            completion = self.completions[number]
            try:
                if len(opened.batch) and not self._has_room(opened, completion, job):
                    return
            except Exception as error:  # the job cannot be planned; the others go on
                self._fail(number, "complete", error)
                continue
            self.waiting.popleft()
            opened.batch.add(completion.row)

    def _has_room(self, opened: Opened, completion: Completion, job: dict[str, Any] | None) -> bool:
        """Return True if the keys and values to come fit, with those of one more completion."""
        if opened.loaded is None:  # a program has room for the texts of one, and takes no more
            return True
        waiting = {number for number, _ in self.waiting}
        running = [one for number, one in self.completions.items() if number not in waiting]
        lengths = [one.tokens for one in [completion, *running]]
        return has_room(opened.loaded, lengths, sum(one.row.read for one in running), job)

    @property
    def _asked_rows(self) -> list[int]:
        """The requests for predictions."""
        return [] if self.rows is None else [*self.rows.requests]

    def _take_rows(
        self, number: int, model: str | None, artifact: str | None, adapter: str | None,
        rows: list[Any], folder: str | None, name: str, task: str | None = None,
        max_new_tokens: int | None = None, job: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Begin to predict rows, together with those of other requests.

        Args:
            folder: where the task is recorded (`task_of`); `name` is its name.
            max_new_tokens: of an answer; None for twice the longest of the training.
        """
        record = task_of(None if folder is None else Path(folder), name, task)
        records, source = read_input(as_records(rows, record))
        place = (model, artifact, adapter, folder, task)
        if self.rows is None or self.rows.place != place or not self._asked_rows:
            self._close()
            if artifact is not None and is_program(Path(artifact)):
                predictor = hold_program(artifact, job).predictor(record, adapter)
                self.rows = Rows(place, predictor, None)
            else:
                longest = max(len(str(record.fields)) for record in records)
                tokens = longest + (max_new_tokens or 0)
                loaded = hold(model, artifact, tokens, job, precise=True)
                if adapter is not None:
                    base: Any = loaded.source  # its digest is a cached property
                    check_base(record, base, name)
                    self.applied.enter_context(adapted(loaded, load_adapter(Path(adapter))))
                self.rows = Rows(place, Predictor.of(loaded, record), loaded)
        self.rows.add(number, records, source, max_new_tokens, job)

    def _predict(self) -> None:
        """Predict a few rows."""
        rows = self.rows
        if rows is None or not self._asked_rows:
            return
        try:
            for number in rows.step():
                self.channel.send({"id": number, "part": {}})
                if rows.requests[number].is_done:
                    self._end(number, rows.value(number))
        except Exception as error:
            for number in self._asked_rows:
                self._fail(number, "predict", error)

    def _cancel(self, number: int) -> None:
        if number in self.completions or number in self._asked_rows:
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
        if self.rows is not None:
            self.rows.remove(number)


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
