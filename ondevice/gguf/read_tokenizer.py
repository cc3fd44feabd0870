"""The tokenizer of a GGUF file as `tokenizer.json`, read as llama.cpp reads it.

transformers has such a reader, but its result depends on its version: with 5.17 a Gemma gets a
Unigram model of single letters without a first token, with 5.23 the right one. Here `tokenizers` is
told the rules, so that the ids are llama.cpp's under every version. Token kinds and treatment of
spaces are those of llama.cpp's `llama-vocab.cpp`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ondevice.core.errors import MissingPackageError, ModelError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from ondevice.gguf.metadata import Metadata

NAMED_TEMPLATES = "additional_chat_templates"
"""transformers' folder of the templates other than the default."""
SPACE = "▁"
SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_REST_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{SHORT}|{LETTERS}|\p{{N}}{{1,3}}|{REST}"
QWEN2 = rf"{SHORT}|{LETTERS}|\p{{N}}|{REST}"
_TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}|{_REST_SLASH}"
_GPT4O = rf"{_BEFORE}{_UPPER}*{_LOWER}+{SHORT}?|{_BEFORE}{_UPPER}+{_LOWER}*{SHORT}?|\p{{N}}{{1,3}}|{_REST_SLASH}"
_GPT2 = "GPT-2's words"
_DIGITS = "GPT-2's words, single digits"
WORDS = {
    **dict.fromkeys(["default", "gpt-2", "mpt", "olmo", "jais", "phi-2", "granite-docling"], _GPT2),
    **dict.fromkeys(["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"], _DIGITS),
    **dict.fromkeys(
        ["llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "dbrx", "smaug-bpe"], LLAMA3
    ),
    **dict.fromkeys(["qwen2", "deepseek-r1-qwen", "stablelm2", "megrez"], QWEN2),
    **dict.fromkeys(["gpt-4o", "llama4"], _GPT4O),
    "tekken": _TEKKEN,
}
"""How each of llama.cpp's names (`tokenizer.ggml.pre`) splits text into words. Files without a name
get `default`."""
_WHOLE = {"llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "tekken"}
"""Names with which llama.cpp takes a word that is a token whole, without merges; but for lfm2, they
also begin a text with the first token unless the file says otherwise."""
KEEPS_SPACES = ("<unk>", "<s>", "<|endoftext|>")
"""Special tokens after which llama.cpp never removes spaces."""
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4


def write_tokenizer(data: Metadata, config: dict[str, Any], folder: Path) -> None:
    """Write `tokenizer.json`, `tokenizer_config.json` and, if there is one, `chat_template.jinja`
    to `folder`.

    Args:
        config: the model's `config.json`, for the ids that begin, end and pad a text.

    Raises:
        ModelError: a key is missing, or the kind of tokenizer or its way of cutting text is not
            known.
    """
    try:
        import tokenizers  # noqa: F401
    except ImportError:
        raise MissingPackageError(
            "reading a GGUF file's tokenizer needs the package 'tokenizers'",
            expected="tokenizers",
            received="not installed",
            hint="pip install 'ondevice-train[torch]'",
        ) from None
    kind = data.general("tokenizer.ggml.model")
    tokens = data.general("tokenizer.ggml.tokens")
    types = data.optional("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(
            f"{data.path}: tokenizer.ggml.token_type", expected=len(tokens), received=len(types)
        )
    named = {"unk_token": data.optional("tokenizer.ggml.unknown_token_id")}
    named |= {
        key.replace("_id", ""): config.get(key)
        for key in ("bos_token_id", "eos_token_id", "pad_token_id")
    }
    named = {
        key: tokens[number]
        for key, number in named.items()
        if number is not None and number < len(tokens)
    }
    if kind == "gpt2":
        name = str(data.optional("tokenizer.ggml.pre") or "default")
        if name not in WORDS:
            raise ModelError(
                f"{data.path}: unknown way of splitting text (tokenizer.ggml.pre)",
                expected=", ".join(sorted(WORDS)),
                received=name,
                hint="use the model's safetensors files, which have a tokenizer.json",
            )
        made = _byte_level(data, tokens, types, name)
        first = name in _WHOLE - {"lfm2"}
    elif kind == "llama":
        made = _sentencepiece(data, tokens, types, named.get("unk_token"))
        first = True
    else:
        raise ModelError(
            f"{data.path}: unknown kind of tokenizer (tokenizer.ggml.model)",
            expected="gpt2 (byte-level BPE) or llama (sentencepiece's BPE)",
            received=kind,
            hint="use the model's safetensors files, which have a tokenizer.json",
        )
    _add_tokens(made, tokens, types, strips_right(str(data.optional("general.name") or "")))
    _begin_and_end(made, data, named, first)
    made.save(str(folder / "tokenizer.json"))
    # The rules are all in tokenizer.json: a class of its own would put its rules in their place.
    # The flag says that no pattern is to be mended, which transformers else asks about at every
    # large vocabulary.
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **named,
    }
    text = json.dumps(
        settings | {"fix_mistral_regex": False}, indent=2, sort_keys=True, ensure_ascii=False
    )
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    if template := data.optional("tokenizer.chat_template"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    for name in data.optional("tokenizer.chat_templates") or ():
        named_template = data.optional(f"tokenizer.chat_template.{name}")
        if named_template and re.fullmatch(r"[\w-]+", name):
            (folder / NAMED_TEMPLATES).mkdir(exist_ok=True)
            path = folder / NAMED_TEMPLATES / f"{name}.jinja"
            path.write_text(named_template, encoding="utf-8")


def _byte_level(data: Metadata, tokens: list[str], types: list[int], name: str) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    merges = [tuple(pair.split(" ", 1)) for pair in data.general("tokenizer.ggml.merges")]
    vocab = _vocab(data, tokens)
    merges = [
        pair for pair in merges if "".join(pair) in vocab and pair[0] in vocab and pair[1] in vocab
    ]
    made = Tokenizer(models.BPE(vocab, merges, ignore_merges=name in _WHOLE))
    words = WORDS[name]
    if words in (_GPT2, _DIGITS):
        cut: Any = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        if words == _DIGITS:
            cut = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), cut])
    else:
        by_word = pre_tokenizers.Split(Regex(words), behavior="isolated")
        cut = pre_tokenizers.Sequence(
            [by_word, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    made.pre_tokenizer = cut
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=False)
    return made


def _sentencepiece(
    data: Metadata, tokens: list[str], types: list[int], unknown: str | None
) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = data.general("tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise ModelError(
            f"{data.path}: tokenizer.ggml.scores", expected=len(tokens), received=len(scores)
        )
    vocab = _vocab(data, tokens)
    whole = {
        token for token, kind in zip(tokens, types) if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    }
    merges = _merges(vocab, scores, whole)
    bpe = models.BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    made: Any = Tokenizer(bpe)
    prefix = data.optional("tokenizer.ggml.add_space_prefix")
    forth: list[Any] = [normalizers.Replace(" ", SPACE)]
    back: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix is None or prefix:
        forth.insert(0, normalizers.Prepend(SPACE))
        back.append(decoders.Strip(" ", 1, 0))
    made.normalizer = normalizers.Sequence(forth)
    made.decoder = decoders.Sequence(back)
    return made


def _vocab(data: Metadata, tokens: list[str]) -> dict[str, int]:
    vocab = {token: number for number, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for number, token in enumerate(tokens) if vocab[token] != number)
        raise ModelError(
            f"{data.path}: duplicate token (tokenizer.ggml.tokens)", received=repr(twice)
        )
    return vocab


def _merges(vocab: dict[str, int], scores: list[float], whole: set[str]) -> list[tuple[str, str]]:
    """List every pair of tokens that makes a token, the best score first: sentencepiece's BPE has
    only scores."""
    found = []
    for token, number in vocab.items():
        if token in whole:
            continue
        for place in range(1, len(token)):
            left = token[:place]
            right = token[place:]
            if left in vocab and right in vocab and left not in whole and right not in whole:
                found.append((-scores[number], place, left, right))
    return [(left, right) for _, _, left, right in sorted(found)]


def strips_right(name: str) -> bool:
    """Return True if llama.cpp removes spaces after special tokens, for a file of this name."""
    return any(part in name.lower() for part in ("phi-3", "phi3"))


def _add_tokens(made: Tokenizer, tokens: list[str], types: list[int], strips: bool) -> None:
    """Name the tokens that are found in a text before it is cut."""
    from tokenizers import AddedToken

    def some(kinds: tuple[int, ...], special: bool) -> list[AddedToken]:
        chosen = [token for token, kind in zip(tokens, types) if kind in kinds and token]
        return [
            AddedToken(
                token,
                normalized=False,
                special=special,
                rstrip=strips and token not in KEEPS_SPACES,
            )
            for token in chosen
        ]

    made.add_special_tokens(some((_UNKNOWN, _CONTROL), True))
    made.add_tokens(some((_USER_DEFINED,), False))


def _begin_and_end(made: Any, data: Metadata, named: dict[str, str], first: bool) -> None:
    """Put the first and the last token around a text if the file, or else llama.cpp, does."""
    from tokenizers import processors

    adds = data.optional("tokenizer.ggml.add_bos_token")
    if adds is None:
        adds = first
    before = after = None
    if adds:
        before = named.get("bos_token")
    if data.optional("tokenizer.ggml.add_eos_token"):
        after = named.get("eos_token")
    around = [token for token in (before, after) if token]
    if not around:
        if made.post_processor is None:
            made.post_processor = processors.TemplateProcessing(
                single="$A", pair="$A $B:1", special_tokens=[]
            )
        return
    single = [token for token in (before, "$A", after) if token]
    pair = [*single, *(f"{part}:1" for part in (before, "$B", after) if part)]
    ids = [(token, made.token_to_id(token)) for token in dict.fromkeys(around)]
    made.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=ids
    )
