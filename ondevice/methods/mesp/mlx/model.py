"""A frozen model with its A and B: the interpreter of a block's instructions, the stages before and
after the blocks, and a batch's way through all of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ondevice.methods.mesp.mlx import instructions
from ondevice.methods.mesp.mlx.mixers import Instruction, Operand
from ondevice.methods.mesp.mlx.mixture import MixtureStages
from ondevice.methods.mesp.mlx.recurrent import RecurrentStages
from ondevice.methods.mesp.mlx.settings import Settings, bounds, ranges
from ondevice.methods.mesp.mlx.stages import Stages
from ondevice.methods.mesp.mlx.weights import Block, Weights, select

Update = Callable[[str, Any, Any], None]
"""Takes the target, and the gradients of A [rank, inputs] and of B [outputs, rank]."""
Scale = float | np.ndarray | Callable[[np.ndarray], np.ndarray]
"""Of the rows' gradients: one for all, one each, or a function of the rows' losses to them."""
Branches = tuple[np.ndarray, np.ndarray]
"""See `branch_rows`."""
OnGradient = Callable[[int, str, Any, Any], None]
"""Takes layer, target, and the gradients of A and of B: uses them and keeps nothing."""


class Functions(Protocol):
    """The stages: Python's, or those of an artifact."""

    def call(self, stage: str, arrays: dict[str, Any]) -> dict[str, Any]:
        """Return the outputs of `stage` by name."""
        ...


def own_stages(settings: Settings) -> Stages:
    """Return Python's stages of a run."""
    stages = MixtureStages if settings.active_experts else RecurrentStages
    return stages(settings)


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
        written: an artifact's instructions by name, length and kind of block; else they follow from
            `settings`.
        kinds: of each layer, the kind of its block in `written`.
        fixed_chunks: pad each chunk of label tokens to `loss_chunk_tokens`.
        clear: give back what MLX's allocator keeps after every evaluation.

    Attributes:
        adapter: A and B of each layer by target: `q_proj.A`, float32.
        ids, embedded: of the pass that runs, if layers have inputs of their own.
        shared: of the pass, by layer, keys and values that later layers read, and the sums of their
            gradients.
    """

    def __init__(
        self,
        settings: Settings,
        weights: Weights,
        *,
        loss_tiles: int = 8,
        loss_chunk_tokens: int | None = None,
        functions: Functions | None = None,
        written: dict[tuple[str, int, int], list[Instruction]] | None = None,
        kinds: Sequence[int] = (),
        fixed_chunks: bool = False,
        clear: bool = True,
    ) -> None:
        self.settings = settings
        self.weights = weights
        self.written = written
        self.kinds = kinds
        self.interpreter = Interpreter(functions or own_stages(settings), clear=clear)
        self.tiles = bounds(settings.dims.vocab, loss_tiles)
        self.chunk_tokens = loss_chunk_tokens
        self.fixed_chunks = fixed_chunks
        self.layers = len(weights.blocks)
        self.adapter: list[dict[str, Any]] = [{} for _ in range(self.layers)]
        self.ids: Any = None
        self.embedded: Any = None
        self.shared: dict[int, dict[str, Any]] = {}

    def listed(
        self, name: str, length_tokens: int = 0, layer: int = 0, row_tokens: int = 0
    ) -> list[Instruction]:
        """Return the instructions of that name, for sequences of that length; those of a block are
        of `layer`'s kind. See `instructions.of`."""
        if self.written is not None:
            return self.written[name, length_tokens, self.kinds[layer] if length_tokens else 0]
        settings = self.settings.at(layer)
        return instructions.of(name, settings, self.tiles, length_tokens, row_tokens)

    def _run(self, name: str, inputs: dict[str, Any], weights: Block) -> dict[str, Any]:
        return self.interpreter.run(self.listed(name), inputs, weights, {})

    def embed(self, ids: np.ndarray) -> Any:
        """Embed tokens: int64 [B, T] -> x [B, T, D]."""
        rows = self.weights.rows("embedding", ids.reshape(-1))
        x = self._run("embed", rows, self.weights.table)["x"].reshape(*ids.shape, -1)
        self.shared = {}
        if self.settings.dims.traits.layer_input:
            self.ids = ids.reshape(-1)
            self.embedded = x
        return x

    def _inputs(self, layer: int) -> dict[str, Any]:
        """Return what a block reads in addition to the residual stream: its layer's input, and
        another layer's keys and values."""
        found: dict[str, Any] = {}
        traits = self.settings.dims.traits
        block = self.weights.blocks[layer]
        if traits.layer_input:
            inputs = {"x": self.embedded}
            for part in self.weights.parts:
                inputs[f"rows.{part}"] = block.rows(f"layer_rows.{part}", self.ids)
            listed = self.listed(instructions.LAYER_INPUT_LIST, layer=layer)
            found = self.interpreter.run(listed, inputs, block, {})
        if not traits.has_keys(layer):
            keys = self.shared[traits.key_layer(layer)]
            found |= {"k": keys["k"], "v": keys["v"]}
        return found

    def forward(self, layer: int, x: Any, branches: Branches | None = None) -> Any:
        """Run one block; `x` may be kept."""
        self.weights.announce(layer + 1)
        inputs = {"x": x} | self._inputs(layer)
        row_tokens = 0
        if branches is not None:
            inputs |= dict(zip(("apart", "together"), map(mx.array, branches), strict=True))
            row_tokens = branches[0].shape[1]
        listed = self.listed("forward", x.shape[1], layer, row_tokens)
        block = self.weights.blocks[layer]
        left = self.interpreter.run(listed, inputs, block, self.adapter[layer])
        if self.settings.dims.traits.lends_keys(layer):
            self.shared[layer] = {"k": left["k"], "v": left["v"]}
        return left["x"]

    def backward(self, layer: int, x: Any, g: Any, on_gradient: OnGradient) -> Any:
        """Return the gradient of a block's input from that of its output; those of A and B are
        called back."""
        self.weights.announce(layer - 1)
        listed = self.listed("backward", x.shape[1], layer)
        block = self.weights.blocks[layer]
        inputs = {"x": x, "g": g} | self._inputs(layer)
        traits = self.settings.dims.traits
        shared = self.shared.get(traits.key_layer(layer))
        if shared is not None:
            for name in "kv":
                before = shared.get(f"g.{name}")
                inputs[f"g.{name}"] = mx.zeros(shared[name].shape) if before is None else before
        del x, g

        def update(target: str, a: Any, b: Any) -> None:
            on_gradient(layer, target, a, b)

        left = self.interpreter.run(listed, inputs, block, self.adapter[layer], update)
        if shared is not None and not traits.has_keys(layer):
            shared |= {"g.k": left["g.k"], "g.v": left["g.v"]}
        return left["g"]

    def forward_backward(
        self, ids: np.ndarray, labels: np.ndarray, scale: Scale, on_gradient: OnGradient
    ) -> float:
        """Return the summed loss, with `scale` times its gradients called back, last layer
        first."""
        inputs = [self.embed(ids)]
        for layer in range(self.layers):
            inputs.append(self.forward(layer, inputs[-1]))
        loss, g = self.loss(inputs.pop(), labels, scale)
        if g is None:
            return 0.0
        for layer in reversed(range(self.layers)):
            g = self.backward(layer, inputs.pop(), g, on_gradient)
        return loss

    def loss(self, x: Any, labels: np.ndarray, scale: Scale) -> tuple[float, Any]:
        """Return the summed loss, and `scale` times its gradient of x; None if there is no label
        token. A function of the rows' losses takes another forward pass of the head."""
        places, targets = label_tokens(labels)
        hn = self._final_norm(x)
        if callable(scale):
            scale = scale(self._row_sums(hn, labels))
        if not len(places):
            return 0.0, None
        weights = np.broadcast_to(np.asarray(scale, dtype=np.float32), len(labels))
        of_tokens = weights[places // labels.shape[1]]
        ghn = mx.zeros(hn.shape, dtype=mx.float32)
        total = 0.0
        for low, high in self._chunks(len(places)):
            place, inputs = self._gather(hn, places[low:high])
            inputs["weight"] = mx.array(self._padded(of_tokens[low:high]))
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
        sums = self._row_sums(self._final_norm(x), labels)
        return sums.astype(np.float32), (labels[:, 1:] >= 0).sum(1).astype(np.int64)

    def branches_nll(
        self, ids: np.ndarray, branches: Branches, sources: np.ndarray, labels: np.ndarray
    ) -> np.ndarray:
        """Return each label's negative log likelihood, float32 [N]; see `core.session.Branching`."""
        x = self.embed(ids)
        for layer in range(self.layers):
            x = self.forward(layer, x, branches)
        return self._token_nll(self._final_norm(x), sources.astype(np.int32), labels)

    def _row_sums(self, hn: Any, labels: np.ndarray) -> np.ndarray:
        """Return each row's negative log likelihood, float64 [B]."""
        places, targets = label_tokens(labels)
        nll = self._token_nll(hn, places, targets).astype(np.float64)
        return np.bincount(places // labels.shape[1], nll, len(labels))

    def _token_nll(self, hn: Any, places: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return the negative log likelihood of the token after each place, float32 [N]."""
        found = np.zeros(len(places), dtype=np.float32)
        for low, high in self._chunks(len(places)):
            _, inputs = self._gather(hn, places[low:high])
            outputs = self._loss("loss_only", inputs, targets[low:high])
            found[low:high] = np.array(outputs["nll"])[: high - low]
        return found

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
        return ranges(count, self.chunk_tokens or max(count, 1))


def label_tokens(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return places in the flattened batch whose next token is a label token, int32 [n], and these
    tokens, int64 [n]."""
    following = np.full_like(labels, -100)
    following[:, :-1] = labels[:, 1:]
    places = np.flatnonzero(following >= 0)
    return places.astype(np.int32), following.reshape(-1)[places]
