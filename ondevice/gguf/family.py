"""What reading and writing GGUF files asks of a model family, with the defaults of most
families."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from ondevice.core.dims import ModelDims
    from ondevice.gguf.metadata import Metadata

    Numbers = Callable[[np.ndarray], np.ndarray]


class GGUFFamily:
    """The part of `ondevice.models.families.base.Family` that GGUF files need."""

    model_type: ClassVar[str]
    gguf_architecture: ClassVar[str | None] = None
    """`general.architecture` of its GGUF files; None if they are not supported."""
    gguf_written_as: ClassVar[str | None] = None
    """`general.architecture` of written files, if reading that architecture yields another
    family."""

    @classmethod
    def gguf_config(cls, data: Metadata, config: dict[str, Any]) -> dict[str, Any]:
        """Read what only this family has in a GGUF file's metadata, as fields of `config.json`.

        Args:
            config: the fields that every family has.

        Raises:
            ModelError: the file needs something that the family does not support.
        """
        return {}

    @classmethod
    def gguf_keys(cls, dims: ModelDims, config: dict[str, Any]) -> dict[str, Any]:
        """Return the GGUF keys that `gguf_config` reads; `config` may be empty, for the check only.

        Raises:
            ModelError: llama.cpp computes models of this architecture in another way.
        """
        return {}

    @classmethod
    def gguf_tensor(cls, name: str, weights: np.ndarray, dims: ModelDims) -> np.ndarray:
        """Lay out a dequantised GGUF tensor as transformers does; `name` is transformers' name."""
        return weights

    @classmethod
    def gguf_columns(cls, name: str, dims: ModelDims) -> np.ndarray | None:
        """Return which of transformers' columns each column of a file's matrix is; None if they
        are in the same order."""
        return None

    @classmethod
    def gguf_function(cls, name: str) -> tuple[Numbers, Numbers] | None:
        """Return what files have of a tensor's numbers, if it is a function of them, and its
        inverse."""
        return None

    @classmethod
    def gguf_known_as(cls, name: str) -> str:
        """Return the name of a weight in the tables of the `gguf` package, if it is another."""
        return name

    @classmethod
    def weight_shapes(cls, dims: ModelDims) -> dict[str, tuple[int, ...]]:
        """Map every weight's name in transformers to its shape."""
        raise NotImplementedError
