"""Answers that were judged: what a run on them is, and what the objective makes of numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RUN = "--steps 9 --set train.checkpoint_every=4 --set train.eval_every=4"


def write_rows(out: Path) -> tuple[str, str]:
    """Write the app's own form of judged answers, to train on and to judge by; return the files' names."""
    names = ("judged train.jsonl", "judged valid.jsonl")
    words = ("warm", "dull", "long \u00fc", "short", "a film", "no", "seen it twice")
    for name, count in zip(names, (11, 5), strict=True):
        rows = [
            {"prompt": f"What of {number}?  ", "answer": words[number % 7] * (1 + number % 3), "liked": number % 3 != 0}
            for number in range(count)
        ]
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (out / name).write_text(text, encoding="utf-8")
    return names


def grades() -> list[dict[str, Any]]:
    """Return log ratios with what `kto` makes of them."""
    import numpy as np

    from ondevice.objectives import Kto, Scores

    made = []
    for seed, count in enumerate((1, 2, 3, 7, 8, 9, 33, 130)):
        draw = np.random.default_rng(seed)
        ratios = draw.normal(seed % 3 - 1, 20, (count, 2))
        liked = draw.random(count) < 0.6
        kto = Kto(beta=0.05 * (seed + 1), desirable_weight=1.5, undesirable_weight=0.75)
        zeros = np.zeros((count, 2))
        graded = kto.grade(Scores(ratios, zeros, np.ones((count, 2), np.int64), liked))
        made.append(
            {
                "beta": kto.beta,
                "ratios": ratios.T.tolist(),
                "liked": liked.tolist(),
                "loss": graded.loss,
                "coefficients": graded.coefficients[:, 0].tolist(),
                "figures": graded.figures,
                "right": graded.right.tolist(),
            }
        )
    return made
