"""Open a model without its weights: its files with their headers checked.

Methods that read the weights themselves start here: block by block, or in another framework than
torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.core.dims import ModelDims
from ondevice.core.errors import ModelError
from ondevice.models.families.base import BLOCKS, Family
from ondevice.models.families.configuration import dims_of
from ondevice.models.load import DTYPES, load_tokenizer, read_dims
from ondevice.models.registry import family_for
from ondevice.models.sources import resolve as sources
from ondevice.models.sources.resolve import TINY_PREFIX, SourceInfo, check_head

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


TextFamily = Callable[[str, "str | None"], "tuple[ModelDims, type[Family], dict[str, Any]]"]


@dataclass(frozen=True)
class ModelFiles:
    """A `LoadedModel` before its weights are read; neither torch nor mlx is imported for it.

    Attributes:
        tokenizer: with a padding token.
        dims: sizes.
        family: the class that knows the names of its weights.
        source: its origin; `path` holds `config.json` and safetensors files whose headers were
            checked.
        dtype: precision to read the weights in: `float32`, `bfloat16` or `float16`.
        packed: bits and group size of matrices that mlx-lm has packed already; None for a model in
            full precision.
        text: fields of the configuration of a checkpoint's language model, whose weights have other
            names in the files (`text_name`); None for a model of text.
    """

    tokenizer: PreTrainedTokenizerBase
    dims: ModelDims
    family: type[Family]
    source: SourceInfo
    dtype: str
    packed: tuple[int, int] | None = None
    text: dict[str, Any] | None = None

    @property
    def folder(self) -> Path:
        """The folder of the safetensors files."""
        assert self.source.path is not None  # noqa: S101 - `open_model` refuses models without files
        return self.source.path

    @property
    def config(self) -> dict[str, Any]:
        """The fields of `config.json`, of a checkpoint its language model's."""
        return self.text or sources.read_config(self.folder)


def check_has_files(source: str) -> None:
    """Refuse a model without files (`tiny:FAMILY`) with ModelError."""
    if source.startswith(TINY_PREFIX):
        raise ModelError(
            f"{source} has no files to read weights from",
            expected="a model with safetensors files",
            hint="write it with ondevice.models.save_tiny(FOLDER) and give that folder",
        )


def open_model(
    source: str,
    *,
    revision: str | None = None,
    dtype: str = "float32",
    verify: bool = False,
    packed: bool = False,
    text: TextFamily | None = None,
) -> ModelFiles:
    """Find a model, fetch and convert it if needed, and check its files' headers; arguments as
    `load_model`'s.

    Args:
        packed: a model that mlx-lm has packed will do.
        text: `text_family`, to open the language model of a checkpoint that also reads images.

    Raises:
        ModelError: as `load_model`; or the model has no files (`tiny:FAMILY`).
    """
    if dtype not in DTYPES:
        raise ModelError("unknown dtype of the weights", expected=", ".join(DTYPES), received=dtype)
    check_has_files(source)
    packing = None
    if packed and not source.endswith(".gguf"):
        config, where = sources.config_of(source, revision)
        packing = mlx_packing(config, where)
    fields = None
    if text is not None and packing is None and not source.endswith(".gguf"):
        dims, family, values = text(source, revision)
        fields = values if family.blocks != BLOCKS else None
    elif packing is None:
        dims = read_dims(source, revision)
        family = family_for(dims.family, source)
    else:
        family = family_for(config.get("model_type"), where)
        plain_config = {
            key: value for key, value in config.items() if not key.startswith("quantization")
        }
        dims = dims_of(family, plain_config, where)
    info = sources.resolve(source, revision, verify=verify)
    assert info.path is not None  # noqa: S101 - only `tiny:` sources have none
    shapes = family.weight_shapes(dims)
    if packing is not None:  # packed matrices have other shapes; vectors are as they were
        shapes = {name: shape for name, shape in shapes.items() if len(shape) == 1}
    sources.check_weights(info.path, shapes)
    if dims.tied and sources.read_config(info.path).get("tie_word_embeddings") is False:
        dims = replace(dims, tied=False)  # of a hub id the weights are known only now
    if not dims.tied and fields is None:
        check_head(info.path)
    return ModelFiles(load_tokenizer(source, revision), dims, family, info, dtype, packing, fields)


def mlx_packing(config: dict[str, Any], where: str) -> tuple[int, int] | None:
    """Read bits and group size that mlx-lm wrote into a `config.json`; None if it did not pack the
    weights.

    Raises:
        ModelError: layers are packed in different ways, or in a way that cannot be read.
    """
    packing = config.get("quantization")
    if not isinstance(packing, dict):
        return None
    mixed = [key for key in packing if key not in ("bits", "group_size", "mode")]
    bits = packing.get("bits")
    group = packing.get("group_size")
    if (
        mixed
        or bits not in (4, 8)
        or group not in (32, 64, 128)
        or packing.get("mode", "affine") != "affine"
    ):
        raise ModelError(
            f"{where}: the weights are packed in a way that is not supported",
            expected="mode affine, bits 4 or 8, group_size 32, 64 or 128, the same in every layer",
            received=f"{packing.get('mode', 'affine')}, {bits} bits in groups of {group}"
            + (f", and others for {mixed[0]}" if mixed else ""),
            hint="give the model's original weights: method.bits=4 packs them",
        )
    return bits, group
