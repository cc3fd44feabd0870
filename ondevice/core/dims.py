"""The sizes of a decoder, its linear layers and the parameters they have; no framework is needed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NoReturn

from ondevice.core.errors import ModelError, Need
from ondevice.core.near import nearest_value

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
"""Linear layers of a mixture of experts that carry adapters."""
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
"""The experts' parameters, by their names in the MLP."""
EXPERT_PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")
"""Names of the experts' parameters, in the order of transformers' modules, in which PEFT nests its wrappers."""
_EXPERTS = re.compile(rf"(?:.+\.)?experts\.(?:{'|'.join(EXPERT_PARAMETERS)})")


LLAMA_NORMS = {"before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm"}
"""The norms of a block by the place where they stand, and their modules in the block."""


@dataclass(frozen=True)
class BlockTraits:
    """A block; the defaults are Llama's.

    Attributes:
        norms: (place, module) of its norms; places are `before_attention`, `after_attention`, `before_mlp`,
            `after_mlp` (of a branch, before it is added to the residual), `q` and `k`.
        norm_offset: a norm's factor is 1 + w, not w.
        qk_norm_all: norms of q and k are over all heads together, not over each.
        activation: of the gate: `silu` or `gelu_tanh`.
        fused: q, k and v are one linear layer, and gate and up are one.
        rotary: of each layer, whether q and k are rotated; () is every layer.
        rotary_width: dimensions of a head that are rotated, the first ones; 0 is all.
        windows: of each layer, how many tokens a query sees, itself included; 0 is all before it. () is none.
        score_scale: factor of the scores; 0 is 1 / sqrt(head_dim).
        embedding_scale, residual_scale, logit_scale: factors of the embedding's rows, of a branch where it is added,
            and of the logits.
    """

    norms: tuple[tuple[str, str], ...] = tuple(LLAMA_NORMS.items())
    norm_offset: bool = False
    qk_norm_all: bool = False
    activation: str = "silu"
    fused: bool = False
    rotary: tuple[bool, ...] = ()
    rotary_width: int = 0
    windows: tuple[int, ...] = ()
    score_scale: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0

    def rotated(self, layer: int) -> bool:
        """Return True if q and k of that layer are rotated."""
        return not self.rotary or self.rotary[layer]

    def window(self, layer: int) -> int:
        """Return how many tokens a query of that layer sees; 0 is all."""
        return self.windows[layer] if self.windows else 0

    def shortest_window(self, otherwise: int) -> int:
        """Return the shortest window of any layer, or `otherwise` if there is none."""
        return min((window for window in self.windows if window), default=otherwise)


LLAMA = BlockTraits()


@dataclass(frozen=True)
class Linear:
    """A linear layer of a block: `target` is its name within the block, `inputs` and `outputs` its sides.

    Attributes:
        experts: matrices of one parameter [experts, outputs, inputs], each with a pair of its own; 1 for a layer.
    """

    layer: int
    target: str
    inputs: int
    outputs: int
    experts: int = 1


@dataclass(frozen=True)
class ModelDims:
    """The sizes of a decoder, read from its configuration; no weights are needed.

    Attributes:
        family: Hugging Face `model_type`.
        hidden: width of the residual stream; `intermediate` of the MLP.
        heads: query heads; `kv_heads` key and value heads, each `head_dim` wide.
        tied: the output head is the embedding.
        qkv_bias: q, k and v have a bias; `o_bias` and `mlp_bias` say so of the other linear layers.
        rope_theta: base of the rotary embedding; `rope_type` its scaling (0 and `none` if there is none).
        max_positions: longest sequence that the model takes as it was trained, tokens.
        gated: the MLP has a gate, and norms are RMS norms; else two matrices and layer norms.
        traits: what else its blocks do; see `BlockTraits`.
        experts: of a mixture of experts, in which `intermediate` is what a token passes through; 0 for one MLP.
        classes: of a classification head on an encoder; 0 for a decoder.
    """

    gated: ClassVar[bool] = True
    whole: ClassVar[bool] = False
    """True if the model runs only as a whole, because its blocks are unknown."""

    family: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    qkv_bias: bool
    rope_theta: float
    norm_eps: float
    max_positions: int
    o_bias: bool = False
    mlp_bias: bool = False
    rope_type: str = "default"
    experts: int = 0
    traits: BlockTraits = LLAMA
    classes: int = 0

    @classmethod
    def from_manifest(cls, values: dict[str, Any]) -> ModelDims:
        """Build them from what a manifest has of `dataclasses.asdict`."""

        def tuples(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return tuple(map(tuples, value))
            return value

        traits = {name: tuples(value) for name, value in values.get("traits", {}).items()}
        for name in ("score_cap", "logit_cap"):  # older manifests have them, always as 0
            traits.pop(name, None)
        if "active_experts" in values:
            cls = MoeDims
            values = {**values, "dense_layers": tuples(values["dense_layers"])}
        return cls(**{**values, "traits": BlockTraits(**traits)})

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of each of the family's `linear_targets`."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if self.traits.fused:
            return {
                "qkv_proj": (self.hidden, q + 2 * kv),
                "o_proj": (q, self.hidden),
                "gate_up_proj": (self.hidden, 2 * self.intermediate),
                "down_proj": (self.intermediate, self.hidden),
            }
        return {
            "q_proj": (self.hidden, q),
            "k_proj": (self.hidden, kv),
            "v_proj": (self.hidden, kv),
            "o_proj": (q, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    def linear_shape(self, target: str) -> tuple[int, int]:
        """Return (inputs, outputs) of that linear layer.

        Raises:
            ModelError: `target` is no linear layer of a block.
        """
        shapes = self.linear_shapes
        if target not in shapes:
            near = nearest_value(target, shapes)
            raise ModelError(
                "unknown linear layer",
                expected=", ".join(shapes),
                received=target,
                hint=near and f"did you mean '{near}'?",
            )
        return shapes[target]

    @property
    def linear_list(self) -> tuple[Linear, ...]:
        """Every linear layer of every block, in order of the layers."""
        shapes = self.linear_shapes.items()
        return tuple(
            Linear(layer, name, *shape) for layer in range(self.layers) for name, shape in shapes
        )

    @property
    def expert_list(self) -> tuple[Linear, ...]:
        """The matrices of the experts of every block, those of one parameter together, in order of the layers."""
        return ()

    @property
    def default_targets(self) -> tuple[str, ...]:
        """Names of linear layers for a method's default if the model does not have those; () refuses."""
        if self.traits.fused:
            return tuple(self.linear_shapes)
        return ()

    def resolve_targets(self, config: Any) -> tuple[str, ...]:
        """Return the `target_modules` of a method's settings as this model has them.

        A method's own default gives way to `default_targets` if the model lacks one of its names; one without such
        a setting has none.

        Raises:
            ModelError: the model has no linear layer of a name; or it is the experts', and the method has no pairs
                there.
        """
        targets = tuple(getattr(config, "target_modules", ()))
        names = [linear.target for linear in self.linear_list]
        if experts := [one.target for one in self.expert_list]:
            asked = [
                target for target in targets if any(names_experts(name, target) for name in experts)
            ]
            if asked and not getattr(config, "adapts_experts", False):
                raise ModelError(
                    f"{config.name} does not adapt the matrices of experts",
                    expected=", ".join(self.linear_shapes),
                    received=asked[0],
                    needs=Need.ADAPTS_EXPERTS,
                )
            names += [
                name for name in experts if any(names_experts(name, target) for target in asked)
            ]
        missing = [target for target in targets if not any(named(name, target) for name in names)]
        if not missing:
            return targets
        default = type(config).model_fields["target_modules"].default
        if targets == tuple(default) and self.default_targets:
            return self.default_targets
        if not self.default_targets:
            self.linear_shape(missing[0])  # the family's own words
        raise ModelError(
            f"no block of this {self.family} model has a linear layer {missing[0]}",
            expected=", ".join(dict.fromkeys(name.rsplit(".", 1)[-1] for name in names)),
            received=missing[0],
            hint="set method.target_modules to some of these",
        )

    def adapted(self, config: Any, first_layer: int = 0) -> tuple[Linear, ...]:
        """List the linear layers that carry an adapter of a method's settings, by layer and in the settings' order.

        Raises:
            ModelError: as `resolve_targets`; or the layers from `first_layer` on have none of them.
        """
        targets = self.resolve_targets(config)
        adapted = {
            (linear.layer, linear.target): linear
            for layer in range(first_layer, self.layers)
            for target in targets
            for linear in self._by_layer.get(layer, ())
            if (named if linear.experts == 1 else names_experts)(linear.target, target)
        }
        if not adapted:
            message = f"layers {first_layer} to {self.layers - 1} have no linear layer to adapt"
            raise ModelError(message, expected=", ".join(targets), hint="raise method.top_layers")
        return tuple(adapted.values())

    @cached_property
    def _by_layer(self) -> dict[int, list[Linear]]:
        result: dict[int, list[Linear]] = {}
        for linear in (*self.linear_list, *self.expert_list):
            result.setdefault(linear.layer, []).append(linear)
        return result

    def unknown(self, wanted: str) -> ModelError:
        """Build the refusal of what needs to know a block that is not known; `wanted` is what needs it."""
        return ModelError(f"{wanted} does not know the blocks of {self.family} models")

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on these sizes for a plan."""
        return ()

    def norm_width(self, place: str) -> int:
        """Return the width of a norm of `traits.norms`."""
        if place not in ("q", "k"):
            return self.hidden
        if not self.traits.qk_norm_all:
            return self.head_dim
        return self.head_dim * (self.heads if place == "q" else self.kv_heads)

    def linear_bias(self, target: str) -> bool:
        """Return True if that linear layer has a bias."""
        if target in ("q_proj", "k_proj", "v_proj", "qkv_proj"):
            return self.qkv_bias
        return self.o_bias if target == "o_proj" else self.mlp_bias

    @property
    def block_parameters(self) -> int:
        """Parameters of one block, the largest if they differ."""
        count = sum(self.norm_width(place) for place, _ in self.traits.norms)
        for target, (inputs, outputs) in self.linear_shapes.items():
            count += inputs * outputs + outputs * self.linear_bias(target)
        return count

    @property
    def matrices(self) -> int:
        """Parameters of the matrices of all blocks."""
        return self.layers * sum(
            inputs * outputs for inputs, outputs in self.linear_shapes.values()
        )

    @property
    def active_matrices(self) -> int:
        """Those of `matrices` that one token passes through."""
        return self.matrices

    @property
    def parameters(self) -> int:
        """Parameters of the whole model; a tied head counts once."""
        embeddings = self.vocab * self.hidden * (2 - self.tied)
        return embeddings + self.layers * self.block_parameters + self.hidden


def is_expert_parameter(name: str) -> bool:
    """Return True for the name of a parameter that holds all experts' matrices, by its full name or its last parts."""
    return _EXPERTS.fullmatch(name) is not None


def named(name: str, target: str) -> bool:
    """Return True if `target` names the linear layer `name`, as PEFT matches: all of it, or its last parts."""
    return name == target or name.endswith(f".{target}")


def names_experts(name: str, target: str) -> bool:
    """Return True if `target` names the experts' parameter `name`; its last part may also be a linear layer's."""
    return is_expert_parameter(target) and named(name, target)


@dataclass(frozen=True)
class MoeDims(ModelDims):
    """Dimensions of a mixture of experts.

    Attributes:
        active_experts: of `experts`, those that a token passes through.
        expert_intermediate: width of one expert; `shared_intermediate` of the expert that sees every token, 0 if
            there is none.
        dense_intermediate: width of the MLP of `dense_layers`, the blocks that have no experts.
    """

    active_experts: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    dense_intermediate: int = 0
    dense_layers: tuple[int, ...] = ()

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of the attention's linear layers, the only ones that can carry adapters."""
        shapes = super().linear_shapes
        return {target: shapes[target] for target in ATTENTION}

    @property
    def default_targets(self) -> tuple[str, ...]:
        return ATTENTION

    @property
    def expert_list(self) -> tuple[Linear, ...]:
        width = self.expert_intermediate
        hidden = self.hidden
        count = self.experts
        return tuple(
            Linear(layer, name, *sides, count)
            for layer in range(self.layers)
            if layer not in self.dense_layers
            for name, sides in zip(EXPERTS, ((hidden, 2 * width), (width, hidden)), strict=True)
        )

    def linear_shape(self, target: str) -> tuple[int, int]:
        """Return what `ModelDims.linear_shape` does; ModelError names the targets that do work."""
        return self.linear_shapes.get(target) or refuse_adapter(self.family, target)

    def resolve_targets(self, config: Any) -> tuple[str, ...]:
        """Return what `ModelDims.resolve_targets` does; ModelError names the targets that do work."""
        targets = tuple(getattr(config, "target_modules", ()))
        if targets and targets != tuple(type(config).model_fields["target_modules"].default):
            for target in set(targets) & set(super().linear_shapes) - set(ATTENTION):
                refuse_adapter(self.family, target)
        return super().resolve_targets(config)

    @property
    def matrices(self) -> int:
        return super().matrices + self._mlps(self.experts)

    @property
    def active_matrices(self) -> int:
        return super().matrices + self._mlps(self.active_experts)

    @property
    def block_parameters(self) -> int:
        kinds = []
        if len(self.dense_layers) < self.layers:
            kinds.append(self._sparse_matrices(self.experts))
        if self.dense_layers:
            kinds.append(self._mlp(self.dense_intermediate))
        return super().block_parameters + max(kinds)

    @property
    def parameters(self) -> int:
        attention = super().block_parameters
        embeddings = self.vocab * self.hidden * (2 - self.tied)
        return embeddings + self.layers * attention + self._mlps(self.experts) + self.hidden

    def _mlps(self, experts: int) -> int:
        """Count the MLPs of all blocks, a sparse one with `experts` of its experts."""
        dense = len(self.dense_layers)
        return (self.layers - dense) * self._sparse_matrices(experts) + dense * self._mlp(
            self.dense_intermediate
        )

    def _mlp(self, width: int) -> int:
        return 3 * self.hidden * width

    def _sparse_matrices(self, experts: int) -> int:
        """Count one block's parameters: `experts` of its experts, the shared one with its gate, and the router."""
        gates = self.hidden * (bool(self.shared_intermediate) + self.experts)
        return (
            experts * self._mlp(self.expert_intermediate)
            + self._mlp(self.shared_intermediate)
            + gates
        )


def refuse_adapter(family: str, target: str) -> NoReturn:
    """Refuse a pair next to a linear layer that a mixture of experts does not have."""
    raise ModelError(
        f"in a {family} model {target} takes no adapter: the experts of a layer are one tensor",
        expected=f"targets among {', '.join((*ATTENTION, *EXPERTS))}",
        received=target,
        hint="a method that trains all parameters trains the experts themselves",
        needs=Need.TRAINS_ALL,
    )
