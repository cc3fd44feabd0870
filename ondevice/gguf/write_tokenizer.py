"""Write a tokenizer as llama.cpp reads it: tokens, merges or scores, word splitting, chat template.

llama.cpp has its own code for splitting text into words, chosen by a name. The name follows from
what the tokenizer does, not from what the model is called. A tokenizer that splits in a way without
a name is refused, because it would produce other tokens than those it was trained with.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ondevice.core.errors import ModelError
from ondevice.gguf.read_tokenizer import SPACE, WORDS

if TYPE_CHECKING:
    from gguf import GGUFWriter

WRITTEN_WORDS = {WORDS[name]: name for name in ("llama-bpe", "qwen2")}
"""llama.cpp's name of each pattern that a `Split` step has. A byte-level step without a pattern
follows it."""
KNOWN_ENDS = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>"}
)
"""Special tokens at which llama.cpp stops because of their names."""
ENDS = 3
"""End tokens that have a key: eos, eot and eom."""
_NO_MERGE = ("<none>", "<none>")
"""llama.cpp loads no file without merges; no token has this name, so this merge never applies."""
_USE_LORA = "--to gguf-lora, next to a GGUF file of the base model"


Templates = str | dict[str, str] | None


def write_tokenizer(
    writer: GGUFWriter,
    tokenizer: Any,
    rows: int,
    stops: Sequence[int],
    where: str,
    templates: Templates = None,
    add_space: bool | None = None,
) -> None:
    """Add the tokenizer's keys to `writer`.

    Args:
        rows: of the embedding.
        stops: tokens at which generation stops, in addition to the tokenizer's own.
        where: names the model in errors.
        templates: the chat template, or several by name.
        add_space: put a space before a text and after each special token; None as the tokenizer
            does. Only for a tokenizer with spaces as letters.

    Raises:
        ModelError: not a BPE tokenizer, or llama.cpp has no name for how it splits text.
    """
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ModelError(
            f"{where}: the tokenizer has no tokenizer.json", hint="save it with a fast tokenizer"
        )
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    if rules["model"]["type"] != "BPE":
        raise ModelError(f"{where}: the tokenizer", expected="BPE", received=rules["model"]["type"])
    merges = [
        tuple(pair.split(" ", 1)) if isinstance(pair, str) else tuple(pair)
        for pair in rules["model"]["merges"]
    ]
    tokens, kinds = _tokens(rules, rows)
    if rules["model"].get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(_scores(tokens, merges))
        own = _adds_space(rules, where)
        writer.add_add_space_prefix(own if add_space is None else add_space)
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_pre(rules, bool(merges), where))
        writer.add_token_merges([" ".join(pair) for pair in merges or [_NO_MERGE]])
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    _add_special(writer, tokenizer, stops)
    _add_templates(writer, templates)


def _tokens(rules: dict[str, Any], rows: int) -> tuple[list[str], list[int]]:
    """List token and kind for every row of the embedding; unused rows get names."""
    from gguf import TokenType

    by_id = {number: token for token, number in rules["model"]["vocab"].items()}
    kinds = {number: int(TokenType.NORMAL) for number in by_id}
    if rules["model"].get("byte_fallback"):
        bytes_ = (
            number for number, token in by_id.items() if len(token) == 6 and token.startswith("<0x")
        )
        kinds |= dict.fromkeys(bytes_, int(TokenType.BYTE))
        unknown = rules["model"]["vocab"].get(rules["model"].get("unk_token"))
        if unknown is not None:
            kinds[unknown] = int(TokenType.UNKNOWN)
    for added in rules["added_tokens"]:
        by_id[added["id"]] = added["content"]
        if kinds.get(added["id"]) != int(TokenType.UNKNOWN):
            kinds[added["id"]] = int(
                TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
            )
    tokens = [by_id.get(number, f"[PAD{number}]") for number in range(rows)]
    return tokens, [kinds.get(number, int(TokenType.UNUSED)) for number in range(rows)]


def _pre(rules: dict[str, Any], merges: bool, where: str) -> str:
    """Return llama.cpp's name for how a byte-level tokenizer splits text into words."""
    if (rules["normalizer"] or {}).get("type", "NFC") != "NFC":
        raise ModelError(
            f"{where}: the tokenizer's normalizer",
            expected="none or NFC",
            received=rules["normalizer"],
        )
    step = rules["pre_tokenizer"] or {}
    steps = step.get("pretokenizers", [step])
    before = steps[:-1]
    last = steps[-1]
    name = None
    if last.get("type") == "ByteLevel" and not last.get("add_prefix_space"):
        uses_words = last.get("use_regex", True)
        if not before and (uses_words or not merges):  # without merges, every split gives bytes
            name = "gpt-2"
        elif len(before) == 1:
            kind = before[0]["type"]
            if kind == "Digits" and before[0]["individual_digits"] and uses_words:
                name = "smollm"
            elif kind == "Split" and not uses_words:
                name = WRITTEN_WORDS.get(before[0]["pattern"].get("Regex", ""))
    if name is None:
        raise ModelError(
            f"{where}: llama.cpp has no name for how the tokenizer splits text",
            expected="the way of GPT-2, SmolLM, Llama 3 or Qwen2",
            received=json.dumps(step)[:300],
            hint=_USE_LORA,
        )
    return name


def _scores(tokens: list[str], merges: list[tuple[str, ...]]) -> list[float]:
    """Return sentencepiece's scores, which llama.cpp merges by: the earlier a merge, the higher."""
    ranks = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), -float(rank))
    return [ranks.get(token, -float(len(merges))) for token in tokens]


def _adds_space(rules: dict[str, Any], where: str) -> bool:
    """Return True if text gets a space before it; ModelError for another way with spaces."""
    normalizer = rules["normalizer"] or {}
    steps = normalizer.get("normalizers", [normalizer] if normalizer else [])
    kinds = [step["type"] for step in steps]
    if rules["pre_tokenizer"] is None and kinds in (["Prepend", "Replace"], ["Replace"]):
        if all(step.get("content", step.get("prepend")) == SPACE for step in steps):
            return kinds[0] == "Prepend"
    step = rules["pre_tokenizer"] or {}
    if step.get("type") == "Metaspace" and step.get("replacement") == SPACE and not steps:
        return step.get("prepend_scheme") != "never"
    raise ModelError(
        f"{where}: llama.cpp has no name for how the tokenizer treats spaces",
        expected="sentencepiece's way",
        received=json.dumps([rules["normalizer"], rules["pre_tokenizer"]])[:300],
        hint=_USE_LORA,
    )


def split_ends(tokenizer: Any, stops: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the end tokens that have a key in the file, and those that llama.cpp does not stop at.

    llama.cpp stops at three tokens with keys, and at those with a name that it knows.
    """
    own = tokenizer.eos_token_id
    ends = list(dict.fromkeys(number for number in (own, *stops) if number is not None))
    if own is None:
        own = next(iter(ends), None)
    others = [number for number in ends if number != own]
    named = [n for n in others if tokenizer.convert_ids_to_tokens(n) in KNOWN_ENDS]
    unnamed = [number for number in others if number not in named]
    keyed = [own, *unnamed, *named][:ENDS]
    return [n for n in keyed if n is not None], unnamed[ENDS - 1 :]


def _add_special(writer: GGUFWriter, tokenizer: Any, stops: Sequence[int]) -> None:
    """Add the ids that begin and end a text, and whether they are added."""
    if tokenizer.bos_token_id is not None:
        writer.add_bos_token_id(tokenizer.bos_token_id)
    keyed, _ = split_ends(tokenizer, stops)
    # llama.cpp stops at each of the three; templates write the first.
    for number, add in zip(
        keyed, (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)
    ):
        add(number)
    if tokenizer.pad_token_id is not None:
        writer.add_pad_token_id(tokenizer.pad_token_id)
    if tokenizer.unk_token_id is not None:
        writer.add_unk_token_id(tokenizer.unk_token_id)
    ids = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(bool(ids) and ids[0] == tokenizer.bos_token_id)
    # An answer never follows an end, so no prompt was trained with one, whatever the tokenizer adds.
    writer.add_add_eos_token(False)


def _add_templates(writer: GGUFWriter, templates: Templates) -> None:
    if isinstance(templates, str):
        templates = {"default": templates}
    named = dict(templates or {})
    if (default := named.pop("default", None)) is not None:
        writer.add_chat_template(default)
    for name, text in sorted(named.items()):
        writer.add_string(f"tokenizer.chat_template.{name}", text)
    if named:
        writer.add_array("tokenizer.chat_templates", sorted(named))
