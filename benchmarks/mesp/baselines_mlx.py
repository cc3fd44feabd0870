"""The same gradients by automatic differentiation: plain, with a checkpoint a block, or block by
block (MeBP); and MeZO's, in MLX. With mesp's own loss, weights and clearing, for benchmarks and
tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from ondevice.methods.mesp.mlx import instructions
from ondevice.methods.mesp.mlx.mixers import Instruction, Operand
from ondevice.methods.mesp.mlx.model import Interpreter, Model, OnGradient, label_tokens
from ondevice.methods.mesp.mlx.stages import Arrays, Stages
from ondevice.runtime_ops import mlx_ops


class PlainStages(Stages):
    """The stages as one writes them for automatic differentiation: MLX's own attention, nothing in
    tiles."""

    def __init__(self, model: Model) -> None:
        super().__init__(replace(model.settings, mlp_tiles=1, query_chunk_tokens=1 << 30))

    def product(self, x: Any, a: Arrays, name: str) -> Any:
        """A matrix that is made dense is made so again for the gradient, not kept."""
        if self.settings.product == "quantized" or f"{name}.scales" not in a:
            return super().product(x, a, name)
        parts = {key: a[key] for key in a if key.startswith(f"{name}.")}
        forward = super().product

        @mx.custom_function
        def product(x: Any) -> Any:
            return forward(x, parts, name)

        @product.vjp
        def gradient(x: Any, g: Any, _: Any) -> Any:
            return mx.vjp(lambda x: forward(x, parts, name), [x], [g])[1][0]

        return product(x)

    def attend(self, a: Arrays) -> Arrays:
        q, mask = a["q"], "causal"
        if "window.weight" in a:
            behind = mx.arange(q.shape[2])[:, None] - mx.arange(q.shape[2])[None]
            mask = (behind >= 0) & (behind < a["window.weight"])
        o = mx.fast.scaled_dot_product_attention(
            q, a["k"], a["v"], scale=self.score_scale, mask=mask
        )
        return {"o": o.transpose(0, 2, 1, 3).reshape(q.shape[0], q.shape[2], -1)}

    def loss_tile(self, a: Arrays) -> Arrays:
        """Not before the tile in front of it: a graph has no other order."""
        a["hn"] = mx.depends([a["hn"]], [a["total"]])[0]
        return super().loss_tile(a)

    def loss_tile_backward(self, a: Arrays) -> Arrays:
        a["hn"] = mx.depends([a["hn"]], [a["gh"]])[0]
        return super().loss_tile_backward(a)


def _unevaluated(listed: list[Instruction]) -> list[Instruction]:
    """The same, computed in one graph with what comes before and after."""
    return [replace(one, evaluate=False) for one in listed]


def block_of(model: Model) -> Callable[..., Any]:
    """(layer, adapter, x) -> the next x, nothing evaluated."""
    stages = PlainStages(model)
    interpreter = Interpreter(stages)

    def block(layer: int, adapter: dict[str, Any], x: Any) -> Any:
        listed = _unevaluated(instructions.of("forward", stages.settings, [], x.shape[1]))
        return interpreter.run(listed, {"x": x}, model.weights.blocks[layer], adapter)["x"]

    return block


def blockwise(
    model: Model, ids: np.ndarray, labels: np.ndarray, scale: float, on_gradient: OnGradient
) -> float:
    """Block by block: forward without a graph, then each block's own vector-Jacobian product,
    computed and dropped."""
    block, inputs = block_of(model), [model.embed(ids)]
    for layer in range(model.layers):
        model.weights.announce(layer + 1)
        inputs.append(block(layer, model.adapter[layer], inputs[-1]))
        mx.eval(inputs[-1])
        if model.interpreter.clear:
            mx.clear_cache()
    loss, g = model.loss(inputs.pop(), labels, scale)
    if g is None:
        return 0.0
    for layer in reversed(range(model.layers)):
        model.weights.announce(layer - 1)
        names = list(model.adapter[layer])

        def run(x: Any, *values: Any, layer: int = layer, names: list[str] = names) -> Any:
            return block(layer, dict(zip(names, values)), x)

        primals = [inputs.pop(), *(model.adapter[layer][name] for name in names)]
        _, derivatives = mx.vjp(run, primals, [g])
        g, *gradients = derivatives
        mx.eval(derivatives)
        del primals, derivatives
        _give(layer, dict(zip(names, gradients)), on_gradient)
        del gradients
        if model.interpreter.clear:
            mx.clear_cache()
    return loss


def autodiff(
    model: Model, ids: np.ndarray, labels: np.ndarray, scale: float, on_gradient: OnGradient
) -> float:
    """One graph of the whole step."""
    return whole(model, ids, labels, scale, on_gradient, checkpointed=False)


def checkpoint(
    model: Model, ids: np.ndarray, labels: np.ndarray, scale: float, on_gradient: OnGradient
) -> float:
    """One graph, in which each block is computed again for its gradient (`mx.checkpoint`)."""
    return whole(model, ids, labels, scale, on_gradient, checkpointed=True)


def whole(
    model: Model, ids: np.ndarray, labels: np.ndarray, scale: float, on_gradient: OnGradient, *, checkpointed: bool,
    tiled: bool = True,
) -> float:  # fmt: skip
    """`mx.value_and_grad` of the step's loss; with `tiled` the cross-entropy is this method's, else
    all logits."""
    places, wanted = label_tokens(labels)
    if not len(places):
        return 0.0
    block, x = block_of(model), model.embed(ids)
    run = [mx.checkpoint(lambda a, x, i=i: block(i, a, x)) if checkpointed else lambda a, x, i=i: block(i, a, x)
           for i in range(model.layers)]  # fmt: skip
    nll = _tiled_nll(model, wanted) if tiled else _plain_nll(model, wanted)

    def loss(adapter: list[dict[str, Any]]) -> Any:
        h = x
        for layer in range(model.layers):
            h = run[layer](adapter[layer], h)
        hn = mx.fast.rms_norm(
            h, model.weights.final.get(Operand("final_norm.weight")), model.settings.dims.norm_eps
        )
        return mx.sum(nll(hn.reshape(-1, hn.shape[-1])[mx.array(places)])) * scale

    value, derivatives = mx.value_and_grad(loss)(model.adapter)
    mx.eval(value, derivatives)
    for layer in reversed(range(model.layers)):
        _give(layer, derivatives[layer], on_gradient)
        derivatives[layer] = {}
    return float(value) / scale


def _plain_nll(model: Model, wanted: np.ndarray) -> Callable[[Any], Any]:
    stages, head, labels = PlainStages(model), model.weights.table, mx.array(wanted)

    def nll(hn: Any) -> Any:
        parts = {f"head.{part}": head.get(Operand(f"head.{part}")) for part in model.weights.parts}
        logits = stages.product(hn, parts, "head").astype(mx.float32)
        return (
            mx.logsumexp(logits, axis=-1)
            - mx.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
        )

    return nll


def _tiled_nll(model: Model, wanted: np.ndarray) -> Callable[[Any], Any]:
    """The cross-entropy in tiles, whose gradient is computed next to it."""
    stages, weights = PlainStages(model), model.weights
    interpreter, rows = Interpreter(stages), weights.rows("head", wanted)

    @mx.custom_function
    def nll(hn: Any) -> Any:
        listed = _unevaluated(instructions.of("loss_only", stages.settings, model.tiles))
        return interpreter.run(listed, {"hn": hn, **rows}, weights.table, {})["nll"]

    @nll.vjp
    def gradient(hn: Any, cotangent: Any, _: Any) -> Any:
        listed = _unevaluated(instructions.of("loss", stages.settings, model.tiles))
        given = {"hn": mx.depends([hn], [cotangent])[0], "weight": cotangent, **rows}
        return interpreter.run(listed, given, weights.table, {})["gh"].astype(hn.dtype)

    return nll


def _give(layer: int, derivatives: dict[str, Any], on_gradient: OnGradient) -> None:
    for name in [name for name in derivatives if name.endswith(".A")]:
        target = name.removesuffix(".A")
        on_gradient(layer, target, derivatives.pop(name), derivatives.pop(f"{target}.B"))


def mezo(
    model: Model,
    ids: np.ndarray,
    labels: np.ndarray,
    seed: int,
    step: int,
    scale: float,
    learning_rate: float,
) -> float:
    """One MeZO step on A and B, layer by layer: two forward passes, noise made again wherever it is
    needed."""

    def move(factor: float) -> None:
        for layer, held in enumerate(model.adapter):
            for number, name in enumerate(sorted(held)):
                z = mlx_ops.normal(seed, step, layer * len(held) + number, 1, 0, held[name].size)
                held[name] = held[name] + factor * z.reshape(held[name].shape)
                mx.eval(held[name])

    losses = []
    for factor in (scale, -2 * scale):
        move(factor)
        nll, count = model.row_nll(ids, labels)
        losses.append(float(nll.sum() / count.sum()))
    move(scale - learning_rate * (losses[0] - losses[1]) / (2 * scale))
    return sum(losses) / 2
