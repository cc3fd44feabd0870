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
from ondevice.methods.mesp.mlx.settings import Settings, bounds
from ondevice.methods.mesp.mlx.stages import Stages
from ondevice.methods.mesp.mlx.weights import Weights, select

Update = Callable[[str, Any, Any], None]
"""Takes the target, and the gradients of A [rank, inputs] and of B [outputs, rank]."""
OnGradient = Callable[[int, str, Any, Any], None]
"""Takes layer, target, and the gradients of A and of B: uses them and keeps nothing."""


class Functions(Protocol):
    """The stages: Python's, or those of an artifact."""

    def call(self, stage: str, arrays: dict[str, Any]) -> dict[str, Any]:
        """Return the outputs of `stage` by name."""
        ...


class BlockWeights(Protocol):
    """One block's frozen arrays by their names in the instructions."""

    def get(self, operand: Operand) -> Any:
        """Return an array or a range of it; read from its file if it is streamed."""
        ...

    def drop(self, name: str) -> None:
        """Drop it: nothing uses it in this pass any more."""
        ...


class Interpreter:
    """Runs instructions: gives each stage its arrays, computes where they say so, and drops what is
    dead.

    Args:
        functions: the stages.
        clear: give back what MLX's allocator keeps after every evaluation.
    """

    def __init__(self, functions: Functions, *, clear: bool = True) -> None:
        self.functions, self.clear = functions, clear

    def run(
        self,
        instructions: list[Instruction],
        inputs: dict[str, Any],
        weights: BlockWeights,
        adapter: Mapping[str, Any],
        update: Update | None = None,
    ) -> dict[str, Any]:
        """Run `instructions` over one block.

        Args:
            inputs: the arrays that they begin with; taken over and emptied.
            adapter: A and B by target: `q_proj.A`.
            update: called with the gradients of each A and B.

        Returns:
            What they leave.
        """
        live, pending = inputs, []
        for instruction in instructions:
            if instruction.stage == "update":
                gradients = (live.pop(instruction.inputs[side].name) for side in ("dA", "dB"))
                if update is not None:
                    update(instruction.outputs["target"], *gradients)
                continue
            arrays = {
                name: _find(operand, live, weights, adapter)
                for name, operand in instruction.inputs.items()
            }
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


def _find(
    operand: Operand, live: dict[str, Any], weights: BlockWeights, adapter: Mapping[str, Any]
) -> Any:
    arrays = live if operand.name in live else adapter if operand.name in adapter else None
    return weights.get(operand) if arrays is None else select(arrays[operand.name], operand)


class Model:
    """A frozen model with its A and B: embedding, blocks one after the other, loss, and the way
    back.

    Args:
        settings: the run's shape.
        weights: frozen.
        loss_tiles: of the vocabulary.
        loss_chunk_tokens: labelled tokens whose logits exist at once; None is all.
        functions: the stages, if not Python's.
        written: an artifact's instructions by name and length; else they follow from `settings`.
        fixed_chunks: pad each chunk of labelled tokens to `loss_chunk_tokens`.
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
        self.settings, self.weights, self.written = settings, weights, written
        self.interpreter = Interpreter(functions or stages_of(settings), clear=clear)
        self.tiles = bounds(settings.dims.vocab, loss_tiles)
        self.chunk_tokens, self.fixed_chunks = loss_chunk_tokens, fixed_chunks
        self.adapter: list[dict[str, Any]] = [{} for _ in range(settings.dims.layers)]

    @property
    def layers(self) -> int:
        return self.settings.dims.layers

    def listed(self, name: str, length_tokens: int = 0) -> list[Instruction]:
        """Return the instructions of that name, for sequences of that length."""
        if self.written is not None:
            return self.written[name, length_tokens]
        return instructions.of(name, self.settings, self.tiles, length_tokens)

    def embed(self, ids: np.ndarray) -> Any:
        """Embed tokens: int64 [B, T] -> x [B, T, D]."""
        rows = self.weights.embedding_rows(ids.reshape(-1))
        x = self.interpreter.run(self.listed("embed"), rows, self.weights.table, {})["x"]
        return x.reshape(*ids.shape, -1)

    def forward(self, layer: int, x: Any) -> Any:
        """Run one block; `x` may be kept."""
        self.weights.announce(layer + 1)
        listed = self.listed("forward", x.shape[1])
        return self.interpreter.run(
            listed, {"x": x}, self.weights.blocks[layer], self.adapter[layer]
        )["x"]

    def backward(self, layer: int, x: Any, g: Any, on_gradient: OnGradient) -> Any:
        """Return the gradient of a block's input from that of its output; those of A and B are
        called back."""
        self.weights.announce(layer - 1)
        listed = self.listed("backward", x.shape[1])
        inputs = {"x": x, "g": g}
        del x, g
        run = self.interpreter.run(
            listed,
            inputs,
            self.weights.blocks[layer],
            self.adapter[layer],
            lambda t, a, b: on_gradient(layer, t, a, b),
        )
        return run["g"]

    def forward_backward(
        self, ids: np.ndarray, labels: np.ndarray, labelled: int, on_gradient: OnGradient
    ) -> float:
        """Return the summed loss of some rows; the gradients of (sum / `labelled`) are called back,
        last block first."""
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
        """Return the summed loss, and the gradient of x for (sum / `labelled`); None if no token
        is labelled."""
        where, wanted = targets(labels)
        if not len(where):
            return 0.0, None
        hn = self._final_norm(x)
        ghn, total = mx.zeros(hn.shape, dtype=mx.float32), 0.0
        for low, high in self._chunks(len(where)):
            place, inputs = self._gather(hn, where[low:high])
            inputs["weight"] = mx.where(mx.arange(place.size) < high - low, 1 / labelled, 0.0)
            outputs = self._loss(inputs, wanted[low:high], gradient=True)
            rows = {"ghn": ghn, "place": place, "gh": outputs.pop("gh")}
            ghn = self.interpreter.functions.call("scatter_rows", rows)["ghn"]
            mx.eval(ghn)
            total += float(mx.sum(outputs.pop("nll")[: high - low]))
            del inputs, rows
        del hn
        inputs = {"x": x, "ghn": ghn.reshape(x.shape)}
        del ghn, x
        listed = self.listed("final_norm_backward")
        return total, self.interpreter.run(listed, inputs, self.weights.final, {})["g"]

    def row_nll(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return each row's negative log likelihood float32 [rows], and labelled tokens int64
        [rows]."""
        x = self.embed(ids)
        for layer in range(self.layers):
            x = self.forward(layer, x)
        return self.row_nll_of(x, labels)

    def row_nll_of(self, x: Any, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return `row_nll` from the last block's output."""
        where, wanted = targets(labels)
        rows, count = where // labels.shape[1], len(labels)
        sums = np.zeros(count, dtype=np.float64)
        if len(where):
            hn = self._final_norm(x)
            for low, high in self._chunks(len(where)):
                outputs = self._loss(
                    self._gather(hn, where[low:high])[1], wanted[low:high], gradient=False
                )
                nll = np.array(outputs["nll"], dtype=np.float64)[: high - low]
                sums += np.bincount(rows[low:high], nll, count)
        return sums.astype(np.float32), np.bincount(rows, minlength=count).astype(np.int64)

    def _final_norm(self, x: Any) -> Any:
        hn = self.interpreter.run(self.listed("final_norm"), {"x": x}, self.weights.final, {})["hn"]
        return hn.reshape(-1, hn.shape[-1])

    def _gather(self, hn: Any, where: np.ndarray) -> tuple[Any, dict[str, Any]]:
        """Places of some labelled tokens, int32, and their hidden states."""
        place = mx.array(self._padded(where))
        return place, self.interpreter.functions.call("gather_rows", {"all": hn, "place": place})

    def _padded(self, values: np.ndarray) -> np.ndarray:
        """With zeros behind, if every chunk has the same size."""
        if not self.fixed_chunks or self.chunk_tokens is None:
            return values
        return np.pad(values, (0, self.chunk_tokens - len(values)))

    def _loss(self, inputs: dict[str, Any], wanted: np.ndarray, gradient: bool) -> dict[str, Any]:
        mx.eval(inputs)
        inputs |= self.weights.head_rows(self._padded(wanted))
        listed = self.listed("loss" if gradient else "loss_only")
        return self.interpreter.run(listed, inputs, self.weights.head, {})

    def _chunks(self, count: int) -> list[tuple[int, int]]:
        size = self.chunk_tokens or count
        return [(low, min(low + size, count)) for low in range(0, count, size)]


def stages_of(settings: Settings) -> Stages:
    """Return the stages of such a model."""
    return MixtureStages(settings) if settings.active_experts else Stages(settings)


def targets(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return places in the flattened batch whose next token is labelled, int32 [n], and these
    labels, int64 [n]."""
    following = np.full_like(labels, -100)
    following[:, :-1] = labels[:, 1:]
    where = np.flatnonzero(following >= 0)
    return where.astype(np.int32), following.reshape(-1)[where]
