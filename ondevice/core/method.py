"""The interface of a training method: one `MethodSpec` in its folder answers everything that other packages ask.

`training`, `planning`, `api`, `cli`, `server` and the exporters know a method through its spec alone. A method is a
folder of `ondevice/methods` whose package has a `METHOD`, or an entry point of the group `ondevice.methods` in any
other package; `ondevice.core.registry` finds both.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from ondevice.core.errors import ConfigError, MissingPackageError, ModelError, Need

if TYPE_CHECKING:
    from pathlib import Path

    from ondevice.core.config import StrictConfig
    from ondevice.core.dims import ModelDims
    from ondevice.core.session import OpenedNetwork, Session
    from ondevice.models import LoadedModel, ModelFiles

Backend = Literal["torch", "mlx"]


def load_place(place: str, package: str) -> Any:
    """Import the object at `module:name`, relative to `package` where it begins with a dot."""
    # Late, because a spec is read by commands that need no framework: only what is asked for is imported.
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module, package), name)


@dataclass(frozen=True)
class StepCost:
    """Operations and bytes of one step.

    Attributes:
        flops: floating-point operations, a multiply-add counted as two.
        moved_bytes: weights read, and for first-order methods gradients and moments read and written.
        dtype: in which the products are computed, where the method decides it.
    """

    flops: float
    moved_bytes: float
    dtype: str | None = None


@dataclass(frozen=True)
class Reduction:
    """A change of the method's settings that makes its plan smaller.

    Attributes:
        words: what to set, as a person would type it; `{config.KEY}` is the changed setting.
        change: the settings and the rows of a step to other settings; None where it does not apply.
    """

    words: str
    change: Callable[[Any, int], Any | None]  # (settings, rows of a step)


@dataclass(frozen=True)
class MemoryModel:
    """Bytes that a step needs, by part, from dimensions alone (units: bytes; sizes: tokens and rows).

    Attributes:
        step: (dims, config, batch_size, length_tokens, activation_bytes) to parts on the device that computes.
        host: the same arguments to parts in host memory beside an accelerator; empty where nothing waits there.
        ranked: (parts of `step`, dims, config, processes) to the parts as one of several processes has them that train
            together; None: each has all of them.
        weights: (dims, config, bytes of a weight, runtime) to the bytes of the frozen weights on the device that
            computes; None: the whole model, as it is loaded.
        blocks: (dims, config, batch_size, length_tokens, quantize) to what a run of an exported block program keeps
            beside the mapped weights; None: there are no such programs.
        notes: (dims, config) to sentences below the plan.
        host_note: what is in host memory, in a sentence.
        host_hint: what to set where the host's memory does not suffice.
        reductions: changes of settings that need less.
    """

    step: Callable[[ModelDims, Any, int, int, int], dict[str, int]]
    host: Callable[[ModelDims, Any, int, int, int], dict[str, int]] | None = None
    ranked: Callable[[dict[str, int], ModelDims, Any, int], dict[str, int]] | None = None
    weights: Callable[[ModelDims, Any, int, str], int] | None = None
    blocks: Callable[[ModelDims, Any, int, int, str], dict[str, int]] | None = None
    notes: Callable[[ModelDims, Any], list[str]] | None = None
    host_note: str = ""
    host_hint: str = ""
    reductions: tuple[Reduction, ...] = ()


@dataclass(frozen=True)
class MethodSpec:
    """A training method, as the rest of the program sees it. Places are `module:name`, relative to `package` where they
    begin with a dot, and are imported when they are first needed.

    Attributes:
        name: as in `--method` and `method.name`.
        package: the method's own package, `__name__` in its `__init__.py`.
        summary: what it does, in half a sentence, for lists.
        keeps: its state beside the weights, in half a sentence.
        page: of the documentation, a file of docs/methods.
        config: its settings.
        trains: an adapter, or all parameters of the model.
        order: of the derivatives it needs: `first` runs backward passes, `zeroth` runs forward passes only.
        sessions: backend to `open_session(model, config, seed, device)`; `model` is a `LoadedModel`, or `ModelFiles`
            where `reads_files` says so.
        memory: place of its `MemoryModel`.
        cost: place of (dims, config, batch_size, length_tokens, bytes of the weights) to `StepCost`.
        programs: kind of target to the place of its training step as a program (`ondevice.core.program`).
        preference: its place among the methods that are taken where none is named, from 1; 0: only where it is named.
        precision: the setting that says in which numbers it computes; empty where that is the model's `dtype`.
        offloads: it keeps the model in host memory and brings parts of it to the device that computes.
        ranks: several processes can train together, under `torchrun`.
        replayable: a run can be rebuilt from its log: the seed and one number a query.
        knows_block: (dims) whether its passes know the model's blocks, for the choice of a method.
        packs: backends whose sessions compute several rows in one sequence (`Session.packed_step`).
        packs_not: why others do not, in half a sentence.
        any_decoder: it takes models whose blocks are not known, because it computes no block itself; `tried`: it runs
            their blocks one by one, and finds out on opening whether it can.
        classifies: it trains an encoder with a classification head (`ModelDims.classes`).
        quantises: (config) whether it packs the model's weights itself, which are then loaded on the host.
        for_training: (config) its settings for training in eager PyTorch, with `auto` decided.
        schedule: (config) of a run that names none; None for the loop's own.
        reads_files: (config) whether a torch session reads the weights from their files itself.
        network: place of (folder, device) to `OpenedNetwork`, for a method whose trained model transformers alone
            cannot open; the folder's config.json then has the method's name as its `model_type`.
        advise: place of (plan, rates, plan_of) to what to set on a device; see `planning.advice`.
        lanes: place of (request, rates, rows, flops) to seconds by lane of a step, for methods that offload; `request`
            and `rates` are those of `planning.advice`.
        resolve: place of (request, rates or None, usable bytes of the host or None) to the method's settings with
            `auto` decided by the memory and the rates of the request's device, and why in a sentence; `rates` are
            measured ones. Results do not depend on what it decides.
    """

    name: str
    package: str
    summary: str
    config: type[StrictConfig]
    trains: Literal["adapter", "all"]
    order: Literal["zeroth", "first"]
    sessions: Mapping[str, str]
    memory: str
    cost: str
    keeps: str = ""
    page: str = ""
    programs: Mapping[str, str] = field(default_factory=dict)
    preference: int = 0
    precision: str = ""
    offloads: bool = False
    ranks: bool = False
    replayable: bool = False
    knows_block: Callable[[Any], bool] = lambda dims: True
    packs: tuple[str, ...] = ()
    packs_not: str = "its passes have no mask between the rows of a sequence"
    any_decoder: bool | Literal["tried"] = False
    classifies: bool = False
    quantises: Callable[[Any], bool] = lambda config: False
    for_training: Callable[[Any], Any] = lambda config: config
    schedule: Callable[[Any], str | None] = lambda config: None
    reads_files: Callable[[Any], bool] = lambda config: False
    network: str | None = None
    advise: str | None = None
    lanes: str | None = None
    resolve: str | None = None

    def load(self, place: str) -> Any:
        """Import the object at `place`, `module:name`."""
        return load_place(place, self.package)

    @cached_property
    def memory_model(self) -> MemoryModel:
        """The method's memory model, imported at the first use."""
        return self.load(self.memory)

    def step_cost(
        self, dims: ModelDims, config: Any, batch_size: int, length_tokens: int, weight_bytes: int
    ) -> StepCost:
        """Return the operations and bytes of a step on [batch_size, length_tokens]; every token counts as trained on.

        Args:
            weight_bytes: bytes of weights that one pass over the model reads.
        """
        return self.load(self.cost)(dims, config, batch_size, length_tokens, weight_bytes)

    def program(self, kind: str) -> Any | None:
        """Return the training step as a program for a kind of target; None where the method has none."""
        return self.load(self.programs[kind]) if kind in self.programs else None

    def load_device(self, config: Any, device: str) -> str:
        """Return the device torch loads the model on: the host, for methods that move or quantise it themselves."""
        return "cpu" if self.offloads or self.quantises(config) else device

    def open_session(
        self,
        model: LoadedModel | ModelFiles,
        config: Any,
        seed: int,
        device: str | None = None,
        backend: str = "torch",
    ) -> Session:
        """Open an eager session; changes a loaded model in place.

        Args:
            model: with its weights, or the files of one (`reads_files`, MLX).
            device: where torch computes, for methods that offload, stream or quantise; None is where the model is.
            backend: `torch` or `mlx`.

        Raises:
            ConfigError: the method has no part in that backend.
            ModelError: as `check_model`.
            MissingPackageError: the framework is not installed.
        """
        if backend not in self.sessions:
            flags = " or ".join(f"--backend {name}" for name in self.sessions)
            raise ConfigError(
                f"method {self.name} does not run in {backend}", expected=flags, received=backend
            )
        if backend == "mlx" and importlib.util.find_spec("mlx") is None:
            raise MissingPackageError(
                "mlx is not installed", hint="pip install 'ondevice-train[mlx]'"
            )
        self.check_model(model.dims)
        return self.load(self.sessions[backend])(model, config, seed, device)

    def check_model(self, dims: ModelDims) -> None:
        """Refuse a model whose blocks this method would have to know.

        Raises:
            ModelError: naming the methods that take it.
        """
        if dims.whole and not self.any_decoder:
            raise dims.unknown(f"method {self.name}")
        if dims.classes and not self.classifies:
            raise ModelError(
                f"method {self.name} does not train a model with a classification head",
                expected="a decoder",
                received=f"model_type {dims.family!r}",
                needs=Need.CLASSIFIES,
            )

    def check_packing(self, backend: str, whole: bool) -> None:
        """Refuse several rows in one sequence where their attention would not be kept apart.

        Args:
            whole: the model runs only as a whole (`ModelDims.whole`).

        Raises:
            ConfigError: saying why, and which methods do.
        """
        if backend in self.packs and not whole:
            return
        why = (
            self.packs_not
            if not self.packs
            else f"it does so in {' and '.join(self.packs)}, not in {backend}"
        )
        if whole and backend in self.packs:
            why = "the blocks of this model are not known, and each would need the mask"
        raise ConfigError(
            f"method {self.name} does not pack rows here: {why}",
            received=f"data.packing with method {self.name}, backend {backend}",
            hint="leave --packing out: the rows of a step are then padded to the longest",
            needs=Need.PACKS,
        )

    def open_network(self, folder: Path, device: str) -> OpenedNetwork:
        """Open a network that this method trained and saved."""
        if self.network is None:
            raise ConfigError(
                f"method {self.name} trains networks that transformers opens", received=str(folder)
            )
        return self.load(self.network)(folder, device)


@dataclass(frozen=True)
class Placement:
    """Backend, device and rank of a run, decided once from its run file and this machine.

    Attributes:
        spec: of its method.
        backend: `torch` or `mlx`.
        device: of torch: `cpu` or `cuda`; `cpu` for MLX, which has its own.
        rank, world: this process' number and how many train together (`torchrun`); 0 and 1 without.
    """

    spec: MethodSpec
    backend: Backend
    device: str
    rank: int = 0
    world: int = 1

    def precision(self, dtype: str) -> list[str]:
        """Say in which numbers the run computes, and where."""
        from ondevice.core.registry import metal

        if self.backend != "mlx":
            return [f"precision: {dtype} on {'the GPU' if self.device == 'cuda' else 'the CPU'}"]
        said = [f"precision: {dtype} on MLX"]
        if not metal():
            said.append(
                "MLX is meant for a Mac with Metal; on this CPU it is slow, --backend torch is the quick one"
            )
        return said
