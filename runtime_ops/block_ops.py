"""The ops of block programs: products with a frozen matrix as the file has it, and what a block
computes between them, each in one pass. References here, kernels in `csrc/` for the ExecuTorch
runtime; eager PyTorch runs the references.

A frozen matrix W [outputs, inputs] is float32; int8 with scales float32 [outputs]; or uint8 with
two levels a byte, the first in the high half, and float16 scales and minima [outputs, inputs / 32].
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ondevice.core.errors import ModelError
from ondevice.runtime_ops.quantized import dequantize_q8_rows
from ondevice.runtime_ops.registry import define, expect

GROUP = 32
"""Inputs that share a scale and a minimum in 4 bits."""
UNLABELLED = -1
"""Label of a position that `head_step` leaves out."""


def dense(weight: Tensor, scales: Tensor | None, mins: Tensor | None) -> Tensor:
    """Return the matrix, float32 [outputs, inputs]."""
    if scales is None:
        return weight
    if mins is None:
        return dequantize_q8_rows(weight, scales)
    levels = torch.stack((weight >> 4, weight & 15), -1).flatten(1).unflatten(1, (-1, GROUP))
    return (levels * scales.float()[..., None] + mins.float()[..., None]).flatten(1)


def grouped(x: Tensor) -> Tensor:
    """Return x as 8 bits with a scale for each group of 32 of a row make it."""
    length = x.shape[-1]
    groups = functional.pad(x, (0, -length % GROUP)).unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(-1, keepdim=True) / 127.0
    levels = (groups / torch.where(scales > 0, scales, 1.0) + 0.5).floor()
    return (levels * scales).flatten(-2)[..., :length]


def in_8_bits(matrix: Tensor, scales: Tensor, mins: Tensor) -> tuple[Tensor, Tensor]:
    """Return the integers that a matrix of 4 bits is rounded to for g W, and a scale for each row."""
    low = mins.to(matrix.dtype)
    high = low + 15.0 * scales.to(matrix.dtype)
    largest = torch.maximum(low.abs(), high.abs()).amax(1)
    rows = torch.where(largest > 0, largest / 127.0, 1.0)
    return (matrix / rows[:, None] + 0.5).floor(), rows


def _matrix_shape(
    name: str, weight: Tensor, scales: Tensor | None, mins: Tensor | None
) -> list[int]:
    dtype = torch.float32
    if scales is not None:
        dtype = torch.int8 if mins is None else torch.uint8
    expect(name, "weight", weight, dtype, (None, None))
    outputs, inputs = weight.shape
    if mins is not None and scales is not None:
        inputs *= 2
        for part, value in (("scales", scales), ("mins", mins)):
            expect(name, part, value, torch.float16, (outputs, inputs // GROUP))
        if inputs % GROUP:
            raise ModelError(f"ondevice::{name} needs inputs in groups of {GROUP}", received=inputs)
    elif scales is not None:
        expect(name, "scales", scales, torch.float32, (outputs,))
    return [outputs, inputs]


def _linear_shape(
    x: Tensor, weight: Tensor, scales: Tensor | None, mins: Tensor | None, bias: Tensor | None,
    h: Tensor | None, b: Tensor | None, into: Tensor | None, scale: float, transposed: bool, integers: bool,
) -> Tensor:  # fmt: skip
    width, length = _matrix_shape("block_linear", weight, scales, mins)
    if transposed:
        width, length = length, width
    expect("block_linear", "x", x, torch.float32, (None, length))
    rows = x.shape[0]
    if bias is not None:
        expect("block_linear", "bias", bias, torch.float32, (width,))
    if h is not None and b is not None:
        expect("block_linear", "h", h, torch.float32, (rows, None))
        expect("block_linear", "b", b, torch.float32, (h.shape[1], width))
    if into is not None:
        expect("block_linear", "into", into, torch.float32, (rows, width))
    if integers and scales is None:
        raise ModelError("ondevice::block_linear multiplies integers with packed weights")
    return x.new_empty(rows, width)


def _linear(
    x: Tensor, weight: Tensor, scales: Tensor | None, mins: Tensor | None, bias: Tensor | None,
    h: Tensor | None, b: Tensor | None, into: Tensor | None, scale: float, transposed: bool, integers: bool,
) -> Tensor:  # fmt: skip
    if integers and scales is not None and mins is not None:
        matrix = dense(weight, scales, mins).to(x.dtype)
        if transposed:
            levels, rows = in_8_bits(matrix, scales, mins)
            y = grouped(x * rows) @ levels
        else:
            y = functional.linear(grouped(x), matrix)
    elif integers and scales is not None:
        levels = weight.to(x.dtype)
        if transposed:
            y = grouped(x * scales) @ levels
        else:
            y = grouped(x) @ levels.t() * scales
    else:
        matrix = dense(weight, scales, mins).to(x.dtype)
        y = x @ matrix if transposed else functional.linear(x, matrix)
    if bias is not None:
        y = y + bias
    if h is not None and b is not None:
        y = y + scale * (h @ b)
    return y if into is None else into + y


def _adapted_shape(
    x: Tensor, weight: Tensor, scales: Tensor | None, mins: Tensor | None, bias: Tensor | None,
    adapter: Tensor, into: Tensor | None, a: int, b: int, rank: int, scale: float, integers: bool,
) -> Tensor:  # fmt: skip
    name = "adapted_linear"
    width, length = _matrix_shape(name, weight, scales, mins)
    expect(name, "adapter", adapter, torch.float32, (None,))
    count = adapter.shape[0]
    if min(a, b) < 0 or rank < 1 or a + rank * length > count or b + rank * width > count:
        raise ModelError(
            f"ondevice::{name} got A and B outside the adapter",
            expected=f"ranges of [0, {count})",
            received=f"A at {a}, B at {b}, rank {rank}",
        )
    return _linear_shape(x, weight, scales, mins, bias, None, None, into, scale, False, integers)


def _adapted(
    x: Tensor, weight: Tensor, scales: Tensor | None, mins: Tensor | None, bias: Tensor | None,
    adapter: Tensor, into: Tensor | None, a: int, b: int, rank: int, scale: float, integers: bool,
) -> Tensor:  # fmt: skip
    left = adapter[a : a + rank * x.shape[1]].view(rank, -1)
    right = adapter[b : b + rank * weight.shape[0]].view(rank, -1)
    h = functional.linear(x, left)
    return _linear(x, weight, scales, mins, bias, h, right, into, scale, False, integers)


def _narrow_shape(x: Tensor, a: Tensor, scale: float) -> Tensor:
    expect("narrow_linear", "x", x, torch.float32, (None, None))
    expect("narrow_linear", "a", a, torch.float32, (None, x.shape[1]))
    return x.new_empty(x.shape[0], a.shape[0])


def _narrow_gradient_shape(left: Tensor, right: Tensor, scale: float) -> Tensor:
    expect("narrow_gradient", "left", left, torch.float32, (None, None))
    expect("narrow_gradient", "right", right, torch.float32, (left.shape[0], None))
    return left.new_empty(left.shape[1], right.shape[1])


def _norm_shape(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    expect("rms_norm", "x", x, torch.float32, (None, None))
    expect("rms_norm", "weight", weight, torch.float32, (x.shape[1],))
    return torch.empty_like(x)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def _norm_backward_shape(x: Tensor, weight: Tensor, eps: float, gn: Tensor, g: Tensor) -> Tensor:
    for name, value in (("gn", gn), ("g", g)):
        expect("rms_norm_backward", name, value, torch.float32, tuple(x.shape))
    return _norm_shape(x, weight, eps)


def _norm_backward(x: Tensor, weight: Tensor, eps: float, gn: Tensor, g: Tensor) -> Tensor:
    r = torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    gw = gn * weight
    return g + r * (gw - x * ((gw * x).mean(-1, keepdim=True) * r * r))


def _rotate_shape(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    expect("rotate", "x", x, torch.float32, (None, None, None, None))
    for name, value in (("cos", cos), ("sin", sin)):
        expect("rotate", name, value, torch.float32, (x.shape[1], cos.shape[-1]))
    if 2 * cos.shape[1] > x.shape[3]:
        raise ModelError("ondevice::rotate got a table wider than a head", received=list(cos.shape))
    return torch.empty_like(x)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    half = cos.shape[1]
    first, second, rest = x.split((half, half, x.shape[3] - 2 * half), -1)
    c, s = cos[None, :, None], sign * sin[None, :, None]
    return torch.cat((first * c - second * s, second * c + first * s, rest), -1)


def _same_shape(name: str, *values: Tensor) -> Tensor:
    for value in values:
        expect(name, "argument", value, torch.float32, tuple(values[0].shape))
    return torch.empty_like(values[0])


def _swiglu_gate(gate: Tensor, up: Tensor, g: Tensor) -> Tensor:
    s = torch.sigmoid(gate)
    return g * up * (s + gate * s * (1.0 - s))


def _attend_shape(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    expect("attend", "q", q, torch.float32, (None, None, None, None))
    rows, tokens, heads, width = q.shape
    expect("attend", "k", k, torch.float32, (rows, tokens, None, width))
    expect("attend", "v", v, torch.float32, tuple(k.shape))
    if heads % k.shape[2] or scale <= 0 or window < 0:
        raise ModelError(
            "ondevice::attend takes whole groups of heads, a scale above 0, a window of 0 or more"
        )
    return torch.empty_like(q)


def _weights(q: Tensor, k: Tensor, scale: float, window: int) -> Tensor:
    """Return probabilities [B, K, group, T, T]."""
    by_group = q.unflatten(2, (k.shape[2], -1))
    scores = torch.einsum("btkgh,bskh->bkgts", by_group, k) * scale
    hidden = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device)
    hidden = hidden.triu(1) | (hidden.tril(-window) if window else hidden & False)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int) -> Tensor:
    p = _weights(q, k, scale, window)
    return torch.einsum("bkgts,bskh->btkgh", p, v).flatten(2, 3)


def _attend_cached_shape(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, start: Tensor, scale: float
) -> Tensor:
    expect("attend_cached", "q", q, torch.float32, (1, None, None, None))
    heads, width = k.shape[2], q.shape[3]
    expect("attend_cached", "keys", keys, torch.float32, (heads, width, None))
    expect("attend_cached", "values", values, torch.float32, (heads, keys.shape[2], width))
    expect("attend_cached", "start", start, torch.int64, (1,))
    return _attend_shape(q, k, v, scale, 0)


def _attend_cached(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, start: Tensor, scale: float
) -> Tensor:
    tokens, context = q.shape[1], keys.shape[2]
    by_group = q.unflatten(2, (k.shape[2], -1))
    old = torch.einsum("btkgh,khc->bkgtc", by_group, keys) * scale
    old = old.masked_fill(torch.arange(context, device=q.device) >= start, float("-inf"))
    young = torch.einsum("btkgh,bskh->bkgts", by_group, k) * scale
    hidden = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
    p = torch.cat((old, young.masked_fill(hidden, float("-inf"))), -1).softmax(-1)
    read = torch.einsum("bkgtc,kch->btkgh", p[..., :context], values)
    return (read + torch.einsum("bkgts,bskh->btkgh", p[..., context:], v)).flatten(2, 3)


def _attend_backward_shape(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int
) -> Tensor:
    _attend_shape(q, k, v, scale, window)
    expect("attend_backward", "g", g, torch.float32, tuple(q.shape))
    return q.new_empty(q.numel() + 2 * k.numel())


def _attend_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int
) -> Tensor:
    p = _weights(q, k, scale, window)
    by_group = g.unflatten(2, (k.shape[2], -1))
    gp = torch.einsum("btkgh,bskh->bkgts", by_group, v)
    gs = p * (gp - (gp * p).sum(-1, keepdim=True)) * scale
    gq = torch.einsum("bkgts,bskh->btkgh", gs, k)
    gk = torch.einsum("bkgts,btkgh->bskh", gs, q.unflatten(2, (k.shape[2], -1)))
    gv = torch.einsum("bkgts,btkgh->bskh", p, by_group)
    return torch.cat((gq.reshape(-1), gk.reshape(-1), gv.reshape(-1)))


def _head_shape(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    labels: Tensor,
    weights: Tensor,
    integers: bool,
) -> Tensor:
    _, inputs = _matrix_shape("head_step", weight, scales, None)
    expect("head_step", "x", x, torch.float32, (None, inputs))
    expect("head_step", "labels", labels, torch.int64, (x.shape[0],))
    expect("head_step", "weights", weights, torch.float32, (x.shape[0],))
    if integers and scales is None:
        raise ModelError("ondevice::head_step multiplies integers with weights in 8 bits")
    return x.new_empty(x.shape[0], inputs + 1)


def _head(
    x: Tensor,
    weight: Tensor,
    scales: Tensor | None,
    labels: Tensor,
    weights: Tensor,
    integers: bool,
) -> Tensor:
    """The loss of each row in the first column, and its weighted gradient."""
    matrix = dense(weight, scales, None).to(x.dtype)
    used = labels != UNLABELLED
    at = labels.clamp(min=0)[:, None]
    logits = _linear(x, weight, scales, None, None, None, None, None, 1.0, False, integers)
    shares = logits.softmax(-1)
    losses = logits.logsumexp(-1) - logits.gather(1, at)[:, 0]
    one_hot = torch.zeros_like(shares).scatter(1, at, 1.0)
    gradient = (shares - one_hot) @ matrix * weights[:, None]
    return torch.where(used[:, None], torch.cat((losses[:, None], gradient), 1), 0.0)


def _adam_shape(
    value: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: Tensor, rate: Tensor,
    beta1: float, beta2: float, eps: float, decay: float,
) -> Tensor:  # fmt: skip
    for one in (value, gradient, first, second):
        expect("block_adam", "range", one, torch.float32, (value.numel(),))
    expect("block_adam", "step", step, torch.int64, (1,))
    expect("block_adam", "rate", rate, torch.float32, (1,))
    return value.new_empty(3, value.numel())


def _adam(
    value: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: Tensor, rate: Tensor,
    beta1: float, beta2: float, eps: float, decay: float,
) -> Tensor:  # fmt: skip
    number = step.to(torch.float32) + 1.0
    m = first * beta1 + gradient * (1.0 - beta1)
    v = second * beta2 + gradient * gradient * (1.0 - beta2)
    one, two = (1.0 - torch.pow(beta, number) for beta in (beta1, beta2))
    new = value * (1.0 - rate * decay) - rate / one * m / (torch.sqrt(v / two) + eps)
    return torch.stack((new, m, v))


define(
    "block_linear",
    "Tensor x, Tensor weight, Tensor? scales, Tensor? mins, Tensor? bias, Tensor? h, Tensor? b, "
    "Tensor? into, float scale, bool transposed, bool integers",
    fake=_linear_shape,
    reference=_linear,
)
define(
    "adapted_linear",
    "Tensor x, Tensor weight, Tensor? scales, Tensor? mins, Tensor? bias, Tensor adapter, Tensor? into, "
    "int a, int b, int rank, float scale, bool integers",
    fake=_adapted_shape,
    reference=_adapted,
)
define(
    "narrow_linear",
    "Tensor x, Tensor a, float scale",
    fake=_narrow_shape,
    reference=lambda x, a, scale: scale * functional.linear(x, a),
)
define(
    "narrow_gradient",
    "Tensor left, Tensor right, float scale",
    fake=_narrow_gradient_shape,
    reference=lambda left, right, scale: scale * (left.t() @ right),
)
define("rms_norm", "Tensor x, Tensor weight, float eps", fake=_norm_shape, reference=_norm)
define(
    "rms_norm_backward",
    "Tensor x, Tensor weight, float eps, Tensor gn, Tensor g",
    fake=_norm_backward_shape,
    reference=_norm_backward,
)
define(
    "rotate", "Tensor x, Tensor cos, Tensor sin, float sign", fake=_rotate_shape, reference=_rotate
)
define(
    "swiglu",
    "Tensor gate, Tensor up",
    fake=lambda gate, up: _same_shape("swiglu", gate, up),
    reference=lambda gate, up: functional.silu(gate) * up,
)
define(
    "swiglu_gate",
    "Tensor gate, Tensor up, Tensor g",
    fake=lambda gate, up, g: _same_shape("swiglu_gate", gate, up, g),
    reference=_swiglu_gate,
)
define(
    "attend",
    "Tensor q, Tensor k, Tensor v, float scale, int window",
    fake=_attend_shape,
    reference=_attend,
)
define(
    "attend_cached",
    "Tensor q, Tensor k, Tensor v, Tensor keys, Tensor values, Tensor start, float scale",
    fake=_attend_cached_shape,
    reference=_attend_cached,
)
define(
    "attend_backward",
    "Tensor g, Tensor q, Tensor k, Tensor v, float scale, int window",
    fake=_attend_backward_shape,
    reference=_attend_backward,
)
define(
    "head_step",
    "Tensor x, Tensor weight, Tensor? scales, Tensor labels, Tensor weights, bool integers",
    fake=_head_shape,
    reference=_head,
)
define(
    "block_adam",
    "Tensor value, Tensor gradient, Tensor first, Tensor second, Tensor step, Tensor rate, "
    "float beta1, float beta2, float eps, float decay",
    fake=_adam_shape,
    reference=_adam,
)
