"""Random models in MLX, without files, and the gradients that a way of differentiating gives."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from ondevice.core.dims import ModelDims
from ondevice.methods.mesp.mlx.model import Model
from ondevice.methods.mesp.mlx.settings import NORMS, Rope, Settings
from ondevice.methods.mesp.mlx.weights import Block, Weights

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def dims(**sizes: Any) -> ModelDims:
    """A small model; head_dim is hidden / heads unless given."""
    values = {
        "family": "qwen2", "layers": 2, "hidden": 64, "intermediate": 96, "heads": 4, "kv_heads": 2, "vocab": 50,
        "tied": True, "qkv_bias": True, "rope_theta": 1e4, "norm_eps": 1e-6, "max_positions": 512,
    } | sizes  # fmt: skip
    return ModelDims(**{"head_dim": values["hidden"] // values["heads"], **values})


def matrix(outputs: int, inputs: int, bits: int | None) -> dict[str, Any]:
    weight = mx.random.normal((outputs, inputs)) / inputs**0.5
    if not bits:
        return {"weight": weight}
    return dict(zip(("weight", "scales", "biases"), mx.quantize(weight, group_size=64, bits=bits)))


def random_model(
    sizes: ModelDims, target_modules: tuple[str, ...] = ALL, rank: int = 4, bits: int | None = None, seed: int = 0,
    loss_tiles: int = 3, loss_chunk_tokens: int | None = None, clear: bool = True, **settings: Any,
) -> Model:  # fmt: skip
    """A model whose every part matters: biases and B are not zero."""
    mx.random.seed(seed)
    chosen = Settings(
        sizes,
        target_modules,
        1.5,
        settings.pop("rope", Rope(sizes.rope_theta)),
        bits=bits,
        **settings,
    )
    blocks = []
    for layer in range(sizes.layers):
        arrays = {
            f"{NORMS[place]}.weight": 1 + 0.1 * mx.random.normal((sizes.norm_width(place),))
            for place, _ in sizes.traits.norms
        }
        arrays |= {name: mx.array(values) for name, values in chosen.of_layer(layer).items()}
        for target, (inputs, outputs) in sizes.linear_shapes.items():
            arrays |= {
                f"{target}.{part}": value for part, value in matrix(outputs, inputs, bits).items()
            }
            if sizes.linear_bias(target):
                arrays[f"{target}.bias"] = 0.1 * mx.random.normal((outputs,))
        blocks.append(Block(arrays))
    tables = ("embedding",) if sizes.tied else ("embedding", "head")
    table = {
        f"{n}.{p}": v for n in tables for p, v in matrix(sizes.vocab, sizes.hidden, bits).items()
    }
    final = {"final_norm.weight": 1 + 0.1 * mx.random.normal((sizes.hidden,))}
    weights = Weights(blocks, Block(table), Block(final), tied=sizes.tied, bits=bits)
    model = Model(
        chosen, weights, loss_tiles=loss_tiles, loss_chunk_tokens=loss_chunk_tokens, clear=clear
    )
    for held in model.adapter:
        for target in target_modules:
            inputs, outputs = sizes.linear_shape(target)
            held[f"{target}.A"] = mx.random.normal((rank, inputs)) / inputs**0.5
            held[f"{target}.B"] = 0.1 * mx.random.normal((outputs, rank))
    mx.eval(model.adapter, [block.arrays for block in blocks], table, final)
    return model


def gradients(
    model: Model, how: Any, ids: np.ndarray, labels: np.ndarray
) -> tuple[float, dict[str, np.ndarray]]:
    """Mean loss, and every gradient: `0.q_proj.A`. Each arises once."""
    by_name: dict[str, np.ndarray] = {}

    def on_gradient(layer: int, target: str, a: Any, b: Any) -> None:
        for side, value in (("A", a), ("B", b)):
            assert f"{layer}.{target}.{side}" not in by_name
            assert value.dtype == mx.float32
            by_name[f"{layer}.{target}.{side}"] = np.array(value)

    labelled = int((labels[:, 1:] >= 0).sum())
    return how(model, ids, labels, 1 / labelled, on_gradient) / labelled, by_name


def tokens(rows: int, length: int, vocab: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Ids and labels; prompts of different lengths are not trained on, and rows are padded on the
    right."""
    random = np.random.default_rng(seed)
    ids = random.integers(0, vocab, (rows, length))
    labels = ids.copy()
    for row in range(rows):
        labels[row, : random.integers(0, length)] = -100
        if row:
            end = random.integers(1, length + 1)
            ids[row, end:], labels[row, end:] = 0, -100
    labels[0, -1] = ids[0, -1]
    return ids, labels


def error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Relative, in the Euclidean norm."""
    return float(np.linalg.norm(actual - expected) / max(np.linalg.norm(expected), 1e-12))
