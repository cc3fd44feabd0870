"""Rows of a table by number, on the CPU: torch's indexing takes ten times as long next to other busy
threads.

Without a compiler, torch's indexing.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from ondevice.core.errors import DataError
from ondevice.runtime_ops import native


def gather(table: Tensor, rows: Tensor, out: Tensor, threads: int | None = None) -> None:
    """Copy rows out of a table: `out[i] = table[rows[i]]`.

    Args:
        table: [V, width], contiguous on the CPU.
        rows: int64 [R].
        out: [R, width], of the table's dtype.

    Raises:
        DataError: a row lies outside the table, or dtypes or shapes differ.
    """
    _check(table, rows, out)
    if (library := native.library()) is None:
        out.copy_(table[rows])
        return
    _call(
        library.ondevice_gather_rows,
        table,
        rows,
        table.shape[1] * table.element_size(),
        out,
        threads=threads,
    )


def scatter(table: Tensor, rows: Tensor, source: Tensor, threads: int | None = None) -> None:
    """Set `table[rows[i]] = source[i]`; arguments and errors as for `gather`, no row twice."""
    _check(table, rows, source)
    if (library := native.library()) is None:
        table[rows] = source
        return
    _call(
        library.ondevice_scatter_rows,
        table,
        rows,
        table.shape[1] * table.element_size(),
        source,
        threads=threads,
    )


def add(table: Tensor, rows: Tensor, source: Tensor, threads: int | None = None) -> None:
    """Compute `table[rows[i]] += source[i]`, bfloat16 or float32; arguments and errors as for
    `gather`, no row twice."""
    _check(table, rows, source)
    if (library := native.library()) is None or table.dtype not in (torch.bfloat16, torch.float32):
        table[rows] += source
        return
    wide = ctypes.c_int64(table.dtype == torch.float32)
    _call(library.ondevice_add_rows, table, rows, table.shape[1], source, wide, threads=threads)


def clear(table: Tensor, rows: Tensor, threads: int | None = None) -> None:
    """Set `table[rows[i]] = 0`."""
    _check(table, rows, None)
    if (library := native.library()) is None:
        table[rows] = 0
        return
    _call(
        library.ondevice_clear_rows,
        table,
        rows,
        table.shape[1] * table.element_size(),
        threads=threads,
    )


def _call(
    function: Any, table: Tensor, rows: Tensor, width: int, *others: Any, threads: int | None
) -> None:
    arguments = [
        ctypes.c_void_p(item.data_ptr()) if isinstance(item, Tensor) else item for item in others
    ]
    function.restype = None
    function(
        ctypes.c_void_p(table.data_ptr()), ctypes.c_void_p(rows.data_ptr()), ctypes.c_int64(rows.numel()),
        ctypes.c_int64(width), *arguments, ctypes.c_int64(threads or torch.get_num_threads()),
    )  # fmt: skip


def _check(table: Tensor, rows: Tensor, other: Tensor | None) -> None:
    wanted = [rows.numel(), table.shape[1]]
    fits = other is None or (
        other.dtype == table.dtype and list(other.shape) == wanted and other.is_contiguous()
    )
    if (
        not fits
        or rows.dtype != torch.int64
        or not (table.is_contiguous() and rows.is_contiguous())
    ):
        raise DataError(
            "rows and table do not fit",
            expected=f"contiguous int64 rows, and {table.dtype} {wanted}",
            received=f"{rows.dtype} rows, and {None if other is None else (other.dtype, list(other.shape))}",
        )
    if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < table.shape[0]:
        raise DataError(
            "a row lies outside the table",
            expected=f"0 to {table.shape[0] - 1}",
            received=min(int(rows.min()), 0) or int(rows.max()),
        )
