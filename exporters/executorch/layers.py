"""A program for each layer, where a backend multiplies only with constants: one is lowered over
markers, and a layer's has its weights where the markers are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ondevice.core.errors import VerificationError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ondevice.core.program import LayerConstants

LAYER_PROGRAM = "layers/{layer}.pte"
"""Name of a layer's program in an artifact."""


def write_layers(
    folder: Path, programs: Sequence[bytes], kinds: Sequence[int], constants: LayerConstants
) -> None:
    """Write every layer's program.

    Args:
        folder: of the artifact.
        programs: of each kind of block, lowered over the markers.
        kinds: of each layer, the kind of its block; empty if there is one.

    Raises:
        VerificationError: a marker is not in its program exactly once, as it is.
    """
    layers = list(zip(kinds or [0] * len(constants.layers), constants.layers, strict=True))
    places: dict[tuple[int, str], int] = {}
    for kind, values in layers:
        for name in values:
            if (kind, name) not in places:
                places[kind, name] = _place(
                    programs[kind], name, constants.markers[kind][name].tobytes()
                )
    (folder / LAYER_PROGRAM).parent.mkdir()
    for layer, (kind, values) in enumerate(layers):
        content = bytearray(programs[kind])
        for name, value in values.items():
            start = places[kind, name]
            content[start : start + value.nbytes] = value.tobytes()
        (folder / LAYER_PROGRAM.format(layer=layer)).write_bytes(content)


def _place(program: bytes, name: str, marker: bytes) -> int:
    if (count := program.count(marker)) != 1:
        raise VerificationError(
            f"the lowered program does not keep {name} as it is; nothing was written",
            expected="its bytes once",
            received=f"{count} times",
            hint="another version of executorch stores constants in another way: --quantize int8 needs none",
        )
    return program.index(marker)
