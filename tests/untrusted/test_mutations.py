"""A slice of the mutations: each ends in a result or in an error of ours, and none ends the process.

`python -m tests.untrusted.runner` runs 100,000 of each kind.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sampling import part_of
from tests.untrusted import runner
from tests.untrusted.kinds import KINDS

MUTATIONS = part_of(200)


@pytest.mark.parametrize("name", KINDS)
def test_damaged_files_are_read_or_refused_with_a_reason(name: str) -> None:
    if name.startswith(("arrow", "parquet")):
        pytest.importorskip("pyarrow")
    if name == "xlsx":
        pytest.importorskip("openpyxl")
    tally = runner.run(KINDS[name], MUTATIONS)
    assert not tally.failures, tally.failures[:5]
    assert tally.mutations == MUTATIONS


@pytest.mark.parametrize(
    ("read", "ended"),
    [
        (lambda folder: {}[0], "KeyError"),
        (lambda folder: __import__("ctypes").string_at(0), "signal SIGSEGV"),
        (lambda folder: bytearray(2 * runner.MOST_BYTES), "MemoryError"),
    ],
    ids=["exception", "signal", "memory"],
)
def test_the_runner_notices_what_must_not_happen(read, ended: str) -> None:
    def build(folder: Path) -> None:
        (folder / "a.json").write_text('{"a": 1}')

    def careless(folder: Path) -> None:
        path = folder / "a.json"
        if not path.is_file() or path.is_symlink() or path.read_bytes() != b'{"a": 1}':
            read(folder)

    tally = runner.run(runner.Kind("careless", build, careless, {"a.json": ()}), 5)
    assert tally.mutations == 5
    assert len(tally.failures) >= 4 and all(ended in reason for _, reason in tally.failures)
