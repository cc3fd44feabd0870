"""From a loaded model and an export's settings to the program that is exported, and that eager runs as reference."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ondevice.exporters.base import ExportConfig
from ondevice.methods.prge.layout import AdapterLayout
from ondevice.methods.prge.torch import PrgeProgram
from ondevice.nn.cross_entropy import tile_bounds
from ondevice.nn.graph_loss import Tile, graph_token_nll, weight_tiles
from ondevice.runtime_ops import graph

if TYPE_CHECKING:
    from ondevice.methods.prge.config import PrgeConfig
    from ondevice.models import LoadedModel


@dataclass(frozen=True)
class Lowering:
    """How noise and loss are lowered, once `auto` is settled."""

    generator: str
    loss: str


def settle(config: ExportConfig) -> Lowering:
    """Decide the `auto` settings: a program that needs our ops anyway uses all of them; else none."""
    generator = config.generator if config.generator != "auto" else ("op" if config.quantize == "q4" else "aten")
    loss = config.loss
    if loss == "auto":
        loss = "op" if config.quantize == "q4" else "tiled"
    return Lowering(generator, loss)


def author(loaded: LoadedModel, method: PrgeConfig, config: ExportConfig, seed: int) -> PrgeProgram:
    """The program to export. Changes `loaded.model` in place (adapters, quantised weights).

    Args:
        loaded: a float32 model.
        method: P-RGE's settings.
        config: the export's settings.
        seed: draws the frozen A.
    """
    family, lowering = loaded.family, settle(config)
    token_loss = _quantize(family, method, config, lowering)
    layout = AdapterLayout.build(family.dims, method, seed)
    program = PrgeProgram(family, layout, method, noise_op(method, lowering.generator), token_loss=token_loss)
    program.use_explicit_masks(config.lengths_tokens)
    return program


def noise_op(method: PrgeConfig, generator: str) -> Any:
    """The generator in the lowering asked for."""
    if generator == "aten":
        return graph.aten_normal if method.noise == "gaussian" else graph.aten_rademacher
    from ondevice.runtime_ops import torch_ops

    torch_ops.register()
    return torch.ops.ondevice.normal if method.noise == "gaussian" else torch.ops.ondevice.rademacher


def _quantize(family: Any, method: PrgeConfig, config: ExportConfig, lowering: Lowering) -> Any:
    """Quantise the frozen weights in place and return the loss that goes with them."""
    tiles = method.loss_tiles if lowering.loss == "tiled" else 1
    if config.quantize == "q4":
        from ondevice.nn.quantized import quantize_q4_model

        head = quantize_q4_model(family)
        if lowering.loss == "op":
            return head.token_nll
        return graph_token_nll(_q8_tiles(head, tiles))
    if config.quantize == "8da4w":
        return graph_token_nll(_quantize_8da4w(family, tiles))
    if lowering.loss == "op":
        weight = family.head_weight
        return lambda hidden, labels: torch.ops.ondevice.linear_cross_entropy(hidden, weight, labels)
    return graph_token_nll(weight_tiles(family.head_weight, tiles))


def _q8_tiles(head: Any, tiles: int) -> list[Tile]:
    def tile(low: int, high: int) -> Tile:
        def logits(hidden: Tensor) -> Tensor:
            weight = head.weight[low:high].to(torch.float32) * head.scales[low:high, None]
            return nn.functional.linear(hidden, weight)

        return low, logits

    return [tile(low, high) for low, high in tile_bounds(head.weight.shape[0], tiles)]


def _quantize_8da4w(family: Any, tiles: int) -> list[Tile]:
    """Torchao's 8da4w on every linear and on the head's tiles, int8 on the embedding; XNNPACK runs them."""
    from torchao.quantization import quantize_
    from torchao.quantization.granularity import PerAxis, PerGroup
    from torchao.quantization.quant_api import Int8DynamicActivationIntxWeightConfig, IntxWeightOnlyConfig

    head = family.head_weight.detach().clone()
    heads: list[tuple[int, nn.Linear]] = []
    for low, high in tile_bounds(head.shape[0], tiles):
        linear = nn.Linear(head.shape[1], high - low, bias=False)
        linear.weight = nn.Parameter(head[low:high].clone(), requires_grad=False)
        heads.append((low, linear))
    container = nn.ModuleList([linear for _, linear in heads])
    family.embedding.padding_idx = None
    linears = Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=PerGroup(32))  # pyright: ignore[reportAttributeAccessIssue]
    embeddings = IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=PerAxis(0))
    body = family.model.get_decoder()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize_(body, embeddings, lambda module, name: isinstance(module, nn.Embedding))
        quantize_(body, linears, lambda module, name: isinstance(module, nn.Linear))
        quantize_(container, linears)
    family.model.head_tiles = container
    return [(low, container[i]) for i, (low, _) in enumerate(heads)]
