"""The sizes of a decoder, its linear layers and its weights' shapes, from its configuration alone.

The fields that Hugging Face decoders share in `config.json` are read here, with readable errors. Importing this module
loads no framework.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from ondevice.artifact.adapter import is_expert_parameter
from ondevice.core.errors import ModelError
from ondevice.core.untrusted import well_formed
from ondevice.models.traits import LLAMA, BlockTraits

if TYPE_CHECKING:
    from ondevice.models.families.base import Family


ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings whose table is a function of the position alone; `dynamic` and `longrope` are not."""


class UnknownTrait(ModelError):
    """A configuration asks for something that a family's block does not do; the model can still run as a whole."""


def decoder_dims(
    family: str,
    config: dict[str, Any],
    where: str,
    *,
    qkv_bias: bool,
    o_bias: bool,
    mlp_bias: bool,
    traits: BlockTraits = LLAMA,
    rope_types: tuple[str, ...] = (),
) -> ModelDims:
    """Read the dimensions of a Llama-like decoder; `rope_parameters` (transformers 5) and `rope_theta` both do.

    Raises:
        ModelError: a size is missing or not a positive integer, or the weights are quantised.
        UnknownTrait: the activation is not SiLU, or the rotary embedding's table depends on the length.
    """
    refuse_quantised(config, where)
    hidden, heads = (
        read_size(config, "hidden_size", where),
        read_size(config, "num_attention_heads", where),
    )
    kv_heads = read_size(config, "num_key_value_heads", where, heads)
    head_dim = read_size(config, "head_dim", where, max(1, hidden // heads))
    if heads % kv_heads:
        expected = f"a divisor of num_attention_heads ({heads})"
        raise ModelError(
            f"{where}: field 'num_key_value_heads'", expected=expected, received=kv_heads
        )
    wanted = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}[traits.activation]
    field = "hidden_activation" if "hidden_activation" in config else "hidden_act"
    if config.get(field, wanted) != wanted:
        raise UnknownTrait(f"{where}: field '{field}'", expected=wanted, received=config[field])
    theta, rope_type = _rope(config, where, rope_types or ROPE_TYPES, bool(traits.rotary_width))
    return ModelDims(
        family=family,
        layers=read_size(config, "num_hidden_layers", where),
        hidden=hidden,
        intermediate=read_size(config, "intermediate_size", where),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=read_size(config, "vocab_size", where),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=qkv_bias,
        rope_theta=theta,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        max_positions=read_size(config, "max_position_embeddings", where, 2048),
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        rope_type=rope_type,
        traits=traits,
    )


_COUNTS = (
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
)
_MOST = 10_000
"""Of layers or experts: each has an entry in lists that are made before the weights are looked at."""


def dims_of(family: type[Family], config: dict[str, Any], where: str) -> ModelDims:
    """Read the dimensions in a configuration that comes from outside.

    Raises:
        ModelError: as `Family.dims_from_config`, or a field is of a wrong type or too large.
    """
    text = config.get("text_config")
    for values in (config, text if isinstance(text, dict) else {}):
        for field in _COUNTS:
            value = values.get(field)
            if isinstance(value, (int, float)) and value > _MOST:
                raise ModelError(
                    f"{where}: field '{field}'", expected=f"{_MOST} at most", received=value
                )
    with well_formed(where, ModelError, hint="check config.json, or copy it again"):
        return family.dims_from_config(config, where)


def refuse_quantised(config: dict[str, Any], where: str) -> None:
    """Raise ModelError if the weights are stored in a format that transformers would have to unpack."""
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ModelError(
            f"{where}: the weights are quantised ({method})",
            expected="float32, bfloat16 or float16 weights",
            hint="give the model's original weights or a .gguf file; a method quantises by itself",
        )


def read_size(config: dict[str, Any], field: str, where: str, default: int | None = None) -> int:
    """Read a field that must be an integer of 1 or more; null is the default. ModelError if it is not."""
    value = config.get(field)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(
            f"{where}: field '{field}'", expected="an integer of 1 or more", received=value
        )
    return value


def _rope(
    config: dict[str, Any], where: str, types: tuple[str, ...], partial: bool
) -> tuple[float, str]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if "full_attention" in rope:  # transformers 5 keeps one set for each kind of layer
        rope = rope["full_attention"]
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in types:
        message = f"{where}: the rotary embedding's scaling is not supported"
        raise UnknownTrait(message, expected=", ".join(types), received=rope_type)
    if not partial and config.get(
        "partial_rotary_factor", rope.get("partial_rotary_factor", 1.0)
    ) not in (1.0, None):
        raise UnknownTrait(f"{where}: field 'partial_rotary_factor'", expected="1.0")
    return float(rope.get("rope_theta", config.get("rope_theta") or 10000.0)), rope_type


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
        rope_theta: base of the rotary embedding; `rope_type` its scaling (0 and `none` where there is none).
        max_positions: longest sequence that the model takes as it was trained, tokens.
        gated: the MLP has a gate, and norms are RMS norms; else two matrices and layer norms.
        traits: what else its blocks do; see `BlockTraits`.
        experts: of a mixture of experts, in which `intermediate` is what a token passes through; 0 for one MLP.
        classes: of a classification head on an encoder; 0 for a decoder.
    """

    gated: ClassVar[bool] = True
    whole: ClassVar[bool] = False
    """True where the model runs only as a whole, its blocks being unknown."""

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
            return tuple(map(tuples, value)) if isinstance(value, list | tuple) else value

        traits = {name: tuples(value) for name, value in values.get("traits", {}).items()}
        if "active_experts" in values:
            from ondevice.models.families.moe import MoeDims  # it is built on this

            cls, values = MoeDims, {**values, "dense_layers": tuples(values["dense_layers"])}
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
            raise ModelError("unknown linear layer", expected=", ".join(shapes), received=target)
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
        """Names of linear layers for a method's default where the model does not have those; () refuses."""
        return tuple(self.linear_shapes) if self.traits.fused else ()

    def resolve_targets(self, config: Any) -> tuple[str, ...]:
        """Return the `target_modules` of a method's settings as this model has them.

        A method's own default gives way to `default_targets` where the model lacks one of its names; one without such
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
                    f"{config.name} puts no pairs beside the matrices of experts",
                    expected=", ".join(self.linear_shapes),
                    received=asked[0],
                    hint=_adapting_experts(),
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
            message = f"layers {first_layer} to {self.layers - 1} have no linear layer that is to be adapted"
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
        if place in ("q", "k"):
            heads = self.heads if place == "q" else self.kv_heads
            return self.head_dim * (heads if self.traits.qk_norm_all else 1)
        return self.hidden

    def linear_bias(self, target: str) -> bool:
        """Return True if that linear layer has a bias."""
        if target in ("q_proj", "k_proj", "v_proj", "qkv_proj"):
            return self.qkv_bias
        return self.o_bias if target == "o_proj" else self.mlp_bias

    @property
    def block_parameters(self) -> int:
        """Parameters of one block, the largest where they differ."""
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
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * self.block_parameters + self.hidden


def named(name: str, target: str) -> bool:
    """Return True if `target` names the linear layer `name`, as PEFT matches: all of it, or its last parts."""
    return name == target or name.endswith(f".{target}")


def names_experts(name: str, target: str) -> bool:
    """Return True if `target` names the experts' parameter `name`; its last part alone may be a linear layer's."""
    return is_expert_parameter(target) and named(name, target)


def _adapting_experts() -> str:
    from ondevice.core.registry import methods

    able = [spec.name for spec in methods() if getattr(spec.config, "adapts_experts", False)]
    return f"methods that do: {', '.join(able)}"


def weight_shapes(cls: type[Family], dims: ModelDims) -> dict[str, tuple[int, ...]]:
    """Map every weight's name in transformers to its shape; a tied head is not among them."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (dims.vocab, dims.hidden)}
    for i in range(dims.layers):
        for place, module in dims.traits.norms:
            shapes[f"model.layers.{i}.{module}.weight"] = (dims.norm_width(place),)
        for target in cls.linear_targets:
            inputs, outputs = dims.linear_shape(target)
            name = f"model.layers.{i}.{cls.linear_parents[target]}.{target}"
            shapes[f"{name}.weight"] = (outputs, inputs)
            if dims.linear_bias(target):
                shapes[f"{name}.bias"] = (outputs,)
    shapes["model.norm.weight"] = (dims.hidden,)
    if not dims.tied:
        shapes["lm_head.weight"] = (dims.vocab, dims.hidden)
    return shapes
