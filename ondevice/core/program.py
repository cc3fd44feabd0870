"""A method's training step as a program: what a method registers in `MethodSpec.programs` for a kind of target.

Methods build and compare programs and know no target; targets lower, write and run them and know no method. A kind has
one contract: `GraphProgram` for `executorch` and `qnn`, `TorchProgram` for `torch`, `StagesProgram` for `mlx`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from torch import Tensor, nn

    from ondevice.core.config import ExportConfig
    from ondevice.core.dims import ModelDims
    from ondevice.core.manifest import (
        AdapterEntry,
        Constant,
        Counter,
        ProgramMethod,
        StateTensor,
        TensorPort,
    )
    from ondevice.core.session import Preparing, ProgramSession, Session

M = TypeVar("M")
"""A model: `LoadedModel`, or `ModelFiles` for MLX."""
Batch = tuple["np.ndarray", "np.ndarray"]
"""Token ids and labels, int64 [rows, tokens] each."""
Batches = Callable[[int], Iterable[Batch]]
"""So many batches, or more."""
FUSED = "fused_"
"""Before a function's name: the same function in this project's ops, which a host calls if its runtime links them."""
LOWEST = -1e30
"""The largest logit before the first tile of a block program, and a logit that does not count: its exponential is zero,
and unlike minus infinity it can be subtracted from itself."""


@dataclass(frozen=True)
class Agreement:
    """Comparison of a program in its runtime with the method in eager.

    Attributes:
        values: all that was measured, as `--json` and the manifest's `check` have it.
        errors: those that a target holds against its tolerances, by kind of error: `loss` from the same state on both
            sides, `loss_free` where each side follows its own updates, `update`, `gradient`.
        shares: those that must be large: `sign_agreement`, `correlation`.
    """

    values: dict[str, Any]
    errors: dict[str, float]
    shares: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ProgramModule:
    """One method of a program: a module that torch.export takes, with its ports in the order of its arguments."""

    name: str
    module: nn.Module
    inputs: tuple[TensorPort, ...]
    outputs: tuple[TensorPort, ...]
    per_layer: bool = False
    """It holds weights of a layer (`BuiltProgram.constants_of_layers`), so that every layer has its own."""

    def example_inputs(self) -> tuple[Tensor, ...]:
        """Return zeros of the ports' shapes and dtypes: torch.export reads nothing else."""
        import torch

        return tuple(
            torch.zeros(port.shape, dtype=getattr(torch, port.dtype)) for port in self.inputs
        )


@dataclass(frozen=True)
class LayerConstants:
    """Weights that functions of a block hold, for a backend that multiplies integers only with constants.

    Attributes:
        markers: of each kind of block, noise that its modules hold in their place, by name with `{layer}`. A module is
            lowered once; a layer's program is that one with the layer's bytes where the markers' are.
        layers: of each layer, those that its block has, with the markers' names, shapes and dtypes.
    """

    markers: Sequence[Mapping[str, np.ndarray]]
    layers: Sequence[Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class NpuPart:
    """A function of one layer, a part of which an NPU's compiler takes.

    Attributes:
        name: of the function, as in the manifest.
        body: the compiled part, with its example `inputs`; the layer's frozen weights are constants of it.
        finish: (name, compiled body) to the function.
    """

    name: str
    body: nn.Module
    inputs: tuple[Tensor, ...]
    finish: Callable[[str, nn.Module], ProgramModule]


@dataclass(frozen=True)
class BuiltProgram:
    """A step as graphs, and the state that a host keeps for it (`core.manifest.ProgramSpec` has the meanings).

    Attributes:
        eager: the method's own program, for `GraphProgram.compare`.
        loaded: the model inside it.
        first: by name, the values of state tensors that do not begin as zeros.
        frozen: `<linear>.lora_A.weight` float32 [rank, inputs] of every entry without `a_offset`.
        blocks: for `qnn`, the module of all transformer blocks and its example inputs; `finish` takes it compiled and
            gives the modules, which are empty before.
        parts: for `qnn` and shape `blocks`, a layer's number to its functions, which are in a program file of their
            own; `modules` has the others.
        eval_batch_size: rows of an evaluation, if the program decides them.
    """

    eager: Any
    loaded: Any
    modules: tuple[ProgramModule, ...]
    state: tuple[StateTensor, ...]
    layout: tuple[AdapterEntry, ...]
    rank: int
    alpha: float
    counters: tuple[Counter, ...] = ()
    constants: tuple[Constant, ...] = ()
    first: Mapping[str, np.ndarray] = field(default_factory=dict)
    frozen: Mapping[str, np.ndarray] = field(default_factory=dict)
    batch_copies: int = 1
    evaluates_with: Literal["evaluate", "train_step"] = "evaluate"
    noise: str = "none"
    """Distribution of the generator's numbers; `none` without a generator."""
    shape: Literal["step", "blocks"] = "step"
    """`blocks`: the modules are functions of one block, and frozen weights are inputs; see `ProgramSpec.shape`."""
    layers: int = 0
    """Of `blocks`."""
    kinds: tuple[int, ...] = ()
    """Of `blocks`; see `ProgramSpec.kinds`."""
    weights: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Of `blocks`: the frozen weights by the names of the `frozen` ports, in the order in which a step reads them."""
    constants_of_layers: LayerConstants | None = None
    """Of `blocks`, if modules are `per_layer`."""
    blocks: tuple[nn.Module, tuple[Tensor, ...]] | None = None
    finish: Callable[[nn.Module], tuple[ProgramModule, ...]] | None = None
    parts: Callable[[int], tuple[NpuPart, ...]] | None = None
    loss_scale: float | None = None
    """Of `blocks`; see `ProgramSpec.loss_scale`."""
    eval_batch_size: int | None = None


@dataclass(frozen=True)
class GraphProgram(Generic[M]):
    """A step that `torch.export` takes, for ExecuTorch.

    Attributes:
        problems: (config, export, dims) to every reason why there is no such program, before weights are loaded.
        build: (loaded, config, export, seed) to the program; changes the model in place.
        compare: (session, built, batches, learning_rate) to how the session agrees with eager; the session is
            somewhere else afterwards.
        rounding: (session, float32, config, batches) to measured values and warnings: what rounding did to gradients.
            `float32` is the program built over the model as it was, `batches` gives so many.
        rounded: values of `export.quantize` for which `rounding` is asked.
        uses_ops: (export) whether the program needs kernels of this project in the runtime.
        calibrate: (loaded, config, rows, seed) to the settings of a program that begins with what the exported model's
            rows say, and the first values of its state; None if the settings ask for nothing of the kind.
        chosen: values of `export.quantize` whose levels can be chosen on rows of the task.
        choose: (loaded, token ids of rows, `export.quantize`) chooses them, in place.
        restore: (loaded, tensors of the weights file) puts an artifact's matrices into the model, for `chosen`.
        refresh: (session) to what prepares its steps and its replay, for a method that now and then changes the state
            from outside the program.
    """

    problems: Callable[[Any, ExportConfig, ModelDims], list[str]]
    build: Callable[[M, Any, ExportConfig, int], BuiltProgram]
    compare: Callable[[ProgramSession, BuiltProgram, Iterable[Batch], float], Agreement]
    rounding: (
        Callable[
            [ProgramSession, BuiltProgram, Any, Callable[[int], Iterable[Batch]]],
            tuple[dict[str, Any], list[str]],
        ]
        | None
    ) = None
    rounded: tuple[str, ...] = ()
    uses_ops: Callable[[ExportConfig], bool] = lambda export: export.uses_ops
    calibrate: Callable[[M, Any, Any, int], tuple[Any, Mapping[str, np.ndarray]] | None] | None = (
        None
    )
    chosen: tuple[str, ...] = ()
    choose: Callable[[M, Sequence[Sequence[int]], str], None] | None = None
    restore: Callable[[M, Mapping[str, np.ndarray]], None] | None = None
    refresh: Callable[[ProgramSession], Preparing] | None = None


@dataclass(frozen=True)
class TorchProgram(Generic[M]):
    """A step that stays PyTorch's, over weights that were packed beforehand.

    Attributes:
        problems: (config) to every setting that an artifact cannot have.
        trains_a: (config) whether LoRA's A is trained, too.
        open_fixed: (loaded, config, seed) to a session for fixed shapes on a GPU; None: the method's own session.
    """

    problems: Callable[[Any], list[str]] = lambda config: []
    trains_a: Callable[[Any], bool] = lambda config: True
    open_fixed: Callable[[M, Any, int], Session] | None = None


@dataclass(frozen=True)
class StagesProgram(Generic[M]):
    """A step as stage functions that are called in an order which is data, for MLX.

    Attributes:
        problems: (files or None, config) to every setting that a program cannot have; with the model's files, those
            that the model stands against, too.
        write: (session, files, config, export, folder, functions) writes `program.json` and `weights/` into `folder`
            and the stages into `functions`; gives the ports of every trace.
        open: (folder, manifest, functions, streamed) to a session; `functions.call(stage, arrays)` runs a stage.
    """

    problems: Callable[[M | None, Any], list[str]]
    write: Callable[[Any, M, Any, ExportConfig, Path, Path], dict[str, ProgramMethod]]
    open: Callable[[Path, Any, Any, bool | None], ProgramSession]
