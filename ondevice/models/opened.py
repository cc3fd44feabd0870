"""A model of which no weight is in memory yet: its sizes, its tokenizer and where its files are.

For methods that read the weights themselves: block by block, or in another framework than torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ondevice.errors import ModelError
from ondevice.models import source as sources
from ondevice.models.base import Family, ModelDims
from ondevice.models.load import DTYPES, load_tokenizer, read_dims
from ondevice.models.registry import family_for
from ondevice.models.source import TINY_PREFIX, SourceInfo

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ModelFiles:
    """What `LoadedModel` is before its weights are read; neither torch nor mlx is imported for it.

    Attributes:
        tokenizer: with a padding token.
        dims: sizes.
        family: the class that knows the names of its weights.
        source: where it came from; its `path` holds `config.json` and safetensors files whose headers were checked.
        dtype: precision to read the weights in: `float32`, `bfloat16` or `float16`.
    """

    tokenizer: PreTrainedTokenizerBase
    dims: ModelDims
    family: type[Family]
    source: SourceInfo
    dtype: str

    @property
    def folder(self) -> Path:
        """The folder of the safetensors files."""
        assert self.source.path is not None  # noqa: S101 - `open_model` refuses models without files
        return self.source.path


def open_model(source: str, *, revision: str | None = None, dtype: str = "float32", verify: bool = False) -> ModelFiles:
    """Find a model, fetch and convert it where needed, and check its files' headers; arguments as `load_model`'s.

    Raises:
        ModelError: as `load_model`; or the model has no files (`tiny:FAMILY`).
    """
    if dtype not in DTYPES:
        raise ModelError("unknown dtype of the weights", expected=", ".join(DTYPES), received=dtype)
    if source.startswith(TINY_PREFIX):
        raise ModelError(
            f"{source} has no files to read weights from",
            expected="a model with safetensors files",
            hint="write it with ondevice.models.save_tiny(FOLDER) and give that folder",
        )
    dims = read_dims(source, revision)
    family = family_for(dims.family, source)
    info = sources.resolve(source, revision, verify=verify)
    assert info.path is not None  # noqa: S101 - only `tiny:` sources have none
    sources.check_weights(info.path, family.weight_shapes(dims))
    return ModelFiles(load_tokenizer(source, revision), dims, family, info, dtype)
