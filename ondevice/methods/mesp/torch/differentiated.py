"""Blocks that are not known: each is differentiated by itself, so the memory is one block's still.

Transformers' own model runs once without a graph, and what goes into each block is kept. Then each
block, from the last to the first, runs again under autograd and is differentiated at its saved
input (MeSP, section 4.2, with automatic differentiation in place of appendix A). Embedding, masks,
positions, norm and head are the model's own: it runs once more with blocks that only pass on. That
this is exact is tried out when the session opens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ondevice.core.errors import ConfigError, ModelError
from ondevice.methods.mesp.lora import LoraParameters
from ondevice.methods.model_loss import method_token_nll, row_nll
from ondevice.models.families.any_decoder import AnyDecoder
from ondevice.models.families.any_dims import find_blocks
from ondevice.nn.cross_entropy import shift
from ondevice.nn.experts import pair_of
from ondevice.nn.lora import LoRALinear

if TYPE_CHECKING:
    from ondevice.methods.mesp.config import MespConfig
    from ondevice.methods.mesp.torch.optimizer import Optimizer
    from ondevice.models import LoadedModel

PROBE_TOKENS = 7
PROBE_ERROR = 1e-3
"""Relative, of all gradients together; float32 rounds to about 1e-6, and a path that is left out is
far beyond."""
PLAIN = {"weight_placement": "resident", "activations": "device", "bits": None,
         "mlp_chunk_tokens": None}  # fmt: skip
"""Settings of the hand-written backward pass, which a block that is differentiated has not."""


def differentiated_parameters(
    loaded: LoadedModel, config: MespConfig
) -> tuple[LoraParameters, ...]:
    """List the parameters of a run over blocks that are not known.

    Raises:
        ConfigError: a setting that is the hand-written backward pass's.
        ModelError: no layer has one of the names, or the model never calls one of them.
    """
    for name, value in PLAIN.items():
        if getattr(config, name) != value:
            raise ConfigError(
                f"method.{name} needs a known block; {loaded.dims.family}'s are differentiated",
                expected=f"method.{name}: {str(value).lower() if value is not None else 'null'}",
                received=getattr(config, name),
            )
    listed = [
        LoraParameters(one.layer, one.target, loaded.family.linear_name(one.layer, one.target), number, config.rank,
                       one.inputs, one.outputs, one.experts)
        for number, one in enumerate(loaded.dims.adapted(config))
    ]  # fmt: skip
    modules = [one.name if one.experts == 1 else one.name.rpartition(".")[0] for one in listed]
    loaded.family.check_adapted([*dict.fromkeys(modules)])
    return tuple(listed)


class Call:
    """The arguments of a block's call, by reference; the hidden state is apart.

    Attributes:
        stores: by place, what was in dictionaries that blocks hand on to each other (keys and
            values that later blocks share), as it was before this block.
    """

    def __init__(self, arguments: Sequence[Any], named: dict[str, Any]) -> None:
        self.first = bool(arguments)
        self.arguments = list(arguments)
        self.named = dict(named)
        self.hidden: Tensor = self.arguments[0] if self.first else self.named["hidden_states"]
        self.stores = {
            place: dict(value)
            for place, value in self.named.items()
            if isinstance(value, MutableMapping)
        }

    def run(self, block: Callable[..., Any], hidden: Tensor, stores: Mapping[str, Any]) -> Tensor:
        """Call the block with another hidden state, and with dictionaries of its own."""
        arguments = self.arguments
        named = {**self.named, **stores}
        if self.first:
            arguments = [hidden, *arguments[1:]]
        else:
            named["hidden_states"] = hidden
        return _first(block(*arguments, **named))


class Whole:
    """Weights that stay where the model has them; on closing, the model gets its own layers
    back."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.family = loaded.family
        self.replaced: dict[str, nn.Module] = {}
        self.changed: list[tuple[nn.Module, str]] = []

    def put(self, name: str, module: nn.Module) -> None:
        """Put a layer in another's place."""
        self.replaced[name] = self.family.module(name)
        self.family.replace(name, module)

    def change(self, name: str, change: nn.Module) -> None:
        """Let a parameter be read as what `change` makes of it."""
        module, _, parameter = name.rpartition(".")
        self.changed.append((self.family.module(module), parameter))
        parametrize.register_parametrization(*self.changed[-1], change)

    def close(self) -> None:
        while self.changed:
            parametrize.remove_parametrizations(*self.changed.pop(), leave_parametrized=False)
        while self.replaced:
            self.family.replace(*self.replaced.popitem())


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


def _whole_block(layer: int, block: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Run a block in which a changed parameter is made once, however often it is read, and is gone
    after it."""
    with parametrize.cached():
        return block(*arguments, **named)


class DifferentiatedModel:
    """A model whose blocks are differentiated one by one; the interface of `model.Model`.

    Args:
        weights: takes the adapters' layers in.

    Raises:
        ModelError: what this computes is not the gradient: blocks are not called one after the
            other, or hand on more than the residual stream and dictionaries of tensors.
    """

    def __init__(
        self, loaded: LoadedModel, weights: Whole, optimizer: Optimizer, config: MespConfig
    ) -> None:
        self.family = loaded.family
        self.config = config
        self.optimizer = optimizer
        self.blocks: list[Any] = list(find_blocks(loaded.model)[1])
        self.leaves: list[dict[tuple[int, str], tuple[nn.Parameter, nn.Parameter]]] = [
            {} for _ in self.blocks
        ]
        for key, one in optimizer.parameters.items():
            a = optimizer.tensors[one.a_name]
            b = optimizer.tensors[one.b_name]
            if one.experts > 1:
                self.leaves[one.layer][key] = nn.Parameter(a), nn.Parameter(b)
                weights.change(
                    one.name, ExpertsChange(*self.leaves[one.layer][key], one.experts, config.scale)
                )
                continue
            base = self.family.module(one.name)
            layer = LoRALinear.from_base(base, config.rank, config.alpha, a, b)
            # The optimizer's own memory: an update changes the layer.
            layer.lora_A = nn.Parameter(a)
            layer.lora_B = nn.Parameter(b)
            weights.put(one.name, layer)
            self.leaves[one.layer][key] = layer.lora_A, layer.lora_B
        self.given = [0] * len(self.blocks)
        """Number of values in a block's tuple; 0 if it returns a tensor."""
        try:
            self._check()
        except BaseException:
            weights.close()
            raise

    @torch.no_grad()
    def row_nll(self, ids_BT: Tensor, labels_BT: Tensor) -> Tensor:
        """Return each row's summed negative log likelihood, float32 [B]."""
        with self._blocks_as(_whole_block):
            return row_nll(
                self.family, ids_BT, labels_BT, self.config.loss_tiles, self.config.answers
            )[0].float()

    @torch.no_grad()
    def forward_backward(
        self, ids_BT: Tensor, labels_BT: Tensor, scale: float, places_BT: Tensor | None = None
    ) -> Tensor:
        """Return the summed loss, float32 []; `scale` times its gradients go to the optimizer as
        they arise.

        Rows are not packed if blocks are not known: `places_BT` is None.
        """

        def apply(layer: int, gradients: dict[tuple[int, str], tuple[Tensor, Tensor]]) -> None:
            for key, pair in gradients.items():
                self.optimizer.apply(self.optimizer.parameters[key], *pair)
            self.optimizer.flush()

        return self._gradients(ids_BT, labels_BT, scale, apply)

    def _gradients(
        self, ids_BT: Tensor, labels_BT: Tensor, scale: float, on_block: Callable[..., None]
    ) -> Tensor:
        calls, last = self._forward(ids_BT)
        total, g = self._end(ids_BT, labels_BT, last, scale)
        del last
        pending: dict[tuple[str, Any, int], Tensor] = {}
        for layer in reversed(range(len(self.blocks))):
            g, gradients = self._backward(layer, calls.pop(), g, pending)
            on_block(layer, gradients)
        return total

    def _forward(self, ids_BT: Tensor) -> tuple[list[Call], Tensor]:
        """Return the arguments of each block's call, and the last block's output."""
        calls: list[Call] = []
        outputs: list[Tensor] = []

        def keep(layer: int, block: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
            call = Call(arguments, named)
            if layer != len(calls) or (outputs and not _same(call.hidden, outputs.pop())):
                raise _refused(
                    self.family, "the blocks do not read each other's outputs one after the other"
                )
            calls.append(call)
            result = _whole_block(layer, block, *arguments, **named)
            outputs.append(_first(result))
            self.given[layer] = len(result) if isinstance(result, tuple) else 0
            return result

        with self._blocks_as(keep):
            self.family.hidden(ids_BT)
        if len(calls) != len(self.blocks):
            raise _refused(self.family, f"{len(calls)} of {len(self.blocks)} blocks were called")
        return calls, outputs.pop()

    def _end(
        self, ids_BT: Tensor, labels_BT: Tensor, last: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """The summed loss, and the gradient of the last block's output."""
        leaf = last.detach().requires_grad_(True)

        def pass_on(layer: int, block: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
            return (leaf, *[None] * (self.given[layer] - 1)) if self.given[layer] else leaf

        with torch.enable_grad(), self._blocks_as(pass_on):
            hidden_ND, labels_N = shift(self.family.hidden(ids_BT), labels_BT)
            nll = method_token_nll(
                self.family, hidden_ND, labels_N, self.config.loss_tiles, self.config.answers
            )
            total = nll.sum()
        (g,) = torch.autograd.grad(total, leaf)
        return total.detach().float(), g * scale

    def _backward(
        self, layer: int, call: Call, g: Tensor, pending: dict[tuple[str, Any, int], Tensor]
    ) -> tuple[Tensor, dict[tuple[int, str], tuple[Tensor, Tensor]]]:
        """The gradient of a block's input, and those of its A and B.

        Args:
            pending: gradients of tensors that blocks above took from a dictionary; what this block
                put there is taken out, and what it took is added.
        """
        x = call.hidden.detach().requires_grad_(True)
        taken: dict[tuple[str, Any, int], Tensor] = {}
        stores = {
            place: _with_leaves(place, held, call.named[place], taken)
            for place, held in call.stores.items()
        }
        with torch.enable_grad(), parametrize.cached():
            outputs = [call.run(self.blocks[layer], x, stores)]
            gradients = [g]
            for key, value in _tensors(stores):
                if value is not taken.get(key) and key in pending and value.requires_grad:
                    outputs.append(value)
                    gradients.append(pending.pop(key))
        leaves = [leaf for pair in self.leaves[layer].values() for leaf in pair]
        inputs = [x, *taken.values(), *leaves]
        found = torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)
        for key, gradient in zip(taken, found[1:], strict=False):
            if gradient is not None:
                pending[key] = pending[key] + gradient if key in pending else gradient
        of_leaves = iter(found[1 + len(taken) :])
        result = {}
        for key, pair in self.leaves[layer].items():
            a, b = (
                torch.zeros_like(leaf) if one is None else one for leaf, one in zip(pair, of_leaves)
            )
            result[key] = (a, b)
        return torch.zeros_like(x) if found[0] is None else found[0], result

    @contextmanager
    def _blocks_as(self, run: Callable[..., Any]) -> Iterator[None]:
        """Let `run(layer, forward, ...)` stand in the place of every block's forward pass."""

        def instead(layer: int, forward: Callable[..., Any]) -> Callable[..., Any]:
            return lambda *arguments, **named: run(layer, forward, *arguments, **named)

        for layer, block in enumerate(self.blocks):
            block.forward = instead(layer, block.forward)
        try:
            yield
        finally:
            for block in self.blocks:
                del block.forward  # the class's own is seen again

    def _check(self) -> None:
        """Hold the gradients of a few tokens against autograd's over the whole model."""
        device = self.family.head_weight.device
        vocab = self.family.dims.vocab
        ids = (torch.arange(1, PROBE_TOKENS + 1, device=device)[None] * 7) % vocab
        listed = [leaf for block in self.leaves for pair in block.values() for leaf in pair]
        saved = [leaf.detach().clone() for leaf in listed]
        generator = torch.Generator().manual_seed(0)
        try:
            with torch.no_grad():
                for leaf in listed:  # B is zero at first, and A would have no gradient
                    leaf.add_(0.02 * torch.randn(leaf.shape, generator=generator).to(leaf.device))
            found: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
            with torch.no_grad():
                self._gradients(ids, ids, 1.0, lambda layer, gradients: found.update(gradients))
            with torch.enable_grad(), self._blocks_as(_whole_block):
                hidden_ND, labels_N = shift(self.family.hidden(ids), ids)
                nll = method_token_nll(
                    self.family, hidden_ND, labels_N, self.config.loss_tiles, self.config.answers
                )
            theirs = torch.autograd.grad(nll.sum(), listed, materialize_grads=True)
        except (RuntimeError, KeyError, TypeError) as error:
            raise _refused(
                self.family, f"a block cannot run by itself: {str(error).splitlines()[0]}"
            ) from error
        finally:
            with torch.no_grad():
                for leaf, value in zip(listed, saved, strict=True):
                    leaf.copy_(value)
        ours = [value for block in self.leaves for key in block for value in found[key]]
        wrong = (
            sum(float((a - b).double().square().sum()) for a, b in zip(ours, theirs, strict=True))
            ** 0.5
        )
        size = sum(float(value.double().square().sum()) for value in theirs) ** 0.5
        limit = PROBE_ERROR if next(iter(theirs)).dtype == self.family.head_weight.dtype else 0.05
        if not wrong <= limit * size:
            error = wrong / max(size, 1e-30)
            reason = f"gradients of single blocks differ from the model's by {error:.2g}"
            raise _refused(self.family, reason)


def _refused(family: Any, reason: str) -> ModelError:
    """Build the error for a model whose blocks cannot be differentiated one by one."""
    unknown = (
        family.dims.unknown("method mesp") if isinstance(family, AnyDecoder) else ModelError("")
    )
    return ModelError(
        f"mesp cannot differentiate the blocks of {family.dims.family} one by one: {reason}",
        expected="blocks that pass on the residual stream and only dictionaries of tensors",
        received=unknown.received or family.dims.family,
        hint="--method lora trains an adapter by automatic differentiation of the whole model",
    )


def _same(x: Tensor, y: Tensor) -> bool:
    """Return True for one tensor, or another view of all of it."""
    return x is y or (
        x.shape == y.shape and x.stride() == y.stride() and x.data_ptr() == y.data_ptr()
    )


def _first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple | list) else result


def _with_leaves(
    place: str, held: Mapping[Any, Any], like: Any, taken: dict[tuple[str, Any, int], Tensor]
) -> MutableMapping[Any, Any]:
    """A dictionary of `like`'s kind with the tensors of `held` as leaves, which are noted in
    `taken`."""
    result = type(like)()

    def leaf(key: Any, number: int, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        made = taken[place, key, number] = value.detach().requires_grad_(True)
        return made

    for key, value in held.items():
        if isinstance(value, tuple | list):
            result[key] = type(value)(leaf(key, number, one) for number, one in enumerate(value))
        else:
            result[key] = leaf(key, 0, value)
    return result


def _tensors(
    stores: Mapping[str, Mapping[Any, Any]],
) -> Iterator[tuple[tuple[str, Any, int], Tensor]]:
    for place, held in stores.items():
        for key, value in held.items():
            for number, one in enumerate(value if isinstance(value, tuple | list) else (value,)):
                if isinstance(one, Tensor):
                    yield (place, key, number), one
