"""Which form of which family is read back by which program; tests/exits runs every cell, and docs/howto/exits.md shows
it.
"""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "howto" / "exits.md"

FAMILIES = ("lfm2", "llama", "mistral", "qwen2", "qwen2_moe", "qwen3")

READERS = {
    "executorch": "ExecuTorch",
    "gguf": "llama.cpp",
    "gguf-lora": "llama.cpp",
    "gguf-pair": "llama.cpp",
    "mlx": "mlx-lm",
    "mlx-model": "mlx-lm",
    "mlx-pair": "mlx-lm",
    "ollama": "llama.cpp",
    "peft": "PEFT",
    "safetensors": "transformers",
    "vllm": "PEFT",
}
"""The program that a test opens each form with."""
WITHOUT = {
    ("executorch", "lfm2"), ("executorch", "qwen2_moe"), ("mlx-model", "qwen2_moe"), ("mlx-pair", "qwen2_moe"),
}  # fmt: skip
"""What is refused: a program has one way through, and experts are packed in another way."""
CELLS = [(form, family) for form in READERS for family in FAMILIES if (form, family) not in WITHOUT]
MORE = (
    "gemma3_text", "gemma4_text", "granite", "granitemoe", "lfm2_moe", "olmo2", "phi3", "qwen3_5_text", "qwen3_moe",
    "smollm3",
)  # fmt: skip
"""The other families that have a GGUF form: `tests/exits/test_families.py` reads `OF_MORE` of them back."""
OF_MORE = ("gguf", "gguf-lora")


def table() -> str:
    """Write the table as Markdown; families with the same cells have one row."""
    lines = [
        "| Family | " + " | ".join(f"`{form}`" for form in READERS) + " |",
        "|---" * (len(READERS) + 1) + "|",
    ]
    rows: dict[tuple[str, ...], list[str]] = {}
    for family in sorted((*FAMILIES, *MORE)):
        rows.setdefault(tuple(_cell(form, family) for form in READERS), []).append(f"`{family}`")
    lines += [f"| {', '.join(names)} | {' | '.join(cells)} |" for cells, names in rows.items()]
    return "\n".join(lines)


def _cell(form: str, family: str) -> str:
    known = form in OF_MORE if family in MORE else (form, family) not in WITHOUT
    return READERS[form] if known else ""


def update(text: str) -> str:
    """Return the page with the table as the tests have it."""
    begin, end = "<!-- exits -->\n", "<!-- /exits -->"
    head, rest = text.split(begin)
    return f"{head}{begin}\n{table()}\n\n{end}{rest.split(end)[1]}"


if __name__ == "__main__":  # python -m tests.exits.table
    PAGE.write_text(update(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
