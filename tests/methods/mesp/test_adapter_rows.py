"""A layer's range of the adapter in rows: what a program slices row by row is what it was number by
number."""

from __future__ import annotations

import pytest
import torch

from ondevice.core.registry import method_config
from ondevice.methods.mesp.block_functions import BlockFunctions
from ondevice.models.load import tiny_model


@pytest.mark.parametrize("targets", [["q_proj", "v_proj", "down_proj"], ["k_proj"]])
@pytest.mark.parametrize("rank", [3, 8])
def test_pairs_from_rows_of_the_adapter_are_those_of_the_vector(
    rank: int, targets: list[str]
) -> None:
    config = method_config("mesp", {"rank": rank, "target_modules": targets})
    functions = BlockFunctions(tiny_model("llama"), config)
    vector = torch.randn(functions.layer_size)
    rows = functions.in_rows(vector)
    assert rows.shape[1] >= 32 and rows.data_ptr() == vector.data_ptr()
    for entry in functions.entries():
        for one, same in zip(entry.pair(rows), entry.pair(vector), strict=True):
            assert torch.equal(one, same)
