"""What a CUDA graph cannot hold, found before it is made: a capture that breaks leaves PyTorch's
allocator in a state that it does not leave again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ondevice.models.families.any_decoder import AnyDecoder

if TYPE_CHECKING:
    from ondevice.models import LoadedModel

_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEXED = ("aten::index", "aten::index_put", "aten::index_put_")
_COPIES = ("aten::_to_copy", "aten::copy_")


class NotForGraphs(RuntimeError):
    """Work whose kernels depend on values that the host reads."""


class _Watch(TorchDispatchMode):
    """Refuses operators that wait for the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if _waits(func, [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)], result):
            raise NotForGraphs(f"{func} waits for values on the host")
        return result


def _waits(func: Any, tensors: list[Tensor], result: Any) -> bool:
    """Return whether an operator's shape or result needs values of its inputs on the host."""
    name = func._schema.name
    if name in _INDEXED:  # numbers of rows do not, a mask does
        return any(x.dtype in (torch.bool, torch.uint8) for x in tensors[1:])
    if name in _COPIES:  # between devices, from memory that is not pinned
        return len({x.device for x in (*tensors, result)}) > 1
    return bool(_READS & set(func.tags))


@torch.no_grad()
def rehearse(run: Callable[[], Tensor]) -> Tensor:
    """Return what `run` does, without gradients.

    Raises:
        NotForGraphs: it reads values on the host, naming the operator.
    """
    with _Watch():
        return run()


def reason_against(loaded: LoadedModel) -> str:
    """Return why a model's passes cannot be graphs, as far as it is known before they run."""
    family = loaded.family
    if loaded.dims.experts:
        return "experts are chosen by values that the host reads"
    if isinstance(family, AnyDecoder) and family.pictures is not None:
        return "the host places pictures among the tokens"
    if family.model.training:
        return "the model is in training mode, in which it drops values at random"
    return ""
