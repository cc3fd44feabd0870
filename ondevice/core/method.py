"""The interface of a training method: one `MethodSpec` in its folder answers what other packages ask.

`training`, `planning`, `api`, `cli`, `server` and the exporters know a method through its spec only. A method is a
folder of `ondevice/methods` whose package has a `METHOD`, or an entry point of the group `ondevice.methods` in any
other package; `ondevice.core.registry` finds both. What only some methods can do is in `ondevice.core.capabilities`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from ondevice.core.capabilities import (
    AnyDecoder,
    Asked,
    C,
    Capability,
    Classifies,
    Offloads,
    OpenedNetwork,
    OpensNetwork,
    Packs,
    Quantises,
    ReadsFiles,
    Refuses,
    TrainingDefaults,
)
from ondevice.core.errors import ConfigError, MissingPackageError, ModelError, Need

if TYPE_CHECKING:
    from pathlib import Path

    from ondevice.core.dims import ModelDims
    from ondevice.core.session import Session

Backend = Literal["torch", "mlx"]
K = TypeVar("K", bound=Capability)


@dataclass(frozen=True)
class StepCost:
    """Operations and bytes of one step.

    Attributes:
        flops: floating-point operations, a multiply-add counted as two.
        moved_bytes: weights read, and for first-order methods gradients and moments read and written.
        dtype: in which the products are computed, if the method decides it.
    """

    flops: float
    moved_bytes: float
    dtype: str | None = None


@dataclass(frozen=True)
class Reduction(Generic[C]):
    """A change of the method's settings that makes its plan smaller.

    Attributes:
        words: what to set, as a person would type it; `{config.KEY}` is the changed setting.
        change: the settings and the rows of a step to other settings; None if it does not apply.
    """

    words: str
    change: Callable[[C, int], C | None]  # (settings, rows of a step)


@dataclass(frozen=True)
class MemoryModel(Generic[C]):
    """Bytes that a step needs, by part, from dimensions only (units: bytes; sizes: tokens and rows).

    Attributes:
        step: (dims, config, batch_size, length_tokens, activation_bytes) to parts on the device that computes.
        host: the same arguments to parts in host memory, next to an accelerator; empty if nothing waits there.
        ranked: (parts of `step`, dims, config, processes) to the parts as one of several processes has them that train
            together; None: each has all of them.
        weights: (dims, config, bytes of a weight, runtime) to the bytes of the frozen weights on the device that
            computes; None: the whole model, as it is loaded.
        blocks: (dims, config, batch_size, length_tokens, quantize) to what a run of an exported block program keeps
            in addition to the mapped weights; None: there are no such programs.
        notes: (dims, config) to sentences below the plan.
        host_note: the content of host memory, in a sentence.
        host_hint: what to set if the host's memory does not suffice.
        reductions: changes of settings that need less.
    """

    step: Callable[[ModelDims, C, int, int, int], dict[str, int]]
    host: Callable[[ModelDims, C, int, int, int], dict[str, int]] | None = None
    ranked: Callable[[dict[str, int], ModelDims, C, int], dict[str, int]] | None = None
    weights: Callable[[ModelDims, C, int, str], int] | None = None
    blocks: Callable[[ModelDims, C, int, int, str], dict[str, int]] | None = None
    notes: Callable[[ModelDims, C], list[str]] | None = None
    host_note: str = ""
    host_hint: str = ""
    reductions: tuple[Reduction[C], ...] = ()


OpenSession = Callable[[Any, C, int, "str | None"], "Session"]
"""(model, config, seed, device) to a session; `model` is a `LoadedModel`, or `ModelFiles` if `reads_files` says so."""
CostFunction = Callable[["ModelDims", C, int, int, int], StepCost]
"""(dims, config, batch_size, length_tokens, bytes of weights that one pass reads) to the cost of a step."""


@dataclass(frozen=True)
class MethodSpec(Generic[C]):
    """A training method, as the rest of the program sees it.

    `sessions`, `memory`, `cost` and `programs` hold functions that import their result when they are called, because
    commands that need no framework read specs, too.

    Attributes:
        name: as in `--method` and `method.name`.
        summary: of the method, in half a sentence, for lists.
        config: its settings.
        trains: an adapter, or all parameters of the model.
        order: of the derivatives it needs: `first` runs backward passes, `zeroth` runs forward passes only.
        sessions: backend to what opens its sessions.
        memory: its `MemoryModel`.
        cost: its `CostFunction`.
        keeps: its state next to the weights, in half a sentence.
        words: its gains and costs, for somebody who knows no method.
        page: of the documentation, a file of docs/methods.
        programs: kind of target to its training step as a program (`ondevice.core.program`).
        preference: its rank, from 1, among the methods that are chosen if none is named; 0: never chosen.
        capabilities: those that not every method has.
    """

    name: str
    summary: str
    config: type[C]
    trains: Literal["adapter", "all"]
    order: Literal["zeroth", "first"]
    sessions: Mapping[str, Callable[[], OpenSession[C]]]
    memory: Callable[[], MemoryModel[C]]
    cost: Callable[[], CostFunction[C]]
    keeps: str = ""
    words: str = ""
    page: str = ""
    programs: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    preference: int = 0
    capabilities: tuple[Capability, ...] = ()

    def capability(self, kind: type[K]) -> K | None:
        """Return the method's capability of that kind, or None if it does not have it."""
        return next((one for one in self.capabilities if isinstance(one, kind)), None)

    def program(self, kind: str) -> Any | None:
        """Return the training step as a program for a kind of target; None if the method has none."""
        if kind in self.programs:
            return self.programs[kind]()
        return None

    def for_training(self, config: C) -> C:
        """Return settings for training in eager PyTorch, with `auto` decided."""
        defaults = self.capability(TrainingDefaults)
        if defaults:
            return defaults.settings(config)
        return config

    def schedule(self, config: C) -> str | None:
        """Return the schedule of a run that names none; None for the loop's own."""
        defaults = self.capability(TrainingDefaults)
        if defaults:
            return defaults.schedule(config)
        return None

    def reads_files(self, config: C, backend: str) -> bool:
        """Return True if a session reads the weights from their files itself."""
        reads = self.capability(ReadsFiles)
        return backend == "mlx" or (reads is not None and reads.when(config))

    def load_device(self, config: C, device: str) -> str:
        """Return the device torch loads the model on: the host, for methods that move or quantise it themselves."""
        quantises = self.capability(Quantises)
        on_host = self.capability(Offloads) or (quantises and quantises.when(config))
        if on_host:
            return "cpu"
        return device

    def open_session(
        self, model: Any, config: C, seed: int, device: str | None = None, backend: str = "torch"
    ) -> Session:
        """Open an eager session; changes a loaded model in place.

        Args:
            model: a `LoadedModel` with its weights, or the `ModelFiles` of one (`reads_files`).
            device: on which torch computes, for methods that offload, stream or quantise; None is the model's.
            backend: `torch` or `mlx`.

        Raises:
            ConfigError: the method does not run in that backend.
            ModelError: as `check_model`.
            MissingPackageError: the framework is not installed.
        """
        self._check_backend(backend)
        self.check_model(model.dims)
        return self.sessions[backend]()(model, config, seed, device)

    def check_run(self, asked: Asked[C]) -> None:
        """Refuse what `open_session` would refuse, as far as it is known without the model's weights.

        Raises:
            OndeviceError: as `open_session`.
        """
        self._check_backend(asked.backend)
        self.check_model(asked.dims)
        refuses = self.capability(Refuses)
        if refuses is not None:
            refuses.check(asked)

    def _check_backend(self, backend: str) -> None:
        if backend not in self.sessions:
            flags = " or ".join(f"--backend {name}" for name in self.sessions)
            raise ConfigError(
                f"method {self.name} does not run in {backend}", expected=flags, received=backend
            )
        if backend == "mlx" and importlib.util.find_spec("mlx") is None:
            raise MissingPackageError(
                "mlx is not installed", hint="pip install 'ondevice-train[mlx]'"
            )

    def check_model(self, dims: ModelDims) -> None:
        """Refuse a model with blocks that this method would have to know.

        Raises:
            ModelError: it needs a method that takes any decoder, or one that trains a classification head.
        """
        if dims.whole and self.capability(AnyDecoder) is None:
            raise dims.unknown(f"method {self.name}")
        if dims.classes and self.capability(Classifies) is None:
            raise ModelError(
                f"method {self.name} does not train a model with a classification head",
                expected="a decoder",
                received=f"model_type {dims.family!r}",
                needs=Need.CLASSIFIES,
            )

    def check_packing(self, backend: str, whole: bool) -> None:
        """Refuse several rows in one sequence if the method's attention would not keep them apart.

        Args:
            whole: the model runs only as a whole (`ModelDims.whole`).

        Raises:
            ConfigError: saying why; it needs a method that packs.
        """
        packs = self.capability(Packs)
        if packs is None:
            why = "its passes have no mask between the rows of a sequence"
        elif backend not in packs.backends:
            why = f"it does so in {' and '.join(packs.backends)}, not in {backend}"
        elif whole:
            why = "the blocks of this model are not known, and each would need the mask"
        else:
            return
        raise ConfigError(
            f"method {self.name} does not pack rows here: {why}",
            received=f"data.packing with method {self.name}, backend {backend}",
            hint="leave --packing out: the rows of a step are then padded to the longest",
            needs=Need.PACKS,
        )

    def open_network(self, folder: Path, device: str) -> OpenedNetwork:
        """Open a network that this method trained and saved."""
        opens = self.capability(OpensNetwork)
        if opens is None:
            raise ConfigError(
                f"method {self.name} trains networks that transformers opens", received=str(folder)
            )
        return opens.open(folder, device)


@dataclass(frozen=True)
class Placement:
    """Backend, device and rank of a run, decided once from its run file and this machine.

    Attributes:
        spec: of its method.
        backend: `torch` or `mlx`.
        device: of torch: `cpu` or `cuda`; `cpu` for MLX, which has its own.
        rank, world: this process' number and how many train together (`torchrun`); 0 and 1 without.
    """

    spec: MethodSpec[Any]
    backend: Backend
    device: str
    rank: int = 0
    world: int = 1

    def precision(self, dtype: str) -> list[str]:
        """Say in which numbers the run computes, and where."""
        if self.backend != "mlx":
            return [f"precision: {dtype} on {'the GPU' if self.device == 'cuda' else 'the CPU'}"]
        said = [f"precision: {dtype} on MLX"]
        if not metal():
            said.append(
                "MLX is meant for a Mac with Metal; on this CPU it is slow, --backend torch is the quick one"
            )
        return said


@cache
def metal() -> bool:
    """Return True on a Mac with MLX and Metal."""
    if sys.platform != "darwin" or importlib.util.find_spec("mlx") is None:
        return False
    return bool(importlib.import_module("mlx.core").metal.is_available())


def has_liger(device: str) -> bool:
    """Return True if liger-kernel is installed and `device` is a GPU."""
    return device.startswith("cuda") and importlib.util.find_spec("liger_kernel") is not None


def has_triton(device: str) -> bool:
    """Return True if Triton is installed, as with PyTorch's build for CUDA, and `device` is a
    GPU."""
    return device.startswith("cuda") and importlib.util.find_spec("triton") is not None
