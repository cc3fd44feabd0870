"""Weights in 4 and 8 bits with float32 activations: formats, their references, and the ops that
read them.

Q4: weight = q * scale + min, q in 0..15, a float16 scale and minimum for each group of inputs of
each output. Packed in panels of 32 outputs, as the kernel reads them: byte [panel, input, j] with j
in 0..15 holds output 32 panel + j in its low nibble and output 32 panel + 16 + j in its high
nibble; outputs are padded to a multiple of 32. Q8: weight = q * scale, q in -127..127, a float32
scale for each row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ondevice.core.errors import ModelError
from ondevice.core.session import IGNORE
from ondevice.runtime_ops import native
from ondevice.runtime_ops.registry import define, expect

PANEL = 32
"""The label of a position that is not trained on."""
TILE_ROWS = 4096
"""Vocabulary rows that the reference cross-entropy looks at at once."""


def quantize_q4(weight: Tensor, group: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    """Return asymmetric min-max quantisation to 4 bits.

    A weight that already lies on such a grid with float16 scales and minima (Q4_1) is recovered: a
    group that uses its first and last level has exactly its scale and minimum again.

    Args:
        weight: float [out, in].
        group: inputs that share a scale and a minimum.

    Returns:
        packed uint8 [out rounded up to 32, in / 2] (the module's layout), scales and mins float16
        [out, in / group].

    Raises:
        ModelError: `in` is no multiple of `group`, or a value is not finite or beyond float16.
    """
    if weight.dim() != 2 or weight.shape[1] % group or weight.shape[1] % 2:
        raise ModelError(
            "this weight cannot be stored in 4 bits",
            expected=f"[out, in] with in an even multiple of the group of {group}",
            received=list(weight.shape),
            hint="choose a group that divides the inputs, or leave this layer out",
        )
    outputs, inputs = weight.shape
    groups = weight.detach().float().reshape(outputs, inputs // group, group)
    low, high = groups.amin(-1), groups.amax(-1)
    mins, scales = low.half(), ((high - low) / 15).half()
    if not (torch.isfinite(mins).all() and torch.isfinite(scales).all()):
        raise ModelError(
            "this weight cannot be stored in 4 bits",
            expected="finite values within float16",
            hint="check the model",
        )
    # Against the rounded scale and minimum, so that rounding them is made up for if it can be.
    divisor = torch.where(scales == 0, torch.ones_like(scales), scales).float()
    levels = (
        ((groups - mins.float()[..., None]) / divisor[..., None])
        .round()
        .clamp(0, 15)
        .to(torch.uint8)
    )
    padded = -(-outputs // PANEL) * PANEL
    rows = torch.zeros(padded, inputs, dtype=torch.uint8, device=weight.device)
    rows[:outputs] = levels.reshape(outputs, inputs)
    halves = rows.reshape(padded // PANEL, 2, PANEL // 2, inputs)
    packed = (halves[:, 0] | (halves[:, 1] << 4)).transpose(1, 2)
    return packed.reshape(padded, inputs // 2).contiguous(), scales, mins


def dequantize_q4(packed: Tensor, scales: Tensor, mins: Tensor, group: int = 32) -> Tensor:
    """Dequantise the result of `quantize_q4` to the float32 weight [out, in]."""
    outputs, inputs = scales.shape[0], 2 * packed.shape[1]
    panels = packed.reshape(-1, inputs, PANEL // 2).transpose(1, 2)
    levels = torch.stack([panels & 15, panels >> 4], dim=1).reshape(-1, inputs)[:outputs]
    grouped = levels.reshape(outputs, inputs // group, group).to(torch.float32)
    return (grouped * scales.float()[..., None] + mins.float()[..., None]).reshape(outputs, inputs)


def quantize_q8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return symmetric quantisation of each row: float [V, d] to int8 [V, d] and scales float32
    [V]."""
    weight = weight.detach().float()
    scales = weight.abs().amax(-1) / 127
    divisor = torch.where(scales == 0, torch.ones_like(scales), scales)
    return (weight / divisor[:, None]).round().clamp(-127, 127).to(torch.int8), scales


def dequantize_q8_rows(weight: Tensor, scales: Tensor) -> Tensor:
    """Dequantise int8 rows to the float32 weight [V, d]."""
    return weight.to(torch.float32) * scales[:, None]


def _q4_shape(x: Tensor, packed: Tensor, scales: Tensor, mins: Tensor, group: int) -> Tensor:
    inputs = x.shape[-1]
    if group < 1 or inputs % group or inputs % 2:
        raise ModelError(
            "ondevice::q4_linear needs inputs that are an even multiple of the group",
            expected=f"a multiple of {group}",
            received=inputs,
        )
    outputs = scales.shape[0]
    expect("q4_linear", "x", x, torch.float32, (..., None))
    expect("q4_linear", "packed", packed, torch.uint8, (-(-outputs // PANEL) * PANEL, inputs // 2))
    expect("q4_linear", "scales", scales, torch.float16, (None, inputs // group))
    expect("q4_linear", "mins", mins, torch.float16, (outputs, inputs // group))
    return x.new_empty(*x.shape[:-1], outputs)


def _q4_reference(x: Tensor, packed: Tensor, scales: Tensor, mins: Tensor, group: int) -> Tensor:
    return x @ dequantize_q4(packed, scales, mins, group).T


def _q4_cpu(x: Tensor, packed: Tensor, scales: Tensor, mins: Tensor, group: int) -> Tensor:
    op = native.q4_linear if native.library() else _q4_reference
    return op(x, packed, scales, mins, group)


def _embedding_shape(ids: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    expect("q8_embedding", "ids", ids, torch.int64, (...,))
    expect("q8_embedding", "weight", weight, torch.int8, (None, None))
    expect("q8_embedding", "scales", scales, torch.float32, (weight.shape[0],))
    return ids.new_empty(*ids.shape, weight.shape[1], dtype=torch.float32)


def _embedding_reference(ids: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    return weight[ids].to(torch.float32) * scales[ids].unsqueeze(-1)


def _embedding_cpu(ids: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    if native.library():
        return native.q8_embedding(ids, weight, scales)
    _refuse_outside(ids, weight.shape[0], "a token id")
    return _embedding_reference(ids, weight, scales)


def _loss_shape(hidden: Tensor, weight: Tensor, scales: Tensor | None, labels: Tensor) -> Tensor:
    name, dtype = "linear_cross_entropy", torch.float32
    if scales is not None:
        name, dtype = "q8_linear_cross_entropy", torch.int8
    expect(name, "hidden", hidden, torch.float32, (None, weight.shape[-1]))
    expect(name, "weight", weight, dtype, (None, hidden.shape[-1]))
    expect(name, "labels", labels, torch.int64, (hidden.shape[0],))
    if scales is not None:
        expect(name, "scales", scales, torch.float32, (weight.shape[0],))
    return hidden.new_empty(hidden.shape[0])


def _loss_reference(
    hidden: Tensor, weight: Tensor, scales: Tensor | None, labels: Tensor
) -> Tensor:
    """Over tiles of the vocabulary, so that logits of [N, TILE_ROWS] exist at most."""
    used = labels != IGNORE
    safe = torch.where(used, labels, torch.zeros_like(labels))
    sums = []
    target = torch.zeros_like(hidden[:, 0])
    for low in range(0, weight.shape[0], TILE_ROWS):
        tile = weight[low : low + TILE_ROWS]
        if scales is not None:
            tile = dequantize_q8_rows(tile, scales[low : low + TILE_ROWS])
        logits = hidden @ tile.T
        sums.append(logits.logsumexp(-1))
        offset = safe - low
        inside = (offset >= 0) & (offset < tile.shape[0])
        chosen = logits.gather(1, offset.clamp(0, tile.shape[0] - 1)[:, None])[:, 0]
        target = torch.where(inside, chosen, target)
    losses = torch.stack(sums).logsumexp(0) - target
    return torch.where(used, losses, torch.zeros_like(losses))


def _loss_cpu(hidden: Tensor, weight: Tensor, scales: Tensor | None, labels: Tensor) -> Tensor:
    if native.library():
        return native.linear_cross_entropy(hidden, weight, scales, labels)
    _refuse_outside(labels[labels != IGNORE], weight.shape[0], "a label")
    return _loss_reference(hidden, weight, scales, labels)


def _refuse_outside(values: Tensor, vocabulary: int, what: str) -> None:
    bad = ((values < 0) | (values >= vocabulary)).reshape(-1).nonzero()
    if len(bad):
        native.refuse(int(bad[0]), values, vocabulary, what)


define(
    "q4_linear",
    "Tensor x, Tensor packed, Tensor scales, Tensor mins, int group",
    fake=_q4_shape,
    reference=_q4_reference,
    cpu=_q4_cpu,
    gradient=lambda gradient, packed, scales, mins, group: (
        gradient @ dequantize_q4(packed, scales, mins, group)
    ),
)
define(
    "q8_embedding",
    "Tensor ids, Tensor weight, Tensor scales",
    fake=_embedding_shape,
    reference=_embedding_reference,
    cpu=_embedding_cpu,
)
define(
    "q8_linear_cross_entropy",
    "Tensor hidden, Tensor weight, Tensor scales, Tensor labels",
    fake=_loss_shape,
    reference=_loss_reference,
    cpu=_loss_cpu,
)
define(
    "linear_cross_entropy",
    "Tensor hidden, Tensor weight, Tensor labels",
    fake=lambda hidden, weight, labels: _loss_shape(hidden, weight, None, labels),
    reference=lambda hidden, weight, labels: _loss_reference(hidden, weight, None, labels),
    cpu=lambda hidden, weight, labels: _loss_cpu(hidden, weight, None, labels),
)
