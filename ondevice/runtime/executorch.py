"""A session that trains with the ExecuTorch runtime: the program does everything, this file only hands it tensors."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.artifact.adapter import Adapter
from ondevice.artifact.manifest import Manifest
from ondevice.errors import ArtifactError, CheckpointError, MissingPackageError
from ondevice.methods.prge.config import PrgeConfig
from ondevice.methods.prge.layout import AdapterLayout, Entry
from ondevice.methods.session import StepResult
from ondevice.runtime.quiet import without_lines

if TYPE_CHECKING:
    from collections.abc import Sequence


CHATTER = "[cpuinfo_utils.cpp"
"""What ExecuTorch says of a processor that it does not know."""


def load_runtime() -> Any:
    """The ExecuTorch runtime of this process.

    Raises:
        MissingPackageError: when the `executorch` extra is not installed.
    """
    os.environ.setdefault("ET_LOG_LEVEL", "error")
    try:
        with without_lines(CHATTER):
            from executorch.runtime import Runtime
    except ImportError:
        raise MissingPackageError(
            "the ExecuTorch runtime is not installed", hint="pip install 'ondevice-train[executorch]'"
        ) from None
    return Runtime.get()


class ExecutorchSession:
    """Runs an artifact's program; batches are int64 [batch_size, one of lengths_tokens].

    Args:
        folder: the artifact.
        manifest: its checked manifest.
        seed: keys the noise and drew the frozen A; the manifest's unless given.
    """

    backend = "executorch"

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self.batch_size = manifest.batch_size
        self.eval_batch_size = manifest.eval_batch_size
        self.lengths_tokens = tuple(sorted(manifest.lengths_tokens))
        self.seed = manifest.generator.seed
        self.stateful = manifest.form == "stateful"
        self.generator_backend = f"executorch-{manifest.generator.lowering}"
        runtime = load_runtime()
        if manifest.custom_ops:
            from ondevice.runtime_ops.build import load_executorch_ops

            load_executorch_ops()
        if any(op.startswith("quantized_decomposed::") for method in manifest.methods.values() for op in method.ops):
            import executorch.kernels.quantized  # noqa: F401  registers ExecuTorch's own quantised kernels
        self._missing_kernels(runtime)
        try:
            self.program = runtime.load_program(str(Path(folder) / manifest.program))
        except RuntimeError as error:
            raise ArtifactError(f"{folder}: the runtime cannot load {manifest.program}", received=str(error)) from None
        self._methods: dict[str, Any] = {}
        self._adapter = np.zeros(manifest.adapter_size, dtype=np.float32)
        if self.stateful:
            for name in ("get_adapter", "set_adapter"):
                self._methods[name] = self._loaded(name)
            self._set(self._adapter)

    def _missing_kernels(self, runtime: Any) -> None:
        """Name missing kernels before the runtime says only 0x14."""
        known = {name.removesuffix(".") for name in runtime.operator_registry.operator_names}
        needed = {op for method in self.manifest.methods.values() for op in method.ops}
        missing = sorted(op for op in needed if op not in known)
        if missing:
            raise ArtifactError(
                "the runtime lacks kernels that the program needs",
                expected=", ".join(missing),
                hint="install the version of executorch in the manifest, and build the ops of runtime_ops/",
            )

    def _run(self, name: str, *inputs: np.ndarray) -> list[np.ndarray]:
        import torch

        if name not in self._methods:
            self._unload_other_kind(name)
            self._load(name)
        outputs: Sequence[Any] = self._methods[name].execute([torch.from_numpy(value) for value in inputs])
        return [value.numpy() for value in outputs]

    def _unload_other_kind(self, name: str) -> None:
        """Drop `evaluate` before `train_step`, the other way round, and so for `next_token`.

        XNNPACK packs a copy of its weights for every loaded method (425 MB for SmolLM2-135M in float32), and
        loading one again takes less than a second. A stateful program's methods share the buffer and stay.
        """
        kinds = ("train_step", "evaluate", "next_token")
        kind = next((kind for kind in kinds if name.startswith(kind)), None)
        if self.stateful or kind is None:
            return
        for loaded in [key for key in self._methods if key.startswith(kinds) and not key.startswith(kind)]:
            del self._methods[loaded]

    def _loaded(self, name: str) -> Any:
        with without_lines(CHATTER):  # XNNPACK looks at the processor when the first method is loaded
            return self.program.load_method(name)

    def _load(self, name: str) -> None:
        """Load a method when it is first needed; loading writes the initial state into the shared buffer again."""
        kept = self.flat().copy() if self.stateful else None
        self._methods[name] = self._loaded(name)
        if kept is not None:
            self._run("set_adapter", kept)

    def _method(self, name: str, rows: int, ids: np.ndarray) -> str:
        length_tokens = ids.shape[1]
        if length_tokens not in self.lengths_tokens:
            raise ArtifactError(
                f"the program has no method for {length_tokens} tokens",
                expected=f"a length among {self.lengths_tokens}",
                received=length_tokens,
            )
        if ids.shape[0] != rows:
            raise ArtifactError(f"the program's {name} takes {rows} rows", expected=rows, received=ids.shape[0])
        return name if length_tokens == self.lengths_tokens[-1] else f"{name}_{length_tokens}"

    def _scalars(self, step: int, learning_rate: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return np.array([self.seed]), np.array([step]), np.array([learning_rate], dtype=np.float32)

    def step(self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float) -> StepResult:
        """One whole training step inside the program; see `Session.step`."""
        name = self._method("train_step", self.batch_size, ids)
        scalars = self._scalars(step, learning_rate)
        if self.stateful:
            losses, gradients = self._run(name, ids, labels, *scalars)
        else:
            losses, gradients, self._adapter = self._run(name, ids, labels, self._adapter, *scalars)
        return StepResult(float(losses.mean()), tuple(losses.tolist()), tuple(gradients.tolist()))

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Row losses and token counts; see `Session.evaluate`."""
        state = () if self.stateful else (self._adapter,)
        nll, tokens = self._run(self._method("evaluate", self.eval_batch_size, ids), ids, labels, *state)
        return nll, tokens.astype(np.int64)

    def next_token(self, ids: np.ndarray, length_tokens: int) -> np.ndarray:
        """Logits float32 [vocab] of the token behind the first `length_tokens` of `ids`, int64 [1, longest bucket].

        Raises:
            ArtifactError: the program was exported without `next_token`.
        """
        if "next_token" not in self.manifest.methods:
            raise ArtifactError("the program cannot write", hint="export it again with --set export.next_token=true")
        return self._run("next_token", ids, np.array([length_tokens]), self._adapter)[0]

    def apply_update(self, projected_gradients: tuple[float, ...], step: int, learning_rate: float) -> None:
        """The program's own update from logged projected gradients."""
        gradients = np.array(projected_gradients, dtype=np.float32)
        scalars = self._scalars(step, learning_rate)
        if self.stateful:
            self._run("apply_update", gradients, *scalars)
        else:
            (self._adapter,) = self._run("apply_update", self._adapter, gradients, *scalars)

    def flat(self) -> np.ndarray:
        """The adapter vector, float32 [adapter_size]."""
        return self._run("get_adapter")[0] if self.stateful else self._adapter

    def _set(self, flat: np.ndarray) -> None:
        self._adapter = np.ascontiguousarray(flat, dtype=np.float32)
        if self.stateful:
            self._run("set_adapter", self._adapter)

    def state(self) -> dict[str, np.ndarray]:
        """The adapter vector and the seed: all there is."""
        return {"adapter": self.flat().copy(), "seed": np.array([self.seed], dtype=np.int64)}

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Take back what `state` gave."""
        flat = state.get("adapter")
        if flat is None or flat.shape != (self.manifest.adapter_size,) or flat.dtype != np.float32:
            raise CheckpointError(
                "the checkpoint is not of this program",
                expected=f"adapter float32 [{self.manifest.adapter_size}]",
                received=None if flat is None else f"{flat.dtype} {list(flat.shape)}",
            )
        self.seed = int(state["seed"][0])
        self._set(flat)

    def layout(self) -> AdapterLayout:
        """The adapter's layout, from the manifest."""
        entries = tuple(Entry(e.layer, e.target, e.offset, e.rank, e.inputs, e.outputs) for e in self.manifest.adapter)
        return AdapterLayout(entries, self.manifest.adapter_size, self.manifest.generator.seed)

    def _names(self) -> dict[tuple[int, str], str]:
        return {(entry.layer, entry.target): entry.linear for entry in self.manifest.adapter}

    def adapter(self) -> Adapter:
        """The trained adapter in PEFT's layout."""
        method = PrgeConfig.parse(self.manifest.method, "manifest.json: method")
        tensors = self.layout().to_tensors(self.flat(), self._names())
        return Adapter(tensors, method.rank, method.alpha, method.targets, self.manifest.model.source)

    def load_adapter(self, adapter: Adapter) -> None:
        """Start from an adapter that has this program's frozen A."""
        alpha = PrgeConfig.parse(self.manifest.method, "manifest.json: method").alpha
        self._set(self.layout().from_adapter(adapter, self._names(), alpha))

    def close(self) -> None:
        """Release the program's methods."""
        self._methods.clear()
