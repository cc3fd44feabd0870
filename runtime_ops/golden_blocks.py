"""Golden cases of the ops of block programs: how their arguments are drawn, and their definitions in
numpy and float64. `csrc/golden_blocks.h` draws the same.

Streams are numbered in the order of an op's tensors; tensors that a case does not name are None.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ondevice.runtime_ops import draws

SCALE = 0.5
EPS = 1e-5
STEP = 2
RATE = 0.01
ADAM = (0.9, 0.999, 1e-8, 0.1)
"""Decay rates, epsilon and weight decay."""
GROUP = 32


def cases() -> list[dict[str, Any]]:
    """List the cases, without results."""
    linear = {"op": "block_linear", "rows": 3, "inputs": 64, "outputs": 35, "rank": 3}
    heads = {"rows": 1, "tokens": 19, "heads": 2, "kv_heads": 1, "width": 5}
    wide = {"rows": 5, "width": 37}
    labels = [300, -1, 0, 255, 256, -1, 7]
    return [
        *(
            {**linear, "form": form, "transposed": transposed}
            for form in ("float", "int8", "q4", "integers", "q4_integers")
            for transposed in (0, 1)
        ),
        *(
            {**linear, "rows": 1, "form": form, "transposed": 0}
            for form in ("float", "int8", "q4", "integers", "q4_integers")
        ),
        *({**linear, "op": "adapted_linear", "form": form, "a": 7, "b": 201} for form in ("q4", "q4_integers")),
        {"op": "narrow_linear", **wide, "rank": 9},
        {"op": "narrow_gradient", **wide, "rank": 9},
        {"op": "rms_norm", **wide},
        {"op": "rms_norm_backward", **wide},
        {"op": "rotate", "rows": 2, "tokens": 3, "heads": 2, "width": 7, "half": 3},
        {"op": "swiglu", **wide},
        {"op": "swiglu_gate", **wide},
        *({"op": op, **heads, "window": window} for op in ("attend", "attend_backward") for window in (0, 5)),
        {"op": "attend_cached", **heads, "context": 41, "start": 37},
        {"op": "head_step", "form": "float", "vocabulary": 301, "depth": 9, "labels": labels},
        {"op": "head_step", "form": "int8", "vocabulary": 301, "depth": 9, "labels": labels},
        {"op": "block_adam", "width": 37},
    ]  # fmt: skip


def arguments(case: dict[str, Any]) -> list[Any]:
    """Draw the op's arguments, in the order of its schema."""
    op = case["op"]
    if op == "block_linear":
        return _linear_arguments(case)
    if op == "adapted_linear":
        rows, width, length, rank = (case[key] for key in ("rows", "outputs", "inputs", "rank"))
        shapes = {1: (rows, length), 5: (width,), 6: (case["b"] + rank * width,), 7: (rows, width)}
        x, *added = (draws.normals(stream, *shape) for stream, shape in shapes.items())
        places = (case["a"], case["b"], rank)
        integers = case["form"].endswith("integers")
        return [x, *_matrix(case["form"], width, length), *added, *places, SCALE, integers]
    if op == "head_step":
        labels = np.array(case["labels"], np.int64)
        x = draws.normals(1, len(labels), case["depth"])
        weight, scales, _ = _matrix(case["form"], case["vocabulary"], case["depth"])
        weights = np.abs(draws.normals(5, len(labels)))
        return [x, weight, scales, labels, weights, False]
    if op == "attend_cached":
        tokens, heads, kv_heads, width = (
            case[key] for key in ("tokens", "heads", "kv_heads", "width")
        )
        new = [1, tokens, kv_heads, width]
        kept = [kv_heads, width, case["context"]], [kv_heads, case["context"], width]
        return [
            *_drawn([[1, tokens, heads, width], new, new, *kept]),
            np.array([case["start"]]),
            SCALE,
        ]
    if op in ("attend", "attend_backward"):
        queries = [case[key] for key in ("rows", "tokens", "heads", "width")]
        keys = [case[key] for key in ("rows", "tokens", "kv_heads", "width")]
        shapes = [queries, keys, keys]
        if op == "attend_backward":
            shapes.insert(0, queries)
        return [*_drawn(shapes), SCALE, case["window"]]
    if op == "rotate":
        x = [case[key] for key in ("rows", "tokens", "heads", "width")]
        table = [case["tokens"], case["half"]]
        return [*_drawn([x, table, table]), -1.0]
    if op == "block_adam":
        value, gradient, first, second = _drawn([[case["width"]]] * 4)
        step, rate = np.array([STEP]), np.array([RATE], np.float32)
        return [value, gradient, first, np.abs(second), step, rate, *ADAM]
    rows, width = case["rows"], case["width"]
    if op == "narrow_linear":
        return [*_drawn([[rows, width], [case["rank"], width]]), SCALE]
    if op == "narrow_gradient":
        return [*_drawn([[rows, case["rank"]], [rows, width]]), SCALE]
    if op == "rms_norm":
        return [*_drawn([[rows, width], [width]]), EPS]
    if op == "rms_norm_backward":
        x, weight, gn, g = _drawn([[rows, width], [width], [rows, width], [rows, width]])
        return [x, weight, EPS, gn, g]
    return _drawn([[rows, width]] * (2 if op == "swiglu" else 3))


def result(op: str, *values: Any) -> np.ndarray:
    """Compute the op in float64."""
    return _RESULTS[op](*(_wide(value) for value in values))


def _wide(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype == np.float32:
        return value.astype(np.float64)
    return value


def _drawn(shapes: list[list[int]]) -> list[np.ndarray]:
    return [draws.normals(stream, *shape) for stream, shape in enumerate(shapes, 1)]


def _matrix(form: str, outputs: int, inputs: int) -> tuple[np.ndarray, Any, Any]:
    """A matrix, its scales and its minima, of streams 2 to 4."""
    if form == "float":
        return draws.normals(2, outputs, inputs), None, None
    if form.startswith("q4"):
        groups = (outputs, inputs // GROUP)
        packed = draws.some_bytes(2, outputs, inputs // 2)
        return packed, draws.halves(3, 0x2800, *groups), draws.halves(4, 0xB400, *groups)
    levels = draws.some_levels(2, outputs, inputs)
    return levels, draws.halves(3, 0x2800, outputs).astype(np.float32), None


def _linear_arguments(case: dict[str, Any]) -> list[Any]:
    width, length = case["outputs"], case["inputs"]
    form = case["form"]
    matrix = _matrix(form, width, length)
    if case["transposed"]:
        width, length = length, width
    rows, rank = case["rows"], case["rank"]
    shapes = {1: (rows, length), 5: (width,), 6: (rows, rank), 7: (rank, width), 8: (rows, width)}
    x, bias, h, b, into = (draws.normals(stream, *shape) for stream, shape in shapes.items())
    flags = (bool(case["transposed"]), form.endswith("integers"))
    return [x, *matrix, bias, h, b, into, SCALE, *flags]


def _dense(weight: np.ndarray, scales: Any, mins: Any) -> np.ndarray:
    if scales is None:
        return weight
    if mins is None:
        return weight * scales[:, None]
    levels = np.stack((weight >> 4, weight & 15), -1).reshape(len(weight), -1)
    scale, low = (np.repeat(part.astype(np.float64), GROUP, 1) for part in (scales, mins))
    return levels * scale + low


def _grouped(x):
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % GROUP)))
    groups = padded.reshape(len(x), -1, GROUP)
    scale = np.abs(groups).max(-1, keepdims=True) / 127
    rounded = scale * np.floor(groups / np.where(scale > 0, scale, 1) + 0.5)
    return rounded.reshape(padded.shape)[:, : x.shape[1]]


def _linear(x, weight, scales, mins, bias, h, b, into, scale, transposed, integers):
    if integers and mins is not None:
        matrix = _dense(weight, scales, mins)
        low = mins.astype(np.float64)
        largest = np.maximum(np.abs(low), np.abs(low + 15.0 * scales.astype(np.float64))).max(1)
        rows = largest / 127
        if transposed:
            y = _grouped(x * rows) @ np.floor(matrix / rows[:, None] + 0.5)
        else:
            y = _grouped(x) @ matrix.T
    elif not integers:
        matrix = _dense(weight, scales, mins)
        y = x @ matrix if transposed else x @ matrix.T
    elif transposed:
        y = _grouped(x * scales) @ weight
    else:
        y = _grouped(x) @ weight.T * scales
    return y + bias + scale * (h @ b) + into


def _adapted(x, weight, scales, mins, bias, adapter, into, a, b, rank, scale, integers):
    left = adapter[a : a + rank * x.shape[1]].reshape(rank, -1)
    right = adapter[b : b + rank * len(weight)].reshape(rank, -1)
    h = x @ left.T
    return _linear(x, weight, scales, mins, bias, h, right, into, scale, False, integers)


def _rms_norm_backward(x, weight, eps, gn, g):
    r = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
    gw = gn * weight
    return g + r * (gw - x * r * r * (gw * x).mean(-1, keepdims=True))


def _rotate(x, cos, sin, sign):
    half = cos.shape[1]
    first, second, rest = np.split(x, [half, 2 * half], -1)
    c, s = cos[None, :, None], sign * sin[None, :, None]
    return np.concatenate((first * c - second * s, second * c + first * s, rest), -1)


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _probabilities(q, k, scale, window):
    """[rows, heads, tokens, tokens], and keys by head of q."""
    keys = np.repeat(k, q.shape[2] // k.shape[2], 2)
    scores = np.einsum("bthd,bshd->bhts", q, keys) * scale
    distance = np.arange(q.shape[1])[:, None] - np.arange(q.shape[1])
    seen = (distance >= 0) & (distance < (window or q.shape[1]))
    p = np.where(seen, np.exp(scores), 0.0)
    return p / p.sum(-1, keepdims=True), keys


def _attend(q, k, v, scale, window):
    p, _ = _probabilities(q, k, scale, window)
    return np.einsum("bhts,bshd->bthd", p, np.repeat(v, q.shape[2] // k.shape[2], 2))


def _attend_cached(q, k, v, keys, values, start, scale):
    start = int(start[0])
    every_k = np.concatenate((np.moveaxis(keys, 2, 0)[None, :start], k), 1)
    every_v = np.concatenate((np.moveaxis(values, 1, 0)[None, :start], v), 1)
    first = np.zeros((1, start, *q.shape[2:]))
    return _attend(np.concatenate((first, q), 1), every_k, every_v, scale, 0)[:, start:]


def _attend_backward(g, q, k, v, scale, window):
    p, keys = _probabilities(q, k, scale, window)
    group = q.shape[2] // k.shape[2]
    gp = np.einsum("bthd,bshd->bhts", g, np.repeat(v, group, 2))
    gs = p * (gp - (gp * p).sum(-1, keepdims=True)) * scale
    gq = np.einsum("bhts,bshd->bthd", gs, keys)
    by_group = (*k.shape[:3], group, k.shape[3])
    gk = np.einsum("bhts,bthd->bshd", gs, q).reshape(by_group).sum(3)
    gv = np.einsum("bhts,bthd->bshd", p, g).reshape(by_group).sum(3)
    return np.concatenate([part.reshape(-1) for part in (gq, gk, gv)])


def _head_step(x, weight, scales, labels, weights, integers):
    matrix = _dense(weight, scales, None)
    logits = x @ matrix.T
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    used = labels >= 0
    at = np.arange(len(labels))[used], labels[used]
    losses = np.zeros(len(labels))
    losses[used] = -np.log(shares[at])
    shares[at] -= 1
    gradient = shares @ matrix * weights[:, None] * used[:, None]
    return np.concatenate((losses[:, None], gradient), 1)


def _adam(value, gradient, first, second, step, rate, beta1, beta2, eps, decay):
    m = first * beta1 + gradient * (1 - beta1)
    v = second * beta2 + gradient**2 * (1 - beta2)
    one, two = 1 - beta1 ** (step + 1.0), 1 - beta2 ** (step + 1.0)
    return np.stack((value * (1 - rate * decay) - rate / one * m / (np.sqrt(v / two) + eps), m, v))


_RESULTS: dict[str, Any] = {
    "block_linear": _linear,
    "adapted_linear": _adapted,
    "narrow_linear": lambda x, a, scale: scale * (x @ a.T),
    "narrow_gradient": lambda left, right, scale: scale * (left.T @ right),
    "rms_norm": lambda x, w, eps: x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w,
    "rms_norm_backward": _rms_norm_backward,
    "rotate": _rotate,
    "swiglu": lambda gate, up: gate * _sigmoid(gate) * up,
    "swiglu_gate": lambda gate, up, g: g * up * _sigmoid(gate) * (1 + gate * (1 - _sigmoid(gate))),
    "attend": _attend,
    "attend_cached": _attend_cached,
    "attend_backward": _attend_backward,
    "head_step": _head_step,
    "block_adam": _adam,
}
OPS = frozenset(_RESULTS)
