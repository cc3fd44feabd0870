"""Text generation in MLX with the stages of a training step: keys and values of what was read are
kept, and only new tokens pass.

Several texts after one prompt share a pass: they have the same length at every token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ondevice.methods.mesp.mlx.mixers import Instruction, Operand
from ondevice.methods.mesp.mlx.model import Functions, Model, own_stages

CONVOLUTIONS = {"convolve": ("bcx", "o"), "convolve_alone": ("qkv", "c")}
"""Input and output of the stages in which a token sees a few before it."""


class CachedStages:
    """The stages over new tokens, each layer's with the state that earlier ones left.

    Attributes:
        read: tokens before the new ones.
        layer: whose stages run.
        kept: by layer, what its mixer keeps: keys and values [B, K, S, h], or the last inputs
            of a convolution [B, taps - 1, channels], and the state of a delta rule.
    """

    def __init__(self, stages: Functions, layers: int) -> None:
        self.stages = stages
        self.read = 0
        self.layer = 0
        self.kept: list[dict[str, Any]] = [{} for _ in range(layers)]
        self.next: list[dict[str, Any]] = [{} for _ in range(layers)]

    def call(self, stage: str, arrays: dict[str, Any]) -> dict[str, Any]:
        """Run `stage` as if the earlier tokens were in its inputs, too."""
        if stage in ("rope", "rope_queries"):
            return self.stages.call(stage, arrays | {"offset": self.read})
        if stage == "attend":
            return self.stages.call(stage, arrays | self._after("k", "v", arrays=arrays, axis=2))
        if stage in ("correct_first", "correct"):
            return self._corrected(stage, arrays)
        if stage in CONVOLUTIONS:
            return self._convolved(stage, arrays)
        return self.stages.call(stage, arrays)

    def _corrected(self, stage: str, arrays: dict[str, Any]) -> dict[str, Any]:
        """Run a chunk of the delta rule; the first one goes on from the state that was kept."""
        old = self.kept[self.layer]
        if stage == "correct_first" and old:
            stage = "correct"
            arrays = arrays | {"state": old["state"]}
        outputs = self.stages.call(stage, arrays)
        self.next[self.layer]["state"] = outputs["state"]
        return outputs

    def _convolved(self, stage: str, arrays: dict[str, Any]) -> dict[str, Any]:
        """Convolve the new inputs behind the last ones."""
        given, output = CONVOLUTIONS[stage]
        joined = self._after(given, arrays=arrays, axis=1)[given]
        new = arrays[given].shape[1]
        before = arrays["taps.weight"].shape[1] - 1
        self.next[self.layer][given] = joined[:, max(0, joined.shape[1] - before) :]
        values = self.stages.call(stage, arrays | {given: joined})[output]
        return {output: values[:, values.shape[1] - new :]}

    def _after(self, *names: str, arrays: dict[str, Any], axis: int) -> dict[str, Any]:
        """Return arrays behind those kept of this layer, which a later pass finds kept."""
        old = self.kept[self.layer]
        joined = {name: arrays[name] for name in names}
        if old:
            joined = {name: mx.concatenate([old[name], arrays[name]], axis) for name in names}
        self.next[self.layer] |= joined
        return joined

    def passed(self, tokens: int) -> None:
        """Keep what the pass over so many new tokens has left."""
        mx.eval(self.next)
        self.kept = self.next
        self.next = [{} for _ in self.kept]
        self.read += tokens

    def take(self, rows: Sequence[int]) -> None:
        """Go on with these rows of the batch; one may come several times."""
        numbers = mx.array(list(rows), dtype=mx.int32)
        self.kept = [
            {name: mx.take(array, numbers, axis=0) for name, array in layer.items()}
            for layer in self.kept
        ]


class Reader(Model):
    """A model that reads texts on; its weights and its adapter are another one's.

    The stages are Python's: an artifact's have a trace for each shape of a step, and none for one
    token behind others.
    """

    def __init__(self, model: Model) -> None:
        self.stages = own_stages(model.settings)
        self.cached = CachedStages(self.stages, model.layers)
        super().__init__(model.settings, model.weights, functions=self.cached)
        self.tiles = model.tiles
        self.adapter = model.adapter
        self._lists: dict[tuple[str, int, int, int], list[Instruction]] = {}

    def listed(
        self, name: str, length_tokens: int = 0, layer: int = 0, row_tokens: int = 0
    ) -> list[Instruction]:
        """Return the instructions; they are the same for every token of an answer."""
        key = (name, length_tokens, layer, row_tokens)
        if key not in self._lists:
            self._lists[key] = super().listed(name, length_tokens, layer, row_tokens)
        return self._lists[key]

    def feed(self, ids: np.ndarray) -> np.ndarray:
        """Read new tokens, int64 [B, T]; return the logits behind them, float32 [B, vocab]."""
        x = self.embed(ids)
        for layer in range(self.layers):
            self.cached.layer = layer
            x = self.forward(layer, x)
        self.cached.passed(ids.shape[1])
        hidden = self._final_norm(x[:, -1:]).astype(mx.float32)
        logits = []
        for low, high in self.tiles:
            names = [f"head.{part}" for part in self.weights.parts]
            rows = {name: self.weights.table.get(Operand(name, 0, low, high)) for name in names}
            logits.append(np.array(self.stages.product(hidden, rows, "head"), dtype=np.float32))
        joined = np.concatenate(logits, axis=1)
        cap = self.settings.dims.traits.logit_cap
        return cap * np.tanh(joined / cap) if cap else joined


def answer_prompt(
    model: Model, prompt: Sequence[int], samplers: Sequence[Any], most_tokens: int
) -> list[list[int]]:
    """Return the tokens of each sampler's answer; see `ondevice.core.session.Answering`."""
    reader = Reader(model)
    logits = reader.feed(np.array([prompt], dtype=np.int64))
    logits = np.repeat(logits, len(samplers), axis=0)
    reader.cached.take([0] * len(samplers))
    drawn: list[list[int]] = [[] for _ in samplers]
    writing = list(range(len(samplers)))
    while True:
        tokens = [samplers[number].next(row) for number, row in zip(writing, logits, strict=True)]
        for number, token in zip(writing, tokens, strict=True):
            drawn[number].append(token.id)
        goes_on = [
            row
            for row, (number, token) in enumerate(zip(writing, tokens, strict=True))
            if not token.ends and len(drawn[number]) < most_tokens
        ]
        if not goes_on:
            break
        if len(goes_on) < len(writing):
            reader.cached.take(goes_on)
            writing = [writing[row] for row in goes_on]
        logits = reader.feed(np.array([drawn[number][-1:] for number in writing]))
    return drawn
