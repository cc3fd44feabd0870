"""Half precision against float32: each way is measured, and in float32 itself all are the same."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from benchmarks.prge import rounding


def test_each_way_is_measured_and_all_agree_in_float32(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    rounding.arguments(parser)
    args = parser.parse_args(["--model", "tiny:llama", "--steps", "2"])
    exact = rounding.Slopes(args, "float32", tmp_path, first=True)
    plain = exact.differences(1e-2, 2)
    with rounding.rounded("common rounding"):
        np.testing.assert_allclose(exact.differences(1e-2, 2), plain, rtol=0.02, atol=1e-6)
    args.dtypes = "bfloat16,float32"
    rows = rounding.measure(args)
    assert len(rows) == 2 * 3 * len(rounding.SCALES) and {row["directions"] for row in rows} == {8}
    found = {(row["dtype"], row["how"], row["scale"]): row["correlation"] for row in rows}
    assert min(value for (dtype, *_), value in found.items() if dtype == "float32") > 0.99
    assert found["bfloat16", "as it is", 3e-3] < found["float32", "as it is", 3e-3] - 5e-4
