"""A model that RevFFN has trained, in transformers alone: load it with `trust_remote_code=True`.

This file lies next to the weights it belongs to. It holds an ordinary decoder (Llama, Qwen3, Gemma 3
and others) and runs its layers in another order: two streams (u, v), and step by step (u, v)
becomes (v, w) with

    w = past * u + (1 - past) * v + scale * branch(v)        (past = 1 leaves the middle term out)

where a branch is a layer's attention or MLP with its norm, or both (`part`), between two small
matrices if the streams have half the width. `config.json` lists the steps. At the end the final
norm reads both halves, or, if both streams have the whole width, v + late * (v - u). There is no
key-value cache: generation computes the whole sequence for every token.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding, linear, scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers.configuration_utils import PretrainedConfig
from transformers.modeling_outputs import CausalLMOutputWithPast

NORMS = {"before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm"}


class RevffnConfig(PretrainedConfig):
    """The ordinary model's configuration under `base`, and the steps.

    Attributes:
        steps: in order, each with `block`, `part` (attention, mlp or block), `past`, `scale`, and
            `crossed`: the attention's queries come from u.
        half_width: the streams are the two halves of the hidden state; else both begin as the whole
            of it.
        late: how much of its last change the newer stream of whole width is given at the end.
        stream_dtype: in which the streams are added up.
        norms: the module of each norm of a layer, by its place: before or after attention or MLP.
        mlp: the module of a layer's MLP.
        windows: of each layer, how many tokens a query sees; 0 is all before it.
        residual_scale, embedding_scale, logit_scale: factors of a branch, of the embedding's rows
            and of the logits.
    """

    model_type = "revffn"

    def __init__(
        self,
        base: dict[str, Any] | None = None,
        steps: list[dict[str, Any]] | None = None,
        half_width: bool = False,
        late: float = 0.0,
        stream_dtype: str = "float32",
        norms: dict[str, str] | None = None,
        mlp: str = "mlp",
        windows: list[int] | None = None,
        residual_scale: float = 1.0,
        embedding_scale: float = 1.0,
        logit_scale: float = 1.0,
        **kwargs: Any,
    ) -> None:
        self.base = base or {}
        self.steps = steps or []
        self.half_width = half_width
        self.late = late
        self.stream_dtype = stream_dtype
        self.norms = norms or dict(NORMS)
        self.mlp = mlp
        self.windows = windows or []
        self.residual_scale = residual_scale
        self.embedding_scale = embedding_scale
        self.logit_scale = logit_scale
        super().__init__(**kwargs)

    def ordinary(self) -> PretrainedConfig:
        """Return the configuration of the ordinary model."""
        values = dict(self.base)
        return AutoConfig.for_model(values.pop("model_type"), **values)


class RevffnAdapters(nn.Module):
    """P_up [hidden, hidden / 2] and P_down [hidden / 2, hidden] of one layer's attention and MLP."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        for part in ("attention", "mlp"):
            self.register_parameter(f"{part}_up", nn.Parameter(torch.empty(hidden, hidden // 2)))
            self.register_parameter(f"{part}_down", nn.Parameter(torch.empty(hidden // 2, hidden)))


class RevffnForCausalLM(PreTrainedModel, GenerationMixin):
    """The reversible network around an ordinary decoder's layers."""

    config_class = RevffnConfig
    base_model_prefix = "model"
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _supports_sdpa = True

    def __init__(self, config: RevffnConfig) -> None:
        super().__init__(config)
        base = config.ordinary()
        ordinary: Any = AutoModelForCausalLM.from_config(
            base, attn_implementation="sdpa", dtype=torch.get_default_dtype()
        )
        self.model = ordinary.model
        self.lm_head = ordinary.lm_head
        if config.half_width:
            for layer in self.model.layers:
                layer.revffn = RevffnAdapters(base.hidden_size)
        cast(Any, self).post_init()  # a type checker would read all models for its return type

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.embed_tokens = value

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head = new_embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        logits_to_keep: int = 0,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits [B, T, vocab] of int64 [B, T]; with labels also their mean negative log
        likelihood."""
        hidden = inputs_embeds
        ids = input_ids
        if hidden is None:
            if ids is None:
                raise ValueError("expected input_ids or inputs_embeds")
            rows = embedding(
                ids, self.model.embed_tokens.weight
            )  # the module may multiply by itself
            hidden = rows * rows.new_tensor(self.config.embedding_scale)
        mask = None
        places = torch.arange(hidden.shape[1], device=hidden.device)[None]
        if attention_mask is not None and not bool(attention_mask.all()):
            mask = _causal(attention_mask)
            places = attention_mask.long().cumsum(-1).sub(1).clamp(min=0)
        positions = self._positions(hidden, places if position_ids is None else position_ids)
        masks = [
            _windowed(mask, window, hidden)
            for window in self.config.windows or [0] * len(positions)
        ]
        dtype = getattr(torch, self.config.stream_dtype)
        u, v = (
            x.to(dtype)
            for x in (hidden.chunk(2, -1) if self.config.half_width else (hidden, hidden))
        )
        for step in self.config.steps:
            past = step["past"]
            branch = self._branch(step, u.to(hidden.dtype), v.to(hidden.dtype), positions, masks)
            w = step["scale"] * branch.float() + past * u.float()
            u = v
            v = (w if past == 1 else w + (1 - past) * v.float()).to(dtype)
        u = u.float()
        v = v.float()
        last = (
            torch.cat((u, v), -1) if self.config.half_width else v + self.config.late * (v - u)
        ).to(hidden.dtype)
        normed = self.model.norm(last[:, -logits_to_keep:] if logits_to_keep else last)
        logits = self.lm_head(normed * self.config.logit_scale)
        loss = None
        if labels is not None:
            loss = cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(loss=loss, logits=logits)

    def _positions(self, hidden: Tensor, places: Tensor) -> list[Any]:
        """Return cos and sin for each layer; layers of two kinds may have tables of their own."""
        rotary = self.model.rotary_emb
        layers = len(self.model.layers)
        if not hasattr(rotary, "layer_types"):
            return [rotary(hidden, places)] * layers
        kinds = self.model.config.layer_types
        tables = {kind: rotary(hidden, places, kind) for kind in set(kinds)}
        return [tables[kind] for kind in kinds]

    def _branch(
        self, step: dict[str, Any], u: Tensor, v: Tensor, positions: Any, masks: Any
    ) -> Tensor:
        block = step["block"]
        part = step["part"]
        layer = self.model.layers[block]
        position = positions[block]
        mask = masks[block]
        adapters = getattr(layer, "revffn", None)
        if adapters is not None:
            up, down = (getattr(adapters, f"{part}_{way}").to(v.dtype) for way in ("up", "down"))
            u = linear(u, up)
            v = linear(v, up)
        if part == "mlp":
            y = self._mlp(layer, v)
        elif step["crossed"]:
            y = _attention_between(layer, u, v, position, mask)
        else:
            n = self._normed(layer, "before_attention", v)
            y = layer.self_attn(hidden_states=n, position_embeddings=position, attention_mask=mask)[
                0
            ]
            y = self._scaled(self._normed(layer, "after_attention", y))
            if part == "block":
                y = y + self._mlp(layer, v + y)
        if adapters is None:
            return y
        return linear(y, down)

    def _mlp(self, layer: Any, x: Tensor) -> Tensor:
        y = getattr(layer, self.config.mlp)(self._normed(layer, "before_mlp", x))
        # a mixture of experts gives its router's logits too
        if isinstance(y, tuple):
            y = y[0]
        return self._scaled(self._normed(layer, "after_mlp", y))

    def _normed(self, layer: Any, place: str, x: Tensor) -> Tensor:
        module = self.config.norms.get(place)
        if module is None:
            return x
        return layer.get_submodule(module)(x)

    def _scaled(self, y: Tensor) -> Tensor:
        if self.config.residual_scale == 1.0:
            return y
        return y * self.config.residual_scale


def _attention_between(
    layer: Any, queries: Tensor, keys: Tensor, position: Any, mask: Tensor | None
) -> Tensor:
    """Causal attention with its norm; queries from one input, keys and values from the other."""
    attention = layer.self_attn
    queries = layer.input_layernorm(queries)
    keys = layer.input_layernorm(keys)
    heads = [project(x).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2) for project, x in (
        (attention.q_proj, queries), (attention.k_proj, keys), (attention.v_proj, keys))]  # fmt: skip
    cos, sin = (table[:, None] for table in position)
    q, k = (
        x * cos + torch.cat((-x.chunk(2, -1)[1], x.chunk(2, -1)[0]), -1) * sin for x in heads[:2]
    )
    mixed = scaled_dot_product_attention(
        q,
        k,
        heads[2],
        attn_mask=mask,
        is_causal=mask is None,
        scale=attention.scaling,
        enable_gqa=True,
    )
    return attention.o_proj(mixed.transpose(1, 2).flatten(2))


def _windowed(mask: Tensor | None, window: int, hidden: Tensor) -> Tensor | None:
    """Return `mask` without the keys that are behind a window, bool [B or 1, 1, T, T]; None is the
    causal mask."""
    length = hidden.shape[1]
    if not 0 < window < length:
        return mask
    seen = (
        torch.ones(length, length, dtype=torch.bool, device=hidden.device)
        .tril()
        .triu(1 - window)[None, None]
    )
    own = torch.eye(length, dtype=torch.bool, device=hidden.device)
    if mask is None:
        return seen
    return (mask & seen) | own


def _causal(attention_mask: Tensor) -> Tensor:
    """Mark the keys that each query reads, bool [B, 1, T, T]; a padded query reads itself, so that
    no row is empty."""
    length = attention_mask.shape[1]
    own = torch.eye(length, dtype=torch.bool, device=attention_mask.device)
    causal = torch.ones(length, length, dtype=torch.bool, device=attention_mask.device).tril()
    return (causal & attention_mask.bool()[:, None] | own)[:, None]
