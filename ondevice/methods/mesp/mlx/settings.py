"""The sizes of a model and the choices of a run, on which the stages and their order depend.
Imports no MLX.

A tile is a part of a matrix's width (the vocabulary, or the MLP's inner dimension), a chunk a part
of the tokens (queries, or labelled tokens), a part one of the arrays of a packed matrix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ondevice.core.dims import MoeDims
from ondevice.core.errors import ConfigError
from ondevice.core.traits import DELTA_CHUNK_TOKENS, RoutingTraits
from ondevice.methods.mesp.config import GROUP_SIZE

if TYPE_CHECKING:
    from ondevice.core.dims import ModelDims

Product = Literal["quantized", "dequantized"]
ATTENTION = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")
NORMS = {
    "before_attention": "input_norm", "after_attention": "attention_norm", "before_mlp": "mlp_norm",
    "after_mlp": "output_norm", "after_layer_input": "layer_out_norm",
    "before_experts": "experts_norm", "after_experts": "experts_out_norm", "after_dense": "dense_norm",
    "q": "q_norm", "k": "k_norm", "v": "v_norm",
}  # fmt: skip
"""The norms' names in the instructions, by place (`BlockTraits.norms`)."""
SHARED = ("shared.gate", "shared.up", "shared.down")
"""Matrices of the expert for all tokens."""


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: angle of pair i at position t is t * scale / wavelength_i.

    Attributes:
        theta: base of the wavelengths theta^(2i / head_dim).
        scale: 1 / factor if positions are interpolated (`linear`).
        wavelengths: one for each pair, if they are not powers of theta (`llama3`, `yarn`,
            `longrope`).
        longer: those of sequences of more than `trained_tokens`, if they are others
            (`longrope`).
        factor: of the rotated vectors (`yarn`, `longrope`).
        local_theta: base in layers with a window, if it is another; they are not scaled.
        part: of the pairs, the first ones, that are rotated in layers without a window
            (`proportional`).
    """

    theta: float
    scale: float = 1.0
    wavelengths: tuple[float, ...] | None = None
    local_theta: float | None = None
    longer: tuple[float, ...] | None = None
    trained_tokens: int = 0
    factor: float = 1.0
    part: float = 1.0

    def of_layer(self, width: int, rotated: bool, local: bool) -> list[list[float]]:
        """Return a layer's wavelengths, one for each pair of `width` dimensions, the scale
        included, and the factor of each pair; infinity and 1 if nothing is rotated."""
        pairs = width // 2
        if not rotated:
            return [[math.inf] * pairs, [1.0] * pairs]
        if local and self.local_theta is not None:
            return [_waves(self.local_theta, width), [1.0] * pairs]
        waves = self.wavelengths or _waves(self.theta, width)
        turned = int(self.part * pairs)
        waves = [wave if pair < turned else math.inf for pair, wave in enumerate(waves)]
        return [[wave / self.scale for wave in waves], [self.factor] * pairs]


def _waves(theta: float, width: int) -> list[float]:
    return [theta ** (2 * pair / width) for pair in range(width // 2)]


def read_rope(config: dict[str, Any], dims: ModelDims) -> Rope:
    """Read the rotary embedding of a `config.json`: one of the scalings that `ModelDims.rope_type`
    may be."""
    parameters = config.get("rope_parameters") or {}
    rope = parameters or config.get("rope_scaling") or {}
    rope = rope.get("full_attention", rope)
    local = parameters.get("sliding_attention") or {}
    local_theta = local.get("rope_theta", config.get("rope_local_base_freq"))
    width = dims.traits.rotary_width or dims.head_dim
    plain = Rope(dims.rope_theta)
    if dims.traits.windows and local_theta is not None:
        plain = replace(plain, local_theta=float(local_theta))
    if dims.rope_type == "default":
        return plain
    if dims.rope_type == "proportional":
        return replace(plain, part=float(rope.get("partial_rotary_factor", 1.0)))
    if dims.rope_type == "linear":
        return replace(plain, scale=1.0 / float(rope["factor"]))
    if dims.rope_type == "longrope":
        # Configurations as they were published have this next to the scaling; transformers 5 writes
        # it among its fields.
        trained = config.get("original_max_position_embeddings", dims.max_positions)
        rope = {"original_max_position_embeddings": trained, **rope}
    read = {"llama3": _llama3, "longrope": _longrope, "yarn": _yarn}[dims.rope_type]
    return replace(plain, **read(rope, _waves(plain.theta, width), dims))


def _longrope(rope: dict[str, Any], waves: list[float], dims: ModelDims) -> dict[str, Any]:
    """Stretch each wave by its own factor, by another in sequences beyond those of training
    (LongRoPE, arXiv 2402.13753; transformers' `_compute_longrope_parameters`)."""
    trained = int(rope["original_max_position_embeddings"])
    stretched = float(rope.get("factor") or dims.max_positions / trained)
    factor = rope.get("attention_factor")
    if factor is None:
        factor = math.sqrt(1 + math.log(max(stretched, 1.0)) / math.log(trained))
    short, longer = (
        tuple(float(own) * wave for own, wave in zip(rope[name], waves, strict=True))
        for name in ("short_factor", "long_factor")
    )
    return {
        "wavelengths": short, "longer": longer, "trained_tokens": trained, "factor": float(factor)
    }  # fmt: skip


def _llama3(rope: dict[str, Any], waves: list[float], dims: ModelDims) -> dict[str, Any]:
    factor, low, high, trained = (
        float(rope[key])
        for key in (
            "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
        )
    )  # fmt: skip
    kept = [
        min(1.0, max(0.0, (trained / (2 * math.pi * wave) - low) / (high - low))) for wave in waves
    ]
    return {"wavelengths": _mixed(waves, factor, [(1 - part, part) for part in kept])}


def _mixed(
    waves: list[float], factor: float, parts: list[tuple[float, float]]
) -> tuple[float, ...]:
    """Return the mean of the frequencies of each wave stretched by `factor` and of itself."""
    return tuple(
        1.0 / (stretched / (factor * wave) + kept / wave)
        for wave, (stretched, kept) in zip(waves, parts)
    )


def _yarn(rope: dict[str, Any], waves: list[float], dims: ModelDims) -> dict[str, Any]:
    """Stretch long waves by the factor, keep short ones, with a ramp between (YaRN, arXiv
    2309.00071, section 3.2); cosine and sine have a factor of their own (section 3.4)."""
    factor = float(rope["factor"])
    trained = float(rope["original_max_position_embeddings"])
    low, high = (
        len(waves) * math.log(trained / (turns * 2 * math.pi)) / math.log(dims.rope_theta)
        for turns in (float(rope.get("beta_fast") or 32), float(rope.get("beta_slow") or 1))
    )
    if rope.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, 2 * len(waves) - 1)
    high += 0.001 * (low == high)  # as transformers, so that the ramp never divides by zero
    ramp = [min(1.0, max(0.0, (pair - low) / (high - low))) for pair in range(len(waves))]
    attention, own, every = (
        rope.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim")
    )
    stretched = math.log(max(factor, 1.0))
    if attention is None and own and every:
        attention = (0.1 * own * stretched + 1.0) / (0.1 * every * stretched + 1.0)
    elif attention is None:
        attention = 0.1 * stretched + 1.0
    wavelengths = _mixed(waves, factor, [(part, 1 - part) for part in ramp])
    return {"wavelengths": wavelengths, "factor": float(attention)}


@dataclass(frozen=True)
class Settings:
    """The sizes of a model and the choices of a run, which the stages and their order depend on.

    Attributes:
        target_modules: parts of a block (`ModelDims.block_linears`) that have an adapter.
        scale: LoRA's alpha / rank.
        bits: of packed weights, in groups of `group_size`; None is dense.
        dtype: of activations; sums over tiles and all of LoRA are float32.
        product: `quantized` multiplies packed weights as they are; `dequantized` makes some rows
            dense at a time, which is faster with a good BLAS.
        mlp_tiles: parts of the MLP's inner dimension that are computed one after the other.
        query_chunk_tokens: queries whose attention scores exist at once.
        active_experts: of a mixture of experts, those that a token passes through; `shared`: there
            is an expert for all tokens.
        layer: the block that the stages and their order are of, if blocks differ (`at`).
    """

    dims: ModelDims
    target_modules: tuple[str, ...]
    scale: float
    rope: Rope
    bits: int | None = None
    group_size: int = GROUP_SIZE
    dtype: str = "float32"
    product: Product = "quantized"
    mlp_tiles: int = 8
    query_chunk_tokens: int = 128
    active_experts: int = 0
    shared: bool = False
    layer: int = 0

    def at(self, layer: int) -> Settings:
        """Return the settings of that block."""
        return replace(self, layer=layer)

    @property
    def routes(self) -> bool:
        """The block's tokens choose experts, and there is no MLP next to these."""
        return bool(self.active_experts) and not self._dense and not self.beside

    @property
    def beside(self) -> bool:
        """Experts stand next to the block's MLP."""
        return isinstance(self.dims, MoeDims) and self.dims.beside

    @property
    def routing(self) -> RoutingTraits:
        """How the experts of a mixture are weighted."""
        return self.dims.routing if isinstance(self.dims, MoeDims) else RoutingTraits()

    @property
    def _dense(self) -> bool:
        """The block of a mixture has one MLP for every token."""
        return isinstance(self.dims, MoeDims) and self.layer in self.dims.dense_layers

    @property
    def mlp_width(self) -> int:
        """Width of the block's MLP, if it has one for every token."""
        if isinstance(self.dims, MoeDims) and self._dense:
            return self.dims.dense_intermediate
        return self.dims.mlp_width(self.layer)

    @property
    def attention_targets(self) -> tuple[str, ...]:
        """Linear layers that give q, k and v."""
        if self.dims.traits.fused:
            return ("qkv_proj",)
        parts = self.dims.block_linears(self.layer)
        return tuple(part for part in ATTENTION if part in parts)

    def doubles(self, target: str) -> bool:
        """Return True if that linear layer gives keys, which are values, too."""
        return target == "k_proj" and not self.dims.traits.has_values(self.layer)

    @property
    def borrows_keys(self) -> bool:
        """The block attends to another's keys and values."""
        return not self.dims.traits.has_keys(self.layer)

    @property
    def lends_keys(self) -> bool:
        """Later blocks attend to the block's keys and values, too."""
        return self.dims.traits.lends_keys(self.layer)

    @property
    def has_behind(self) -> bool:
        """Something is behind the MLP: the branch of the layer's input, or a factor."""
        return bool(self.dims.traits.layer_input) or self.dims.traits.output_scale

    @property
    def gate_up_targets(self) -> tuple[str, ...]:
        """Linear layers that give gate and up."""
        return ("gate_up_proj",) if self.dims.traits.fused else GATE_UP

    def gates(self, target: str) -> bool:
        """Return True if that linear layer also gives the gate of attention's output."""
        return target == "q_proj" and self.dims.traits.output_gate

    def place(self, target: str) -> tuple[str, int]:
        """Return the linear layer that `target` is some rows of, and the first of them: gate and up
        may be one."""
        if self.dims.traits.fused and target in GATE_UP:
            return "gate_up_proj", GATE_UP.index(target) * self.mlp_width
        return target, 0

    def has(self, target: str) -> bool:
        """Return True if there is an adapter next to that linear layer."""
        return self.place(target)[0] in self.target_modules

    def norm(self, place: str) -> bool:
        """Return True if the block has a norm there."""
        if place == "v":
            return self.dims.traits.value_norm
        return any(place == one for one, _ in self.dims.traits.norms)

    @property
    def mixer(self) -> str:
        """Return what mixes the block's tokens."""
        return self.dims.traits.mixer(self.layer)

    @property
    def rope_by_layer(self) -> bool:
        """Layers rotate differently, or some do not: then `rope.weight` of a block has its
        wavelengths."""
        one = self.rope.local_theta is None and self.rope.part == 1.0
        return not one or not all(self.dims.traits.rotary)

    @property
    def rotary_width(self) -> int:
        """Dimensions of a head that are rotated."""
        return self.dims.traits.rotary_width or self.dims.head_dim

    def of_layer(self, layer: int) -> dict[str, list[Any]]:
        """Return what differs by layer, if anything does: the window, and the rotation."""
        arrays: dict[str, list[Any]] = {}
        traits = self.dims.traits
        if traits.windows:
            arrays["window.weight"] = [traits.window(layer) or math.inf]
        if self.rope_by_layer:
            arrays["rope.weight"] = self.rope.of_layer(
                traits.rotary_width or self.dims.head_width(layer),
                traits.rotated(layer),
                bool(traits.window(layer)),
            )
        if traits.value_norm and traits.has_keys(layer):
            arrays["v_norm.weight"] = [1.0] * self.dims.head_width(layer)
        return arrays

    @property
    def branch_apart(self) -> bool:
        """Something is between the MLP and the sum: a norm, or a factor."""
        return self.norm("after_mlp") or self.dims.traits.residual_scale != 1.0

    def mlp_bounds(self) -> list[tuple[int, int]]:
        """Return ranges of the MLP's inner dimension, all but the last of equal size; in packed
        columns they begin at a group."""
        quantum = self.group_size if self.bits else 1
        return bounds(self.mlp_width, self.mlp_tiles, quantum)

    def query_bounds(self, length_tokens: int) -> list[tuple[int, int]]:
        """Return ranges of a sequence's queries."""
        return ranges(length_tokens, self.query_chunk_tokens)

    @staticmethod
    def delta_bounds(length_tokens: int) -> list[tuple[int, int]]:
        """Return ranges of the tokens of a gated delta rule that are computed together."""
        return ranges(length_tokens, DELTA_CHUNK_TOKENS)

    def check(self) -> None:
        """Refuse matrices that cannot be packed.

        Raises:
            ConfigError: a width is not a multiple of the group size.
        """
        if not self.bits:
            return
        widths = {linear.target: linear.inputs for linear in self.dims.linear_list}
        widths |= {linear.target: linear.inputs for linear in self.dims.expert_list}
        for target, inputs in widths.items():
            if inputs % self.group_size:
                raise ConfigError(
                    f"{target} cannot be kept in {self.bits} bits",
                    expected=f"inputs a multiple of the group of {self.group_size}",
                    received=f"{inputs} inputs",
                    hint="--set method.bits=null keeps the weights as they are",
                )


def bounds(size: int, tiles: int, quantum: int = 1) -> list[tuple[int, int]]:
    """Split `size` into at most `tiles` ranges that begin at multiples of `quantum`."""
    step = -(-size // max(1, tiles))
    return ranges(size, -(-step // quantum) * quantum)


def ranges(size: int, step: int) -> list[tuple[int, int]]:
    """Split `size` into ranges of `step`; the last may be shorter."""
    return [(low, min(low + step, size)) for low in range(0, size, step)]


def matrix_parts(bits: int | None) -> tuple[str, ...]:
    """Return names of the arrays that a matrix consists of."""
    return ("weight", "scales", "biases") if bits else ("weight",)
