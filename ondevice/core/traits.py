"""What a block is: its traits, its linear layers and their names; and refusals of blocks whose traits a method
does not know. No framework is needed."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import Any

from ondevice.core.errors import ModelError, Need

ATTENDS = "attention"
CONVOLUTION = "conv"
"""The mixer (`BlockTraits.mixers`) that is a short gated convolution: of the projection's three thirds b, c and x it
computes c * conv(b * x), in which each channel sees its last `taps` tokens."""
DELTA = "delta"
"""The mixer that is a gated delta rule: each head has a matrix that maps keys to values; a token lets it decay and
corrects its answer to the token's key (`ondevice.nn.delta_rule`)."""
DELTA_CHUNK_TOKENS = 64
"""Tokens of a gated delta rule that are computed together."""
MIXER_PARTS = {
    ATTENDS: ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"),
    CONVOLUTION: ("conv_in", "conv_out"),
    DELTA: ("delta_qkv", "delta_z", "delta_b", "delta_a", "delta_out"),
}
"""Linear layers of each mixer; the last one ends it."""
LLAMA_NORMS = {"before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm"}
"""The norms of a block by the place where they stand, and their modules in the block."""


@dataclass(frozen=True)
class BlockTraits:
    """A block; the defaults are Llama's.

    Attributes:
        norms: (place, module) of its norms; places are `before_attention`, `after_attention`, `before_mlp`,
            `after_mlp`, `after_layer_input` (of a branch, before it is added to the residual), `q` and `k`; if experts
            stand next to an MLP also `before_experts`, `after_experts` and `after_dense`, of the MLP.
        norm_offset: a norm's factor is 1 + w, not w.
        qk_norm_all: norms of q and k are over all heads together, not over each.
        activation: of the gate: `silu` or `gelu_tanh`.
        fused: q, k and v are one linear layer, and gate and up are one.
        rotary: of each layer, whether q and k are rotated; () is every layer.
        rotary_width: dimensions of a head that are rotated, the first ones; 0 is all.
        windows: of each layer, how many tokens a query sees, itself included; 0: all before it; (): no windows.
        mixers: of each layer, what mixes its tokens: a key of `MIXER_PARTS`; () is attention.
        taps: tokens that a short convolution sees, the last one included.
        delta: of a gated delta rule: heads of keys and of values, and the width of a key and of a value.
        output_gate: the query's projection has a gate for each head behind its query; attention's output is multiplied
            by its sigmoid.
        paths: (part, module) of a block's linear layers, and of its other tensors (`mixer_tensors`), if they are
            not Llama's; of a mixture of experts also `mlp` and `mlp.gate`, its router.
        head_dims, key_heads, mlp_widths: of each layer, the width of a head, the heads of keys and values, and the
            width of the MLP; () is `ModelDims`' for every layer.
        key_layers: of each layer, the one whose keys and values it attends to, often its own; () is its own.
        keys_as_values: of each layer, whether its values are its keys as they are projected; () is none.
        value_norm: values have a norm without a factor.
        layer_input: width of what each layer reads of a token's own embedding for it, in a branch behind the MLP; 0
            is none.
        output_scale: each block multiplies its output by a number of its own.
        score_scale: factor of the scores; 0 is 1 / sqrt(head_dim).
        embedding_scale, residual_scale, logit_scale: factors of the embedding's rows, of a branch where it is added,
            and of the logits.
        logit_cap: a logit z is cap * tanh(z / cap); 0: no cap.
    """

    norms: tuple[tuple[str, str], ...] = tuple(LLAMA_NORMS.items())
    norm_offset: bool = False
    qk_norm_all: bool = False
    activation: str = "silu"
    fused: bool = False
    rotary: tuple[bool, ...] = ()
    rotary_width: int = 0
    windows: tuple[int, ...] = ()
    mixers: tuple[str, ...] = ()
    taps: int = 0
    delta: tuple[int, ...] = ()
    output_gate: bool = False
    paths: tuple[tuple[str, str], ...] = ()
    head_dims: tuple[int, ...] = ()
    key_heads: tuple[int, ...] = ()
    mlp_widths: tuple[int, ...] = ()
    key_layers: tuple[int, ...] = ()
    keys_as_values: tuple[bool, ...] = ()
    value_norm: bool = False
    layer_input: int = 0
    output_scale: bool = False
    score_scale: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float = 0.0

    def rotated(self, layer: int) -> bool:
        """Return True if q and k of that layer are rotated."""
        return not self.rotary or self.rotary[layer]

    def mixer(self, layer: int) -> str:
        """Return what mixes the tokens of that layer."""
        return self.mixers[layer] if self.mixers else ATTENDS

    def attends(self, layer: int) -> bool:
        """Return True if attention mixes the tokens of that layer."""
        return self.mixer(layer) == ATTENDS

    @property
    def delta_channels(self) -> int:
        """Queries, keys and values of a gated delta rule, which its convolution is over."""
        key_heads, value_heads, key_width, value_width = self.delta
        return 2 * key_heads * key_width + value_heads * value_width

    def path(self, part: str) -> str:
        """Return the module of a part in the block; a part of Llama's block has its own name."""
        return dict(self.paths).get(part, part)

    def part(self, module: str) -> str:
        """Return what `path` inverts."""
        return next((part for part, path in self.paths if path == module), module)

    def norms_of(self, layer: int) -> tuple[tuple[str, str], ...]:
        """Return (place, module) of that layer's norms: without attention none is of q or k, and
        without keys of its own none is of k."""
        absent: tuple[str, ...] = ()
        if not self.attends(layer):
            absent = ("q", "k")
        elif not self.has_keys(layer):
            absent = ("k",)
        return tuple(norm for norm in self.norms if norm[0] not in absent)

    def key_layer(self, layer: int) -> int:
        """Return the layer whose keys and values that layer attends to."""
        return self.key_layers[layer] if self.key_layers else layer

    def has_keys(self, layer: int) -> bool:
        """Return True if that layer computes keys and values."""
        return self.key_layer(layer) == layer

    def lends_keys(self, layer: int) -> bool:
        """Return True if later layers attend to that layer's keys and values, too."""
        return self.key_layers.count(layer) > 1

    def has_values(self, layer: int) -> bool:
        """Return True if that layer has a projection to values."""
        return self.has_keys(layer) and not (self.keys_as_values and self.keys_as_values[layer])

    @property
    def hands_on(self) -> bool:
        """True if blocks read more than the residual stream: other layers' keys and values, or the
        tokens' embeddings for each layer."""
        return bool(self.key_layers or self.layer_input)

    def out_part(self, layer: int) -> str:
        """Return the part that ends the mixer of that layer."""
        return MIXER_PARTS[self.mixer(layer)][-1]

    def window(self, layer: int) -> int:
        """Return how many tokens a query of that layer sees; 0 is all."""
        return self.windows[layer] if self.windows else 0

    def shortest_window(self, otherwise: int) -> int:
        """Return the shortest window of any layer, or `otherwise` if there is none."""
        return min((window for window in self.windows if window), default=otherwise)


LLAMA = BlockTraits()


@dataclass(frozen=True)
class RoutingTraits:
    """How a token's experts are chosen, and weighted in their sum.

    Attributes:
        scores: of a token's experts: `softmax` of the router's logits over all of them, or the `sigmoid` of each.
        bias: each expert's number is added to its score when experts are chosen, but not to its weight.
        normalised: weights are divided by their sum and `least`.
        scale: factor of the weights.
    """

    scores: str = "softmax"
    bias: bool = False
    normalised: bool = False
    least: float = 0.0
    scale: float = 1.0


SOFTMAX = RoutingTraits()
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
"""Linear layers of a mixture of experts that carry adapters."""
GATED_MLP = ("gate_proj", "up_proj", "down_proj")
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
"""The experts' parameters, by their names in the MLP."""
EXPERT_PARAMETERS = ("gate_up_proj", "up_proj", "down_proj")
"""Names of the experts' parameters, in the order of transformers' modules, in which PEFT nests its wrappers."""
_EXPERTS = re.compile(rf"(?:.+\.)?experts\.(?:{'|'.join(EXPERT_PARAMETERS)})")


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


def is_expert_parameter(name: str) -> bool:
    """Return True for the name of a parameter that holds all experts' matrices, by its full name or its last parts."""
    return _EXPERTS.fullmatch(name) is not None


def named(name: str, target: str) -> bool:
    """Return True if `target` names the linear layer `name`, as PEFT matches: all of it, or its last parts."""
    return name == target or name.endswith(f".{target}")


def names_experts(name: str, target: str) -> bool:
    """Return True if `target` names the experts' parameter `name`; its last part may also be a linear layer's."""
    return is_expert_parameter(target) and named(name, target)


WORDS = {
    "norm_offset": "norm weights of 1 + w",
    "qk_norm_all": "norms of q and k over all heads",
    "fused": "fused projections (q, k and v in one, gate and up in one)",
    "rotary": "layers without a rotary embedding",
    "rotary_width": "a rotary embedding of a part of each head",
    "windows": "a sliding window of attention in some layers",
    "mixers": "short convolutions in the place of attention in some layers",
    "delta": "a gated delta rule in the place of attention in some layers",
    "output_gate": "a gate of attention's output",
    "head_dims": "heads of several widths",
    "key_heads": "another number of heads of keys in some layers",
    "mlp_widths": "MLPs of several widths",
    "key_layers": "keys and values that layers share",
    "keys_as_values": "keys that are values, too",
    "value_norm": "a norm of values",
    "layer_input": "embeddings of the tokens for each layer",
    "output_scale": "a factor of each block's output",
    "score_scale": "a scale of the scores of its own",
    "embedding_scale": "a factor of the embedding",
    "residual_scale": "a factor of each branch",
    "logit_scale": "a factor of the logits",
    "logit_cap": "a soft cap of the logits",
}


_PARTS = ("taps", "paths")
"""Sizes and names that no trait has without another."""


def beyond_llama(traits: BlockTraits, known: Collection[str] = ()) -> list[str]:
    """List in words what differs from Llama's block, without the traits that are known."""
    unknown = [field.name for field in fields(traits) if field.name not in (*known, *_PARTS)]
    if traits.delta and "delta" in unknown:  # says which mixer it is
        unknown = [name for name in unknown if name != "mixers"]
    return [
        _words(name, traits) for name in unknown if getattr(traits, name) != getattr(LLAMA, name)
    ]


def _words(name: str, traits: BlockTraits) -> str:
    if name == "norms":
        own = ", ".join(place.replace("_", " ") for place, _ in traits.norms)
        return f"norms at other places ({own})"
    if name == "activation":
        return f"the activation {traits.activation}"
    return WORDS[name]


def check_traits(
    dims: Any, what: str, known: Collection[str] = (), length_tokens: int | None = None
) -> None:
    """Refuse a block that has a trait which `what`, such as "method revffn", does not do.

    Args:
        known: fields of `BlockTraits`.
        length_tokens: of the longest sequence; a window that it stays within hides nothing.

    Raises:
        ModelError: naming the traits, and the methods that work.
    """
    within = length_tokens is not None and length_tokens <= dims.traits.shortest_window(
        length_tokens
    )
    unknown = beyond_llama(dims.traits, (*known, "windows") if within else known)
    if not unknown:
        return
    raise ModelError(
        f"a block of {dims.family} has {'; '.join(unknown)}, which {what} does not do",
        expected="Llama's block, or a method that takes every decoder",
        received=f"model_type {dims.family!r}",
        hint="docs/howto/models.md has a table of what works with which family",
        needs=Need.ANY_DECODER,
    )


def check_length(dims: Any, length_tokens: int) -> None:
    """Refuse a sequence longer than a window of attention, for attention that is only causal.

    Raises:
        ModelError: with the longest length that is possible.
    """
    window = dims.traits.shortest_window(length_tokens)
    if length_tokens > window:
        raise ModelError(
            "the sequence is longer than the model's sliding window of attention",
            expected=f"at most {window} tokens",
            received=f"{length_tokens} tokens",
            hint=f"set data.max_length_tokens to {window} or less",
        )
