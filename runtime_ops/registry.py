"""Declaration of the ops of the `ondevice` namespace to PyTorch; every op of this folder goes
through here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ondevice.core.errors import ModelError

_LIBRARY = torch.library.Library("ondevice", "FRAGMENT")
OP_NAMES: list[str] = []
"""Every op that has been defined, in order."""


def define(
    name: str,
    arguments: str,
    *,
    fake: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    cpu: Callable[..., Tensor] | None = None,
    cuda: Callable[..., Tensor] | None = None,
    gradient: Callable[..., Tensor] | None = None,
) -> None:
    """Define `ondevice::name(arguments) -> Tensor` and the `.out` form that ExecuTorch lowers it
    to.

    Args:
        arguments: the schema's arguments, such as `Tensor x, int group`.
        fake: the result's shape and dtype, computed without data; also checks the arguments.
        reference: the op in PyTorch, for any device.
        cpu, cuda: faster forms.
        gradient: (gradient of the result, *arguments) -> gradient of the first argument, the only
            one that has one; without it, a backward pass through the op raises ModelError.
    """
    _LIBRARY.define(f"{name}({arguments}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.define(f"{name}.out({arguments}, *, Tensor(a!) out) -> Tensor(a!)")

    def checked(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def run(*values: Any) -> Tensor:
            fake(*values)  # refuses what would make the compiled op read beyond its inputs
            return function(*values)

        return run

    def out_form(*values: Any, out: Tensor) -> Tensor:
        result = getattr(torch.ops.ondevice, name).default(*values)
        out.resize_(result.shape)
        return out.copy_(result)

    _LIBRARY.impl(name, checked(reference), "CompositeExplicitAutograd")
    if cpu is not None:
        _LIBRARY.impl(name, checked(cpu), "CPU")
    if cuda is not None:
        _LIBRARY.impl(name, checked(cuda), "CUDA")
    torch.library.register_fake(f"ondevice::{name}", fake, lib=_LIBRARY)
    _register_backward(name, gradient)
    _LIBRARY.impl(f"{name}.out", out_form, "CompositeExplicitAutograd")
    torch.library.register_fake(f"ondevice::{name}.out", lambda *values, out: out, lib=_LIBRARY)
    OP_NAMES.append(name)


def _register_backward(name: str, gradient: Callable[..., Tensor] | None) -> None:
    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        if gradient is not None:
            ctx.save_for_backward(*[v for v in inputs[1:] if isinstance(v, Tensor)])
        ctx.rest = [None if isinstance(v, Tensor) else v for v in inputs[1:]]

    def backward(ctx: Any, result_gradient: Tensor) -> tuple[Tensor | None, ...]:
        if gradient is None:
            raise ModelError(
                f"ondevice::{name} has no backward",
                hint="it is for forward-only methods; first-order methods use the losses of ondevice.nn",
            )
        saved = iter(ctx.saved_tensors)
        arguments = [next(saved) if value is None else value for value in ctx.rest]
        return (gradient(result_gradient, *arguments), *[None for _ in arguments])

    torch.library.register_autograd(f"ondevice::{name}", backward, setup_context=save, lib=_LIBRARY)


def expect(
    op: str, argument: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[Any, ...]
) -> None:
    """Check one argument of an op; None in `shape` is any size, and a leading `...` any number of
    dimensions.

    Raises:
        ModelError: another dtype or shape.
    """
    sizes = tuple(tensor.shape)
    wanted = shape
    if shape and shape[0] is ...:
        wanted = shape[1:]
        fits = len(sizes) >= len(wanted)
        sizes = sizes[len(sizes) - len(wanted) :] if fits else sizes
    fits = len(sizes) == len(wanted) and all(
        w is None or s == w for s, w in zip(sizes, wanted, strict=True)
    )
    if tensor.dtype != dtype or not fits:
        described = ", ".join({...: "...", None: "any"}.get(w, str(w)) for w in shape)
        raise ModelError(
            f"ondevice::{op} got a wrong {argument}",
            expected=f"{str(dtype).removeprefix('torch.')} [{described}]",
            received=f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}",
        )
