"""`granitemoe`: Granite 3's mixtures of experts: Granite's factors, and the softmax over a token's
own experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from ondevice.core.dims import MoeDims
from ondevice.core.traits import EXPERTS, RoutingTraits
from ondevice.models.families.configuration import decoder_dims
from ondevice.models.families.granite import Granite, factors
from ondevice.models.families.moe import MoeFamily, moe_dims

if TYPE_CHECKING:
    from torch import Tensor

    from ondevice.core.dims import ModelDims
    from ondevice.gguf.metadata import Metadata

MLP = "block_sparse_moe"
PATHS = {"mlp": MLP, "mlp.gate": f"{MLP}.router"}


class GraniteMoe(MoeFamily, Granite):
    """`intermediate_size` is the width of an expert; `attention_bias` puts a bias on q, k, v and o
    together."""

    model_type = "granitemoe"
    gguf_architecture = "granitemoe"
    linear_parents: ClassVar[dict[str, str]] = {
        **MoeFamily.linear_parents,
        **dict.fromkeys(EXPERTS, MLP),
    }

    @classmethod
    def dims_from_config(cls, config: dict[str, Any], where: str = "config.json") -> MoeDims:
        bias = bool(config.get("attention_bias"))
        config = {"num_key_value_heads": config.get("num_attention_heads"), **config}
        traits = factors(config, tuple(PATHS.items()))
        base = decoder_dims(
            "granitemoe", config, where, qkv_bias=bias, o_bias=bias, mlp_bias=False, traits=traits
        )
        width = base.intermediate
        # A softmax over the chosen logits is one over all, divided by its sum over the chosen.
        routing = RoutingTraits(normalised=True)
        sizes = {**config, "moe_intermediate_size": width}
        return moe_dims(
            base, sizes, where, experts=8, active=2, expert=width, shared=0, routing=routing
        )

    def route(self, mlp: Any, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        _, weights, experts = mlp.router(x_ND)
        return weights, experts

    @classmethod
    def gguf_config(cls, data: Metadata, config: dict[str, Any]) -> dict[str, Any]:
        """Read the factors and the sizes of the experts."""
        own = super().gguf_config(data, config)
        return {
            **Granite.gguf_config(data, config),
            "num_experts": own["num_experts"],
            "num_local_experts": own["num_experts"],
            "num_experts_per_tok": own["num_experts_per_tok"],
            "intermediate_size": own["moe_intermediate_size"],
        }

    @classmethod
    def gguf_keys(cls, dims: ModelDims, config: dict[str, Any]) -> dict[str, Any]:
        """Return the factors and the sizes of the experts."""
        return {**super().gguf_keys(dims, {}), **Granite.gguf_keys(dims, config)}

    @classmethod
    def gguf_known_as(cls, name: str) -> str:
        return name.replace(f"{MLP}.router", "mlp.gate").replace(f"{MLP}.experts", "mlp.experts")

    @classmethod
    def tiny_config(cls, **sizes: Any) -> dict[str, Any]:
        """Return what `Granite.tiny_config` does, with 6 experts of which a token takes 2."""
        own = {"num_local_experts": 6, "num_experts_per_tok": 2}
        sizes = {**sizes, "intermediate_size": max(8, sizes["intermediate_size"] // 4)}
        return {**own, **Granite.tiny_config(**{"logits_scaling": 1.5, **sizes})}


FAMILY = GraniteMoe
