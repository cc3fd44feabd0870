"""How projected gradients are compared, and on what text."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.prge import executorch_gradients as gradients


def test_gradients_are_compared_at_every_scale() -> None:
    random = np.random.default_rng(0)
    true = random.normal(size=(len(gradients.SCALES), gradients.DIRECTIONS))
    scales = np.array(gradients.SCALES)[:, None]
    exact = np.stack([7 + true * scales, 7 - true * scales], -1).tolist()
    reversed_ = np.stack([7 - true * scales, 7 + true * scales], -1).tolist()
    both = {"program": exact, "eager": exact}
    rows = gradients.gradient_rows({"fp32": both, "q4": {"program": reversed_, "eager": exact}})
    assert [(row["tested"], row["against"]) for row in rows[:: len(scales)]] == [
        ("fp32 program", "fp32 eager"), ("q4 program", "q4 eager"), ("q4 program", "fp32 program"),
    ]  # fmt: skip
    assert [row["scale"] for row in rows[:3]] == list(gradients.SCALES)
    assert all(
        row["correlation"] == pytest.approx(1) and row["same_sign"] == 12 for row in rows[:3]
    )
    assert all(
        row["correlation"] == pytest.approx(-1) and row["same_sign"] == 0 for row in rows[3:]
    )
    assert rows[3]["relative_error"] == pytest.approx(2)


def test_text_batches_label_only_the_answer() -> None:
    from ondevice.models import tiny_model

    batches = gradients.text_batches(tiny_model().tokenizer, 160)
    assert len(batches) == gradients.DIRECTIONS
    for ids, labels in batches:
        assert ids.shape == labels.shape == (1, 160)
        assert 0 < (labels >= 0).sum() < 16 and (labels[labels >= 0] == ids[labels >= 0]).all()
