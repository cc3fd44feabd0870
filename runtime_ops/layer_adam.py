"""One AdamW step of a layer's flat arrays on the CPU, in one pass over memory (csrc/layer_adam.h).

This is "Layer-Adam" of SlideFormer (section 3): bfloat16 gradients come in, float32 state is
updated, bfloat16 parameters go out. The arithmetic is that of `torch.optim.AdamW`. The master
parameter is one float32 array (`plain`), or the bfloat16 parameter itself and the lower 16 bits
next to it (`split`), the same float32 bits in fewer bytes moved. The call releases the GIL.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ondevice.core.errors import DataError, MissingPackageError, ModelError
from ondevice.runtime_ops import native
from ondevice.runtime_ops.adam_state import (
    BYTES,
    KINDS,
    TILE,
    HostState,
    Moments,
    Traffic,
    check,
    check_state,
    merge,
    split_,
    torch_merge,
    torch_split_,
)
from ondevice.runtime_ops.adam_undo import UndoRecord, check_record, record_bytes
from ondevice.runtime_ops.generator import mix_int

__all__ = [
    "AdamStep",
    "HostState",
    "Moments",
    "UndoRecord",
    "layer_adam",
    "undo_adam",
    "finish_adam",
    "record_bytes",
    "device_adam",
    "numbers_of",
    "torch_adam",
    "torch_step",
    "torch_steps",
    "split_",
    "merge",
    "available",
    "BYTES",
    "Traffic",
    "KINDS",
    "TILE",
]


@dataclass(frozen=True)
class AdamStep:
    """The numbers of one step, the same for every array: those of `torch.optim.AdamW`.

    Args:
        learning_rate: of this step.
        beta1, beta2: decay of the moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled; parameters shrink by learning_rate * weight_decay first.
        step: 1 for the first.
        grad_scale: the gradient is multiplied by this first (clipping).
    """

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    step: int = 1
    grad_scale: float = 1.0


class _Arguments(ctypes.Structure):
    """`AdamArguments` of csrc/layer_adam.h."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("grad", "master", "high", "low", "m", "v")],
        *[(name, ctypes.c_void_p) for name in ("m_scale", "v_scale", "rows")],
        *[
            (name, ctypes.c_int64)
            for name in ("numel", "row_count", "width", "grad_float32", "moments")
        ],
        ("key", ctypes.c_uint64),
        *[(name, ctypes.c_float) for name in ("decay", "beta2", "weight1", "weight2")],
        *[(name, ctypes.c_float) for name in ("root", "eps", "size", "grad_scale")],
        *[(name, ctypes.c_void_p) for name in ("codes", "flags", "arena", "used")],
        *[(name, ctypes.c_int64) for name in ("room", "action")],
    ]


_RECORD, _UNDO, _FINISH = 1, 2, 3
"""Of csrc/adam_undo.h; 0 is a step without a record."""


def available() -> bool:
    """Return True if the compiled step can run; else there is `torch_adam`."""
    return native.library() is not None


def layer_adam(
    grad: Tensor,
    state: HostState,
    adam: AdamStep,
    rows: Tensor | None = None,
    width: int = 0,
    threads: int | None = None,
    undo: UndoRecord | None = None,
) -> None:
    """Run one AdamW step of `state` in place. Bits depend on neither `threads` nor how rows are cut
    into calls.

    Args:
        grad: bfloat16 or float32, n contiguous elements.
        state: a master of n elements and its moments.
        adam: the step's numbers.
        rows: int64 [k], strictly ascending: only these rows of the table [n / width, width] are
            updated.
        width: elements of a row; with int8 moments a multiple of 128, so that no scale spans two
            rows.
        threads: None for `torch.get_num_threads()`.
        undo: written, for `undo_adam` and `finish_adam`, one of which has to follow; all rows.

    Raises:
        ModelError: a tensor of another dtype or size, or not contiguous on the CPU; or a record of
            some rows.
        DataError: rows out of range or order.
        MissingPackageError: no compiler.
    """
    _run(
        grad,
        state,
        adam,
        threads,
        rows=rows,
        width=width,
        record=undo,
        action=_RECORD * (undo is not None),
    )


def undo_adam(
    grad: Tensor, state: HostState, adam: AdamStep, undo: UndoRecord, threads: int | None = None
) -> None:
    """Take back, to the bit, the step that `layer_adam` has just recorded with the same arguments.

    The bfloat16 copy of a plain master is made again.

    Raises:
        ModelError, MissingPackageError: as `layer_adam`.
    """
    _run(grad, state, adam, threads, record=undo, action=_UNDO)


def finish_adam(
    grad: Tensor, state: HostState, adam: AdamStep, undo: UndoRecord, threads: int | None = None
) -> None:
    """Let the recorded step stand: run it on the tiles that had no room in the record. The bits are
    then those of a step without a record.

    Raises:
        ModelError, MissingPackageError: as `layer_adam`.
    """
    _run(grad, state, adam, threads, record=undo, action=_FINISH)


def _run(
    grad: Tensor,
    state: HostState,
    adam: AdamStep,
    threads: int | None,
    *,
    rows: Tensor | None = None,
    width: int = 0,
    record: UndoRecord | None = None,
    action: int,
) -> None:
    """Check the arguments, and call the compiled step."""
    count = check_state(state)
    check("grad", grad, (torch.bfloat16, torch.float32), count)
    if rows is not None:
        _check_rows(rows, width, count, state.moments.kind)
    of_record: dict[str, int | None] = {}
    if record is not None:
        if rows is not None:
            raise ModelError("some rows cannot be recorded", expected="all rows", received="rows")
        check_record(record, count, state.moments.kind)
        of_record = {name: _pointer(tensor) for name, tensor in record.tensors().items()}
        of_record["room"] = len(record.arena)
    if count == 0 or (rows is not None and rows.numel() == 0):
        return  # an empty tensor's address is null, which means something else below
    moments = state.moments
    arguments = _Arguments(
        grad=grad.data_ptr(),
        master=_pointer(state.master),
        high=_pointer(state.high),
        low=_pointer(state.low),
        **{name: _pointer(tensor) for name, tensor in moments.tensors().items()},
        rows=_pointer(rows),
        numel=count,
        row_count=0 if rows is None else rows.numel(),
        width=width,
        grad_float32=grad.dtype == torch.float32,
        moments=KINDS.index(moments.kind),
        # A stream for each array and step: repeated noise would be a bias.
        key=mix_int(mix_int(state.seed) + adam.step),
        **numbers_of(adam),
        **of_record,
        action=action,
    )
    _library().ondevice_layer_adam(
        ctypes.byref(arguments), ctypes.c_int64(threads or torch.get_num_threads())
    )


def device_adam(
    grad: Tensor, state: HostState, adam: AdamStep, scale: Tensor | None, threads: int = 1
) -> None:
    """Run `layer_adam`, with the same bits, where `grad` and `state` lie: on a GPU or on the CPU.

    Args:
        scale: float [1] next to them, in place of `adam.grad_scale`; None leaves that.
        threads: on a CPU.

    Raises:
        MissingPackageError: no compiler, or on a GPU no Triton.
    """
    if grad.device.type == "cpu":
        if scale is not None:
            adam = replace(adam, grad_scale=float(scale))
        return layer_adam(grad, state, adam, threads=threads)
    try:
        from ondevice.runtime_ops import triton_adam
    except ImportError:
        raise MissingPackageError(
            "AdamW on the GPU needs Triton, which is not installed",
            expected="triton, which comes with PyTorch on Linux",
            hint="leave all states on the host: method.resident_layers: 0",
        ) from None
    triton_adam.layer_adam(grad, state, numbers_of(adam), adam.step, scale)


def numbers_of(adam: AdamStep) -> dict[str, float]:
    """Return the float32 numbers of a step as every kernel takes them."""
    return {
        "decay": 1 - adam.learning_rate * adam.weight_decay,
        "beta2": adam.beta2,
        "weight1": 1 - adam.beta1,
        "weight2": 1 - adam.beta2,
        "root": (1 - adam.beta2**adam.step) ** -0.5,
        "eps": adam.eps,
        "size": adam.learning_rate / (1 - adam.beta1**adam.step),
        "grad_scale": adam.grad_scale,
    }


def torch_adam(grad: Tensor, state: HostState, adam: AdamStep, scratch: Tensor) -> None:
    """Run the same step by `torch._fused_adamw_`, for a plain master and float32 moments: three
    passes and more.

    Args:
        grad, state, adam: as for `layer_adam`.
        scratch: float32 [n], overwritten with the scaled gradient.

    Raises:
        ModelError: a state of another layout, or a tensor of another dtype or size.
    """
    count = check_state(state)
    if state.master is None or state.moments.kind != "float32":
        raise ModelError(
            "torch_adam cannot update this state",
            expected="a plain float32 master with float32 moments",
            received=f"{'split' if state.master is None else 'plain'} with {state.moments.kind} moments",
            hint="install a C++ compiler for layer_adam",
        )
    check("grad", grad, (torch.bfloat16, torch.float32), count)
    check("scratch", scratch, (torch.float32,), count)
    scratch.view(-1).copy_(grad.view(-1))
    if adam.grad_scale != 1.0:
        scratch.mul_(adam.grad_scale)
    torch_step(state.master.view(-1), scratch.view(-1), state.moments.m, state.moments.v, adam)
    if state.high is not None:
        state.high.view(torch.bfloat16).view(-1).copy_(state.master.view(-1))


def torch_step(master: Tensor, grad: Tensor, m: Tensor, v: Tensor, adam: AdamStep) -> None:
    """Run `torch._fused_adamw_` on one array; all float32 [n] on one device, `grad` scaled before."""
    torch_steps([master], [grad], [m], [v], adam)


def torch_steps(
    masters: list[Tensor], grads: list[Tensor], m: list[Tensor], v: list[Tensor], adam: AdamStep
) -> None:
    """Run `torch._fused_adamw_` on arrays of one dtype and device, with few launches on a GPU."""
    number = torch.full((), float(adam.step), device=grads[0].device)
    torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
        masters,
        grads,
        m,
        v,
        [],
        [number] * len(masters),
        lr=adam.learning_rate,
        beta1=adam.beta1,
        beta2=adam.beta2,
        weight_decay=adam.weight_decay,
        eps=adam.eps,
        amsgrad=False,
        maximize=False,
    )


def torch_split_step(grad: Tensor, state: HostState, adam: AdamStep) -> None:
    """Run a step of a split master by torch's own operations, on any device and without a compiler.

    Args:
        grad: bfloat16 or float32 [n], scaled before.
        state: split, with float32 moments, where `grad` is.
    """
    assert state.high is not None and state.low is not None  # noqa: S101  a split state
    high, low = state.high.view(-1), state.low.view(-1)
    chunk = 1 << 22  # elements whose float32 masters exist at once
    for begin in range(0, grad.numel(), chunk):
        part = slice(begin, begin + chunk)
        moments = Moments(state.moments.kind, state.moments.m[part], state.moments.v[part])
        master = torch_merge(
            high[part], low[part], moments, torch.empty(high[part].shape, device=grad.device)
        )
        moments.v.abs_()  # its sign belonged to the master
        torch_step(master, grad[part].float(), moments.m, moments.v, adam)
        torch_split_(master, high[part], low[part], moments)


def _library() -> ctypes.CDLL:
    library = native.library()
    if library is None:
        raise MissingPackageError(
            "the compiled AdamW step is not available",
            expected="a C++ compiler, and ONDEVICE_NATIVE not 0",
            hint="install g++, or use torch_adam with a plain master and float32 moments",
        )
    return library


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _check_rows(rows: Tensor, width: int, count: int, kind: str) -> None:
    if width < 1 or count % width or (kind == "int8" and width % TILE):
        expected = f"a positive divisor of {count}"
        if kind == "int8":
            expected += f", a multiple of {TILE} with int8 moments"
        raise ModelError(
            "layer_adam got a wrong width",
            expected=expected,
            received=width,
        )
    check("rows", rows, (torch.int64,), rows.numel())
    if rows.numel() == 0:
        return
    if bool((rows[1:] <= rows[:-1]).any()):
        raise DataError(
            "the rows are not in order", expected="strictly ascending numbers", hint="rows.unique()"
        )
    low, high = int(rows[0]), int(rows[-1])
    if low < 0 or high >= count // width:
        raise DataError(
            "a row lies outside the table",
            expected=f"0 to {count // width - 1}",
            received=min(low, 0) or high,
        )
