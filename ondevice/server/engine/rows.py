"""Rows of several requests that one model predicts together: labels are scored, answers written."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from ondevice.api.predict import ROWS_AT_ONCE, Asked, Predictor, collect
from ondevice.api.predictions import PredictedRow
from ondevice.data.examples import Item
from ondevice.data.readers.source import Record
from ondevice.generation.batch import Batch, Row, Step
from ondevice.generation.one_at_a_time import OneAtATime
from ondevice.generation.sample import Sampler, Sampling
from ondevice.models import LoadedModel
from ondevice.server.room import has_room


@dataclass(eq=False)
class Request:
    """Rows of one request; `next` is the number of the first that has not begun, from 1."""

    asked: Asked
    records: Sequence[Record]
    max_new_tokens: int
    job: dict[str, Any] | None
    next: int = 1
    done: dict[int, PredictedRow] = field(default_factory=dict)
    began_s: float = field(default_factory=time.perf_counter)

    @property
    def is_done(self) -> bool:
        """True once all of its rows are predicted."""
        return len(self.done) == self.asked.count


@dataclass(eq=False)
class Written:
    """An answer that is being written, and the row that it is of."""

    request: Request
    number: int
    row: Row
    ids: list[int] = field(default_factory=list)


class Rows:
    """Requests for one model with one adapter and one task. They take turns, a row at a time.

    Args:
        place: what requests have in common that are predicted together.
        predictor: of the model or the program, with its task.
        loaded: the model; None for a program, which takes one row at a time.
    """

    def __init__(
        self, place: tuple[Any, ...], predictor: Predictor, loaded: LoadedModel | None
    ) -> None:
        self.place = place
        self.loaded = loaded
        self.predictor = predictor
        self.requests: dict[int, Request] = {}
        self._at_once = 1
        if loaded is not None:
            self._at_once = ROWS_AT_ONCE
        self._written: list[Written] = []
        self._held: deque[tuple[Request, int]] = deque()
        """Rows whose turn it is, and that wait for memory."""

    @cached_property
    def _batch(self) -> Batch | OneAtATime:
        """Writes answers."""
        if self.loaded is not None:
            return Batch(self.loaded)
        generator = self.predictor.generator
        assert generator is not None  # noqa: S101  `step` has looked
        return OneAtATime(generator.model)

    def add(
        self, number: int, records: Sequence[Record], source: str, max_new_tokens: int | None,
        job: dict[str, Any] | None,
    ) -> None:  # fmt: skip
        """Begin a request.

        Raises:
            DataError: no row has the columns of the task.
        """
        asked = self.predictor.asked(records, source)
        most = max_new_tokens or self.predictor.max_new_tokens
        self.requests[number] = Request(asked, records, most, job)

    def remove(self, number: int) -> None:
        """Forget a request."""
        request = self.requests.pop(number, None)
        self._held = deque(each for each in self._held if each[0] is not request)
        for one in [one for one in self._written if one.request is request]:
            self._end(one)

    def step(self) -> list[int]:
        """Score the next rows, or draw a token of each answer; return the requests that went on."""
        if self.predictor.generator is None:
            went_on = self._score()
        else:
            went_on = self._write()
        return [number for number, request in self.requests.items() if request in went_on]

    def value(self, number: int) -> dict[str, Any]:
        """Return the predictions of a request that is done, with their counts."""
        request = self.requests[number]
        task = self.predictor.task
        done = [request.done[line] for line in sorted(request.done)]
        seconds_s = time.perf_counter() - request.began_s
        found = collect(task, request.asked, done, request.records, seconds_s)
        return {"format": task.format, "data": [*map(_fields, found)], **found.summary()}

    def _score(self) -> list[Request]:
        turns = self._take(self._at_once)
        asked = [(request.asked, number) for request, number in turns]
        for (request, number), row in zip(turns, self.predictor.predict_rows(asked), strict=True):
            request.done[number] = row
        return [request for request, _ in turns]

    def _write(self) -> list[Request]:
        went_on = self._begin()
        texts = {id(one.row): one for one in self._written}
        for step in self._batch.step():
            went_on.append(texts[id(step.row)].request)
            self._draw(texts[id(step.row)], step)
        return went_on

    def _begin(self) -> list[Request]:
        """Begin answers, if there is memory; the only one always begins. Return whose they are."""
        begun = []
        while len(self._written) < self._at_once and (self._held or self._take_one()):
            request, number = self._held[0]
            item = request.asked.items.get(number)
            if item is None:
                request.done[number] = request.asked.refusal(number)
            elif self._written and not self._has_room(request, item):
                break
            else:
                row = self._row(request, item)
                self._batch.add(row)
                self._written.append(Written(request, number, row))
            begun.append(request)
            self._held.popleft()
        return begun

    def _take_one(self) -> bool:
        self._held.extend(self._take(1))
        return bool(self._held)

    def _take(self, most: int) -> list[tuple[Request, int]]:
        """Take the next rows of all requests in turns."""
        taken: list[tuple[Request, int]] = []
        while len(taken) < most:
            waiting = [one for one in self.requests.values() if one.next <= one.asked.count]
            if not waiting:
                break
            # The one with the fewest rows that have begun comes first: a long request delays none.
            request = min(waiting, key=lambda one: one.next)
            taken.append((request, request.next))
            request.next += 1
        return taken

    def _row(self, request: Request, item: Item) -> Row:
        prompt = item.example.ids[: item.prompt_tokens]
        generator = self.predictor.generator
        assert generator is not None  # noqa: S101  `step` has looked
        sampler = Sampler(Sampling(), prompt, generator.end_tokens)
        return Row(prompt, sampler, generator.room(len(prompt), request.max_new_tokens))

    def _has_room(self, request: Request, item: Item) -> bool:
        """Return True if the keys and values of one more answer fit."""
        if self.loaded is None:
            return True
        rows = [one.row for one in self._written]
        lengths = [len(row.prompt) + row.max_new_tokens for row in rows]
        lengths.append(item.prompt_tokens + request.max_new_tokens)
        return has_room(self.loaded, lengths, sum(row.read for row in rows), request.job)

    def _draw(self, one: Written, step: Step) -> None:
        """Take a token; note the answer if it is the last one."""
        if step.token is None:
            return
        is_over = step.token.ends
        if not is_over:
            one.ids.append(step.token.id)
            is_over = self.predictor.is_complete(one.ids)
        if is_over or one.row.is_done:
            text = self.predictor.text_of(one.ids)
            left_out = one.request.asked.items[one.number].dropped_tokens
            one.request.done[one.number] = PredictedRow(
                one.number, text, is_cut=not is_over, left_out_tokens=left_out
            )
            self._end(one)

    def _end(self, one: Written) -> None:
        self._batch.remove(one.row)
        self._written.remove(one)


def _fields(row: PredictedRow) -> dict[str, Any]:
    values = asdict(row)
    return {"index": values.pop("line") - 1, **values}
