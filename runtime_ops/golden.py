"""The golden values that every form of every op reproduces: `golden.json`, written and read here.

The generator's cases are `generator.golden()`. A case of another op gives sizes, ids or labels, and
the result; its tensors are drawn from the generator, so that the file stays small: `arguments` says
how, and `csrc/golden_check.cpp` draws the same. Results are computed here in float64, from the
formats' definitions and from no form of the op.

Run as a program (`python -m ondevice.runtime_ops.golden`), it prints what `golden.json` must hold.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from ondevice.core.session import IGNORE
from ondevice.runtime_ops import generator, golden_blocks
from ondevice.runtime_ops.draws import halves, normals, some_bytes, some_levels

TOLERANCE = 1e-5
"""Of an op's result, relative to the larger of 1 and the golden value; the generator's normals:
1e-6."""
PANEL = 32


def arguments(case: dict[str, Any]) -> list[Any]:
    """Draw the op's arguments, in the order of its schema: numpy arrays and integers.

    Streams are numbered from 1 in that order. Scales lie in [1/32, 1/16), minima in (-1/2, -1/4],
    int8 weights in [-64, 63]; float32 tensors are standard normals.
    """
    op = case["op"]
    if op in golden_blocks.OPS:
        return golden_blocks.arguments(case)
    if op == "q4_linear":
        rows, inputs, outputs, group = (case[k] for k in ("rows", "inputs", "outputs", "group"))
        packed = some_bytes(2, -(-outputs // PANEL) * PANEL, inputs // 2)
        scales, mins = (
            halves(s, base, outputs, inputs // group) for s, base in ((3, 0x2800), (4, 0xB400))
        )
        return [normals(1, rows, inputs), packed, scales, mins, group]
    vocabulary = case["vocabulary"]
    depth = case["depth"]
    table = some_levels(2, vocabulary, depth)
    scales = halves(3, 0x2800, vocabulary).astype(np.float32)
    if op == "q8_embedding":
        return [np.array(case["ids"], dtype=np.int64), table, scales]
    labels = np.array(case["labels"], dtype=np.int64)
    hidden = normals(1, len(labels), depth)
    if op == "linear_cross_entropy":
        return [hidden, normals(2, vocabulary, depth), labels]
    return [hidden, table, scales, labels]


def ops() -> list[dict[str, Any]]:
    """Compute the cases of the ops other than the generator; `out` is the flat result, rounded to
    float32."""
    labels = [2050, IGNORE, 0, 2047, 2048, IGNORE, 7, 1024, 1999]
    cases: list[dict[str, Any]] = [
        {"op": "q4_linear", "rows": 7, "inputs": 64, "outputs": 33, "group": 32},
        {"op": "q8_embedding", "vocabulary": 9, "depth": 5, "ids": [8, 0, 3, 3]},
        {"op": "q8_linear_cross_entropy", "vocabulary": 2051, "depth": 19, "labels": labels},
        {"op": "linear_cross_entropy", "vocabulary": 2051, "depth": 19, "labels": labels},
        *golden_blocks.cases(),
    ]
    for case in cases:
        result = _result(case["op"], *arguments(case)).astype(np.float32)
        case["out"] = [float(f"{value:.9g}") for value in result.reshape(-1)]
    return cases


def read_ops() -> list[dict[str, Any]]:
    """Read the committed cases of the ops other than the generator."""
    return json.loads(generator.GOLDEN_PATH.read_text())["ops"]


def _result(op: str, *values: Any) -> np.ndarray:
    """Compute the op in float64."""
    if op in golden_blocks.OPS:
        return golden_blocks.result(op, *values)
    if op == "q4_linear":
        x, packed, scales, mins, group = values
        return x.astype(np.float64) @ _q4(packed, scales, mins, group).T
    if op == "q8_embedding":
        ids, table, scales = values
        return (table * scales.astype(np.float64)[:, None])[ids]
    hidden, table, *scales, labels = values
    weight = table.astype(np.float64)
    if scales:
        weight *= scales[0].astype(np.float64)[:, None]
    logits = hidden.astype(np.float64) @ weight.T
    losses = np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(labels)), labels.clip(0)]
    return np.where(labels == IGNORE, 0.0, losses)


def _q4(packed: np.ndarray, scales: np.ndarray, mins: np.ndarray, group: int) -> np.ndarray:
    """float64 [outputs, inputs]: byte [panel, input, j] holds outputs 32 panel + j (low) and + 16 +
    j (high)."""
    outputs, inputs = scales.shape[0], 2 * packed.shape[1]
    panels = packed.reshape(-1, inputs, PANEL // 2)
    levels = np.concatenate([panels & 15, panels >> 4], axis=2)  # [panel, input, 32]
    levels = levels.transpose(0, 2, 1).reshape(-1, inputs)[:outputs]
    scale, low = (np.repeat(v.astype(np.float64), group, axis=1) for v in (scales, mins))
    return levels * scale + low


if __name__ == "__main__":
    lists = {"cases": generator.golden(), "ops": ops()}
    parts = [
        f'"{name}": [\n  ' + ",\n  ".join(json.dumps(case) for case in cases)
        for name, cases in lists.items()
    ]
    print(f'{{"scheme": "{generator.SCHEME}", ' + "\n], ".join(parts) + "\n]}")
