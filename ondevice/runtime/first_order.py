"""A session for programs with exact gradients: adapter and moments go in, and come out updated."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ondevice.artifact.adapter import Adapter
from ondevice.errors import ArtifactError, CheckpointError, ConfigError
from ondevice.methods.mesp.config import MespConfig
from ondevice.methods.mesp.layout import FlatLayout
from ondevice.methods.mesp.pairs import Pair, check_adapter, initial_tensors
from ondevice.methods.session import StepResult
from ondevice.runtime.executorch import CHATTER, ExecutorchSession
from ondevice.runtime.quiet import without_lines

if TYPE_CHECKING:
    from ondevice.artifact.manifest import Manifest


class FirstOrderProgramSession(ExecutorchSession):
    """Runs a MeSP artifact's program; see `ExecutorchSession` for shapes."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        super().__init__(folder, manifest)
        self.generator_backend, self.loud = "none", True
        self.config = MespConfig.parse(manifest.method, "manifest.json: method")
        self.pairs = tuple(
            Pair(entry.layer, entry.target, entry.linear, number, entry.rank, entry.inputs, entry.outputs)
            for number, entry in enumerate(manifest.adapter)
        )
        self.flat_layout = FlatLayout.build(self.pairs)
        if [(e.a, e.b) for e in self.flat_layout.entries] != [(e.a_offset, e.offset) for e in manifest.adapter]:
            raise ArtifactError(f"{folder}: the adapter's layout is another version's", hint="export the model again")
        inputs = [port.name for port in manifest.methods["train_step"].inputs]
        self.names = tuple(name for name in inputs if name.startswith("exp_avg"))
        self.restart()

    def restart(self) -> None:
        """The state before the first step: A drawn from the seed, B and moments zero."""
        self._adapter = self.flat_layout.to_flat(initial_tensors(self.pairs, self.seed))
        self.moments = {name: np.zeros_like(self._adapter) for name in self.names}
        self.done = 0

    def _run(self, name: str, *inputs: np.ndarray) -> list[np.ndarray]:
        if self.loud:  # the runtime looks at the processor when it first computes
            self.loud = False
            with without_lines(CHATTER):
                return super()._run(name, *inputs)
        return super()._run(name, *inputs)

    def step(self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float) -> StepResult:
        """One whole step inside the program; AdamW counts its own steps, as in eager PyTorch."""
        name = self._method("train_step", self.batch_size, ids)
        scalars = np.array([self.done]), np.array([learning_rate], dtype=np.float32)
        loss, self._adapter, *moments = self._run(name, ids, labels, self._adapter, *self.moments.values(), *scalars)
        self.moments = dict(zip(self.names, moments))
        self.done += 1
        value = float(loss[0])
        return StepResult(value, (value,))

    def gradients(self, ids: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
        """What a step's gradients are at this adapter, float64 by PEFT's names; the session is restarted after.

        SGD at rate 1 leaves the adapter less its gradient; AdamW's first moment after one step is the gradient times
        1 - beta1.
        """
        before = self._adapter.astype(np.float64)
        self.moments, self.done = {name: np.zeros_like(self._adapter) for name in self.names}, 0
        self.step(ids, labels, 0, 0.0 if self.names else 1.0)
        if self.names:
            flat = self.moments["exp_avg"].astype(np.float64) / (1.0 - self.config.beta1)
        else:
            flat = before * (1.0 - self.config.weight_decay) - self._adapter
        self.restart()
        return self.flat_layout.to_tensors(flat)

    def apply_update(self, projected_gradients: tuple[float, ...], step: int, learning_rate: float) -> None:
        """A first-order step cannot be rebuilt from scalars."""
        raise ConfigError("a first-order run has no projected gradients to replay", hint="resume from its checkpoint")

    def state(self) -> dict[str, np.ndarray]:
        """The adapter and moments as flat vectors, and the number of steps."""
        counts = {"seed": np.array([self.seed], np.int64), "optimizer_step": np.array([self.done], np.int64)}
        return {"adapter": self._adapter.copy(), **{k: v.copy() for k, v in self.moments.items()}, **counts}

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Take back what `state` gave."""
        for name in ("adapter", *self.names):
            flat = state.get(name)
            if flat is None or flat.shape != self._adapter.shape or flat.dtype != np.float32:
                raise CheckpointError(
                    f"the checkpoint is not of this program: {name}",
                    expected=f"float32 [{self.manifest.adapter_size}]",
                    received=None if flat is None else f"{flat.dtype} {list(flat.shape)}",
                )
        if "optimizer_step" not in state:
            raise CheckpointError("the checkpoint lacks optimizer_step", hint="resume from an older checkpoint")
        self.seed, self.done = int(state["seed"][0]), int(state["optimizer_step"][0])
        self._adapter = np.ascontiguousarray(state["adapter"])
        self.moments = {name: np.ascontiguousarray(state[name]) for name in self.names}

    def adapter(self) -> Adapter:
        """The trained adapter in PEFT's layout."""
        config = self.config
        tensors = self.flat_layout.to_tensors(self._adapter)
        return Adapter(tensors, config.rank, config.alpha, tuple(sorted(config.targets)), self.manifest.model.source)

    def load_adapter(self, adapter: Adapter) -> None:
        """Start from an adapter of the same rank, alpha and linear layers."""
        self._adapter = self.flat_layout.to_flat(check_adapter(adapter, self.pairs, self.config))
