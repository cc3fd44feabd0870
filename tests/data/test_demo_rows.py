"""The rows that ship with the project: readable, balanced, without near-duplicates."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest

from ondevice.data import read_rows

COUNTS = {"reviews_train.jsonl": 240, "reviews_valid.jsonl": 80}


def sentences(root: Path, name: str) -> list[str]:
    return [
        json.loads(line)["sentence"]
        for line in (root / "examples/data" / name).read_text("utf-8").splitlines()
    ]


@pytest.mark.parametrize("name", COUNTS)
def test_rows_are_usable_and_balanced(name: str, root: Path) -> None:
    rows = read_rows(root / "examples/data" / name, task="sst2")
    assert rows.problems == []
    assert Counter(row.label for row in rows.items) == dict.fromkeys(
        ("great", "terrible"), COUNTS[name] // 2
    )


def test_no_two_rows_are_alike(root: Path) -> None:
    words = [
        frozenset(re.findall(r"\w+", text.lower()))
        for name in COUNTS
        for text in sentences(root, name)
    ]
    assert max(len(a & b) / len(a | b) for a, b in combinations(words, 2)) < 0.4


def test_rows_are_not_cut_from_one_template(root: Path) -> None:
    texts = [text for name in COUNTS for text in sentences(root, name)]
    openings = Counter(" ".join(text.split()[:3]) for text in texts)
    assert max(openings.values()) <= 4 and len(openings) > 300
    assert any(not text.isascii() for text in texts)
