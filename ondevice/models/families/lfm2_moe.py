"""`lfm2_moe`: LFM2-8B-A1B: LFM2's mixers, and a mixture of experts behind the first layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from ondevice.core.dims import EXPERTS, GATED_MLP, MoeDims, RoutingTraits
from ondevice.models.families.base import read_size
from ondevice.models.families.lfm2 import LINEARS, Lfm2, lfm2_dims
from ondevice.models.families.moe import MoeFamily, moe_dims

if TYPE_CHECKING:
    from torch import Tensor

MLP = "feed_forward"
PATHS = {**LINEARS, "mlp": MLP, "mlp.gate": f"{MLP}.gate"}
MIXERS = tuple(path for part, path in LINEARS.items() if part not in GATED_MLP)


class Lfm2Moe(MoeFamily, Lfm2):
    """The first `num_dense_layers` have Lfm2's MLP. Experts are weighted by sigmoids; a bias, which
    no gradient reaches, takes part in their choice."""

    model_type = "lfm2_moe"
    gguf_architecture = None
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
    def tiny_config(cls, **sizes: Any) -> dict[str, Any]:
        """Return what `Lfm2.tiny_config` does, with 6 experts of which a token takes 2; the first
        layer has none."""
        own = Lfm2.tiny_config(**MoeFamily.tiny_config(**sizes))
        del own["block_dim"], own["block_auto_adjust_ff_dim"]
        return {"num_dense_layers": 1, **own}


FAMILY = Lfm2Moe
