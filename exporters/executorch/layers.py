"""A program for each layer, where a backend multiplies only with constants: one is lowered over
markers, and a layer's has its weights where the markers are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ondevice.core.errors import VerificationError

if TYPE_CHECKING:
    from pathlib import Path

    from ondevice.core.program import LayerConstants

LAYER_PROGRAM = "layers/{layer}.pte"
"""Name of a layer's program in an artifact."""


def write_layers(folder: Path, program: bytes, constants: LayerConstants) -> None:
    """Write every layer's program.

    Args:
        folder: of the artifact.
        program: lowered over the markers.

    Raises:
        VerificationError: a marker is not in the program exactly once, as it is.
    """
    places = {}
    for name, marker in constants.markers.items():
        if (count := program.count(content := marker.tobytes())) != 1:
            raise VerificationError(
                f"the lowered program does not keep {name} as it is; nothing was written",
                expected="its bytes once",
                received=f"{count} times",
                hint="another version of executorch stores constants in another way: --quantize int8 needs none",
            )
        places[name] = program.index(content)
    (folder / LAYER_PROGRAM).parent.mkdir()
    for layer, values in enumerate(constants.layers):
        content = bytearray(program)
        for name, start in places.items():
            content[start : start + values[name].nbytes] = values[name].tobytes()
        (folder / LAYER_PROGRAM.format(layer=layer)).write_bytes(content)
