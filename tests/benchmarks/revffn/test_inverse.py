"""RevFFN's two benchmarks of the network itself, on tiny models; and what their committed results
must say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.revffn import candidates, inverse
from ondevice.models import load_model, tiny_model
from tests.methods.revffn.networks import SMALL, network, rebuilt, same_bits, stored

RESULTS = Path(__file__).resolve().parents[3] / "benchmarks" / "results"


@pytest.mark.parametrize("case", inverse.CASES, ids=lambda case: "-".join(map(str, case)))
def test_a_row_has_every_column_of_the_table(case: tuple) -> None:
    family = tiny_model("llama", 1, **SMALL, layers=3).family
    for parameter in family.model.parameters():
        parameter.data = parameter.data.to(getattr(torch, case[2]))
    row = inverse.row(family, 3, case, torch.arange(14).reshape(2, 7))
    assert all(column["key"] in row for column in inverse.COLUMNS)
    assert len(row["by_layer"]) == (3 if case[0] == "paper" else 0)
    if case[0] != "paper" and case[1] == "int32":
        assert row["mismatched_elements"] == row["gradient_error"] == row["error"] == 0
    if case[0] == "paper":
        assert {layer["part"] for layer in row["by_layer"]} == {"attention"}
        assert row["step_error"] > 1e-3
    json.dumps(row, allow_nan=False)


def results(name: str) -> list[dict]:
    rows = [
        json.loads(path.read_text())["rows"] for path in sorted((RESULTS / name).glob("*.json"))
    ]
    assert rows
    return [row for machine in rows for row in machine]


def test_the_recorded_inverse_holds_at_every_depth() -> None:
    rows = results("revffn/inverse")
    assert {row["layers"] for row in rows} >= {12, 24, 48}
    for row in rows:
        if row["coupling"] != "paper" and row["streams"] == "int32":
            assert row["mismatched_elements"] == 0 and row["gradient_error"] == 0
        if (row["coupling"], row["streams"]) == ("exact", "float32"):
            assert row["gradient_error"] <= 1e-5
        if row["iterations"] and row["iterations"].startswith("1,"):
            assert row["step_error"] > 0.01 and row["gradient_error"] > 0.1


def test_the_recorded_start_of_full_is_the_pretrained_function() -> None:
    (full,) = (
        row for row in results("revffn/candidates") if row["network"].startswith("coupling: full")
    )
    assert abs(full["text_change"]) <= 1 and abs(full["answers_change"]) <= 1


def test_full_is_the_candidate_that_was_chosen() -> None:
    loaded = tiny_model("llama", 1, **SMALL, layers=4)
    with torch.inference_mode():
        ids = torch.arange(24).reshape(2, 12)
        trial = candidates.Trial("text", loaded, (ids, ids))
        rows = [*candidates.candidates(trial, (4, 8)), *candidates.couplings(loaded, trial)]
    by_name = {(row["network"], row["step"]): row for row in rows}
    assert len(by_name) == len(rows) == 1 + 2 * (2 + 2 * 3) + 2 + 3
    full, chosen = (
        by_name["coupling: full, int32 streams", "block"],
        by_name["momentum, g = -1/16", "block"],
    )
    late = trial.base * (1 + chosen["text_late"] / 100)
    assert (
        full["text_loss"] == pytest.approx(late, rel=1e-5)
        and full["side_bits"] == chosen["side_bits"] == 4
    )
    assert chosen["text_change"] != 0 != chosen["text_late"]
    for (network_, _), row in by_name.items():
        if "1/256" in network_ and "Dr2Net" not in network_:
            assert abs(row["text_change"]) < 1  # all are the base model if g is nothing


@pytest.mark.nightly
@pytest.mark.model
def test_a_deeper_smollm2_has_its_own_layers_again() -> None:
    family = inverse.deep(34, "float32")
    own = load_model(inverse.MODEL).family
    assert family.dims.layers == 34
    for i in (0, 29, 30, 33):
        for mine, theirs in zip(
            family.layer(i).parameters(), own.layer(i % 30).parameters(), strict=True
        ):
            assert torch.equal(mine, theirs)
    assert family.layer(30) is not family.layer(0)
    reversible = network(family, coupling="full")
    ids = inverse.text_ids(1, 6)
    assert same_bits(rebuilt(reversible, ids)[1], stored(reversible, ids)[1])
