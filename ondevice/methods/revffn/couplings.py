"""The couplings: what each step of a network computes, and with which weights (section 3.1; `exact`
and `full` go beyond it).

A network is a list of steps, each of which takes the streams (u, v) to (v, w); see `streams`.
Half-width streams begin as the two halves of the embedding and end as the two halves of what the
final norm reads. Streams of full width both begin as the embedding, and end as the newer one and
what is still on its way to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

from ondevice.core.errors import ModelError
from ondevice.methods.revffn.streams import Mix
from ondevice.models import families_with
from ondevice.runtime_ops import generator

if TYPE_CHECKING:
    from ondevice.methods.revffn.config import RevffnConfig
    from ondevice.models import Family

Part = Literal["attention", "mlp", "block"]
ADAPTERS = ("attention_up", "attention_down", "mlp_up", "mlp_down")
_STREAM = 0x5265  # the generator's tensor number of the adapters' first values


class Place(NamedTuple):
    """Where tokens are: the family's position embeddings, and which token sees which.

    Attributes:
        mask: added to the scores; None is the causal mask.
    """

    position: Any
    mask: Tensor | None = None


@dataclass(frozen=True)
class Step:
    """One step of the network: `part` of block `block`.

    Attributes:
        crossed: the branch reads u as well (Eq. 1), so that the inverse is an equation in u.
    """

    block: int
    part: Part
    mix: Mix
    crossed: bool = False

    @property
    def place(self) -> str:
        """Its name for a message."""
        if self.part == "block":
            return f"layer {self.block}"
        return f"the {self.part} of layer {self.block}"


class Coupling:
    """The steps of a network, and their branches over the family's own weights.

    Attributes:
        late: how much of its last change the newer stream is given at the end.
    """

    steps: tuple[Step, ...]
    adapters: dict[str, nn.Parameter]
    late: float = 0.0

    def __init__(self, family: Family) -> None:
        self.family = family
        self.adapters = {}

    def split(self, hidden_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Split the embedding's output into the first two streams."""
        raise NotImplementedError

    def merge(self, u: Tensor, v: Tensor) -> Tensor:
        """Join the last streams, in float32, to the final norm's input [B, T, hidden]."""
        raise NotImplementedError

    def split_back(self, du: Tensor | None, dv: Tensor) -> Tensor:
        """Return the gradient of the embedding's output from those of the streams that begin; None
        is zero."""
        raise NotImplementedError

    def merge_back(self, grad_BTD: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the gradients of the streams that end; None is zero."""
        raise NotImplementedError

    def branch(self, step: Step, place: Place, v: Tensor, u: Tensor | None = None) -> Tensor:
        """Return the step's branch, without the mix's factor: [B, T, width of a stream]; u is read
        by crossed steps."""
        raise NotImplementedError

    def parameters(self, step: Step) -> dict[str, nn.Parameter]:
        """Return the step's parameters by name, adapters included."""
        return {**_part_parameters(self.family, step.block, step.part), **self._adapters(step)}

    def _adapters(self, step: Step) -> dict[str, nn.Parameter]:
        prefix = adapter_name(step.block, step.part)
        return {name: p for name, p in self.adapters.items() if name.startswith(prefix)}


class HalfWidth(Coupling):
    """`exact`: Y1 = X1 + P_down Attn(P_up X2), Y2 = X2 + P_down MLP(P_up Y1), which inverts in
    closed form.

    `paper`: Eqs. (1) and (2) with the adapters of section 3.2; queries from X1, keys and values
    from X2. The norms are the pretrained ones, of full width, between P_up and the attention or
    MLP.
    """

    def __init__(self, family: Family, crossed: bool, seed: int = 0) -> None:
        super().__init__(family)
        self.crossed = crossed
        if family.dims.hidden % 2:
            raise ModelError(
                "half-width streams need an even width",
                expected="an even hidden size",
                received=family.dims.hidden,
            )
        mix = Mix()
        self.steps = tuple(
            step
            for i in range(family.dims.layers)
            for step in (Step(i, "attention", mix, crossed), Step(i, "mlp", mix))
        )
        device = family.head_weight.device
        up = orthonormal(family.dims.hidden, seed)
        for i in range(family.dims.layers):
            for name, value in zip(ADAPTERS, (up, up.T, up, up.T), strict=True):
                tensor = value.contiguous().clone().to(device)
                self.adapters[f"model.layers.{i}.revffn.{name}"] = nn.Parameter(
                    tensor, requires_grad=False
                )

    def split(self, hidden_BTD: Tensor) -> tuple[Tensor, Tensor]:
        first, second = hidden_BTD.chunk(2, -1)
        return first, second

    def merge(self, u: Tensor, v: Tensor) -> Tensor:
        return torch.cat((u, v), -1)

    def split_back(self, du: Tensor | None, dv: Tensor) -> Tensor:
        return torch.cat((torch.zeros_like(dv) if du is None else du, dv), -1)

    def merge_back(self, grad_BTD: Tensor) -> tuple[Tensor | None, Tensor]:
        return self.split(grad_BTD)

    def branch(self, step: Step, place: Place, v: Tensor, u: Tensor | None = None) -> Tensor:
        prefix = adapter_name(step.block, step.part)
        up, down = (self.adapters[prefix + way].to(v.dtype) for way in ("up", "down"))
        wide = linear(v, up)
        if step.part == "mlp":
            inner = self.family.mlp_branch(step.block, wide)
        elif u is None:
            inner = self.family.attention_branch(step.block, wide, *place)
        else:
            inner = attention_between(self.family, step.block, linear(u, up), wide, place)
        return linear(inner, down)


class FullWidth(Coupling):
    """`full`: h[k+1] = (1 + g) h[k] - g h[k-1] + (1 - g) f(h[k]) with g = 2^-bits and f a whole
    block.

    Beyond the paper. It is the pretrained network if g is 0, and near it if g is small: of a
    block's change, 1 - g arrives at once, g (1 - g) a block later, and so on. The final norm reads
    the last h with all that is still on its way, g / (1 - g) times its last change: the embedding
    and the whole change of every block. With 0 bits it is the midpoint rule, h[k+1] = h[k-1] + 2
    f(h[k]). docs/results/revffn.md has what was measured.
    """

    def __init__(self, family: Family, bits: int) -> None:
        super().__init__(family)
        g = 2.0**-bits * (bits > 0)
        self.late = g / (1 - g)
        first = Mix(0.0, 1 - g)
        if bits:
            later = Mix(-g, 1 - g, bits)
        else:
            later = Mix(1.0, 2.0)
        self.steps = tuple(
            Step(i, "block", later if i else first) for i in range(family.dims.layers)
        )

    def split(self, hidden_BTD: Tensor) -> tuple[Tensor, Tensor]:
        return hidden_BTD, hidden_BTD

    def merge(self, u: Tensor, v: Tensor) -> Tensor:
        return v + self.late * (v - u)

    def split_back(self, du: Tensor | None, dv: Tensor) -> Tensor:
        if du is None:
            return dv
        return du + dv

    def merge_back(self, grad_BTD: Tensor) -> tuple[Tensor | None, Tensor]:
        late = self.late * grad_BTD
        return -late, grad_BTD + late

    def branch(self, step: Step, place: Place, v: Tensor, u: Tensor | None = None) -> Tensor:
        attention = self.family.attention_branch(step.block, v, *place)
        return attention.float() + self.family.mlp_branch(step.block, v + attention).float()


def attention_between(
    family: Family, i: int, queries_BTD: Tensor, keys_BTD: Tensor, place: Place
) -> Tensor:
    """Return causal attention of block `i` (Eq. 1), norm and output projection included: [B, T,
    hidden].

    Queries come from one input, keys and values from the other; with both the same it is the
    family's `attention_branch`.

    Raises:
        ModelError: the family has no separate q, k and v.
    """
    layer: Any = family.layer(i)
    if "q_proj" not in family.linear_targets:
        raise ModelError(
            f"coupling: paper needs separate queries, keys and values, which {family.dims.family} has not",
            expected=", ".join(families_with("q_proj")),
            received=family.dims.family,
            hint="coupling: full or exact",
        )
    dims = family.dims
    queries = layer.input_layernorm(queries_BTD)
    keys = layer.input_layernorm(keys_BTD)
    attention = layer.self_attn
    q = _heads(attention.q_proj(queries), dims.heads)
    k, v = (
        _heads(project(keys), dims.kv_heads) for project in (attention.k_proj, attention.v_proj)
    )
    cos, sin = (table[:, None] for table in place.position)
    q, k = (x * cos + _rotated(x) * sin for x in (q, k))
    mixed = scaled_dot_product_attention(
        q,
        k,
        v,
        place.mask,
        is_causal=place.mask is None,
        scale=attention.scaling,
        enable_gqa=dims.kv_heads != dims.heads,
    )
    return attention.o_proj(mixed.transpose(1, 2).flatten(2))


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _rotated(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def adapter_name(block: int, part: Part) -> str:
    """Return prefix of the names of a step's adapters."""
    return f"model.layers.{block}.revffn.{part}_"


def orthonormal(width: int, seed: int) -> Tensor:
    """Return P_up at the start, float32 [width, width / 2] with orthonormal columns; P_down is its
    transpose."""
    numbers = generator.normal(seed, 0, _STREAM, 1, 0, width * (width // 2)).reshape(
        width, width // 2
    )
    columns, triangle = torch.linalg.qr(torch.from_numpy(numbers).double())
    return (columns * triangle.diagonal().sign()).float()


def _part_parameters(family: Family, block: int, part: Part) -> dict[str, nn.Parameter]:
    """Parameters of a block's attention (with its norm), MLP (with its norm), or both, by name in
    the model."""
    layer: Any = family.layer(block)
    prefix = next(name for name, module in family.model.named_modules() if module is layer)
    named = {f"{prefix}.{name}": p for name, p in layer.named_parameters()}
    if part == "block":
        return named
    norms = (
        f"{name}."
        for place, name in family.dims.traits.norms
        if place in ("before_attention", "after_attention")
    )
    attention = (*norms, "self_attn.", "ln_1.", "attn.")
    return {
        name: p
        for name, p in named.items()
        if name.removeprefix(f"{prefix}.").startswith(attention) == (part == "attention")
    }


def make_coupling(family: Family, config: RevffnConfig, seed: int = 0) -> Coupling:
    """Return the coupling that `config` names; `seed` is that of the adapters' first values."""
    if config.coupling == "full":
        return FullWidth(family, config.gamma_bits)
    return HalfWidth(family, crossed=config.coupling == "paper", seed=seed)
