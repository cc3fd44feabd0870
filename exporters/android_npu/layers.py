"""Functions of one block for the NPU: each layer's are compiled with its weights, into a program
file of its own.

ExecuTorch's passes run only for the first layer: the others' weights take the place of its weights
in what the passes gave (`Compiled.code_for`), and their compiled code that of its code in the
finished program.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ondevice.core.errors import VerificationError
from ondevice.exporters.android_npu import qnn
from ondevice.exporters.android_npu.compile import compile_blocks
from ondevice.exporters.executorch.layers import LAYER_PROGRAM
from ondevice.exporters.executorch.lower import lower_portable
from ondevice.exporters.executorch.target import log

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ondevice.core.program import BuiltProgram
    from ondevice.exporters.base import ExportJob
    from ondevice.exporters.executorch.lower import Lowered


def lower_layers(job: ExportJob, built: BuiltProgram, folder: Path) -> tuple[BuiltProgram, Lowered]:
    """Compile the functions of every layer, write them into `folder`, and lower the others.

    One layer at a time, so that memory holds one layer's compiled code, whatever the depth.

    Returns:
        The program with the functions of the first layer among its modules, as all layers' have the
        same ports.
    """
    assert built.parts is not None  # noqa: S101 - the caller looked
    started, (soc,) = time.perf_counter(), job.export.soc
    with qnn.quiet():
        lowered = lower_portable(built.modules)
    log.info("compiling %d layers for the NPU of %s", built.layers, soc)
    first = {
        part.name: compile_blocks(part.body, part.inputs, soc, method=part.name)
        for part in built.parts(0)
    }
    modules = [part.finish(part.name, first[part.name].delegate) for part in built.parts(0)]
    with qnn.quiet():
        of_layer = lower_portable(modules)
    (folder / LAYER_PROGRAM).parent.mkdir()
    for layer in range(built.layers):
        code = {}
        for part in built.parts(layer):
            compiled = first[part.name]
            code[compiled.code] = compiled.code_for(part.body) if layer else compiled.code
        (folder / LAYER_PROGRAM.format(layer=layer)).write_bytes(with_code(of_layer.buffer, code))
        log.info(
            "layer %d of %d: %.0f s so far", layer + 1, built.layers, time.perf_counter() - started
        )
    lowered = lowered.with_layers(of_layer)
    lowered.seconds = time.perf_counter() - started
    return replace(built, modules=(*modules, *built.modules)), lowered


def with_code(program: bytes, code: Mapping[bytes, bytes]) -> bytes:
    """Write a program file with other compiled code in its delegates.

    Args:
        code: the compiled code of every delegate, and what comes in its place.

    Raises:
        VerificationError: the program's delegates are others.
    """
    from executorch.exir._serialize import _deserialize_pte_binary, _serialize_pte_binary

    file = _deserialize_pte_binary(program)
    blobs = file.program.backend_delegate_data
    if sorted(bytes(blob.data) for blob in blobs) != sorted(code):
        raise VerificationError(
            "the lowered program does not hold the compiled code as it is; nothing was written",
            expected=f"{len(code)} delegates",
            received=f"{len(blobs)} delegates",
        )
    for blob in blobs:
        blob.data = code[bytes(blob.data)]
    return bytes(_serialize_pte_binary(file, extract_delegate_segments=True))
