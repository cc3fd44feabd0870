"""`lfm2_moe`: LFM2-8B-A1B: LFM2's mixers, and a mixture of experts behind the first layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from ondevice.core.dims import MoeDims
from ondevice.core.errors import ModelError
from ondevice.core.traits import EXPERTS, GATED_MLP, RoutingTraits
from ondevice.models.families.configuration import read_size
from ondevice.models.families.lfm2 import LINEARS, Lfm2, lfm2_dims
from ondevice.models.families.moe import MoeFamily, moe_dims

if TYPE_CHECKING:
    from torch import Tensor

    from ondevice.core.dims import ModelDims
    from ondevice.gguf.metadata import Metadata

SIGMOID = 2
"""llama.cpp's number of the sigmoid among the functions of a router."""
MLP = "feed_forward"
PATHS = {**LINEARS, "mlp": MLP, "mlp.gate": f"{MLP}.gate"}
MIXERS = tuple(path for part, path in LINEARS.items() if part not in GATED_MLP)


class Lfm2Moe(MoeFamily, Lfm2):
    """The first `num_dense_layers` have Lfm2's MLP. Experts are weighted by sigmoids; a bias, which
    no gradient reaches, takes part in their choice."""

    model_type = "lfm2_moe"
    gguf_architecture = "lfm2moe"
    rotary = "pos_emb"
    linear_targets = MIXERS
    linear_parents: ClassVar[dict[str, str]] = {
        **dict.fromkeys(MIXERS, ""),
        **dict.fromkeys(EXPERTS, MLP),
    }

    @classmethod
    def dims_from_config(cls, config: dict[str, Any], where: str = "config.json") -> MoeDims:
        base = lfm2_dims("lfm2_moe", {"intermediate_size": 7168, **config}, where, PATHS)
        routing = RoutingTraits(
            scores="sigmoid",
            bias=bool(config.get("use_expert_bias", True)),
            normalised=bool(config.get("norm_topk_prob", True)),
            least=1e-6,
            scale=float(config.get("routed_scaling_factor", 1.0)),
        )
        dense = config.get("num_dense_layers")
        if dense != 0:
            dense = read_size(config, "num_dense_layers", where, 2)
        sizes = {**config, "mlp_only_layers": range(dense)}
        return moe_dims(
            base, sizes, where, experts=32, active=4, expert=1792, shared=0, routing=routing
        )

    @classmethod
    def dense_path(cls, part: str) -> str:
        return LINEARS[part]

    def route(self, mlp: Any, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        bias = mlp.expert_bias if self.dims.routing.bias else None
        _, weights, experts = mlp.gate(x_ND, bias)
        return weights, experts

    @classmethod
    def gguf_config(cls, data: Metadata, config: dict[str, Any]) -> dict[str, Any]:
        """Read what `Lfm2.gguf_config` does, and the sizes of the experts."""
        gating = data.need("expert_gating_func")
        if gating != SIGMOID:
            raise ModelError(
                f"{data.path}: how experts are weighted", expected=SIGMOID, received=gating
            )
        own = Lfm2.gguf_config(data, config)
        del own["block_dim"], own["block_auto_adjust_ff_dim"]
        return {
            **own,
            "num_experts": data.need("expert_count"),
            "num_experts_per_tok": data.need("expert_used_count"),
            "moe_intermediate_size": data.need("expert_feed_forward_length"),
            "num_dense_layers": data.need("leading_dense_block_count"),
        }

    @classmethod
    def gguf_keys(cls, dims: ModelDims, config: dict[str, Any]) -> dict[str, Any]:
        """Return what `Lfm2.gguf_keys` does, and the sizes of the experts."""
        assert isinstance(dims, MoeDims)  # noqa: S101 - this class builds them in `dims_from_config`
        routing = dims.routing
        if not (routing.bias and routing.normalised and routing.scale == 1.0):
            raise ModelError(
                "llama.cpp normalises the weights of a token's experts, and has a bias of the choice",
                expected="use_expert_bias and norm_topk_prob true, routed_scaling_factor 1",
                received=f"{routing.bias}, {routing.normalised}, {routing.scale:g}",
            )
        return {
            **Lfm2.gguf_keys(dims, config),
            "feed_forward_length": dims.dense_intermediate,
            "expert_count": dims.experts,
            "expert_used_count": dims.active_experts,
            "expert_feed_forward_length": dims.expert_intermediate,
            "leading_dense_block_count": len(dims.dense_layers),
            "expert_gating_func": SIGMOID,
        }

    @classmethod
    def tiny_config(cls, **sizes: Any) -> dict[str, Any]:
        """Return what `Lfm2.tiny_config` does, with 6 experts of which a token takes 2; the first
        layer has none."""
        own = Lfm2.tiny_config(**MoeFamily.tiny_config(**sizes))
        del own["block_dim"], own["block_auto_adjust_ff_dim"]
        return {"num_dense_layers": 1, **own}


FAMILY = Lfm2Moe
