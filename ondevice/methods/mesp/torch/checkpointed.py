"""Blocks that are not known: transformers' own model under autograd, with a checkpoint per block.

The forward pass keeps each block's input. In the backward pass a block is computed again and
differentiated, so the memory is one block's still, and a pair's gradient is applied and dropped
once it is there (MeSP, section 4.2, with automatic differentiation in place of appendix A).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from ondevice.methods.mesp.check import check_plain
from ondevice.methods.mesp.lora import LoraParameters
from ondevice.methods.model_loss import method_token_nll, row_nll
from ondevice.models.families.any_dims import find_blocks
from ondevice.nn.cross_entropy import Scale, shift
from ondevice.nn.experts import pair_of
from ondevice.nn.lora import LoRALinear

if TYPE_CHECKING:
    from ondevice.methods.mesp.config import MespConfig
    from ondevice.methods.mesp.torch.optimizer import Optimizer
    from ondevice.models import LoadedModel


def checkpointed_parameters(loaded: LoadedModel, config: MespConfig) -> tuple[LoraParameters, ...]:
    """List the parameters of a run over blocks that are not known.

    Raises:
        ConfigError: a setting that only the hand-written backward pass has.
        ModelError: no layer has one of the names, or the model never calls one of them.
    """
    check_plain(loaded.dims, config)
    listed = [
        LoraParameters(one.layer, one.target, loaded.family.linear_name(one.layer, one.target), number, config.rank,
                       one.inputs, one.outputs, one.experts)
        for number, one in enumerate(loaded.dims.adapted(config))
    ]  # fmt: skip
    modules = [one.name if one.experts == 1 else one.name.rpartition(".")[0] for one in listed]
    loaded.family.check_adapted([*dict.fromkeys(modules)])
    return tuple(listed)


class ExpertsChange(nn.Module):
    """W + scale B A of every expert; PEFT's layout of A and B, which are the optimizer's own
    memory."""

    def __init__(self, a: nn.Parameter, b: nn.Parameter, experts: int, scale: float) -> None:
        super().__init__()
        self.a = a
        self.b = b
        self.experts = experts
        self.scale = scale

    def forward(self, weight_EOI: Tensor) -> Tensor:
        pair = pair_of(self.a, self.b, self.experts, self.scale)
        return weight_EOI + (pair.b_EOR @ pair.a_ERI * pair.scale).to(weight_EOI.dtype)


class CheckpointedModel:
    """A model whose blocks are computed again in the backward pass; the interface of `Model`.

    It changes the model in place, and `close` undoes that.
    """

    def __init__(self, loaded: LoadedModel, optimizer: Optimizer, config: MespConfig) -> None:
        self.family = loaded.family
        self.config = config
        self.optimizer = optimizer
        self.blocks: list[Any] = list(find_blocks(loaded.model)[1])
        self.replaced: dict[str, nn.Module] = {}
        self.changed: list[tuple[nn.Module, str]] = []
        self.leaves: dict[LoraParameters, tuple[nn.Parameter, nn.Parameter]] = {}
        self.waiting: set[LoraParameters] = set()
        for one in optimizer.parameters.values():
            # The optimizer's own memory: an update changes the layer.
            a = nn.Parameter(optimizer.tensors[one.a_name])
            b = nn.Parameter(optimizer.tensors[one.b_name])
            self.leaves[one] = (a, b)
            for leaf in (a, b):
                leaf.register_post_accumulate_grad_hook(partial(self._apply, one))
            if one.experts > 1:
                module, _, parameter = one.name.rpartition(".")
                self.changed.append((self.family.module(module), parameter))
                change = ExpertsChange(a, b, one.experts, config.scale)
                parametrize.register_parametrization(*self.changed[-1], change)
                continue
            base = self.family.module(one.name)
            layer = LoRALinear.from_base(base, config.rank, config.alpha, a, b)
            layer.lora_A = a
            layer.lora_B = b
            self.replaced[one.name] = base
            self.family.replace(one.name, layer)

    def close(self) -> None:
        """Give the model its own layers back."""
        while self.changed:
            parametrize.remove_parametrizations(*self.changed.pop(), leave_parametrized=False)
        while self.replaced:
            self.family.replace(*self.replaced.popitem())

    def padded(self, ids: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows as they are; see `Model.padded`."""
        return ids, labels

    def beside(self) -> AbstractContextManager[None]:
        """Return a context without effect; see `Model.beside`."""
        return nullcontext()

    @torch.no_grad()
    def row_nll(self, ids_BT: Tensor, labels_BT: Tensor) -> Tensor:
        """Return each row's summed negative log likelihood, float32 [B]."""
        config = self.config
        with self._blocks_as(_cached):
            nll, _ = row_nll(self.family, ids_BT, labels_BT, config.loss_tiles, config.answers)
        return nll.float()

    def forward_backward(
        self, ids_BT: Tensor, labels_BT: Tensor, scale: Scale, position_ids_BT: Tensor | None = None
    ) -> Tensor:
        """Return the summed loss, float32 []; `scale` times its gradients go to the optimizer as
        they arise.

        Rows are not packed if blocks are not known: `position_ids_BT` is None.
        """
        config = self.config
        with torch.enable_grad(), self._blocks_as(_checkpointed):
            hidden_ND, labels_N = shift(self.family.hidden(ids_BT), labels_BT)
            nll_N = method_token_nll(
                self.family, hidden_ND, labels_N, config.loss_tiles, config.answers
            )
            total = nll_N.sum()
            if callable(scale):
                nll_B = nll_N.reshape(len(ids_BT), -1).sum(1)
                loss = (nll_B * scale(nll_B.detach().double()).to(nll_B)).sum()
            else:
                loss = total * scale
            self.waiting = set(self.leaves)
            loss.backward(inputs=[leaf for pair in self.leaves.values() for leaf in pair])
        for one in [*self.waiting]:  # no gradient reaches A, B or both
            for leaf in self.leaves[one]:
                if leaf.grad is None:
                    leaf.grad = torch.zeros_like(leaf)
            self._apply(one)
        return total.detach().float()

    @torch.no_grad()
    def _apply(self, one: LoraParameters, *_: Any) -> None:
        """Use the gradients of a pair once both are there."""
        a, b = self.leaves[one]
        if a.grad is None or b.grad is None:
            return
        self.optimizer.apply(one, a.grad, b.grad)
        self.optimizer.flush()
        a.grad = None
        b.grad = None
        self.waiting.discard(one)

    @contextmanager
    def _blocks_as(self, wrapped: Callable[[Callable[..., Any]], Any]) -> Iterator[None]:
        """Let every block's forward pass be what `wrapped` makes of it."""
        for block in self.blocks:
            block.forward = wrapped(block.forward)
        try:
            yield
        finally:
            for block in self.blocks:
                del block.forward  # the class's own is seen again


def _cached(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Make a changed parameter once a call, however often it is read."""

    def run(*arguments: Any, **named: Any) -> Any:
        with parametrize.cached():
            return forward(*arguments, **named)

    return run


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Keep only the arguments of a call.

    When a block is computed again, a dictionary that blocks hand on to each other (keys and values
    that later blocks share) has the content of its first call.
    """

    def run(*arguments: Any, **named: Any) -> Any:
        before = {k: copy(value) for k, value in named.items() if isinstance(value, MutableMapping)}
        stores: dict[str, Any] = {}

        def block(*arguments: Any) -> Any:
            result = _cached(forward)(*arguments, **(named | stores))
            stores.update({name: copy(value) for name, value in before.items()})
            return result

        return checkpoint(block, *arguments, use_reentrant=False, preserve_rng_state=False)

    return run
