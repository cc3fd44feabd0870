"""Interface of a target: one `TargetSpec` in its folder answers everything that other packages ask.

A target is a folder of `exporters` whose package has a `TARGET` (or `TARGETS`, if several differ only in data), or
an entry point of the group `ondevice.targets` in any other package; `ondevice.core.registry` finds both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from ondevice.core.config import ExportConfig, ModelConfig
    from ondevice.core.dims import ModelDims
    from ondevice.core.session import ProgramSession

Runtime = Literal["torch", "mlx", "executorch"]


class WeightBytes(NamedTuple):
    """Bytes of each kind of weight; their sum is the model's.

    Attributes:
        linears: the matrices of all blocks.
        embedding: the token embedding, which is the head too if they are tied and `head` is 0.
        head: an output head of its own.
        vectors: norms, biases and learned positions.
    """

    linears: int
    embedding: int
    head: int
    vectors: int


@dataclass(frozen=True)
class WeightPlacement:
    """Bytes of a program's weights, by where they are.

    Attributes:
        resident: read by every step: in memory for PyTorch; for ExecuTorch the pages of the file that XNNPACK
            does not copy (the embedding, and everything for q4).
        packed: a backend's own copies of the linears: one for each method that is loaded.
        arena: what a step copies for the tile of the head it is at.
        file: the program's weights on disk; pages that are not read again cost nothing.
        notes: sentences below the plan.
    """

    resident: int
    packed: int
    arena: int
    file: int
    notes: tuple[str, ...] = ()


class Exporter(Protocol):
    """A target's code; `exporters.base.Exporter` says what each function returns and raises."""

    def check(self, job: Any) -> list[str]: ...

    def export(self, job: Any, out: Path) -> Any: ...

    def open(self, folder: Path, manifest: Any) -> ProgramSession: ...

    def verify(self, folder: Path, manifest: Any, request: Any) -> dict[str, Any]: ...


PlaceWeights = Callable[["ModelDims", WeightBytes, "ExportConfig", int, bool], WeightPlacement]
"""(dims, weights, export, loss_tiles, evaluates) to where a program's weights are."""


@dataclass(frozen=True)
class TargetSpec:
    """Where an exported program runs.

    `exporter` and `placement` hold functions that import their result when they are called.

    Attributes:
        name: as in `--target`.
        summary: half a sentence for lists.
        kind: key into `MethodSpec.programs`: which runtime's program it takes. Ours are `executorch` (on a CPU), `qnn`
            (ExecuTorch with a Qualcomm NPU), `mlx` and `torch`; a new one needs no more than methods that have it.
        runtime: what a plan of an artifact counts with.
        exporter: its `Exporter` class, which is called with this spec.
        placement: its `PlaceWeights`; None: all weights are resident.
        dtype: (model section) to the precision that the artifact computes in.
        socs: chips that a program is compiled for, with their names; empty if one program runs on all.
        perturbation_scale: the target's own default of zeroth-order methods, if theirs is too small for its
            arithmetic; None for the method's.
        needs: checks of `ondevice doctor` without which it does not work.
        uses: checks of the settings that it can use.
        data: what only the target's own code reads, if one package has several targets.
    """

    name: str
    summary: str
    kind: str
    runtime: Runtime
    exporter: Callable[[], Callable[[TargetSpec], Exporter]]
    placement: Callable[[], PlaceWeights] | None = None
    dtype: Callable[[ModelConfig], str] = lambda model: "float32"
    socs: Mapping[str, str] = field(default_factory=dict)
    perturbation_scale: float | None = None
    needs: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    data: Any = None

    @cached_property
    def _exporter(self) -> Exporter:
        return self.exporter()(self)

    def check(self, job: Any) -> list[str]:
        """Return every reason why an `ExportJob` cannot be exported; no weights are loaded."""
        return self._exporter.check(job)

    def export(self, job: Any, out: Path) -> Any:
        """Write the artifact to `out`, whole or not at all; gives an `ExportReport`. See `Exporter.export`."""
        return self._exporter.export(job, out)

    def open(self, folder: Path, manifest: Any) -> ProgramSession:
        """Return a session of an artifact.

        Raises:
            MissingPackageError: a package that the runtime needs is not installed.
            ArtifactError: the runtime cannot load the program.
        """
        return self._exporter.open(folder, manifest)

    def verify(self, folder: Path, manifest: Any, request: Any) -> dict[str, Any]:
        """Hold an artifact against eager, as a `VerifyRequest` asks; see `Exporter.verify`."""
        return self._exporter.verify(folder, manifest, request)

    def place(
        self,
        dims: ModelDims,
        weights: WeightBytes,
        export: ExportConfig,
        loss_tiles: int,
        evaluates: bool,
    ) -> WeightPlacement:
        """Return where a program's weights are; `evaluates` if runs evaluate, too."""
        if self.placement is None:
            return WeightPlacement(sum(weights), 0, 0, 0)
        return self.placement()(dims, weights, export, loss_tiles, evaluates)
