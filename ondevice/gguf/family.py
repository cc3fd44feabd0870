"""What reading and writing GGUF files asks of a model family; `ondevice.models.families.base` has the defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    import numpy as np

    from ondevice.core.dims import ModelDims
    from ondevice.gguf.config import Metadata


class GGUFFamily(Protocol):
    """A family class; see `ondevice.models.families.base.Family` for each member."""

    model_type: ClassVar[str]
    gguf_architecture: ClassVar[str | None]
    gguf_written_as: ClassVar[str | None]

    @classmethod
    def gguf_config(cls, data: Metadata, config: dict[str, Any]) -> dict[str, Any]: ...

    @classmethod
    def gguf_keys(cls, dims: ModelDims, config: dict[str, Any]) -> dict[str, Any]: ...

    @classmethod
    def gguf_tensor(cls, name: str, weights: np.ndarray, dims: ModelDims) -> np.ndarray: ...

    @classmethod
    def weight_shapes(cls, dims: ModelDims) -> dict[str, tuple[int, ...]]: ...
