"""Small tokenizers, trained on the text below: byte-level, byte-level with BOS and EOS, and Llama's kind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TEXT = """The film was great and the book was terrible. Does this mean that the answer is Yes or No?
Sentence 1: she opened the door. Sentence 2: he closed the window because it was cold, so they went home.
Question: what is the same thing? Answer: a label, a choice, an option, foo foobar bar Grüße, 東京 \U0001f35c
It was terrible. It was great. ### Instruction: ### Input: ### Response: user assistant system Title: Context:
""".splitlines()

CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def make_tokenizer(kind: str) -> Any:
    """kind: "bytes", "bos" (BOS before and EOS behind every text) or "llama" (BOS, spaces as a letter)."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    from tests.trained_tokenizers import byte_level, sentencepiece

    special = ["<|pad|>", "<|start|>", "<|end|>", "<s>", "</s>"]
    if kind == "llama":
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        tokenizer = sentencepiece(TEXT, 700, special, "<0x00>")
    else:
        tokenizer = byte_level(TEXT, 700, special)
    if kind != "bytes":
        ids = [("<s>", tokenizer.token_to_id("<s>")), ("</s>", tokenizer.token_to_id("</s>"))]
        single = "<s> $A </s>" if kind == "bos" else "<s> $A"
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>" if kind == "bytes" else "</s>",
        bos_token=None if kind == "bytes" else "<s>",
    )
    wrapped.chat_template = CHAT_TEMPLATE if kind == "bytes" else None
    return wrapped


@pytest.fixture(scope="session")
def tokenizers() -> dict[str, Any]:
    return {kind: make_tokenizer(kind) for kind in ("bytes", "bos", "llama")}


@pytest.fixture(scope="session", params=["bytes", "bos", "llama"])
def any_tokenizer(request: pytest.FixtureRequest, tokenizers: dict[str, Any]) -> Any:
    return tokenizers[request.param]


@pytest.fixture(scope="session")
def tokenizer(tokenizers: dict[str, Any]) -> Any:
    return tokenizers["bytes"]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write rows (objects as JSON lines, or text, or bytes) into a file and return its path."""

    def write_rows(content: Any, name: str = "rows.jsonl") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        return path

    return write_rows
