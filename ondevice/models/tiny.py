"""A small random model with a byte tokenizer: for tests, and for trying the tools without a
download.

The same seed gives the same weights. `tiny:FAMILY`, such as `tiny:llama`, names the default one as
a source.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.artifact.files import atomic_directory
from ondevice.core.dims import ModelDims
from ondevice.core.errors import ModelError
from ondevice.models.families.base import Family
from ondevice.models.families.configuration import quiet_transformers
from ondevice.models.registry import family_classes
from ondevice.models.sources.cache import missing
from ondevice.models.sources.resolve import TINY_PREFIX, SourceInfo

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<pad>", "<eos>", "<|im_start|>", "<|im_end|>")
VOCABULARY = 256 + len(SPECIAL_TOKENS)
_TOKEN_IDS = {"pad_token_id": 256, "eos_token_id": 257, "bos_token_id": None}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

FACTORS = ("norm.weight", "norm_1.weight", "norm_2.weight", "scale")
"""Ends of the names of vectors that multiply."""


def build(
    family: str = "llama", seed: int = 0, **sizes: Any
) -> tuple[PreTrainedModel, type[Family], SourceInfo]:
    """Build a random float32 model on the CPU, with its family and its origin.

    Args:
        family: `gpt2`, `llama`, `mistral`, `qwen2` or `qwen2_moe`.
        seed: of the weights.
        sizes: as `_config` takes them.

    Raises:
        ModelError: an unknown family or sizes that do not fit.
    """
    kind = _family(family)
    config = _config(family, **sizes)
    model = _build(config)
    _fill(model, seed)
    if kind.dims_from_config(config).traits.score_scale == 1.0:
        _size_scores(model)
    model.generation_config.eos_token_id = [257, 259]
    model.generation_config.pad_token_id = 256
    info = SourceInfo(f"{TINY_PREFIX}{family}", None, known_sha256=_digest(model))
    return model, kind, info


def save_tiny(folder: str | Path, family: str = "llama", seed: int = 0, **sizes: Any) -> Path:
    """Write the model of `build` as a folder that `load_model` and transformers load."""
    model, _, _ = build(family, seed, **sizes)
    with atomic_directory(folder, marker="config.json") as partial, quiet_transformers():
        model.save_pretrained(partial)
        tiny_tokenizer().save_pretrained(partial)
    return Path(folder)


def tiny_dims(family: str) -> tuple[ModelDims, type[Family]]:
    """Return the dimensions of `tiny:FAMILY`, and its family; without transformers."""
    kind = _family(family)
    return kind.dims_from_config(_config(family), f"{TINY_PREFIX}{family}"), kind


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer: one token a byte (its id is the byte), then `<pad>`, `<eos>` and the
    chat's marks."""
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast
        from transformers.convert_slow_tokenizer import bytes_to_unicode
    except ImportError:
        raise missing("transformers") from None
    letters = bytes_to_unicode()
    tokenizer = Tokenizer(models.BPE({letters[byte]: byte for byte in range(256)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _family(name: str) -> type[Family]:
    kind = family_classes().get(name)
    if kind is None:
        expected = ", ".join(f"{TINY_PREFIX}{name}" for name in family_classes())
        raise ModelError("unknown tiny model", expected=expected, received=f"{TINY_PREFIX}{name}")
    return kind


def _check(hidden: int, heads: int, kv_heads: int, vocab: int) -> None:
    if hidden % 32 or hidden % (2 * heads):
        expected = f"hidden a multiple of 32 and of twice the {heads} heads"
        raise ModelError("a tiny model's sizes do not fit", expected=expected, received=hidden)
    if heads % kv_heads:
        raise ModelError(
            "a tiny model's sizes do not fit", expected="kv_heads divides heads", received=kv_heads
        )
    if vocab < VOCABULARY:
        raise ModelError(
            "a tiny model's sizes do not fit", expected=f"vocab >= {VOCABULARY}", received=vocab
        )


def _config(
    family: str,
    *,
    layers: int = 2,
    hidden: int = 64,
    intermediate: int | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = VOCABULARY,
    tied: bool = True,
    max_positions: int = 512,
    **more: Any,
) -> dict[str, Any]:
    """Return a tiny model's `config.json`.

    Args:
        hidden: a multiple of 32 (the group of 4-bit weights) and of `heads`.
        intermediate: width of the MLP; 2 * hidden if None.
        vocab: at least 260, the bytes and four special tokens.
        kv_heads: not for `gpt2`, whose heads are never grouped.
        more: other fields of the file.
    """
    kind = _family(family)
    _check(hidden, heads, kv_heads, vocab)
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": intermediate or 2 * hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": max_positions,
    }
    return {"model_type": family, **kind.tiny_config(**{**_TOKEN_IDS, **sizes, **more})}


def _build(config: dict[str, Any]) -> PreTrainedModel:
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise missing("transformers") from None
    # transformers draws random weights, which `_fill` replaces: the caller's random numbers stay as
    # they were.
    with torch.random.fork_rng(devices=[]), quiet_transformers():
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config), attn_implementation="sdpa", dtype=torch.float32
        )


def _fill(model: PreTrainedModel, seed: int) -> None:
    """Fill with random numbers that make every part matter: logits of about unit size, norms not 1,
    biases not 0."""
    import torch

    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        # In order of the names: transformers may order its modules otherwise in another version.
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=rng)
            if parameter.ndim == 1:
                scale = name.endswith(FACTORS) or (".ln_" in name and name.endswith(".weight"))
                parameter.copy_(0.1 * noise + float(scale))
            else:
                parameter.copy_(noise / parameter.shape[1] ** 0.5)
        files = model.state_dict()
        for name, buffer in sorted(model.named_buffers()):
            if name in files:  # a factor that no method trains
                buffer.copy_(1.0 + 0.1 * torch.randn(buffer.shape, generator=rng))


def _size_scores(model: PreTrainedModel) -> None:
    """Give scores about unit size in a family whose queries' norms alone make them small.

    With norms of 1 they would be of the size of the root of a head's width. Then each token attends
    to one other, and the least rounding may change to which. A router's scores are divided by the
    root of the width.
    """
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("q_norm.weight"):
                parameter.mul_(parameter.numel() ** -0.5)
            elif name.endswith("router.scale"):
                parameter.mul_(parameter.numel() ** 0.5)


def _digest(model: PreTrainedModel) -> str:
    digest = hashlib.sha256(
        repr(sorted(model.config.to_dict().items(), key=lambda item: item[0])).encode()
    )
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()
