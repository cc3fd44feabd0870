"""Gradients in 4.5 bits a number, for a slow bus: codes of 4 bits and a scale for each 32 of them.

A block is 18 bytes: its scale, bfloat16, then 16 bytes, each with one code of the block's first half
in its low bits and one of the second half in its high bits. A value is scale * (code - 8). The number
of largest magnitude has code 0, so it is exact but for the scale's rounding.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ondevice.core.errors import DataError
from ondevice.runtime_ops import native

BLOCK = 32
"""Numbers that share a scale."""
BLOCK_BYTES = 2 + BLOCK // 2


def coded_bytes(numel: int) -> int:
    """Return the bytes of `numel` numbers' codes."""
    return -(-numel // BLOCK) * BLOCK_BYTES


@torch.no_grad()
def encode(values: Tensor) -> Tensor:
    """Return codes, uint8 [coded_bytes], of float32 or bfloat16 values [N], on their device.

    Where a block has an infinity or a NaN, its scale has one, too.
    """
    blocks = torch.nn.functional.pad(values.float(), (0, -len(values) % BLOCK)).view(-1, BLOCK)
    largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    scales = (largest / -8).to(torch.bfloat16)
    wide = scales.float()
    codes = torch.where(wide == 0, 0, blocks / wide).round().clamp(-8, 7).add(8).to(torch.uint8)
    low, high = codes.view(-1, 2, BLOCK // 2).unbind(1)
    return torch.cat([scales.view(torch.uint8), low | high << 4], 1).view(-1)


@torch.no_grad()
def decode(codes: Tensor, out: Tensor, threads: int | None = None) -> None:
    """Write the values of codes into `out`, float32 or bfloat16 [N], on the CPU.

    Args:
        codes: uint8 [coded_bytes], in other memory than `out`.

    Raises:
        DataError: dtypes or sizes do not fit.
    """
    wanted = coded_bytes(len(out))
    if codes.dtype != torch.uint8 or len(codes) != wanted:
        raise DataError(
            "codes do not fit the gradient",
            expected=f"{wanted} bytes",
            received=f"{codes.dtype} [{len(codes)}]",
        )
    if (library := native.library()) is None or out.dtype not in (torch.bfloat16, torch.float32):
        blocks = codes.view(-1, BLOCK_BYTES)
        scales = blocks[:, :2].contiguous().view(torch.bfloat16).float()
        halves = torch.cat([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], 1)
        out.copy_(((halves.float() - 8) * scales).view(-1)[: len(out)])
        return
    library.ondevice_decode_gradient.restype = None
    library.ondevice_decode_gradient(
        ctypes.c_void_p(codes.data_ptr()),
        ctypes.c_int64(len(out)),
        ctypes.c_void_p(out.data_ptr()),
        ctypes.c_int64(out.dtype == torch.float32),
        ctypes.c_int64(threads or torch.get_num_threads()),
    )
