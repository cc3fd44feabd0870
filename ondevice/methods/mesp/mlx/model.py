"""A frozen model with its A and B: the interpreter of a block's instructions, the stages before and
after the blocks, and a batch's way through all of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ondevice.methods.mesp.mlx import instructions
from ondevice.methods.mesp.mlx.instructions import Instruction, Operand
from ondevice.methods.mesp.mlx.mixture import MixtureStages
from ondevice.methods.mesp.mlx.settings import Settings, bounds, ranges
from ondevice.methods.mesp.mlx.stages import Stages
from ondevice.methods.mesp.mlx.weights import Block, Weights, select

Update = Callable[[str, Any, Any], None]
"""Takes the target, and the gradients of A [rank, inputs] and of B [outputs, rank]."""
OnGradient = Callable[[int, str, Any, Any], None]
"""Takes layer, target, and the gradients of A and of B: uses them and keeps nothing."""


class Functions(Protocol):
    """The stages: Python's, or those of an artifact."""

    def call(self, stage: str, arrays: dict[str, Any]) -> dict[str, Any]:
        """Return the outputs of `stage` by name."""
        ...


class Interpreter:
    """Runs instructions: gives each stage its arrays, computes when they say so, and drops what is
    dead.

    Args:
        functions: the stages.
        clear: give back what MLX's allocator keeps after every evaluation.
    """

    def __init__(self, functions: Functions, *, clear: bool = True) -> None:
        self.functions = functions
        self.clear = clear

    def run(
        self,
        instructions: list[Instruction],
        inputs: dict[str, Any],
        weights: Block,
        adapter: Mapping[str, Any],
        update: Update | None = None,
    ) -> dict[str, Any]:
        """Run `instructions` over one block and return the arrays that they leave.

        Args:
            inputs: the arrays that they begin with; taken over and emptied.
            weights: the block's frozen arrays.
            adapter: A and B by target: `q_proj.A`.
            update: called with the gradients of each A and B.
        """
        live = inputs
        pending: list[str] = []

        def find(operand: Operand) -> Any:
            for arrays in (live, adapter):
                if operand.name in arrays:
                    return select(arrays[operand.name], operand)
            return weights.get(operand)

        for instruction in instructions:
            if instruction.stage == "update":
                gradients = (live.pop(instruction.inputs[side].name) for side in ("dA", "dB"))
                if update is not None:
                    update(instruction.outputs["target"], *gradients)
                continue
            arrays = {name: find(operand) for name, operand in instruction.inputs.items()}
            outputs = self.functions.call(instruction.stage, arrays)
            arrays.clear()
            live.update({name: outputs.pop(output) for output, name in instruction.outputs.items()})
            outputs.clear()
            pending += instruction.outputs.values()
            for name in instruction.free:
                if live.pop(name, None) is None:
                    weights.drop(name)
            if instruction.evaluate:
                mx.eval([live[name] for name in pending if name in live])
                pending = []
                if self.clear:
                    mx.clear_cache()
        return live


class Model:
    """A frozen model with its A and B: embedding, blocks one after the other, loss, and the way
    back.

    Args:
        settings: the run's shape.
        weights: frozen.
        loss_tiles: of the vocabulary.
        loss_chunk_tokens: label tokens whose logits exist at once; None is all.
        functions: the stages, if not Python's.
        written: an artifact's instructions by name and length; else they follow from `settings`.
        fixed_chunks: pad each chunk of label tokens to `loss_chunk_tokens`.
        clear: give back what MLX's allocator keeps after every evaluation.

    Attributes:
        adapter: A and B of each layer by target: `q_proj.A`, float32.
    """

    def __init__(
        self,
        settings: Settings,
        weights: Weights,
        *,
        loss_tiles: int = 8,
        loss_chunk_tokens: int | None = None,
        functions: Functions | None = None,
        written: dict[tuple[str, int], list[Instruction]] | None = None,
        fixed_chunks: bool = False,
        clear: bool = True,
    ) -> None:
        self.settings = settings
        self.weights = weights
        self.written = written
        stages = MixtureStages if settings.active_experts else Stages
        self.interpreter = Interpreter(functions or stages(settings), clear=clear)
        self.tiles = bounds(settings.dims.vocab, loss_tiles)
        self.chunk_tokens = loss_chunk_tokens
        self.fixed_chunks = fixed_chunks
        self.layers = len(weights.blocks)
        self.adapter: list[dict[str, Any]] = [{} for _ in range(self.layers)]

    def listed(self, name: str, length_tokens: int = 0) -> list[Instruction]:
        """Return the instructions of that name, for sequences of that length."""
        if self.written is not None:
            return self.written[name, length_tokens]
        return instructions.of(name, self.settings, self.tiles, length_tokens)

    def _run(self, name: str, inputs: dict[str, Any], weights: Block) -> dict[str, Any]:
        return self.interpreter.run(self.listed(name), inputs, weights, {})

    def embed(self, ids: np.ndarray) -> Any:
        """Embed tokens: int64 [B, T] -> x [B, T, D]."""
        rows = self.weights.rows("embedding", ids.reshape(-1))
        return self._run("embed", rows, self.weights.table)["x"].reshape(*ids.shape, -1)

    def forward(self, layer: int, x: Any) -> Any:
        """Run one block; `x` may be kept."""
        self.weights.announce(layer + 1)
        listed = self.listed("forward", x.shape[1])
        block = self.weights.blocks[layer]
        return self.interpreter.run(listed, {"x": x}, block, self.adapter[layer])["x"]

    def backward(self, layer: int, x: Any, g: Any, on_gradient: OnGradient) -> Any:
        """Return the gradient of a block's input from that of its output; those of A and B are
        called back."""
        self.weights.announce(layer - 1)
        listed = self.listed("backward", x.shape[1])
        block = self.weights.blocks[layer]
        inputs = {"x": x, "g": g}
        del x, g

        def update(target: str, a: Any, b: Any) -> None:
            on_gradient(layer, target, a, b)

        return self.interpreter.run(listed, inputs, block, self.adapter[layer], update)["g"]

    def forward_backward(
        self, ids: np.ndarray, labels: np.ndarray, labelled: int, on_gradient: OnGradient
    ) -> float:
        """Return the summed loss, with the gradients of (sum / `labelled`) called back, last layer
        first."""
        inputs = [self.embed(ids)]
        for layer in range(self.layers):
            inputs.append(self.forward(layer, inputs[-1]))
        loss, g = self.loss(inputs.pop(), labels, labelled)
        if g is None:
            return 0.0
        for layer in reversed(range(self.layers)):
            g = self.backward(layer, inputs.pop(), g, on_gradient)
        return loss

    def loss(self, x: Any, labels: np.ndarray, labelled: int) -> tuple[float, Any]:
        """Return the summed loss, and the gradient of x for (sum / `labelled`); None if there is no
        label token."""
        places, targets = label_tokens(labels)
        if not len(places):
            return 0.0, None
        hn = self._final_norm(x)
        ghn = mx.zeros(hn.shape, dtype=mx.float32)
        total = 0.0
        for low, high in self._chunks(len(places)):
            place, inputs = self._gather(hn, places[low:high])
            inputs["weight"] = mx.where(mx.arange(place.size) < high - low, 1 / labelled, 0.0)
            outputs = self._loss("loss", inputs, targets[low:high])
            rows = {"ghn": ghn, "place": place, "gh": outputs.pop("gh")}
            ghn = self.interpreter.functions.call("scatter_rows", rows)["ghn"]
            mx.eval(ghn)
            total += float(mx.sum(outputs.pop("nll")[: high - low]))
            del inputs, rows
        del hn
        inputs = {"x": x, "ghn": ghn.reshape(x.shape)}
        del ghn, x
        return total, self._run("final_norm_backward", inputs, self.weights.final)["g"]

    def row_nll(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return each row's negative log likelihood float32 [rows], and label tokens int64
        [rows]."""
        x = self.embed(ids)
        for layer in range(self.layers):
            x = self.forward(layer, x)
        places, targets = label_tokens(labels)
        rows = places // labels.shape[1]
        count = len(labels)
        sums = np.zeros(count, dtype=np.float64)
        if len(places):
            hn = self._final_norm(x)
            for low, high in self._chunks(len(places)):
                _, inputs = self._gather(hn, places[low:high])
                outputs = self._loss("loss_only", inputs, targets[low:high])
                nll = np.array(outputs["nll"], dtype=np.float64)[: high - low]
                sums += np.bincount(rows[low:high], nll, count)
        return sums.astype(np.float32), np.bincount(rows, minlength=count).astype(np.int64)

    def _final_norm(self, x: Any) -> Any:
        hn = self._run("final_norm", {"x": x}, self.weights.final)["hn"]
        return hn.reshape(-1, hn.shape[-1])

    def _gather(self, hn: Any, places: np.ndarray) -> tuple[Any, dict[str, Any]]:
        """Return the places of some label tokens, int32, and their hidden states."""
        place = mx.array(self._padded(places))
        return place, self.interpreter.functions.call("gather_rows", {"all": hn, "place": place})

    def _padded(self, values: np.ndarray) -> np.ndarray:
        """Return `values` with zeros behind, if every chunk has the same size."""
        if not self.fixed_chunks or self.chunk_tokens is None:
            return values
        return np.pad(values, (0, self.chunk_tokens - len(values)))

    def _loss(self, name: str, inputs: dict[str, Any], targets: np.ndarray) -> dict[str, Any]:
        mx.eval(inputs)
        inputs |= self.weights.rows("head", self._padded(targets))
        return self._run(name, inputs, self.weights.table)

    def _chunks(self, count: int) -> list[tuple[int, int]]:
        return ranges(count, self.chunk_tokens or count)


def label_tokens(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return places in the flattened batch whose next token is a label token, int32 [n], and these
    tokens, int64 [n]."""
    following = np.full_like(labels, -100)
    following[:, :-1] = labels[:, 1:]
    places = np.flatnonzero(following >= 0)
    return places.astype(np.int32), following.reshape(-1)[places]
