"""A state's arrays are finite numbers, or the first that is not is named; bfloat16 travels as uint16."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ondevice.artifact import files
from ondevice.artifact.files import not_finite
from ondevice.core.errors import TrainingError
from ondevice.methods.ranked_session import Follower
from ondevice.models.save import as_numpy


@given(st.integers(0, 0xFFFF))
def test_a_bfloat16_is_finite_if_torch_says_so(bits: int) -> None:
    value = torch.tensor([bits], dtype=torch.uint16).view(torch.bfloat16)
    state = {
        "a": np.ones(3),
        "high/layer.0": as_numpy(torch.cat([torch.ones(2).bfloat16(), value])),
    }
    assert (not_finite(state) is None) == bool(value.isfinite())


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_first_array_that_is_not_finite_is_named(dtype: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(files, "CHECKED_ELEMENTS", 4)
    bad = np.ones((3, 5), dtype=dtype)
    bad[2, 4] = np.nan
    assert not_finite({"a": np.ones(2), "b": bad, "c": bad}) == "b"
    assert not_finite({"a": np.ones(2), "step": np.array([1 << 40])}) is None


def test_lower_halves_of_numbers_may_have_any_bits() -> None:
    assert not_finite({"low/layer.0@0:1:2": np.array([0xFFFF], dtype=np.uint16)}) is None


def test_a_rank_writes_no_shard_with_infinities(tmp_path: Path) -> None:
    state = {"high/layer.0@0:1:2": np.array([0x7F80], dtype=np.uint16)}
    rank: Any = SimpleNamespace(steps_done=3)
    with pytest.raises(TrainingError) as caught:
        Follower._write_state(rank, tmp_path, state)
    assert "step 2" in caught.value.message and not list(tmp_path.iterdir())
