"""Write a GGUF file tensor by tensor: one in memory at a time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from ondevice.gguf.quants import ggml_type, quantised

if TYPE_CHECKING:
    from gguf import GGUFWriter


def write_gguf(
    writer: GGUFWriter,
    tensors: Iterable[tuple[str, np.ndarray, str]],
    plan: dict[str, tuple[tuple[int, ...], str]],
) -> None:
    """Write the keys, the list of tensors, and then each tensor.

    Args:
        writer: with all its keys and no tensors.
        tensors: name, float values and dtype, in the order of `plan`.
        plan: shape and dtype by name; the file lists them before the first tensor is computed.

    Raises:
        OSError: from the disk.
    """
    from gguf.quants import quant_shape_to_byte_shape

    for name, (shape, dtype) in plan.items():
        if dtype in ("float32", "float16"):
            item = np.dtype(dtype)
            writer.add_tensor_info(name, shape, item, int(np.prod(shape)) * item.itemsize)
        else:
            kind = ggml_type(dtype)
            stored = quant_shape_to_byte_shape(shape, kind)
            size = int(np.prod(stored))
            writer.add_tensor_info(name, stored, np.dtype(np.uint8), size, raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        assert writer.fout is not None  # noqa: S101
        (file,) = writer.fout
        writer.write_padding(file, file.tell())
        for _, value, dtype in tensors:
            # Not numpy's `tofile`: its error for a full disk has no errno.
            data = np.ascontiguousarray(quantised(value, dtype))
            file.write(data.data)
            writer.write_padding(file, data.nbytes)
        file.flush()
    finally:
        writer.close()
