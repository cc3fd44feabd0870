"""Rows of a table: the compiled forms against torch's indexing, bit for bit."""

from __future__ import annotations

import pytest
import torch

from ondevice.core.errors import DataError
from ondevice.runtime_ops import rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [1, 7, 64, 129])
@pytest.mark.parametrize("count", [0, 1, 65, 200])
def test_rows_are_torch_s(form, dtype, width, count) -> None:
    generator = torch.Generator().manual_seed(width * 1000 + count)
    table = torch.randn(211, width, generator=generator).to(dtype)
    source = torch.randn(count, width, generator=generator).to(dtype) * 3
    numbers = torch.randperm(211, generator=generator)[:count]
    read = torch.full((count, width), 9.0, dtype=dtype)
    rows.gather(table, numbers, read, threads=3)
    assert torch.equal(read, table[numbers])
    written, added, cleared = table.clone(), table.clone(), table.clone()
    rows.scatter(written, numbers, source, threads=3)
    rows.add(added, numbers, source, threads=3)
    rows.clear(cleared, numbers, threads=3)
    expected = table.clone()
    expected[numbers] = source
    assert torch.equal(written, expected)
    expected = table.clone()
    expected[numbers] += source
    assert torch.equal(added, expected)
    expected = table.clone()
    expected[numbers] = 0
    assert torch.equal(cleared, expected)


def test_what_does_not_fit_is_refused(form) -> None:
    table = torch.zeros(5, 4)
    with pytest.raises(DataError) as error:
        rows.gather(table, torch.tensor([5]), torch.zeros(1, 4))
    assert (error.value.expected, error.value.received) == ("0 to 4", 5)
    with pytest.raises(DataError) as error:
        rows.clear(table, torch.tensor([-1]))
    assert error.value.received == -1
    with pytest.raises(DataError) as error:
        rows.scatter(table, torch.tensor([0, 1]), torch.zeros(1, 4))
    assert "[2, 4]" in error.value.expected
    with pytest.raises(DataError):
        rows.add(table, torch.tensor([0]), torch.zeros(1, 4, dtype=torch.bfloat16))
