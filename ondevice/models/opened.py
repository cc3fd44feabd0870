"""A model of which no weight is in memory yet: its sizes, its tokenizer and where its files are.

For methods that read the weights themselves: block by block, or in another framework than torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
        packed: bits and group size of matrices that mlx-lm has packed already; None for a model in full precision.
    """

    tokenizer: PreTrainedTokenizerBase
    dims: ModelDims
    family: type[Family]
    source: SourceInfo
    dtype: str
    packed: tuple[int, int] | None = None

    @property
    def folder(self) -> Path:
        """The folder of the safetensors files."""
        assert self.source.path is not None  # noqa: S101 - `open_model` refuses models without files
        return self.source.path


def open_model(
    source: str,
    *,
    revision: str | None = None,
    dtype: str = "float32",
    verify: bool = False,
    packed: bool = False,
) -> ModelFiles:
    """Find a model, fetch and convert it where needed, and check its files' headers; arguments as `load_model`'s.

    Args:
        packed: a model that mlx-lm has packed will do.

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
    form = None
    if packed and not source.endswith(".gguf"):
        config, where = sources.config_of(source, revision)
        form = packed_form(config, where)
    if form is None:
        dims = read_dims(source, revision)
        family = family_for(dims.family, source)
    else:
        family = family_for(config.get("model_type"), where)
        whole = {key: value for key, value in config.items() if not key.startswith("quantization")}
        dims = family.dims_from_config(whole, where)
    info = sources.resolve(source, revision, verify=verify)
    assert info.path is not None  # noqa: S101 - only `tiny:` sources have none
    shapes = family.weight_shapes(dims)
    if form is not None:
        shapes = {name: shape for name, shape in shapes.items() if len(shape) == 1}
    sources.check_weights(info.path, shapes)
    return ModelFiles(load_tokenizer(source, revision), dims, family, info, dtype, form)


def packed_form(config: dict[str, Any], where: str) -> tuple[int, int] | None:
    """Bits and group size that mlx-lm wrote into a `config.json`; None where it did not pack the weights.

    Raises:
        ModelError: layers are packed in different ways, or in a way that cannot be read.
    """
    form = config.get("quantization")
    if not isinstance(form, dict):
        return None
    mixed = [key for key in form if key not in ("bits", "group_size", "mode")]
    bits, group = form.get("bits"), form.get("group_size")
    if mixed or bits not in (4, 8) or group not in (32, 64, 128) or form.get("mode", "affine") != "affine":
        raise ModelError(
            f"{where}: the weights are packed in a way that is not supported",
            expected="mode affine, bits 4 or 8, group_size 32, 64 or 128, the same in every layer",
            received=f"{form.get('mode', 'affine')}, {bits} bits in groups of {group}"
            + (f", and others for {mixed[0]}" if mixed else ""),
            hint="give the model's original weights: method.bits=4 packs them",
        )
    return bits, group
