"""Rows that are left out are counted by what is wrong with them, not by where or with what value."""

from __future__ import annotations

from ondevice.data.rows import MOST_REASONS, RowProblem, count_reasons


def test_reasons_are_counted_without_the_rows_own_values() -> None:
    reasons = [
        ("label", "expected a label of sst2: 0 or 1; received 'x'"),
        ("label", "expected a label of sst2: 0 or 1; received a number 7"),
        ("messages.0.role", "expected user, received 'a'"),
        ("messages.31.role", "expected user, received 'b'"),
        ("", "is not JSON: Expecting value at column 12"),
        ("", "is not JSON: Expecting value at column 7"),
        ("", "is not UTF-8: byte 0xff at byte 3"),
        ("", "the answer has 93 tokens; with max_length_tokens=64 at most 63 fit"),
        ("", "expected 2 columns as in the header, received 3; quote a cell that holds a comma"),
    ]
    assert count_reasons(
        [RowProblem("f", line, *reason) for line, reason in enumerate(reasons, 1)]
    ) == {
        "label: expected a label of sst2: 0 or 1": 2,
        "messages.N.role: expected user": 2,
        "is not JSON: Expecting value at column N": 2,
        "is not UTF-8": 1,
        "the answer has N tokens; with max_length_tokens=64 at most 63 fit": 1,
        "expected 2 columns as in the header": 1,
    }


def test_rare_reasons_are_counted_together() -> None:
    rare = [
        RowProblem("f", line, f"key {line}", "occurs twice") for line in range(MOST_REASONS + 5)
    ]
    counted = count_reasons([*rare, rare[0]])
    assert (
        len(counted) == MOST_REASONS + 1
        and counted["other reasons"] == 5
        and counted["key 0: occurs twice"] == 2
    )
    assert sum(counted.values()) == len(rare) + 1
