"""Texts that a program generates, one after another: it has room for the keys and values of one."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import torch

from ondevice.generation.batch import Row, Step, draw_next, report_prompt
from ondevice.generation.sample import TokenModel


class OneAtATime:
    """Texts of one program, in the order in which they were added; used like a `Batch`.

    A step reads a piece of a prompt or draws a token, so a text can be removed while its prompt is
    read. Every text is read from its beginning: it is the same whatever the program read before.

    Args:
        model: a program; `Row.others` are not supported.
    """

    def __init__(self, model: TokenModel) -> None:
        self.model = model
        self._rows: deque[Row] = deque()

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: Row) -> None:
        """Generate another text after the others."""
        self._rows.append(row)

    def remove(self, row: Row) -> None:
        """Stop generating a text; one that is not here changes nothing."""
        row.is_done = True
        if row in self._rows:
            self._rows.remove(row)

    def step(self) -> list[Step]:
        """Go on with the first text."""
        if not self._rows:
            return []
        row = self._rows[0]
        if row.read < len(row.prompt):
            step = self._read(row)
        else:
            step = draw_next(row, torch.as_tensor(self.model.feed(row.drawn[-1:])))
        if row.is_done:
            self.remove(row)
        return [step]

    def _read(self, row: Row) -> Step:
        """Read the next piece of the prompt; after the last one draw the first token."""
        if row.read == 0:
            self.model.rewind(0)
        size = self.model.piece_tokens
        if row.prompt_top is not None:  # a program returns the logits of one token
            size = 1
        begin = row.read
        piece = row.prompt[begin : begin + size]
        logits = torch.as_tensor(self.model.feed(piece))
        row.read += len(piece)
        reported = ()
        if row.prompt_top is not None:
            reported = report_prompt(row, begin, logits[None])
        if row.read == len(row.prompt) and row.max_new_tokens > 0:
            return replace(draw_next(row, logits), prompt=reported)
        row.is_done = row.read == len(row.prompt)
        return Step(row, prompt=reported)
