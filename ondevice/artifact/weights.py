"""The frozen weights of a block program: one safetensors file that a host maps, and hands to a
program without a copy.

Every tensor begins at a multiple of `ALIGNMENT_BYTES`, so that a runtime may use it in place.
"""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ondevice.artifact.files import PADDING, write_tensors
from ondevice.core.errors import ArtifactError
from ondevice.core.untrusted import read_header

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

WEIGHTS_NAME = "weights.safetensors"
ALIGNMENT_BYTES = 64
DTYPES = {"F32": np.float32, "F16": np.float16, "I8": np.int8, "U8": np.uint8}
_HINT = "copy the artifact again, or export it again"


def write_weights(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write float32, float16, int8 or uint8 tensors, aligned, in the order of `tensors`."""
    write_tensors(path, dict(tensors), written=lambda name: None, alignment=ALIGNMENT_BYTES)


class MappedWeights:
    """The tensors of a weights file, mapped: their memory is the file's, and the system may drop
    and read it again.

    Raises:
        ArtifactError: the file is missing, truncated, not aligned, or holds something that is not a
            weight.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._places: dict[str, tuple[np.dtype, tuple[int, ...], int]] = {}
        try:
            tensors = read_header(self.path).tensors
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise ArtifactError(
                f"{self.path}: not a whole safetensors file: {error}", hint=_HINT
            ) from None
        for name, place in tensors.items():
            if place.dtype not in DTYPES:
                expected = ", ".join(DTYPES)
                raise ArtifactError(
                    f"{self.path}: dtype of '{name}'", expected=expected, received=place.dtype
                )
            if place.start % ALIGNMENT_BYTES and not name.startswith(PADDING):
                expected = f"a multiple of {ALIGNMENT_BYTES} bytes"
                raise ArtifactError(
                    f"{self.path}: '{name}' is not aligned", expected=expected, received=place.start
                )
            self._places[name] = (np.dtype(DTYPES[place.dtype]), place.shape, place.start)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def tensor(self, name: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """Return the tensor in the file's memory; not to be written to.

        Args:
            shape: what the program wants; of the first dimension the file may have more, for tables
                taken in tiles.
            dtype: numpy's name.

        Raises:
            ArtifactError: no tensor has that name, shape and dtype: weights of another model, or of
                this one rounded in another way.
        """
        place = self._places.get(name)
        if (
            place is None
            or place[0] != dtype
            or place[1][1:] != shape[1:]
            or place[1][0] < shape[0]
        ):
            other = "quantisation"
            if place is None or place[0] == dtype:
                other = "model"
            raise ArtifactError(
                f"{self.path} holds the weights of another {other}: {name}",
                expected=f"{dtype} {list(shape)}",
                received=None if place is None else f"{place[0]} {list(place[1])}",
                hint=_HINT,
            )
        return self.whole(name)

    def whole(self, name: str) -> np.ndarray:
        """Return the tensor as the file has it."""
        dtype, shape, first = self._places[name]
        return np.frombuffer(self._map, dtype, math.prod(shape), first).reshape(shape)
