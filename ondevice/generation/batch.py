"""Texts that are generated together, one step after another: a piece of a prompt that is not read
yet, and the next token of every other text.

Prompts are read in pieces if the model's family is known, so that a long one delays the other texts
little and can be left. A text has its own random numbers and its own keys and values. So it is the
same as if it were generated without the others, but for the last bits of a product of several rows:
on a GPU every pass has the same number of rows, and they are equal too.
"""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ondevice.core.dims import ModelDims
from ondevice.generation.sample import PlainSampler, Sampler, Token, likeliest
from ondevice.generation.slots import PADDED_ROWS, Slots, can_share, share_pass
from ondevice.models import LoadedModel

PIECE_TOKENS = {"cpu": 128, "cuda": 512, "mps": 256}
"""Most tokens of a prompt that are read at once, by device."""
LEAST_PIECE_TOKENS = 16
PIECE_FLOPS = 4e10
"""Of a piece on a CPU: about half a second on one core, in which no other text goes on."""
ATTENTION_COST = 2
"""Time of an operation of attention, as a multiple of one of the weights' products."""


@dataclass(eq=False)
class Row:
    """A text to generate.

    Args:
        prompt: its tokens, at least one.
        sampler: draws its tokens.
        max_new_tokens: 0 only reads the prompt.
        prompt_top: report the prompt's tokens, each with so many likeliest ones; None for no report.

    Attributes:
        is_done: it needs no more steps.
        others: texts after the same prompt, which is read once for all of them.
    """

    prompt: Sequence[int]
    sampler: Sampler | PlainSampler
    max_new_tokens: int
    prompt_top: int | None = None
    is_done: bool = False
    drawn: list[int] = field(default_factory=list)
    read: int = 0
    cache: Any = None
    others: list[Row] = field(default_factory=list)


@dataclass(frozen=True)
class Step:
    """What a step has made of a text: tokens of the prompt that were read, and a drawn token."""

    row: Row
    prompt: tuple[Token, ...] = ()
    token: Token | None = None


class Batch:
    """Texts of one model that are generated together.

    Args:
        width: most texts that share a pass.
    """

    def __init__(self, loaded: LoadedModel, width: int = PADDED_ROWS) -> None:
        self.loaded = loaded
        self.width = width
        self.device = loaded.family.head_weight.device
        self._reading: deque[Row] = deque()
        self._writing: list[Row] = []
        self._groups: list[tuple[Slots, list[Row]]] = []
        """Rows that share a pass. Each group has the size of a pass, so that it is never another."""
        self._can_share = can_share(loaded)
        self._keeps = "logits_to_keep" in inspect.signature(loaded.model.forward).parameters

    def __len__(self) -> int:
        return len(self._reading) + len(self._writing) + sum(len(rows) for _, rows in self._groups)

    def add(self, row: Row) -> None:
        """Generate another text from the next step on."""
        self._reading.append(row)

    def remove(self, row: Row) -> None:
        """Stop generating a text; one that is not here changes nothing."""
        row.is_done = True
        row.cache = None
        if row in self._reading:
            self._reading.remove(row)
        if row in self._writing:
            self._writing.remove(row)
        for group in self._groups:
            slots, rows = group
            if row in rows:
                slots.remove(rows.index(row))
                rows.remove(row)
                if not rows:
                    self._groups.remove(group)
                return

    def step(self) -> list[Step]:
        """Read a piece of one prompt, and draw a token of every text whose prompt is read."""
        groups = [(slots, [*rows]) for slots, rows in self._groups]
        writing = [*self._writing]
        steps = []
        for slots, rows in groups:
            logits = share_pass(self.loaded, slots, [row.drawn[-1] for row in rows])
            steps += [draw_next(row, logits[number]) for number, row in enumerate(rows)]
        for row in writing:
            steps.append(draw_next(row, self._feed(row, row.drawn[-1:], 1)[-1]))
        if self._reading:
            steps += self._read(self._reading.popleft())
        for step in steps:
            if step.row.is_done:
                self.remove(step.row)
        return steps

    def _read(self, row: Row) -> list[Step]:
        """Read the next piece of a prompt; after the last one draw the first token of each text."""
        begin = row.read
        piece = row.prompt[begin : begin + self._piece_tokens(begin)]
        logits = self._feed(row, piece, 1 if row.prompt_top is None else 0)
        step = Step(row)
        if row.prompt_top is not None:
            step = Step(row, prompt=report_prompt(row, begin, logits))
        if row.read < len(row.prompt):
            self._reading.append(row)
            return [step]
        if row.max_new_tokens == 0:
            row.is_done = True
            return [step]
        steps = [replace(step, token=draw_next(row, logits[-1]).token)]
        for other in row.others:
            other.read = row.read
            other.cache = row.cache if self._can_share else copy.deepcopy(row.cache)
            steps.append(draw_next(other, logits[-1]))
        for one in (row, *row.others):
            if not one.is_done:
                self._join(one)
        return steps

    def _piece_tokens(self, read: int) -> int:
        if not self._can_share:  # its positions or its state may depend on the prompt's length
            return self.loaded.dims.max_positions
        return piece_tokens(self.device.type, self.loaded.dims, read)

    def _join(self, row: Row) -> None:
        """Let a text share the passes of others, if the model can."""
        if not self._can_share:
            self._writing.append(row)
            return
        group = next((group for group in self._groups if len(group[1]) < self.width), None)
        if group is None:
            group = (Slots(len(row.cache.layers)), [])
            self._groups.append(group)
        slots, rows = group
        slots.add(row.cache)
        row.cache = None
        rows.append(row)

    def _feed(self, row: Row, ids: Sequence[int], keep: int) -> Tensor:
        """Read tokens of one text; return the logits after the last `keep` of them (0: all), on the
        CPU."""
        model: Any = self.loaded.model
        options = {}
        if self._keeps:
            options["logits_to_keep"] = keep
        unread = ids
        if row.cache is None:  # nothing is read yet; or a model without keys and values reads again
            unread = [*row.prompt[: row.read], *row.drawn[:-1], *ids]
        row.read += len(ids)
        with torch.no_grad():
            output = model(
                torch.tensor([unread], device=self.device),
                past_key_values=row.cache,
                use_cache=True,
                **options,
            )
        row.cache = getattr(output, "past_key_values", None)
        return output.logits[0, -(keep or len(ids)) :].float().cpu()


def piece_tokens(device: str, dims: ModelDims, read: int) -> int:
    """Return how many tokens of a prompt to read at once behind the `read` ones.

    The sizes decide, and no clock: the same prompt in other pieces has other last bits.
    """
    most = PIECE_TOKENS.get(device, 128)
    if device != "cpu":
        return most
    attention = 4 * dims.layers * dims.heads * dims.head_dim * read
    flops = 2 * dims.parameters + ATTENTION_COST * attention
    piece = LEAST_PIECE_TOKENS
    while piece < most and 2 * piece * flops <= PIECE_FLOPS:
        piece *= 2
    return piece


def draw_next(row: Row, logits: Tensor) -> Step:
    """Draw a text's next token from the logits behind its last one, float32 [vocab]."""
    token = row.sampler.next(logits)
    row.drawn.append(token.id)
    row.is_done = token.ends or len(row.drawn) >= row.max_new_tokens
    return Step(row, token=token)


def report_prompt(row: Row, begin: int, logits: Tensor) -> tuple[Token, ...]:
    """Return the prompt's tokens after the piece from `begin`, of which `logits` are."""
    tokens = []
    if begin == 0:
        tokens.append(Token(row.prompt[0], None))
    logs = torch.log_softmax(logits, -1)
    for number, own in enumerate(logs[: len(row.prompt) - begin - 1], begin + 1):
        token = row.prompt[number]
        tokens.append(Token(token, float(own[token]), likeliest(own, row.prompt_top or 0)))
    return tuple(tokens)
