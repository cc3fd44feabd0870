"""Ask an exported program what comes next, before and after training: `python examples/ask.py
PROGRAM ADAPTER`.

The program was exported with `--set export.next_token=true` and `--task sst2`: a review and "It
was".
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from ondevice.api.open import open_artifact
from ondevice.artifact.adapter import load_adapter
from ondevice.models.load import artifact_tokenizer


def next_word(session: Any, tokenizer: Any, text: str) -> str:
    """The likeliest next token, as text; the row is padded after it."""
    tokens = tokenizer(text)["input_ids"]
    row = np.zeros((1, session.lengths_tokens[-1]), np.int64)
    row[0, : len(tokens)] = tokens
    return tokenizer.decode([int(session.next_token(row, len(tokens)).argmax())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", type=Path)
    parser.add_argument("adapter", type=Path)
    parser.add_argument("--data", type=Path, default=Path("examples/data/reviews_valid.jsonl"))
    parser.add_argument("--rows", type=int, default=3)
    arguments = parser.parse_args()
    session, tokenizer = open_artifact(arguments.program), artifact_tokenizer(arguments.program)
    longest = session.lengths_tokens[-1]
    lines = arguments.data.read_text(encoding="utf-8").splitlines()
    prompts = [f"{json.loads(line)['sentence']} It was" for line in lines]
    prompts = [prompt for prompt in prompts if len(tokenizer(prompt)["input_ids"]) < longest][
        : arguments.rows
    ]
    before = [next_word(session, tokenizer, prompt) for prompt in prompts]
    session.load_adapter(load_adapter(arguments.adapter))
    for prompt, word in zip(prompts, before):
        print(
            f"{prompt} ...\n    before:{word!r:>14}    after:{next_word(session, tokenizer, prompt)!r:>14}"
        )


if __name__ == "__main__":
    main()
