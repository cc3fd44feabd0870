"""A session that trains with the ExecuTorch runtime: the program does everything, this file only
hands it tensors.

It knows no training method. The manifest's `program_spec` says what goes in and comes out by role,
which arrays stay from step to step, and where the trained matrices lie in the flat adapter vector.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.artifact.adapter import Adapter
from ondevice.artifact.adapter_fit import check_fits, check_frozen_a
from ondevice.artifact.files import read_tensors
from ondevice.core.errors import ArtifactError, CheckpointError, ConfigError, MissingPackageError
from ondevice.core.manifest import Manifest
from ondevice.core.program import FUSED
from ondevice.core.registry import method, method_config, target
from ondevice.core.session import ProgramSession, StepResult
from ondevice.exporters.executorch.quiet import without_lines
from ondevice.runtime_ops.build import load_executorch_ops

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from ondevice.core.manifest import AdapterEntry, StateTensor
    from ondevice.core.session import Preparing

log = logging.getLogger("ondevice.exporters")
CHATTER = "[cpuinfo_utils.cpp"
"""ExecuTorch's message about a processor that it does not know."""
KINDS = ("train_step", "evaluate", "next_token")
"""Methods that run the model."""


@cache
def load_runtime() -> Any:
    """Return the ExecuTorch runtime of this process, with its threads started.

    Their start prints lines about the processor, so it is done here and nowhere else. There is one
    for each core, also beside busy processes: fewer made a step longer there
    (`benchmarks/training/neighbour.py`).

    Raises:
        MissingPackageError: when the `executorch` extra is not installed.
    """
    try:
        with without_lines(CHATTER), _without_compiler():
            from executorch.extension.pybindings import portable_lib
            from executorch.runtime import Runtime

            portable_lib._threadpool_get_thread_count()
            return Runtime.get()
    except ImportError:
        raise MissingPackageError(
            "the ExecuTorch runtime is not installed",
            hint="pip install 'ondevice-train[executorch]'",
        ) from None


def execute(method: Any, inputs: list[Any]) -> list[Tensor]:
    """Run a loaded method; the outputs are the caller's.

    numpy copies them. `Method.execute` lets torch do it, whose threads would wake at each call: if
    torch was loaded before this package they then spin for milliseconds.
    """
    import torch

    outputs = method._method(inputs, clone_outputs=False)
    return [torch.from_numpy(value.numpy().copy()) for value in outputs]


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Let the runtime's bindings be imported without ExecuTorch's compiler, which takes seconds and
    which they import for the class of one warning: an empty package stands for it. Who asks for the
    compiler later gets the real one."""
    if "executorch.exir" in sys.modules:
        yield
        return
    import executorch

    package = ModuleType("executorch.exir")
    package.__path__ = [os.path.join(folder, "exir") for folder in executorch.__path__]
    sys.modules[package.__name__] = package
    try:
        yield
    finally:
        for name in ("executorch.exir", "executorch.exir._warnings"):
            sys.modules.pop(name, None)


class ExecutorchSession(ProgramSession):
    """Runs an artifact's program; batches are int64 [batch_size, one of lengths_tokens].

    Args:
        folder: the artifact.
        manifest: its checked manifest.
        stock: leave out the functions in this project's ops, if the program has its functions twice.

    Attributes:
        fused: the functions in this project's ops run.

    Raises:
        ArtifactError: the runtime cannot load the program, or a file of the state does not fit the
            manifest.
    """

    backend = "executorch"

    def __init__(self, folder: Path, manifest: Manifest, stock: bool = False) -> None:
        self.folder = Path(folder)
        self.manifest = manifest
        self.spec = manifest.program_spec
        self.batch_size = manifest.batch_size
        self.eval_batch_size = manifest.eval_batch_size
        self.lengths_tokens = tuple(sorted(manifest.lengths_tokens))
        lowering = manifest.generator.lowering
        self.generator_backend = "none" if lowering == "none" else f"executorch-{lowering}"
        self.constants = {constant.name: constant.train for constant in self.spec.constants}
        runtime = load_runtime()
        if manifest.custom_ops:
            load_executorch_ops()
        twice = any(name.startswith(FUSED) for name in self.spec.methods)
        self.fused = twice and not stock and _links_ops()
        ops = {
            op
            for name, method in self.spec.methods.items()
            for op in method.ops
            if self.fused or not name.startswith(FUSED)
        }
        if any(op.startswith("quantized_decomposed::") for op in ops):
            import executorch.kernels.quantized  # noqa: F401  registers ExecuTorch's own quantised kernels
        _check_kernels(runtime, ops)
        try:
            self.program = runtime.load_program(str(self.folder / manifest.program))
        except RuntimeError as error:
            raise ArtifactError(
                f"{folder}: the runtime cannot load {manifest.program}", received=str(error)
            ) from None
        self._methods: dict[str, Any] = {}
        self.buffers = tuple(tensor.name for tensor in self.spec.state if tensor.kept == "program")
        for name in self.buffers:
            for access in (f"get_{name}", f"set_{name}"):
                self._methods[access] = self.program.load_method(access)
        self.restart()

    @cached_property
    def config(self) -> Any:
        """The method's settings, if a method of that name is installed."""
        return method_config(self.manifest.method["name"], self.manifest.method)

    def restart(self) -> None:
        """Go back to the state that a run starts from."""
        self.seed = self.manifest.generator.seed
        self.counts = {
            counter.name: 0 for counter in self.spec.counters if counter.counts == "updates"
        }
        self._state = {tensor.name: self._first(tensor) for tensor in self.spec.state}
        for name in self.buffers:
            self._run(f"set_{name}", self._state[name])

    def _first(self, tensor: StateTensor) -> np.ndarray:
        if tensor.first is None:
            return np.zeros(tensor.shape, dtype=tensor.dtype)
        value = read_tensors(self.folder / tensor.first).get(tensor.name)
        if value is None or value.shape != tensor.shape or str(value.dtype) != tensor.dtype:
            raise ArtifactError(
                f"{self.folder / tensor.first} does not fit the manifest",
                expected=f"{tensor.name} {tensor.dtype} {list(tensor.shape)}",
                received=None if value is None else f"{value.dtype} {list(value.shape)}",
                hint="export the model again",
            )
        return value

    @cached_property
    def _preparing(self) -> Preparing | None:
        program = method(self.manifest.method["name"]).program(target(self.manifest.target).kind)
        if program is None or program.refresh is None:
            return None
        return program.refresh(self)

    def before_step(self, step: int, batch_at: Callable[[int], Any], folder: Path) -> Path | None:
        """Let the method prepare the state; see `Preparing.before_step`."""
        if self._preparing is None:
            return None
        return self._preparing.before_step(step, batch_at, folder)

    def before_replay(self, step: int, folder: Path) -> None:
        """Let the method take back its preparation; see `Preparing.before_replay`."""
        if self._preparing is not None:
            self._preparing.before_replay(step, folder)

    def step(
        self, ids: np.ndarray, labels: np.ndarray, step: int, learning_rate: float
    ) -> StepResult:
        """Run one whole training step inside the program; see `Session.step`."""
        name = self._bucket("train_step", self.batch_size, ids)
        copies = (self.spec.batch_copies, 1)
        inputs = {"ids": np.tile(ids, copies), "labels": np.tile(labels, copies)}
        outputs = self._call(name, {**inputs, **self._scalars(step, learning_rate)}, keep=True)
        for counter in self.counts:
            self.counts[counter] += 1
        losses = outputs["losses"]
        gradients = outputs.get("projected_gradients", np.empty(0))
        return StepResult(float(losses.mean()), tuple(losses.tolist()), tuple(gradients.tolist()))

    def evaluate(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Compute row losses and token counts; see `Session.evaluate`."""
        name = self._bucket(self.spec.evaluates_with, self.eval_batch_size, ids)
        constants = {constant.name: constant.evaluate for constant in self.spec.constants}
        outputs = self._call(
            name, {"ids": ids, "labels": labels, **self._scalars(0, 0.0, constants)}
        )
        return outputs["nll_sum"], outputs["tokens"].astype(np.int64)

    def next_token(self, ids: np.ndarray, length_tokens: int) -> np.ndarray:
        """Return logits float32 [vocab] of the token behind the first `length_tokens` of `ids`,
        int64 [1, longest bucket].

        Raises:
            ArtifactError: the program was exported without `next_token`.
        """
        if "next_token" not in self.spec.methods:
            raise ArtifactError(
                "the program cannot write", hint="export it again with --set export.next_token=true"
            )
        inputs = {"ids": ids, "length": np.array([length_tokens])}
        return self._call("next_token", inputs)["logits"]

    def apply_update(
        self, projected_gradients: tuple[float, ...], step: int, learning_rate: float
    ) -> None:
        """Apply the program's own update from logged projected gradients."""
        if "apply_update" not in self.spec.methods:
            raise ConfigError(
                "the program has no update to apply again",
                expected="a program of a zeroth-order method",
                received=f"method {self.config.name}",
            )
        gradients = np.array(projected_gradients, dtype=np.float32)
        inputs = {"projected_gradients": gradients, **self._scalars(step, learning_rate)}
        self._call("apply_update", inputs, keep=True)

    def state(self) -> dict[str, np.ndarray]:
        """Return every state tensor, the seed, and how often the optimizer has updated."""
        counts = {name: np.array([count], dtype=np.int64) for name, count in self.counts.items()}
        tensors = {tensor.name: self._tensor(tensor.name).copy() for tensor in self.spec.state}
        return {**tensors, "seed": np.array([self.seed], dtype=np.int64), **counts}

    def load_state(self, state: dict[str, np.ndarray]) -> None:
        """Take back what `state` gave."""
        for tensor in self.spec.state:
            value = state.get(tensor.name)
            if value is None or value.shape != tensor.shape or str(value.dtype) != tensor.dtype:
                raise CheckpointError(
                    f"the checkpoint is not of this program: {tensor.name}",
                    expected=f"{tensor.dtype} {list(tensor.shape)}",
                    received=None if value is None else f"{value.dtype} {list(value.shape)}",
                )
        for name in ("seed", *self.counts):
            if name not in state:
                raise CheckpointError(
                    f"the checkpoint lacks {name}", hint="resume from an older checkpoint"
                )
        for tensor in self.spec.state:
            self._set(tensor.name, state[tensor.name])
        self.seed = int(state["seed"][0])
        self.counts = {name: int(state[name][0]) for name in self.counts}

    def flat(self) -> np.ndarray:
        """Return the adapter vector, float32 [adapter_size]."""
        return self._tensor(self._adapter_name)

    @property
    def _adapter_name(self) -> str:
        if self.spec.adapter is None:
            raise ArtifactError("the program trains no adapter", received=self.manifest.target)
        return self.spec.adapter.name

    def _tensor(self, name: str) -> np.ndarray:
        if name in self.buffers:
            return self._run(f"get_{name}")[0]
        return self._state[name]

    def _set(self, name: str, value: np.ndarray) -> None:
        self._state[name] = np.ascontiguousarray(value)
        if name in self.buffers:
            self._run(f"set_{name}", self._state[name])

    def adapter(self) -> Adapter:
        """Return the trained adapter in PEFT's layout."""
        flat = self.flat()
        tensors = {}
        for entry in self.spec.layout:
            a, b = f"{entry.linear}.lora_A.weight", f"{entry.linear}.lora_B.weight"
            if entry.a_offset is None:
                tensors[a] = self._frozen[a]
            else:
                tensors[a] = _a_of(entry, flat).copy()
            tensors[b] = np.ascontiguousarray(_b_of(entry, flat).T)
        targets = tuple(sorted({entry.target for entry in self.spec.layout}))
        return Adapter(
            tensors, self.spec.rank, self.spec.alpha, targets, self.manifest.model.source
        )

    @cached_property
    def _frozen(self) -> dict[str, np.ndarray]:
        """The A matrices that are not trained, by name."""
        if self.spec.frozen is None:
            return {}
        return read_tensors(self.folder / self.spec.frozen)

    def load_adapter(self, adapter: Adapter) -> None:
        """Start from an adapter of the same rank, alpha, linear layers and, if it is not
        trained, A.

        Raises:
            ArtifactError: it does not fit.
        """
        layout = self.spec.layout
        shapes = {f"{entry.linear}.lora_A.weight": (entry.rank, entry.inputs) for entry in layout}
        shapes |= {f"{entry.linear}.lora_B.weight": (entry.outputs, entry.rank) for entry in layout}
        tensors = check_fits(adapter, shapes, self.spec.rank, self.spec.alpha)
        flat = np.zeros(self.spec.adapter_size, dtype=np.float32)
        for entry in layout:
            name = f"{entry.linear}.lora_A.weight"
            a, b = tensors[name], tensors[f"{entry.linear}.lora_B.weight"]
            if entry.a_offset is not None:
                _a_of(entry, flat)[:] = a
            else:
                check_frozen_a(entry.linear, a, self._frozen[name], self.manifest.generator.seed)
            _b_of(entry, flat)[:] = b.T
        self._set(self._adapter_name, flat)

    def close(self) -> None:
        """Release the program's methods."""
        self._methods.clear()

    def _bucket(self, name: str, rows: int, ids: np.ndarray) -> str:
        """The method for rows of this length."""
        length_tokens = ids.shape[1]
        if length_tokens not in self.lengths_tokens:
            raise ArtifactError(
                f"the program has no method for {length_tokens} tokens",
                expected=f"a length among {self.lengths_tokens}",
                received=length_tokens,
            )
        if ids.shape[0] != rows:
            raise ArtifactError(
                f"the program's {name} takes {rows} rows", expected=rows, received=ids.shape[0]
            )
        if length_tokens == self.lengths_tokens[-1]:
            return name
        return f"{name}_{length_tokens}"

    def _scalars(
        self, step: int, learning_rate: float, constants: dict[str, float] | None = None
    ) -> dict[str, np.ndarray]:
        """Seed, learning rate, counters and constants; see `_call`."""
        scalars = {
            "seed": np.array([self.seed]),
            "learning_rate": np.array([learning_rate], dtype=np.float32),
        }
        for counter in self.spec.counters:
            scalars[f"counter {counter.name}"] = np.array([self.counts.get(counter.name, step)])
        if constants is None:
            constants = self.constants
        for name, value in constants.items():
            scalars[f"constant {name}"] = np.array([value], dtype=np.float32)
        return scalars

    def _call(
        self, name: str, arrays: dict[str, np.ndarray], keep: bool = False
    ) -> dict[str, np.ndarray]:
        """Run a method with inputs by role; gives its outputs by role.

        Args:
            given: by role; counters and constants by role and name, as there may be several.
            keep: take over the state that comes out.
        """
        method = self.spec.methods[name]
        inputs = []
        for port in method.inputs:
            if port.role == "state":
                inputs.append(self._state[port.name])
            else:
                several = port.role in ("counter", "constant")
                inputs.append(arrays[f"{port.role} {port.name}" if several else str(port.role)])
        outputs: dict[str, np.ndarray] = {}
        for port, value in zip(method.outputs, self._run(name, *inputs), strict=True):
            if port.role != "state":
                outputs[str(port.role)] = value
            elif keep:
                self._state[port.name] = value
        return outputs

    def _run(self, name: str, *inputs: np.ndarray) -> list[np.ndarray]:
        import torch

        if name not in self._methods:
            self._unload_other_kind(name)
            self._load(name)
        outputs = execute(self._methods[name], [torch.from_numpy(value) for value in inputs])
        return [value.numpy() for value in outputs]

    def _unload_other_kind(self, name: str) -> None:
        """Drop `evaluate` before `train_step`, the other way round, and so for `next_token`.

        XNNPACK packs a copy of its weights for every loaded method (425 MB for SmolLM2-135M in
        float32), and loading one again takes less than a second. Methods that share a buffer stay.
        """
        kind = next((kind for kind in KINDS if name.startswith(kind)), None)
        if self.buffers or kind is None:
            return
        for loaded in [
            key for key in self._methods if key.startswith(KINDS) and not key.startswith(kind)
        ]:
            del self._methods[loaded]

    def _load(self, name: str) -> None:
        """Load a method when it is first needed; loading writes the initial state into the shared
        buffers again."""
        kept = {buffer: self._tensor(buffer).copy() for buffer in self.buffers}
        self._methods[name] = self.program.load_method(name)
        for buffer, value in kept.items():
            self._set(buffer, value)


def _links_ops() -> bool:
    """Link this project's ops to the runtime; False without a compiler, which is said."""
    try:
        load_executorch_ops()
    except MissingPackageError as error:
        log.warning("the program runs in the stock runtime's kernels, twice as slow: %s", error)
        return False
    return True


def _check_kernels(runtime: Any, needed: set[str]) -> None:
    """Name missing kernels before the runtime says only 0x14."""
    known = {name.removesuffix(".") for name in runtime.operator_registry.operator_names}
    if missing := sorted(needed - known):
        raise ArtifactError(
            "the runtime lacks kernels that the program needs",
            expected=", ".join(missing),
            hint="install the version of executorch in the manifest, and build the ops of runtime_ops/",
        )


def _a_of(entry: AdapterEntry, flat: np.ndarray) -> np.ndarray:
    """View of an entry's A in the flat vector, [rank, inputs]."""
    start = entry.a_offset or 0
    return flat[start : start + entry.rank * entry.inputs].reshape(entry.rank, entry.inputs)


def _b_of(entry: AdapterEntry, flat: np.ndarray) -> np.ndarray:
    """View of an entry's B in the flat vector, transposed: [rank, outputs]."""
    return flat[entry.offset : entry.offset + entry.rank * entry.outputs].reshape(
        entry.rank, entry.outputs
    )
