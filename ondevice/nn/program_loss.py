"""A model's frozen weights as an exported graph has them, and the cross-entropy that goes with
them."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ondevice.nn.cross_entropy import tile_bounds
from ondevice.nn.graph_loss import Tile, answer_loss, graph_token_nll, weight_tiles

if TYPE_CHECKING:
    from ondevice.core.config import ExportConfig


def quantize_model(
    family: Any, export: ExportConfig, loss_tiles: int, answers: tuple[int, ...] = ()
) -> Any:
    """Quantise the frozen weights in place.

    Args:
        family: of a float32 model.
        export: `quantize` and `loss`, as `ExportConfig.resolved` gives them.
        loss_tiles: vocabulary tiles of a tiled loss.
        answers: tokens that the loss is over; empty for the whole vocabulary.

    Returns:
        (hidden float32 [N, hidden], labels int64 [N]) to the negative log likelihood, float32 [N].
    """
    tiles = loss_tiles if export.loss == "tiled" else 1
    if export.quantize == "q4":
        from ondevice.nn.quantized import quantize_q4_model

        head = quantize_q4_model(family)
        if answers:
            some = list(answers)
            rows = head.get_buffer("weight")[some].float() * head.get_buffer("scales")[some, None]
            return answer_loss(rows, range(len(answers)), answers)
        if export.loss == "op":
            return head.token_nll
        return graph_token_nll(_q8_tiles(head, tiles))
    if answers:  # so few rows of the head stay as they are, also if the body is rounded
        loss = answer_loss(family.head_weight, answers)
        if export.quantize == "8da4w":
            _quantize_8da4w(family, tiles)
        return loss
    if export.quantize == "8da4w":
        return graph_token_nll(_quantize_8da4w(family, tiles))
    if export.loss == "op":
        weight = family.head_weight
        return lambda hidden, labels: torch.ops.ondevice.linear_cross_entropy(
            hidden, weight, labels
        )
    return graph_token_nll(weight_tiles(family.head_weight, tiles))


def _q8_tiles(head: Any, tiles: int) -> list[Tile]:
    def tile(low: int, high: int) -> Tile:
        def logits(hidden: Tensor) -> Tensor:
            weight = head.weight[low:high].to(torch.float32) * head.scales[low:high, None]
            return nn.functional.linear(hidden, weight)

        return low, logits

    return [tile(low, high) for low, high in tile_bounds(head.weight.shape[0], tiles)]


def _quantize_8da4w(family: Any, tiles: int) -> list[Tile]:
    """Torchao's 8da4w on every linear and on the head's tiles, int8 on the embedding; XNNPACK runs
    them."""
    from torchao.quantization import quantize_
    from torchao.quantization.granularity import PerAxis, PerGroup
    from torchao.quantization.quant_api import (
        Int8DynamicActivationIntxWeightConfig,
        IntxWeightOnlyConfig,
    )

    head = family.head_weight.detach().clone()
    heads: list[tuple[int, nn.Linear]] = []
    for low, high in tile_bounds(head.shape[0], tiles):
        linear = nn.Linear(head.shape[1], high - low, bias=False)
        linear.weight = nn.Parameter(head[low:high].clone(), requires_grad=False)
        heads.append((low, linear))
    container = nn.ModuleList([linear for _, linear in heads])
    family.embedding.padding_idx = None
    linears = Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4,  # pyright: ignore[reportAttributeAccessIssue]
        weight_granularity=PerGroup(32),
    )
    embeddings = IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0))
    body = family.model.get_decoder()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize_(body, embeddings, lambda module, name: isinstance(module, nn.Embedding))
        quantize_(body, linears, lambda module, name: isinstance(module, nn.Linear))
        quantize_(container, linears)
    family.model.head_tiles = container
    return [(low, container[i]) for i, (low, _) in enumerate(heads)]
