"""The keys of a GGUF file, and the shapes of its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ondevice.core.errors import ModelError

if TYPE_CHECKING:
    from gguf import GGUFReader


class Metadata:
    """Keys and tensors of an open GGUF file.

    Attributes:
        path: names it in errors.
        shapes: of each tensor by GGUF's name, in numpy's order.
    """

    def __init__(self, reader: GGUFReader, path: Path) -> None:
        self.path = path
        self._reader = reader
        self.shapes = {
            tensor.name: tuple(int(n) for n in reversed(tensor.shape)) for tensor in reader.tensors
        }
        self.architecture = str(self.general("general.architecture"))

    def general(self, key: str) -> Any:
        """Return the value of a key; ModelError if it is missing."""
        if (value := self.optional(key)) is None:
            hint = "convert it with a recent llama.cpp"
            raise ModelError(f"{self.path}: missing metadata key", expected=key, hint=hint)
        return value

    def optional(self, key: str) -> Any:
        """Return the value of a key, or None; floats as the decimals they were written as."""
        field = self._reader.get_field(key)
        try:
            if field is None:
                return None
            return short_float(field.contents())
        except UnicodeDecodeError as error:
            raise ModelError(
                f"{self.path}: metadata '{key}' is not UTF-8", received=str(error)
            ) from None

    def need(self, key: str) -> Any:
        """Return the value of the architecture's key; ModelError if it is missing."""
        return self.general(f"{self.architecture}.{key}")

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of the architecture's key, or `default`."""
        value = self.optional(f"{self.architecture}.{key}")
        if value is None:
            return default
        return value

    def vector(self, name: str) -> np.ndarray:
        """Return a float32 tensor."""
        data = next(tensor.data for tensor in self._reader.tensors if tensor.name == name)
        return np.array(data, np.float32)


def short_float(value: Any) -> Any:
    """Convert a float32 to the decimal number it was written as: 9.9999997e-06 is 1e-05."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    return value
