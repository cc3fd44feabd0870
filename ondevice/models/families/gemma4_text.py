"""`gemma4_text`: the text of Gemma 4: layers with a window and layers that see all have heads
of another width and rotary base; the last layers attend to keys and values of layers before them,
and each layer reads an embedding of the token for it alone. In 26B-A4B experts stand next to each
layer's MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ondevice.core.dims import ModelDims, MoeDims
from ondevice.core.errors import ModelError
from ondevice.core.traits import EXPERTS, BlockTraits, RoutingTraits
from ondevice.models.families.configuration import (
    ROPE_TYPES,
    UnknownTrait,
    check_layer_types,
    decoder_dims,
    read_size,
)
from ondevice.models.families.gemma3_text import KINDS, NORMS, Gemma3Text
from ondevice.models.families.moe import moe_dims, sum_of_experts
from ondevice.models.families.traited import window_mask

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from ondevice.gguf.metadata import Metadata
    from ondevice.nn.experts import ExpertLora

FULL = KINDS[0]
SLIDING = KINDS[1]
LAYER_LINEARS = {"layer_gate": "per_layer_input_gate", "layer_out": "per_layer_projection"}
LAYER_TENSORS = {"output_scale": "layer_scalar"}
LAYER_NORM = {"after_layer_input": "post_per_layer_input_norm"}
MIXTURE_NORMS = {
    "before_experts": "pre_feedforward_layernorm_2",
    "after_experts": "post_feedforward_layernorm_2",
    "after_dense": "post_feedforward_layernorm_1",
}
MIXTURE_PATHS = {
    "mlp": "",
    "mlp.gate": "router.proj",
    "router_scale": "router.scale",
    "expert_scale": "router.per_expert_scale",
}
"""The experts are the block's own module, not a part of its MLP."""
INPUTS = (
    "model.embed_tokens_per_layer.weight",
    "model.per_layer_model_projection.weight",
    "model.per_layer_projection_norm.weight",
)
PROPORTIONAL = "proportional"
"""A rotary embedding over the whole head whose last frequencies are 0."""
ROPES = (PROPORTIONAL, *ROPE_TYPES)
PATTERN = 6
"""Transformers' own defaults: every sixth layer sees all; `_DEFAULTS` has the others."""
_DEFAULTS = {
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262_144,
    "sliding_window": 512,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
}
GLOBAL_HEAD = 512
LAYER_WIDTH = 256


class Gemma4Text(Gemma3Text):
    """Keys and values of another layer, and embeddings for each layer, are the model's own business
    in transformers, so its text model runs whole; blocks by hand are MeSP's."""

    model_type = "gemma4_text"
    gguf_architecture = "gemma4"
    input_tensors = INPUTS
    linear_targets = (*Gemma3Text.linear_targets, *LAYER_LINEARS.values())
    linear_parents = Gemma3Text.linear_parents | dict.fromkeys(
        (*LAYER_LINEARS.values(), *EXPERTS), ""
    )

    @classmethod
    def dims_from_config(cls, config: dict[str, Any], where: str = "config.json") -> ModelDims:
        _refuse(config, where)
        layers = read_size(config, "num_hidden_layers", where)
        hidden = read_size(config, "hidden_size", where)
        config = {**_DEFAULTS, **config}
        types = _layer_types(config, layers, where)
        sliding = [kind == SLIDING for kind in types]
        heads, keys = _of_layers(config, types, where)
        key_layers = _key_layers(config, types, where)
        inner = read_size(config, "intermediate_size", where)
        window = read_size(config, "sliding_window", where)
        double = bool(config.get("use_double_wide_mlp"))
        same = bool(config.get("attention_k_eq_v"))
        width = config.get("hidden_size_per_layer_input", LAYER_WIDTH) or 0
        mixed = bool(config.get("enable_moe_block"))
        norms = NORMS | (LAYER_NORM if width else {}) | (MIXTURE_NORMS if mixed else {})
        traits = BlockTraits(
            norms=tuple(norms.items()),
            activation="gelu_tanh",
            windows=tuple(window if one else 0 for one in sliding) if any(sliding) else (),
            paths=(
                *(LAYER_LINEARS.items() if width else ()),
                *LAYER_TENSORS.items(),
                *(MIXTURE_PATHS.items() if mixed else ()),
            ),
            head_dims=heads,
            key_heads=keys,
            mlp_widths=tuple(
                inner * (1 + (double and one != i)) for i, one in enumerate(key_layers)
            ),
            key_layers=key_layers if key_layers != tuple(range(layers)) else (),
            keys_as_values=tuple(not one for one in sliding) if same else (),
            value_norm=True,
            layer_input=width,
            output_scale=True,
            score_scale=1.0,
            embedding_scale=hidden**0.5,
            logit_cap=float(config.get("final_logit_softcapping") or 0.0),
        )
        if width:
            _check_table(config, where)
        rope = (config.get("rope_parameters") or {}).get(FULL) or {"rope_type": PROPORTIONAL}
        own = {
            "rope_parameters": {"rope_theta": 1e6} | rope | {"partial_rotary_factor": 1.0},
            "head_dim": max(heads),
            "intermediate_size": max(traits.mlp_widths),
        }
        biased = bool(config.get("attention_bias"))
        dims = decoder_dims(
            "gemma4_text", config | own, where,
            qkv_bias=biased, o_bias=biased, mlp_bias=False, traits=traits,
            rope_types=ROPES,
        )  # fmt: skip
        return _with_experts(dims, config, where) if mixed else dims

    @classmethod
    def tiny_config(cls, **sizes: Any) -> dict[str, Any]:
        """Return what `Family.tiny_config` does: layers with a window of 12 tokens and such without
        take turns; of three or more layers those from the third on share keys and values."""
        layers = sizes["num_hidden_layers"]
        types = [FULL if i % 2 or i == layers - 1 else SLIDING for i in range(layers)]
        rope = sizes.pop("rope_parameters", None)
        if rope is None:
            rope = {"rope_type": PROPORTIONAL, "rope_theta": 1e6, "partial_rotary_factor": 0.25}
        own = {
            "head_dim": 24,
            "global_head_dim": 40,
            "sliding_window": 12,
            "layer_types": types,
            "num_kv_shared_layers": max(0, layers - 2),
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": sizes["vocab_size"],
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                FULL: rope,
                SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
            },
        }
        if sizes.get("enable_moe_block"):
            width = max(8, sizes["intermediate_size"] // 4)
            own |= {"num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": width}
        return {**own, **sizes}

    @classmethod
    def mlx_lm_fields(cls, dims: ModelDims) -> dict[str, Any]:
        last = dims.layers - 1  # which sees all
        return {
            "global_head_dim": dims.head_width(last),
            "num_global_key_value_heads": dims.key_heads(last),
        }

    @classmethod
    def weight_shapes(cls, dims: ModelDims) -> dict[str, tuple[int, ...]]:
        """Return what `Family.weight_shapes` does, with the embeddings for each layer."""
        shapes = super().weight_shapes(dims)
        if width := dims.traits.layer_input:
            own = ((dims.vocab, dims.layers * width), (dims.layers * width, dims.hidden), (width,))
            shapes |= dict(zip(cls.input_tensors, own, strict=True))
        if isinstance(dims, MoeDims):
            for i in range(dims.layers):
                router = f"model.layers.{i}.{dims.traits.path('mlp.gate')}"
                shapes[f"{router}.weight"] = (dims.experts, dims.hidden)
            for one in dims.expert_list:
                shape = (one.experts, one.outputs, one.inputs)
                shapes[f"model.layers.{one.layer}.{one.target}"] = shape
        return shapes

    @classmethod
    def gguf_config(cls, data: Metadata, config: dict[str, Any]) -> dict[str, Any]:
        """Read which layers have a window and heads of another width, and what they share."""
        layers = config["num_hidden_layers"]
        sliding = data.need("attention.sliding_window_pattern")
        types = [SLIDING if one else FULL for one in sliding]
        inner = _each(config["intermediate_size"], layers)
        keys = _each(config["num_key_value_heads"], layers)
        full, local = config["head_dim"], data.need("attention.key_length_swa")
        own = {i: {} for i in range(layers)}
        for i, kind in enumerate(types):
            if kind == FULL:
                own[i]["head_dim"] = full
            if keys[i] != keys[0]:
                own[i]["num_key_value_heads"] = keys[i]
        base = {"rope_type": "default", "rope_theta": data.get("rope.freq_base_swa", 10000.0)}
        width = data.get("embedding_length_per_layer_input", 0)
        return {
            "hidden_activation": "gelu_pytorch_tanh",
            "layer_types": types,
            "sliding_window": data.need("attention.sliding_window"),
            "head_dim": local,
            "num_key_value_heads": keys[0],
            "per_layer_config": {str(i): fields for i, fields in own.items() if fields},
            "intermediate_size": inner[0],
            "use_double_wide_mlp": inner[-1] == 2 * inner[0],
            "num_kv_shared_layers": data.get("attention.shared_kv_layers", 0),
            "attention_k_eq_v": any(f"blk.{i}.attn_v.weight" not in data.shapes
                                    and f"blk.{i}.attn_k.weight" in data.shapes
                                    for i in range(layers)),
            "hidden_size_per_layer_input": width,
            "vocab_size_per_layer_input": config["vocab_size"],
            "final_logit_softcapping": data.get("final_logit_softcapping"),
            "rope_parameters": {FULL: config["rope_parameters"], SLIDING: base},
        }  # fmt: skip

    @classmethod
    def gguf_keys(cls, dims: ModelDims, config: dict[str, Any]) -> dict[str, Any]:
        """Return what `gguf_config` reads.

        Raises:
            ModelError: layers of a kind have several widths, or biases that llama.cpp has not.
        """
        traits = dims.traits
        every = range(dims.layers)
        full = {dims.head_width(i) for i in every if not traits.window(i)}
        local = {dims.head_width(i) for i in every if traits.window(i)} or full
        if len(full) != 1 or len(local) != 1 or dims.qkv_bias:
            raise ModelError(
                "llama.cpp has no such layers of this family",
                expected="heads of one width in each kind of layer, and no biases",
                received=", ".join(map(str, sorted(full | local))),
            )
        own = [traits.key_layer(i) == i for i in every]
        rope = (config.get("rope_parameters") or {}).get(SLIDING) or {}
        keys: dict[str, Any] = {
            "feed_forward_length": [dims.mlp_width(i) for i in every],
            "attention.head_count_kv": [dims.key_heads(i) for i in every],
            "attention.sliding_window": max(traits.windows, default=0) or dims.max_positions,
            "attention.sliding_window_pattern": [traits.window(i) > 0 for i in every],
            "attention.shared_kv_layers": own.count(False),
            "embedding_length_per_layer_input": traits.layer_input,
            "attention.key_length": min(full),
            "attention.value_length": min(full),
            "attention.key_length_swa": min(local),
            "attention.value_length_swa": min(local),
            "rope.dimension_count": min(full),
            "rope.dimension_count_swa": min(local),
            "rope.freq_base_swa": float(rope.get("rope_theta", 10000.0)),
        }
        if traits.logit_cap:
            keys["final_logit_softcapping"] = float(traits.logit_cap)
        return keys

    @classmethod
    def gguf_tensor(cls, name: str, weights: np.ndarray, dims: ModelDims) -> np.ndarray:
        """Return the weights as they are: no norm's weight is 1 + w."""
        return weights

    @classmethod
    def gguf_known_as(cls, name: str) -> str:
        return f"{name}.weight" if name.endswith("layer_scalar") else name

    def hidden(
        self, ids: Tensor, mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """See `Family.hidden`."""
        if position_ids is not None:
            mask = self.packed(self.embed(ids), position_ids)[1]
        return self._run(ids, position_ids, mask)

    def branched_hidden(self, ids: Tensor, position_ids: Tensor, branches: Tensor) -> Tensor:
        """See `Family.branched_hidden`."""
        mask = self.branched(self.embed(ids), position_ids, branches)[1]
        return self._run(ids, position_ids, mask)

    def _run(self, ids: Tensor, position_ids: Tensor | None, mask: Tensor | None) -> Tensor:
        """Run transformers' text model; `mask` is additive, and windows come on top."""
        masks: Any = None
        if mask is not None:
            window = max(self.dims.traits.windows, default=0)
            masks = {FULL: mask, SLIDING: mask}
            if 0 < window < ids.shape[1]:
                like = mask.new_empty(1, ids.shape[1], 1)
                masks[SLIDING] = mask + window_mask(like, window)
        return self.model.model(
            ids, attention_mask=masks, position_ids=position_ids, use_cache=False
        ).last_hidden_state

    def experts_of(
        self, i: int, x_ND: Tensor, pairs: Mapping[str, ExpertLora] = MappingProxyType({})
    ) -> Tensor:
        """Compute what block `i`'s experts add to its MLP, of its middle: [N, hidden] -> [N,
        hidden]; both norms and the router's are their own.

        Args:
            pairs: adapters of the experts' matrices, by name in the block.
        """
        layer: Any = self.layer(i)
        _, weights_NK, experts_NK = layer.router(x_ND)
        n_ND = self._normed(layer, "before_experts", x_ND)
        routed = sum_of_experts(layer.experts, n_ND, experts_NK, weights_NK, pairs)
        return self._normed(layer, "after_experts", routed)

    def block(self, i: int, h: Tensor, position: Any, mask: Tensor | None = None) -> Tensor:
        """Refuse: a block takes other layers' keys and values, and embeddings of the tokens."""
        raise ModelError(
            f"block {i} of {self.model_type} is not computed by itself",
            expected="a method that runs the model whole, or mesp",
            received="its input only",
        )


def _each(value: Any, layers: int) -> list[int]:
    """Return a number of each layer, of which a file may have one for all."""
    return list(value) if isinstance(value, (list, tuple)) else [value] * layers


def _refuse(config: dict[str, Any], where: str) -> None:
    """Refuse what these blocks do not do, by UnknownTrait."""
    if config.get("use_bidirectional_attention") == "all":
        raise UnknownTrait(
            f"{where}: field 'use_bidirectional_attention'", expected="null", received="all"
        )
    for kind, rope in (config.get("rope_parameters") or {}).items():
        rope_type = rope.get("rope_type", "default")
        part = rope.get("partial_rotary_factor")
        if rope_type in ROPES and (part in (None, 1.0) or rope_type in ("default", PROPORTIONAL)):
            continue
        raise UnknownTrait(
            f"{where}: the rotary embedding's scaling in layers of {kind}",
            expected=f"one of {', '.join(ROPES)}, of whole heads if it is not {PROPORTIONAL}",
            received=f"{rope_type} of {part or 1} of a head",
        )


def _with_experts(dims: ModelDims, config: dict[str, Any], where: str) -> MoeDims:
    """Add the sizes of the experts next to each layer's MLP, which all must be in the file."""
    needed = {name: read_size(config, name, where)
              for name in ("num_experts", "top_k_experts", "moe_intermediate_size")}  # fmt: skip
    routing = RoutingTraits(normalised=True)
    mixture = moe_dims(
        dims, needed, where, experts=0, active=0, expert=0, shared=0,
        routing=routing, chosen="top_k_experts",
    )  # fmt: skip
    width = dims.intermediate + mixture.intermediate
    return replace(mixture, intermediate=width, beside=True)


def _layer_types(config: dict[str, Any], layers: int, where: str) -> list[str]:
    types = config.get("layer_types")
    if types is None:
        types = [SLIDING if (i + 1) % PATTERN else FULL for i in range(layers)]
    check_layer_types(types, (SLIDING, FULL), layers, where)
    return [*types[:-1], FULL]  # as transformers does


def _of_layers(
    config: dict[str, Any], types: list[str], where: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return each layer's width of a head, and its heads of keys and values."""
    head_dim = read_size(config, "head_dim", where)
    kv_heads = read_size(config, "num_key_value_heads", where)
    own = config.get("per_layer_config")
    if own is None:
        fields: dict[str, Any] = {"head_dim": config.get("global_head_dim") or GLOBAL_HEAD}
        of_all = config.get("num_global_key_value_heads")
        if config.get("attention_k_eq_v") and of_all is not None:
            fields["num_key_value_heads"] = of_all
        own = {str(i): fields for i, kind in enumerate(types) if kind == FULL}
    found = {int(i): fields for i, fields in own.items()}
    layers = [found.get(i, {}) for i in range(len(types))]
    for one in layers:
        if set(one) - {"head_dim", "num_key_value_heads"}:
            raise UnknownTrait(
                f"{where}: field 'per_layer_config'",
                expected="head_dim and num_key_value_heads",
                received=", ".join(sorted(one)),
            )
    widths = tuple(read_size(one, "head_dim", where, head_dim) for one in layers)
    keys = tuple(read_size(one, "num_key_value_heads", where, kv_heads) for one in layers)
    heads = read_size(config, "num_attention_heads", where)
    if wrong := [one for one in keys if heads % one]:
        raise ModelError(
            f"{where}: heads of keys",
            expected=f"a divisor of num_attention_heads ({heads})",
            received=wrong[0],
        )
    return widths, keys


def _key_layers(config: dict[str, Any], types: list[str], where: str) -> tuple[int, ...]:
    """Return the layer whose keys and values each layer attends to."""
    layers = len(types)
    shared = config.get("num_kv_shared_layers") or 0
    own = types[: layers - shared]
    if (
        not isinstance(shared, int)
        or not 0 <= shared < layers
        or (set(own) != set(types) and shared)
    ):
        raise ModelError(
            f"{where}: field 'num_kv_shared_layers'",
            expected="so few that each kind of layer has one with keys of its own",
            received=shared,
        )
    last = {kind: max(i for i, one in enumerate(own) if one == kind) for kind in set(own)}
    return tuple(i if i < len(own) else last[kind] for i, kind in enumerate(types))


def _check_table(config: dict[str, Any], where: str) -> None:
    """Refuse embeddings for each layer of other tokens than the vocabulary's, by UnknownTrait."""
    received = config.get("vocab_size_per_layer_input", _DEFAULTS["vocab_size"])
    if received != config["vocab_size"]:
        raise UnknownTrait(
            f"{where}: field 'vocab_size_per_layer_input'",
            expected=f"vocab_size ({config['vocab_size']})",
            received=received,
        )


FAMILY = Gemma4Text
