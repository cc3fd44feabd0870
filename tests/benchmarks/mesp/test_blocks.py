"""What benchmarks of block programs compute of what they measure."""

from __future__ import annotations

from benchmarks.mesp.blocks import by_layers, rows_and_tokens


def test_all_layers_come_from_two_numbers_of_layers_in_a_straight_line():
    row = {"model": "7B", "program": "blocks", "lowering_s": 3.0, "planned_bytes": None}
    few = {**row, "layers": 2, "weights_bytes": 100, "step_s": [1.0, 2.0, 9.0]}
    more = {**row, "layers": 6, "weights_bytes": 140, "step_s": [4.0]}
    assert by_layers(few, more, 28) == {
        "model": "7B",
        "program": "blocks, by layers",
        "layers": 28,
        "weights_bytes": 360,
        "step_s": [15.0],
    }


def test_a_batch_is_rows_by_tokens_or_one_row():
    assert [rows_and_tokens(text) for text in ("4x32", "128")] == [(4, 32), (1, 128)]
