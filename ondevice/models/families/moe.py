"""The base of families whose MLP is a mixture of experts.

The experts' matrices are two tensors a layer, [experts, ...], as transformers holds them. An
adapter of one of them is a pair for each expert, in PEFT's layout. Their forward and backward pass
is this project's own (`ondevice.nn.experts`): the same bits every time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from ondevice.core.dims import ModelDims, MoeDims
from ondevice.core.errors import ModelError
from ondevice.core.traits import ATTENTION, EXPERTS, RoutingTraits
from ondevice.models.families.base import Family
from ondevice.models.families.configuration import UnknownTrait, read_size
from ondevice.models.families.traited import TraitFamily

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from ondevice.gguf.metadata import Metadata
    from ondevice.nn.experts import ExpertLora


class MoeFamily(TraitFamily):
    """A block's MLP is a sum of experts, maybe one of them for all tokens; in `dense_layers` it is
    an ordinary one.

    Attributes:
        on_routing: if set, is called with a block's number and the expert ids of its tokens, int64
            [B * T, active].
    """

    linear_targets = ATTENTION
    linear_parents: ClassVar[dict[str, str]] = {
        **Family.linear_parents,
        **dict.fromkeys(EXPERTS, "mlp"),
    }
    llama_cpp_normalises: ClassVar[bool] = True
    """True if llama.cpp makes the weights of a token's experts add up to 1. GGUF files have no key
    for it."""
    dims: MoeDims

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.on_routing: Callable[[int, Tensor], None] | None = None

    @classmethod
    def gguf_config(cls, data: Metadata, config: dict[str, Any]) -> dict[str, Any]:
        """Read sizes of the experts, of which llama.cpp has some in every layer."""
        shared = data.shapes.get("blk.0.ffn_gate_shexp.weight", (0,))[0]
        return {
            "num_experts": data.need("expert_count"),
            "num_experts_per_tok": data.need("expert_used_count"),
            "moe_intermediate_size": data.shapes.get("blk.0.ffn_gate_exps.weight", (0, 0))[1],
            "norm_topk_prob": cls.llama_cpp_normalises,
            **({"shared_expert_intermediate_size": shared} if shared else {}),
        }

    @classmethod
    def gguf_keys(cls, dims: ModelDims, config: dict[str, Any]) -> dict[str, Any]:
        """Return sizes of the experts, which llama.cpp has in every layer."""
        assert isinstance(dims, MoeDims)  # noqa: S101 - this class builds them in `dims_from_config`
        if dims.dense_layers:
            message = "llama.cpp has experts in every layer of this family"
            raise ModelError(
                message, received=f"none in layers {', '.join(map(str, dims.dense_layers))}"
            )
        normalised = bool(config.get("norm_topk_prob", cls.llama_cpp_normalises))
        if normalised != cls.llama_cpp_normalises:
            does = "does not normalise"
            if cls.llama_cpp_normalises:
                does = "normalises"
            message = f"llama.cpp {does} the weights of a token's experts"
            raise ModelError(
                message, expected=not normalised, received=f"norm_topk_prob {normalised}"
            )
        keys = {"expert_count": dims.experts, "expert_used_count": dims.active_experts,
                "expert_feed_forward_length": dims.expert_intermediate}  # fmt: skip
        shared = dims.shared_intermediate
        if shared:
            return {**keys, "expert_shared_feed_forward_length": shared}
        return keys

    @classmethod
    def tiny_config(cls, **sizes: Any) -> dict[str, Any]:
        """Return what `Family.tiny_config` does, with 6 experts of which a token takes 2."""
        experts = {"num_experts": 6, "num_experts_per_tok": 2}
        return {
            **experts,
            "moe_intermediate_size": max(8, sizes["intermediate_size"] // 4),
            **sizes,
        }

    @classmethod
    def weight_shapes(cls, dims: ModelDims) -> dict[str, tuple[int, ...]]:
        """Map every weight's name in transformers to its shape, without a tied head."""
        assert isinstance(dims, MoeDims)  # noqa: S101 - this class builds them in `dims_from_config`
        shapes = super().weight_shapes(dims)
        for i in range(dims.layers):
            block = f"model.layers.{i}"
            mlp = f"{block}.{dims.traits.path('mlp')}"
            hidden = dims.hidden
            width = dims.expert_intermediate
            for part, (inputs, outputs) in dims.dense_shapes(i).items():
                shapes[f"{block}.{cls.dense_path(part)}.weight"] = (outputs, inputs)
            if i in dims.dense_layers:
                continue
            shapes[f"{block}.{dims.traits.path('mlp.gate')}.weight"] = (dims.experts, hidden)
            if dims.routing.bias:
                shapes[f"{mlp}.expert_bias"] = (dims.experts,)
            shapes[f"{mlp}.experts.gate_up_proj"] = (dims.experts, 2 * width, hidden)
            shapes[f"{mlp}.experts.down_proj"] = (dims.experts, hidden, width)
            if dims.shared_intermediate:
                shapes |= _mlp_shapes(f"{mlp}.shared_expert", hidden, dims.shared_intermediate)
                shapes[f"{mlp}.shared_expert_gate.weight"] = (1, hidden)
        return shapes

    @classmethod
    def dense_path(cls, part: str) -> str:
        """Return the module in a block without experts that is that part of its MLP."""
        return f"mlp.{part}"

    def block(
        self, i: int, h: Tensor, position: tuple[Tensor, ...], mask: Tensor | None = None
    ) -> Tensor:
        """Compute block `i`, as `Family.block` does."""
        h = h + self.attention_branch(i, h, position, mask)
        return h + self.mlp_branch(i, h)

    def mlp_branch(self, i: int, h: Tensor) -> Tensor:
        """Compute the sum of the experts of each token's norm, without the residual: [B, T,
        hidden]."""
        normed = self._normed(self.layer(i), "before_mlp", h)
        return self._branch(self.mlp_of(i, normed.flatten(0, -2)).view(h.shape))

    def route(self, mlp: Any, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights of each token's experts and their numbers, [N, active] each.

        Args:
            mlp: transformers' module of a block's mixture.
        """
        _, weights, experts = mlp.gate(x_ND)
        return weights, experts

    def mlp_of(
        self, i: int, x_ND: Tensor, pairs: Mapping[str, ExpertLora] = MappingProxyType({})
    ) -> Tensor:
        """Compute block `i`'s MLP of tokens that are normed: [N, hidden] -> [N, hidden].

        Gradients go through the weights that the router gives its choice, not through the choice.

        Args:
            pairs: adapters of the experts' matrices by name in the MLP, in addition to the model's
                own.
        """
        from torch.nn.functional import sigmoid

        mlp: Any = self.layer(i).get_submodule(self.dims.traits.path("mlp"))
        if i in self.dims.dense_layers:
            return mlp(x_ND)
        weights_NK, experts_NK = self.route(mlp, x_ND)
        if self.on_routing is not None:
            self.on_routing(i, experts_NK)
        routed = sum_of_experts(mlp.experts, x_ND, experts_NK, weights_NK, pairs)
        if not self.dims.shared_intermediate:
            return routed
        return routed + sigmoid(mlp.shared_expert_gate(x_ND)) * mlp.shared_expert(x_ND)

    def _parent(self, target: str) -> str:
        if target in (*EXPERTS, *self.linear_targets):
            return super()._parent(target)
        return self.dims.refuse_adapter(target)


def moe_dims(
    base: ModelDims,
    config: dict[str, Any],
    where: str,
    *,
    experts: int,
    active: int,
    expert: int,
    shared: int,
    routing: RoutingTraits | None = None,
    chosen: str = "num_experts_per_tok",
) -> MoeDims:
    """Add what a configuration says of experts to a decoder's dimensions; the numbers are
    transformers' defaults, and `routing` is a softmax's unless it is given. `chosen` is the field
    that says how many experts a token has.

    Raises:
        ModelError: a size is wrong, or no layer has experts.
    """
    config = {
        "num_experts": config.get("num_local_experts"),
        **config,
    }  # transformers 5 writes this name
    experts = read_size(config, "num_experts", where, experts)
    active = read_size(config, chosen, where, active)
    if active > experts:
        expected = f"at most num_experts ({experts})"
        raise ModelError(f"{where}: field '{chosen}'", expected=expected, received=active)
    expert = read_size(config, "moe_intermediate_size", where, expert)
    if shared:
        shared = read_size(config, "shared_expert_intermediate_size", where, shared)
    every = read_size(config, "decoder_sparse_step", where, 1)
    dense = config.get("mlp_only_layers") or ()
    dense_layers = tuple(i for i in range(base.layers) if i in dense or (i + 1) % every)
    if len(dense_layers) == base.layers:
        kind = base.family.removesuffix("_moe")
        raise ModelError(
            f"{where}: no layer has experts", expected=f"model_type {kind} for an ordinary decoder"
        )
    routing = routing or RoutingTraits(normalised=bool(config.get("norm_topk_prob")))
    values = {field.name: getattr(base, field.name) for field in fields(ModelDims)}
    # The width that one token passes through: plans count activations and operations from it.
    values |= {"experts": experts, "intermediate": active * expert + shared}
    return MoeDims(
        **values,
        active_experts=active,
        expert_intermediate=expert,
        shared_intermediate=shared,
        dense_intermediate=base.intermediate,
        dense_layers=dense_layers,
        routing=routing,
    )


def sum_of_experts(
    module: Any,
    x_ND: Tensor,
    experts_NK: Tensor,
    weights_NK: Tensor,
    pairs: Mapping[str, ExpertLora],
) -> Tensor:
    """Compute the weighted sum of each token's experts, of transformers' module of them: [N,
    hidden].

    Args:
        pairs: see `MoeFamily.mlp_of`.
    """
    from ondevice.nn.experts import mixture, pairs_of

    experts, held = pairs_of(module)
    held |= {name.removeprefix("experts."): pair for name, pair in pairs.items()}
    matrices = experts.gate_up_proj, experts.down_proj
    return mixture(x_ND, experts_NK, weights_NK, *matrices, experts.act_fn, held)


def refuse_window(config: dict[str, Any], where: str) -> None:
    """Raise UnknownTrait if some layers attend to a sliding window."""
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        raise UnknownTrait(
            f"{where}: some layers attend to a sliding window",
            expected="full attention in every layer",
            received=f"use_sliding_window with a window of {config.get('sliding_window')} tokens",
            hint="set use_sliding_window to false if sequences stay shorter than the window",
        )


def _mlp_shapes(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (width, hidden),
        f"{prefix}.up_proj.weight": (width, hidden),
        f"{prefix}.down_proj.weight": (hidden, width),
    }
