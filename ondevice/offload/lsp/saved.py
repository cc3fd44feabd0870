"""What a resume needs of the engine, as flat arrays by name: small where no change has gone into the base yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ondevice.errors import CheckpointError
from ondevice.offload.lsp.part import Older
from ondevice.offload.lsp.projector import Projector

if TYPE_CHECKING:
    from ondevice.offload.lsp.engine import LspEngine
    from ondevice.offload.lsp.matrix import Matrix
    from ondevice.offload.ranks import Arrays

SIDES = ("left", "right")


def arrays(engine: LspEngine) -> dict[str, Tensor]:
    """Everything a resume needs, on the host, as copies; call `flush` before."""
    found = {name: tensor.clone() for name, tensor in engine.store.arrays().items()}
    found |= engine.updates.clipping.norms()
    for part in engine.parts:
        if not part.matrices:
            continue
        key = part.unit.key
        found[f"change/{key}"] = part.change.cpu().clone()
        found[f"subspace_m/{key}"], found[f"subspace_v/{key}"] = part.moments.m.clone(), part.moments.v.clone()
        found[f"decay/{key}"] = torch.tensor([part.decay, part.folded], dtype=torch.float64)
        if part.folded:
            found[f"base/{key}"] = engine.base_of(part)
        for _, matrix, _ in part.matrices:
            older = part.older.get(matrix.number, [])
            found[f"turn/{matrix.name}"] = torch.tensor([matrix.turn, len(older)])
            found |= _pair(matrix.name, matrix.left, matrix.right)
            for number, old in enumerate(older):
                name = f"{number}/{matrix.name}"
                found |= {**_pair(name, old.left, old.right), f"older/{name}": old.change.cpu().clone()}
                found[f"gain/{name}"] = torch.tensor([old.gain], dtype=torch.float64)
    return found


def load(engine: LspEngine, saved: Arrays) -> None:
    """Take back what `arrays` gave, bfloat16 as uint16.

    Raises:
        CheckpointError: naming the first array that is missing or of another size or type.
    """
    engine.store.load(saved)
    engine.updates.clipping.restore(saved)
    for part in engine.parts:
        engine.put_exact(part)
        if not part.matrices:
            continue
        key = part.unit.key
        part.change.copy_(_take(saved, f"change/{key}", part.change))
        part.moments.m.copy_(_take(saved, f"subspace_m/{key}", part.moments.m))
        part.moments.v.copy_(_take(saved, f"subspace_v/{key}", part.moments.v))
        part.decay, folded = _take(saved, f"decay/{key}", torch.zeros(2, dtype=torch.float64)).tolist()
        if folded:
            engine.put_base(part, _take(saved, f"base/{key}", engine.base_of(part)))
        elif part.folded:
            raise CheckpointError(
                f"the weights of {part.unit.name} have taken changes that the checkpoint has not",
                expected="a session that has not trained yet", hint="open the model again, then load the checkpoint",
            )  # fmt: skip
        for _, matrix, _ in part.matrices:
            turns = _take(saved, f"turn/{matrix.name}", torch.zeros(2, dtype=torch.int64)).tolist()
            matrix.turn = turns[0]
            matrix.put(*_projectors(saved, matrix.name, matrix))
            part.older.pop(matrix.number, None)
            for number in range(turns[1]):
                name = f"{number}/{matrix.name}"
                change = _take(saved, f"older/{name}", torch.zeros(matrix.sizes)).to(matrix.device)
                gain = float(_take(saved, f"gain/{name}", torch.zeros(1, dtype=torch.float64)))
                part.older.setdefault(matrix.number, []).append(Older(*_projectors(saved, name, matrix), gain, change))


def _pair(name: str, left: Projector, right: Projector) -> dict[str, Tensor]:
    found = {}
    for side, projector in zip(SIDES, (left, right), strict=True):
        if projector.positions is not None and projector.values is not None:
            found[f"{side}_positions/{name}"] = projector.positions.to("cpu", torch.int32)
            found[f"{side}_values/{name}"] = projector.values.cpu().clone()
    return found


def _projectors(saved: Arrays, name: str, matrix: Matrix) -> tuple[Projector, Projector]:
    found = []
    for side, like in zip(SIDES, (matrix.left, matrix.right), strict=True):
        if like.positions is None or like.values is None:
            found.append(like)
            continue
        positions = _take(saved, f"{side}_positions/{name}", like.positions.to("cpu", torch.int32))
        values = _take(saved, f"{side}_values/{name}", like.values)
        where = like.device
        found.append(Projector(like.rows, like.size, where, positions.to(where, torch.int64), values.to(where)))
    return found[0], found[1]


def _take(saved: Arrays, name: str, like: Tensor) -> Tensor:
    stored = torch.uint16 if like.dtype == torch.bfloat16 else like.dtype
    value, dtype = saved.get(name), torch.empty(0, dtype=stored).numpy().dtype
    if value is None or value.shape != tuple(like.shape) or value.dtype != dtype:
        raise CheckpointError(
            f"the checkpoint does not fit: {name}",
            expected=f"{dtype} {list(like.shape)}",
            received=None if value is None else f"{value.dtype} {list(value.shape)}",
            hint="resume with the settings that wrote it",
        )
    return torch.from_numpy(np.array(value))
