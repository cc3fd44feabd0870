"""Which form of which family is read back by which program; tests/exits runs every cell, and docs/howto/exits.md shows
it.
"""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "exits.md"

FAMILIES = ("llama", "mistral", "qwen2", "qwen2_moe", "qwen3")

READERS = {
    "executorch": "ExecuTorch",
    "gguf": "llama.cpp",
    "gguf-lora": "llama.cpp",
    "mlx": "mlx-lm",
    "mlx-model": "mlx-lm",
    "ollama": "llama.cpp",
    "peft": "PEFT",
    "safetensors": "transformers",
    "vllm": "PEFT",
}
"""The program that a test opens each form with."""
WITHOUT = {("executorch", "qwen2_moe"), ("mlx-model", "qwen2_moe")}
"""What is refused: a program has one way through, and experts are packed in another way."""
CELLS = [(form, family) for form in READERS for family in FAMILIES if (form, family) not in WITHOUT]


def table() -> str:
    """Write the table as Markdown."""
    lines = ["| Form | " + " | ".join(f"`{family}`" for family in FAMILIES) + " |", "|---" * (len(FAMILIES) + 1) + "|"]
    for form, reader in READERS.items():
        lines.append(f"| `{form}` | " + " | ".join(_cell(form, one, reader) for one in FAMILIES) + " |")
    return "\n".join(lines)


def _cell(form: str, family: str, reader: str) -> str:
    return "" if (form, family) in WITHOUT else reader


def update(text: str) -> str:
    """Return the page with the table as the tests have it."""
    begin, end = "<!-- exits -->\n", "<!-- /exits -->"
    head, rest = text.split(begin)
    return f"{head}{begin}\n{table()}\n\n{end}{rest.split(end)[1]}"


if __name__ == "__main__":  # python -m tests.exits.table
    PAGE.write_text(update(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
