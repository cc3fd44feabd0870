"""The sizes of a decoder and the parameters that its blocks have; no framework is needed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, ClassVar, NoReturn

from ondevice.core.errors import ModelError, Need
from ondevice.core.near import nearest_value
from ondevice.core.traits import (
    ATTENTION,
    CONVOLUTION,
    DELTA,
    EXPERTS,
    GATED_MLP,
    LLAMA,
    MIXER_PARTS,
    SOFTMAX,
    BlockTraits,
    Linear,
    RoutingTraits,
    named,
    names_experts,
)


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
        traits.pop("score_cap", None)  # older manifests have it, always as 0
        if "active_experts" in values:
            cls = MoeDims
            routing = RoutingTraits(**values.get("routing", {}))
            dense = tuples(values["dense_layers"])
            values = {**values, "dense_layers": dense, "routing": routing}
        return cls(**{**values, "traits": BlockTraits(**traits)})

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of each of the family's `linear_targets`; the largest if layers differ."""
        shapes: dict[str, tuple[int, int]] = {}
        for layer in self._kinds:
            for part, shape in self._part_shapes(layer).items():
                name = self.traits.path(part)
                shapes[name] = max(shapes.get(name, shape), shape, key=prod)
        return shapes

    def head_width(self, layer: int) -> int:
        """Return the width of a head of that layer."""
        return self.traits.head_dims[layer] if self.traits.head_dims else self.head_dim

    def key_heads(self, layer: int) -> int:
        """Return the heads of that layer's keys and values."""
        return self.traits.key_heads[layer] if self.traits.key_heads else self.kv_heads

    def mlp_width(self, layer: int) -> int:
        """Return the width of that layer's MLP."""
        return self.traits.mlp_widths[layer] if self.traits.mlp_widths else self.intermediate

    def _part_shapes(self, layer: int) -> dict[str, tuple[int, int]]:
        q = self.heads * self.head_width(layer)
        kv = self.key_heads(layer) * self.head_width(layer)
        inner = self.mlp_width(layer)
        if self.traits.fused:
            return {
                "qkv_proj": (self.hidden, q + 2 * kv),
                "o_proj": (q, self.hidden),
                "gate_up_proj": (self.hidden, 2 * inner),
                "down_proj": (inner, self.hidden),
            }
        shapes = {
            "q_proj": (self.hidden, q * (1 + self.traits.output_gate)),
            "k_proj": (self.hidden, kv),
            "v_proj": (self.hidden, kv),
            "o_proj": (q, self.hidden),
        }
        if CONVOLUTION in self.traits.mixers:
            shapes["conv_in"] = (self.hidden, 3 * self.hidden)
            shapes["conv_out"] = (self.hidden, self.hidden)
        if DELTA in self.traits.mixers:
            _, heads, _, width = self.traits.delta
            shapes["delta_qkv"] = (self.hidden, self.traits.delta_channels)
            shapes["delta_z"] = (self.hidden, heads * width)
            shapes["delta_b"] = (self.hidden, heads)
            shapes["delta_a"] = (self.hidden, heads)
            shapes["delta_out"] = (heads * width, self.hidden)
        shapes |= {
            "gate_proj": (self.hidden, inner),
            "up_proj": (self.hidden, inner),
            "down_proj": (inner, self.hidden),
        }
        if self.traits.layer_input:
            shapes["layer_gate"] = (self.hidden, self.traits.layer_input)
            shapes["layer_out"] = (self.traits.layer_input, self.hidden)
        return shapes

    def block_linears(self, layer: int) -> dict[str, Linear]:
        """Return one block's linear layers by their part in it, which is Llama's name of the layer or one of
        `MIXER_PARTS`, or `layer_gate` and `layer_out` of the branch behind the MLP."""
        own = self.traits.mixer(layer)
        absent = [one for mixer, parts in MIXER_PARTS.items() if mixer != own for one in parts]
        if not self.traits.has_keys(layer):
            absent.append("k_proj")
        if not self.traits.has_values(layer):
            absent.append("v_proj")
        return {
            part: Linear(layer, self.traits.path(part), *shape)
            for part, shape in self._part_shapes(layer).items()
            if part not in absent
        }

    def mixer_tensors(self, layer: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return the tensors of a layer's mixer that are of no linear layer and no norm of the block: each one's name
        in the block and its shape by its part, `taps` of a convolution, and of a gated delta rule also `decay` and
        `step`, one number a head of values, and `gate_norm`, the factor of its output's norm; and `output_scale`, the
        factor of the block's output."""
        mixer = self.traits.mixer(layer)
        shapes: dict[str, tuple[int, ...]] = {}
        if mixer == CONVOLUTION:
            shapes = {"taps": (self.hidden, 1, self.traits.taps)}
        elif mixer == DELTA:
            _, heads, _, width = self.traits.delta
            taps = (self.traits.delta_channels, 1, self.traits.taps)
            shapes = {"taps": taps, "decay": (heads,), "step": (heads,), "gate_norm": (width,)}
        if self.traits.output_scale:
            shapes["output_scale"] = (1,)
        return {part: (self.traits.path(part), shape) for part, shape in shapes.items()}

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
        blocks = map(self.block_linears, range(self.layers))
        return tuple(linear for block in blocks for linear in block.values())

    @property
    def expert_list(self) -> tuple[Linear, ...]:
        """The matrices of the experts of every block, those of one parameter together, in order of the layers."""
        return ()

    @property
    def default_targets(self) -> tuple[str, ...]:
        """Names of linear layers for a method's default if the model does not have those; () refuses."""
        if not (self.traits.fused or self.traits.paths):
            return ()
        return tuple(dict.fromkeys(target.rpartition(".")[2] for target in self.linear_shapes))

    def resolve_targets(self, config: Any) -> tuple[str, ...]:
        """Return the `target_modules` of a method's settings as this model has them.

        A method's own default gives way to `default_targets` if the model lacks one of its names, or if it names all
        layers of attention and not every layer attends; one without such a setting has none.

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
        every = bool(self.traits.mixers) and set(ATTENTION) <= set(targets)
        if not missing and not every:
            return targets
        default = type(config).model_fields["target_modules"].default
        if targets == tuple(default) and self.default_targets:
            return self.default_targets
        if not missing:
            return targets
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

    def norm_width(self, place: str, layer: int = 0) -> int:
        """Return the width of a norm of `traits.norms`."""
        if place not in ("q", "k"):
            return self.hidden
        if not self.traits.qk_norm_all:
            return self.head_width(layer)
        return self.head_dim * (self.heads if place == "q" else self.kv_heads)

    def linear_bias(self, target: str) -> bool:
        """Return True if that linear layer has a bias."""
        if target in ("q_proj", "k_proj", "v_proj", "qkv_proj"):
            return self.qkv_bias
        return self.o_bias if target == "o_proj" else self.mlp_bias

    @property
    def block_parameters(self) -> int:
        """Parameters of one block, the largest if they differ."""
        return max(self._block_parameters(kind) for kind in self._kinds)

    @cached_property
    def _kinds(self) -> dict[int, int]:
        """A layer of each kind, and how many layers are of it: they differ by mixer and sizes."""
        traits = self.traits
        first: dict[tuple[Any, ...], int] = {}
        counts: dict[int, int] = {}
        for layer in range(self.layers):
            sizes = (self.head_width(layer), self.key_heads(layer), self.mlp_width(layer))
            kind = (traits.mixer(layer), traits.has_keys(layer), traits.has_values(layer), *sizes)
            one = first.setdefault(kind, layer)
            counts[one] = counts.get(one, 0) + 1
        return counts

    def _block_parameters(self, layer: int) -> int:
        count = sum(self.norm_width(place, layer) for place, _ in self.traits.norms_of(layer))
        for target, inputs, outputs in self._matrices(layer):
            count += inputs * outputs + outputs * self.linear_bias(target)
        others = self.mixer_tensors(layer)
        others.pop("output_scale", None)  # a buffer in transformers
        return count + sum(prod(shape) for _, shape in others.values())

    def _matrices(self, layer: int) -> list[tuple[str, int, int]]:
        return [(one.target, one.inputs, one.outputs) for one in self.block_linears(layer).values()]

    @property
    def matrices_of_block(self) -> int:
        """Parameters of the matrices of one block, the most if they differ."""
        return max(self._matrix_parameters(layer) for layer in self._kinds)

    def _matrix_parameters(self, layer: int) -> int:
        return sum(inputs * outputs for _, inputs, outputs in self._matrices(layer))

    @property
    def linear_outputs(self) -> int:
        """Outputs of all linear layers of all blocks: rows of their matrices."""
        return sum(
            count * sum(outputs for _, _, outputs in self._matrices(layer))
            for layer, count in self._kinds.items()
        )

    @property
    def matrices(self) -> int:
        """Parameters of the matrices of all blocks."""
        return sum(count * self._matrix_parameters(layer) for layer, count in self._kinds.items())

    @property
    def active_matrices(self) -> int:
        """Those of `matrices` that one token passes through."""
        return self.matrices

    @property
    def parameters(self) -> int:
        """Parameters of the whole model; a tied head counts once."""
        embeddings = self.vocab * self.hidden * (2 - self.tied)
        blocks = sum(count * self._block_parameters(one) for one, count in self._kinds.items())
        return embeddings + self.layer_inputs + blocks + self.hidden

    @property
    def layer_inputs(self) -> int:
        """Parameters of the tokens' embeddings for each layer, their projection and its norm."""
        width = self.traits.layer_input
        return self.layers * width * (self.vocab + self.hidden) + width


@dataclass(frozen=True)
class MoeDims(ModelDims):
    """Dimensions of a mixture of experts.

    Attributes:
        active_experts: of `experts`, those that a token passes through.
        expert_intermediate: width of one expert; `shared_intermediate` of the expert that sees every token, 0 if
            there is none.
        dense_intermediate: width of the MLP of `dense_layers`, the blocks that have no experts.
        routing: how a token's experts are weighted.
        beside: experts stand next to an ordinary MLP in every block, with norms of their own; that MLP's linear
            layers carry adapters.
    """

    active_experts: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    dense_intermediate: int = 0
    dense_layers: tuple[int, ...] = ()
    routing: RoutingTraits = SOFTMAX
    beside: bool = False

    def mixer_tensors(self, layer: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return what `ModelDims.mixer_tensors` does; with experts next to an MLP also `router_scale`, the factor of
        the router's norm, and `expert_scale`, a factor of each expert's weight."""
        own = (
            {"router_scale": (self.hidden,), "expert_scale": (self.experts,)} if self.beside else {}
        )
        tensors = {part: (self.traits.path(part), shape) for part, shape in own.items()}
        return super().mixer_tensors(layer) | tensors

    def _part_shapes(self, layer: int) -> dict[str, tuple[int, int]]:
        """Return those of the mixers, and of an MLP next to the experts: the others carry no adapters."""
        without = () if self.beside else GATED_MLP
        shapes = super()._part_shapes(layer)
        return {part: shape for part, shape in shapes.items() if part not in without}

    def dense_shapes(self, layer: int) -> dict[str, tuple[int, int]]:
        """Return (inputs, outputs) of the MLP's matrices of a layer of `dense_layers`, by part; {} of another."""
        if layer not in self.dense_layers:
            return {}
        width = self.dense_intermediate
        shapes = dict.fromkeys(GATED_MLP, (self.hidden, width))
        return shapes | {"down_proj": (width, self.hidden)}

    @property
    def default_targets(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(target.rpartition(".")[2] for target in self.linear_shapes))

    @property
    def expert_list(self) -> tuple[Linear, ...]:
        hidden, width = self.hidden, self.expert_intermediate
        return tuple(
            Linear(layer, name, *sides, self.experts)
            for layer in range(self.layers)
            if layer not in self.dense_layers
            for name, sides in zip(EXPERTS, ((hidden, 2 * width), (width, hidden)), strict=True)
        )

    def linear_shape(self, target: str) -> tuple[int, int]:
        """Return what `ModelDims.linear_shape` does; ModelError names the targets that do work."""
        return self.linear_shapes.get(target) or self.refuse_adapter(target)

    def resolve_targets(self, config: Any) -> tuple[str, ...]:
        """Return what `ModelDims.resolve_targets` does; ModelError names the targets that do work."""
        targets = tuple(getattr(config, "target_modules", ()))
        default = tuple(type(config).model_fields["target_modules"].default) if targets else ()
        if targets != default and not self.beside:
            for target in set(targets) & set(GATED_MLP):
                self.refuse_adapter(target)
        return super().resolve_targets(config)

    @property
    def matrices(self) -> int:
        return super().matrices + self._mlps(self.experts)

    @property
    def active_matrices(self) -> int:
        return super().matrices + self._mlps(self.active_experts)

    @property
    def block_parameters(self) -> int:
        if self.beside:
            return super().block_parameters + self._sparse_matrices(self.experts)
        kinds = {(self.traits.mixer(i), i in self.dense_layers): i for i in range(self.layers)}
        return max(
            self._block_parameters(i)
            + (self._mlp(self.dense_intermediate) if dense else self._sparse_matrices(self.experts))
            for (_, dense), i in kinds.items()
        )

    @property
    def parameters(self) -> int:
        return super().parameters + self._mlps(self.experts)

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

    def refuse_adapter(self, target: str) -> NoReturn:
        """Refuse a pair next to a linear layer that takes none."""
        raise ModelError(
            f"in a {self.family} model {target} takes no adapter: the experts of a layer are one tensor",
            expected=f"targets among {', '.join((*self.linear_shapes, *EXPERTS))}",
            received=target,
            hint="a method that trains all parameters trains the experts themselves",
            needs=Need.TRAINS_ALL,
        )
