"""The options beyond the paper: each runs, and costs what the rule predicts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.prge import options
from benchmarks.prge.forms import Forms
from ondevice.models import read_dims


def test_every_option_runs_and_is_predicted_by_the_rule() -> None:
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    forms = Forms("tiny:llama")
    pairs = options.option_forms("tiny:llama")
    seconds = {name: forms.seconds(pair, 1) for name, pair in pairs.items()}
    torch.set_num_threads(threads)
    growth = {form: 100 for pair in pairs.values() for form in pair}
    rows = options.option_rows(pairs, seconds, growth, forms)
    assert [row["option"] for row in rows] == list(options.OPTIONS)
    copies = next(row for row in rows if "master" in row["option"])
    assert copies["base_state_bytes"] == 8 * copies["state_bytes"] > 0
    assert all(row["measured_ratio"] > 0 and row["when"] for row in rows)


def test_the_prediction_for_the_top_layers_is_the_formula() -> None:
    dims = replace(read_dims("tiny:llama"), layers=30)
    for queries, top in ((1, 10), (4, 10), (4, 30)):
        values = {"queries": queries, "top_layers": top}
        actual = options.predictions(values, {"queries": queries}, dims)
        expected = (30 - top + 2 * queries * top) / (2 * queries * 30)
        assert actual["predicted_ratio"] == pytest.approx(expected)
        assert expected <= actual["predicted_with_head_ratio"] <= 1
    assert (
        options.predictions({"queries": 4, "estimator": "one_sided"}, {"queries": 4}, dims)[
            "predicted_ratio"
        ]
        == 0.625
    )
