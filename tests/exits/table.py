"""Which form of which family is read back by which program; tests/exits runs every cell, and docs/howto/exits.md shows
it.
"""

from __future__ import annotations

FAMILIES = ("llama", "mistral", "qwen2", "qwen2_moe")

READERS = {
    "gguf": "llama.cpp",
    "gguf-lora": "llama.cpp",
    "mlx": "mlx-lm",
    "peft": "PEFT",
    "safetensors": "transformers",
    "vllm": "PEFT",
}
"""The program that a test opens each form with."""
CELLS = [(form, family) for form in READERS for family in FAMILIES]


def table() -> str:
    """Write the table as Markdown."""
    lines = ["| Form | " + " | ".join(f"`{family}`" for family in FAMILIES) + " |", "|---" * (len(FAMILIES) + 1) + "|"]
    for form, reader in READERS.items():
        lines.append(f"| `{form}` | " + " | ".join([reader] * len(FAMILIES)) + " |")
    return "\n".join(lines)
