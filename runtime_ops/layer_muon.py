"""The host's part of a Muon step (`offload.muon`), in one pass over memory (csrc/layer_muon.h).

Of a master p and the update u that the accelerator has made, in single float32 operations:

    p = decay * p - rate * u

Masters are those of `layer_adam`, plain or split. No moment is here, so ties of split ones round
away from zero, as with int8 moments. The call releases the GIL.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ondevice.runtime_ops import native
from ondevice.runtime_ops.adam_state import (
    HALVES,
    HostState,
    check,
    check_form,
    torch_merge,
    torch_split_,
)

CHUNK = 1 << 22
"""Elements of split masters that exist in float32 at once without a compiler."""
UPDATES = (torch.bfloat16, torch.float32)


def layer_muon(
    update: Tensor,
    state: HostState,
    span: slice,
    decay: float,
    rate: float,
    threads: int | None = None,
) -> None:
    """Apply an update to a master in place. Bits do not depend on `threads`, nor on whether there is
    a compiler.

    Args:
        update: bfloat16 or float32 [n], as it came.
        state: a master of n elements; its moments are neither read nor written.
        span: the elements that are updated.
        decay, rate: of these elements; both are rounded to float32.
        threads: None for `torch.get_num_threads()`.

    Raises:
        ModelError: a tensor of another dtype or size, or not contiguous on the CPU; a state that is
            neither plain nor split.
    """
    check_form(state)
    count = update.numel()
    check("update", update, UPDATES, count)
    master, high, low = (
        _part(name, tensor, dtypes, count, span)
        for name, tensor, dtypes in (
            ("master", state.master, (torch.float32,)),
            ("high", state.high, HALVES),
            ("low", state.low, HALVES[1:]),
        )
    )
    update = update.view(-1)[span]
    if update.numel() == 0:
        return  # an empty tensor's address is null, which means something else in C++
    if (library := native.library()) is None:
        torch_muon(update, HostState(master, high, low, state.moments), decay, rate)
        return
    pointers = [ctypes.c_void_p(t if t is None else t.data_ptr()) for t in (master, high, low)]
    library.ondevice_layer_muon(
        ctypes.c_void_p(update.data_ptr()),
        ctypes.c_int64(update.dtype == torch.float32),
        ctypes.c_int64(update.numel()),
        *pointers,
        ctypes.c_float(decay),
        ctypes.c_float(rate),
        ctypes.c_int64(threads or torch.get_num_threads()),
    )


def torch_muon(update: Tensor, state: HostState, decay: float, rate: float) -> None:
    """Run `layer_muon` on all elements by torch's own operations, wherever the tensors are; all are
    flat."""
    for low in range(0, update.numel(), CHUNK):
        span = slice(low, low + CHUNK)
        change = update[span].float().mul(rate)
        if state.master is not None:
            master = state.master[span].mul_(decay).sub_(change)
            if state.high is not None:
                state.high.view(torch.bfloat16)[span].copy_(master)
            continue
        assert state.high is not None and state.low is not None  # noqa: S101  a split state
        halves = (state.high[span], state.low[span])
        master = torch_merge(*halves, None, torch.empty_like(change))
        torch_split_(master.mul_(decay).sub_(change), *halves, None)


def _part(
    name: str, tensor: Tensor | None, dtypes: tuple[torch.dtype, ...], count: int, span: slice
) -> Tensor | None:
    """Check one array of a state, and return its elements `span`."""
    if tensor is None:
        return None
    check(name, tensor, dtypes, count)
    return tensor.view(-1)[span]
