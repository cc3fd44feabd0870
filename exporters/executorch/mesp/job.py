"""A MeSP export for any CPU that ExecuTorch runs on: what stands in its way, the program, and its check."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.errors import OndeviceError, VerificationError
from ondevice.exporters.executorch.target import check_round_trip
from ondevice.methods.mesp.pairs import check_family

if TYPE_CHECKING:
    from ondevice.artifact.manifest import Manifest
    from ondevice.exporters.base import ExportJob
    from ondevice.exporters.executorch.lower import Lowered
    from ondevice.exporters.executorch.programs import MethodSpec
    from ondevice.methods.mesp.torch.program import MespProgram
    from ondevice.models import LoadedModel, ModelDims

GRADIENT_TOLERANCE = 1e-4
"""Largest relative error of a tensor's gradient against automatic differentiation."""
LOSS_TOLERANCE = 1e-4
START = "adapter_start.bin"
"""The vector that a run starts from, float32 in little-endian order: a host needs no generator."""


def problems(job: ExportJob, dims: ModelDims) -> list[str]:
    """Settings that a MeSP program does not have."""
    found, export, method = [], job.export, job.method
    try:
        check_family(dims)
    except OndeviceError as error:
        found.append(str(error))
    for name, value, wanted in (
        ("export.quantize", export.quantize, "none"),
        ("export.form", export.form, "functional"),
        ("method.gradients", method.gradients, "manual"),
        ("method.weights", method.weights, "resident"),
        ("method.bits", method.bits, None),
    ):
        if value != wanted:
            found.append(f"{name} is {value}: a mesp program has {name}={wanted}")
    if export.loss not in ("auto", "tiled") or export.generator == "op":
        found.append("a mesp program needs no ops of this project: export.loss tiled, export.generator auto or aten")
    if method.micro_batch_size is not None and method.micro_batch_size < export.batch_size:
        found.append("a mesp program computes all rows of a batch at once: method.micro_batch_size=null")
    return found


def build(job: ExportJob, loaded: LoadedModel) -> tuple[MespProgram, list[MethodSpec], Lowered]:
    """The training program, its methods, and the lowered program."""
    from ondevice.exporters.executorch.mesp.programs import build_methods, lower
    from ondevice.methods.mesp.torch.program import MespProgram

    program = MespProgram(loaded, job.method, job.export.lengths_tokens)
    methods = build_methods(program, job.export)
    return program, methods, lower(methods)


def verify(folder: Path, manifest: Manifest, program: MespProgram, job: ExportJob) -> dict[str, Any]:
    """Gradients and steps against automatic differentiation, and an adapter's way through a file.

    Raises:
        VerificationError: the program is wrong.
    """
    from ondevice.exporters.executorch.check import random_batches
    from ondevice.exporters.executorch.mesp.check import compare
    from ondevice.runtime.first_order import FirstOrderProgramSession

    session = FirstOrderProgramSession(folder, manifest)
    session.flat().astype("<f4").tofile(folder / START)
    batches = random_batches(session, program.dims.vocab, job.export.check_steps)
    result = compare(session, program.loaded, job.method, batches, job.method.learning_rate)
    if not (result.gradient_error <= GRADIENT_TOLERANCE and result.max_rel_loss_error <= LOSS_TOLERANCE):
        raise VerificationError(
            "the program does not do what eager PyTorch does; nothing was written",
            expected=f"relative error of gradients <= {GRADIENT_TOLERANCE:g}, of losses <= {LOSS_TOLERANCE:g}",
            received=f"{result.gradient_error:.3g}, {result.max_rel_loss_error:.3g}",
        )
    check_round_trip(session)
    session.close()
    return {**result.to_dict(), "adapter_round_trip": True}
