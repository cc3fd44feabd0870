"""The record of one AdamW step, by which the step is taken back to the bit (csrc/adam_undo.h).

It takes a third to two thirds of a second state. Of nearly every tile of 128 elements it has codes
of a few bits; tiles that have none, such as those of gradients far above their moments, share an
arena. Tiles that find no room there take no step until `finish_adam`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ondevice.core.errors import ModelError
from ondevice.runtime_ops.adam_state import TILE, check

CODE_BYTES = {"float32": 512, "bfloat16": 640, "int8": 400}
"""Of a tile, by the kind of moments."""
ARENA_FLOATS = {"float32": 3 * TILE, "bfloat16": TILE, "int8": TILE}
"""Of a tile in the arena."""
NOT_DONE = -2
"""Flag of a tile that took no step; others are -1, and places in the arena."""
ALIGNMENT = 16
SHARE = 32
"""One of so many tiles has room in the arena."""


@dataclass
class UndoRecord:
    """Memory for the record of a step of n elements in t tiles.

    Args:
        kind: of the moments.
        codes: uint8 [t, CODE_BYTES].
        flags: int32 [t].
        arena: float32 [room, ARENA_FLOATS].
        used: int32 [1].
    """

    kind: str
    codes: Tensor
    flags: Tensor
    arena: Tensor
    used: Tensor

    @classmethod
    def empty(cls, numel: int, kind: str, memory: Tensor | None = None) -> UndoRecord:
        """Return a record for steps of `numel` elements, of none so far; in uint8 `memory` of
        `record_bytes`, if it is given."""
        tiles, room = _sizes(numel)
        floats = ARENA_FLOATS[kind]
        if memory is None:
            memory = torch.empty(record_bytes(numel, kind), dtype=torch.uint8)
        sizes = (tiles * CODE_BYTES[kind], 4 * room * floats, 4 * tiles, 4)
        codes, arena, flags, used = memory[: sum(sizes)].split(sizes)
        return cls(
            kind,
            codes.view(tiles, CODE_BYTES[kind]),
            flags.view(torch.int32).fill_(NOT_DONE),
            arena.view(torch.float32).view(room, floats),
            used.view(torch.int32),
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor by its field's name."""
        named = ("codes", "flags", "arena", "used")
        return {name: getattr(self, name) for name in named}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())


def record_bytes(numel: int, kind: str) -> int:
    """Return the bytes of a record."""
    tiles, room = _sizes(numel)
    return tiles * (CODE_BYTES[kind] + 4) + room * 4 * ARENA_FLOATS[kind] + 4


def check_record(record: UndoRecord, numel: int, kind: str) -> None:
    """Check a record of a step of `numel` elements.

    Raises:
        ModelError: it is of another kind of moments or another size, or not aligned.
    """
    if record.kind != kind:
        raise ModelError("the record is of other moments", expected=kind, received=record.kind)
    tiles, _ = _sizes(numel)
    check("record", record.codes, (torch.uint8,), tiles * CODE_BYTES[kind])
    check("flags", record.flags, (torch.int32,), tiles)
    check("arena", record.arena, (torch.float32,), len(record.arena) * ARENA_FLOATS[kind])
    check("counter", record.used, (torch.int32,), 1)
    if record.codes.data_ptr() % ALIGNMENT:
        raise ModelError(
            "the record's memory is not aligned", expected=f"a multiple of {ALIGNMENT} bytes"
        )


def _sizes(numel: int) -> tuple[int, int]:
    """Tiles, and those with room in the arena."""
    tiles = -(-numel // TILE)
    return tiles, -(-tiles // SHARE)
