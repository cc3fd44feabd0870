"""`qwen2_moe`: Qwen1.5-MoE and Qwen2-57B-A14B, mixtures of experts with a shared expert.

The experts' matrices are two tensors a layer, [experts, ...], as transformers holds them; no adapter goes beside them.
Their forward and backward pass is this project's own (`ondevice.nn.experts`): the same bits every time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NoReturn

from ondevice.core.errors import ModelError
from ondevice.core.registry import methods
from ondevice.models.base import Family, ModelDims, UnknownTrait, decoder_dims, read_size

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class MoeDims(ModelDims):
    """Dimensions of a mixture of experts.

    Attributes:
        active_experts: of `experts`, those that a token passes through.
        expert_intermediate: width of one expert; `shared_intermediate` of the expert that sees every token.
        dense_intermediate: width of the MLP of `dense_layers`, the blocks that have no experts.
    """

    active_experts: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    dense_intermediate: int = 0
    dense_layers: tuple[int, ...] = ()

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of the attention's linear layers, which alone can carry adapters."""
        shapes = super().linear_shapes
        return {target: shapes[target] for target in Qwen2Moe.linear_targets}

    def linear_shape(self, target: str) -> tuple[int, int]:
        """Return what `ModelDims.linear_shape` does; ModelError names the targets that do work."""
        return self.linear_shapes[target] if target in self.linear_shapes else _refuse_adapter(target)

    @property
    def matrices(self) -> int:
        sparse, dense = self._sparse_matrices(self.experts), self._mlp(self.dense_intermediate)
        return super().matrices + self._of_blocks(sparse, dense)

    @property
    def active_matrices(self) -> int:
        sparse, dense = self._sparse_matrices(self.active_experts), self._mlp(self.dense_intermediate)
        return super().matrices + self._of_blocks(sparse, dense)

    @property
    def block_parameters(self) -> int:
        sparse, dense = self._sparse_matrices(self.experts), self._mlp(self.dense_intermediate)
        kinds = [sparse] * self._of_blocks(1, 0) + [dense] * self._of_blocks(0, 1)
        return super().block_parameters + max(kinds)

    @property
    def parameters(self) -> int:
        sparse, dense = self._sparse_matrices(self.experts), self._mlp(self.dense_intermediate)
        attention = super().block_parameters
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * attention + self._of_blocks(sparse, dense) + self.hidden

    def _of_blocks(self, sparse: int, dense: int) -> int:
        without = len(self.dense_layers)
        return (self.layers - without) * sparse + without * dense

    def _mlp(self, width: int) -> int:
        return 3 * self.hidden * width

    def _sparse_matrices(self, experts: int) -> int:
        """Count one block's parameters: `experts` of its experts, the shared one with its gate, and the router."""
        gates = self.hidden * (1 + self.experts)
        return experts * self._mlp(self.expert_intermediate) + self._mlp(self.shared_intermediate) + gates


class Qwen2Moe(Family):
    """q, k and v have a bias. A block's MLP is a sum of experts, or in `dense_layers` an ordinary one.

    Attributes:
        on_routing: if set, is called with a block's number and the expert ids of its tokens, int64 [B * T, active].
    """

    model_type = "qwen2_moe"
    gguf_written_as = "qwen2moe"
    linear_targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    dims: MoeDims

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.on_routing: Callable[[int, Tensor], None] | None = None

    @classmethod
    def dims_from_config(cls, config: dict[str, Any], where: str = "config.json") -> MoeDims:
        if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
            raise UnknownTrait(
                f"{where}: some layers attend to a sliding window",
                expected="full attention in every layer",
                received=f"use_sliding_window with a window of {config.get('sliding_window')} tokens",
                hint="set use_sliding_window to false where sequences stay shorter than the window",
            )
        base = decoder_dims("qwen2_moe", {**config, "intermediate_size": config.get("intermediate_size", 5632)}, where,
                            qkv_bias=bool(config.get("qkv_bias", True)), o_bias=False, mlp_bias=False)  # fmt: skip
        experts = read_size(config, "num_experts", where, 60)
        active = read_size(config, "num_experts_per_tok", where, 4)
        if active > experts:
            expected = f"at most num_experts ({experts})"
            raise ModelError(f"{where}: field 'num_experts_per_tok'", expected=expected, received=active)
        expert = read_size(config, "moe_intermediate_size", where, 1408)
        shared = read_size(config, "shared_expert_intermediate_size", where, 5632)
        every, dense = read_size(config, "decoder_sparse_step", where, 1), config.get("mlp_only_layers") or ()
        dense_layers = tuple(i for i in range(base.layers) if i in dense or (i + 1) % every)
        if len(dense_layers) == base.layers:
            raise ModelError(f"{where}: no layer has experts", expected="model_type qwen2 for an ordinary decoder")
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
        )

    @classmethod
    def tiny_config(cls, **sizes: Any) -> dict[str, Any]:
        """Return what `Family.tiny_config` does, with 6 experts of which a token takes 2."""
        width = sizes["intermediate_size"]
        experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": max(8, width // 4)}
        return {**experts, "shared_expert_intermediate_size": width, **sizes}

    @classmethod
    def weight_shapes(cls, dims: ModelDims) -> dict[str, tuple[int, ...]]:
        """Return every weight by transformers' name, with its shape; a tied head is not among them."""
        assert isinstance(dims, MoeDims)  # noqa: S101
        shapes = super().weight_shapes(dims)
        for i in range(dims.layers):
            mlp, hidden, width = f"model.layers.{i}.mlp", dims.hidden, dims.expert_intermediate
            if i in dims.dense_layers:
                shapes |= _mlp_shapes(mlp, hidden, dims.dense_intermediate)
                continue
            shapes[f"{mlp}.gate.weight"] = (dims.experts, hidden)
            shapes[f"{mlp}.experts.gate_up_proj"] = (dims.experts, 2 * width, hidden)
            shapes[f"{mlp}.experts.down_proj"] = (dims.experts, hidden, width)
            shapes |= _mlp_shapes(f"{mlp}.shared_expert", hidden, dims.shared_intermediate)
            shapes[f"{mlp}.shared_expert_gate.weight"] = (1, hidden)
        return shapes

    def mlp_branch(self, i: int, h: Tensor) -> Tensor:
        """Compute the sum of the experts of each token's norm, without the residual: [B, T, hidden]."""
        if i in self.dims.dense_layers:
            return super().mlp_branch(i, h)
        from torch.nn.functional import sigmoid

        from ondevice.nn.experts import mixture

        layer: Any = self.layer(i)
        mlp = layer.mlp
        x_ND = layer.post_attention_layernorm(h).flatten(0, -2)
        _, weights_NK, experts_NK = mlp.gate(x_ND)
        if self.on_routing is not None:
            self.on_routing(i, experts_NK)
        routed = mixture(
            x_ND, experts_NK, weights_NK, mlp.experts.gate_up_proj, mlp.experts.down_proj, mlp.experts.act_fn
        )
        shared = sigmoid(mlp.shared_expert_gate(x_ND)) * mlp.shared_expert(x_ND)
        return (routed + shared).view(h.shape)

    def _parent(self, target: str) -> str:
        return super()._parent(target) if target in self.linear_targets else _refuse_adapter(target)


def _mlp_shapes(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (width, hidden),
        f"{prefix}.up_proj.weight": (width, hidden),
        f"{prefix}.down_proj.weight": (hidden, width),
    }


def _refuse_adapter(target: str) -> NoReturn:
    everything = [spec.name for spec in methods() if spec.trains == "all"]
    raise ModelError(
        f"in a qwen2_moe model {target} takes no adapter: the experts of a layer are one tensor",
        expected=f"targets among {', '.join(Qwen2Moe.linear_targets)}",
        received=target,
        hint=f"a method that trains all parameters trains the experts themselves: {', '.join(everything)}",
    )


FAMILY = Qwen2Moe
