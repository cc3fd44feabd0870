"""Decoders read from their papers and published files, in plain float64: the second opinion that
the golden gradients come from. Nothing of ondevice and nothing of transformers computes here.

A model is its `config.json` and weights by the names of published checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Config = dict[str, Any]
Weights = dict[str, Tensor]
GEMMA = ("gemma2", "gemma3_text")
"""Factors of norms are 1 + w, the embedding is scaled, and every branch has a norm on both ends."""


def loss(config: Config, weights: Weights, ids: Tensor, labels: Tensor) -> Tensor:
    """Mean negative log likelihood of labelled tokens, each given the tokens before it.

    Args:
        ids: [rows, tokens]; labels the same, -100 where nothing is learned.
    """
    likelihoods = logits(config, weights, ids)[:, :-1].log_softmax(-1)
    targets = labels[:, 1:]
    learned = targets != -100
    picked = likelihoods.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return -(picked * learned).sum() / learned.sum()


def logits(config: Config, weights: Weights, ids: Tensor) -> Tensor:
    """Logits [rows, tokens, vocabulary] in float64."""
    kind = config["model_type"]
    x = weights["model.embed_tokens.weight"][ids] * config.get("embedding_multiplier", 1.0)
    if kind in GEMMA:
        x = x * math.sqrt(config["hidden_size"])
    for layer in range(config["num_hidden_layers"]):
        x = _block(config, _Layer(config, weights, layer), x)
    last = "model.embedding_norm" if kind == "lfm2" else "model.norm"
    x = _norm(config, weights[f"{last}.weight"], x)
    head = "model.embed_tokens" if config["tie_word_embeddings"] else "lm_head"
    out = x @ weights[f"{head}.weight"].T / config.get("logits_scaling", 1.0)
    return _capped(out, config.get("final_logit_softcapping"))


class _Layer:
    """One layer's weights, and what its configuration says about it."""

    def __init__(self, config: Config, weights: Weights, number: int) -> None:
        self.config = config
        self.weights = weights
        self.number = number
        self.prefix = f"model.layers.{number}."
        self.type = config.get("layer_types", ["full_attention"] * (number + 1))[number]

    def __contains__(self, name: str) -> bool:
        return f"{self.prefix}{name}.weight" in self.weights

    def weight(self, name: str) -> Tensor:
        return self.weights[f"{self.prefix}{name}.weight"]

    def linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.weight(name).T
        bias = self.weights.get(f"{self.prefix}{name}.bias")
        return y if bias is None else y + bias

    def norm(self, name: str, x: Tensor) -> Tensor:
        return _norm(self.config, self.weight(name), x)


def _norm(config: Config, weight: Tensor, x: Tensor) -> Tensor:
    epsilon = config["norm_eps" if config["model_type"] == "lfm2" else "rms_norm_eps"]
    factor = 1 + weight if config["model_type"] in GEMMA else weight
    return factor * x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt()


def _capped(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * (x / cap).tanh()


def _block(config: Config, layer: _Layer, x: Tensor) -> Tensor:
    kind = config["model_type"]
    if kind == "lfm2":
        mix = _convolution if layer.type == "conv" else _attention
        x = x + mix(config, layer, layer.norm("operator_norm", x))
        return x + _gated(layer, "feed_forward", ("w1", "w3", "w2"), layer.norm("ffn_norm", x))
    if kind == "olmo2":
        x = x + layer.norm("post_attention_layernorm", _attention(config, layer, x))
        return x + layer.norm("post_feedforward_layernorm", _mlp(config, layer, x))
    mixed = _attention(config, layer, layer.norm("input_layernorm", x))
    if kind in GEMMA:
        x = x + layer.norm("post_attention_layernorm", mixed)
        y = _mlp(config, layer, layer.norm("pre_feedforward_layernorm", x))
        return x + layer.norm("post_feedforward_layernorm", y)
    branch = config.get("residual_multiplier", 1.0)
    x = x + branch * mixed
    return x + branch * _mlp(config, layer, layer.norm("post_attention_layernorm", x))


def _gated(
    layer: _Layer,
    at: str,
    names: tuple[str, str, str],
    x: Tensor,
    activation: Callable[[Tensor], Tensor] = functional.silu,
) -> Tensor:
    gate, up, down = names
    inner = activation(layer.linear(f"{at}.{gate}", x)) * layer.linear(f"{at}.{up}", x)
    return layer.linear(f"{at}.{down}", inner)


def _mlp(config: Config, layer: _Layer, x: Tensor) -> Tensor:
    if "mlp.gate" in layer:
        return _experts(config, layer, x)
    if "mlp.gate_up_proj" in layer:
        gate, up = layer.linear("mlp.gate_up_proj", x).chunk(2, -1)
        return layer.linear("mlp.down_proj", functional.silu(gate) * up)
    activation = functional.silu
    if config["model_type"] in GEMMA:
        activation = _gelu_tanh
    return _gated(layer, "mlp", ("gate_proj", "up_proj", "down_proj"), x, activation)


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)).tanh())


def _experts(config: Config, layer: _Layer, x: Tensor) -> Tensor:
    """Every expert computes every token, and what the router did not choose weighs nothing."""
    names = ("gate_proj", "up_proj", "down_proj")
    shares = layer.linear("mlp.gate", x).softmax(-1)
    chosen, experts = shares.topk(config["num_experts_per_tok"], -1)
    if config["norm_topk_prob"]:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for expert in range(config["num_experts"]):
        share = (chosen * (experts == expert)).sum(-1, keepdim=True)
        out = out + share * _gated(layer, f"mlp.experts.{expert}", names, x)
    if "mlp.shared_expert_gate" in layer:
        share = layer.linear("mlp.shared_expert_gate", x).sigmoid()
        out = out + share * _gated(layer, "mlp.shared_expert", names, x)
    return out


def _convolution(config: Config, layer: _Layer, x: Tensor) -> Tensor:
    """c * conv(b * x); a channel sees its own last `conv_L_cache` tokens."""
    taps = config["conv_L_cache"]
    b, c, inner = layer.linear("conv.in_proj", x).chunk(3, -1)
    seen = functional.pad(b * inner, (0, 0, taps - 1, 0))
    kernel = layer.weight("conv.conv")[:, 0]
    tokens = x.shape[1]
    mixed = sum(kernel[:, tap] * seen[:, tap : tap + tokens] for tap in range(taps))
    return layer.linear("conv.out_proj", c * mixed)


def _attention(config: Config, layer: _Layer, x: Tensor) -> Tensor:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    q, k, v = _queries_keys_values(config, layer, x, width)
    if layer.type == "full_attention" or config["model_type"] in GEMMA:
        if config.get("no_rope_layers", [1] * (layer.number + 1))[layer.number]:
            q, k = (_rotated(config, layer, one, width) for one in (q, k))
    k, v = (one.repeat_interleave(heads // kv_heads, 2) for one in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * _score_scale(config, width)
    scores = _capped(scores, config.get("attn_logit_softcapping"))
    distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
    hidden = distance < 0
    if window := _window(config, layer):
        hidden = hidden | (distance >= window)
    shares = scores.masked_fill(hidden, -math.inf).softmax(-1)
    out = torch.einsum("bhij,bjhd->bihd", shares, v).flatten(2)
    name = "out_proj" if config["model_type"] == "lfm2" else "o_proj"
    return layer.linear(f"self_attn.{name}", out)


def _queries_keys_values(config: Config, layer: _Layer, x: Tensor, width: int) -> list[Tensor]:
    """[rows, tokens, heads, width] each."""
    sizes = [
        config[f"num_{kind}_heads"] * width for kind in ("attention", "key_value", "key_value")
    ]
    if "self_attn.qkv_proj" in layer:
        parts = list(layer.linear("self_attn.qkv_proj", x).split(sizes, -1))
    else:
        parts = [layer.linear(f"self_attn.{name}_proj", x) for name in "qkv"]
    for place, name in enumerate("qk"):
        for norm in (f"self_attn.{name}_norm", f"self_attn.{name}_layernorm"):
            if norm not in layer:
                continue
            if config["model_type"] == "olmo2":  # over all heads together
                parts[place] = layer.norm(norm, parts[place])
            else:
                parts[place] = layer.norm(norm, parts[place].unflatten(-1, (-1, width))).flatten(2)
    return [part.unflatten(-1, (-1, width)) for part in parts]


def _score_scale(config: Config, width: int) -> float:
    if "attention_multiplier" in config:
        return config["attention_multiplier"]
    return config.get("query_pre_attn_scalar", width) ** -0.5


def _window(config: Config, layer: _Layer) -> int | None:
    if config["model_type"] in GEMMA and layer.type == "full_attention":
        return None
    return config.get("sliding_window")


def _rotated(config: Config, layer: _Layer, x: Tensor, width: int) -> Tensor:
    """The first dimensions of each head, in pairs (i, i + half), turned by position * frequency."""
    rope = config["rope_parameters"]
    rope = rope.get(layer.type, rope)
    turned = int(width * rope.get("partial_rotary_factor", 1.0))
    frequencies, factor = _frequencies(config, rope, turned, x.shape[1])
    angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * frequencies
    cos, sin = (factor * table[:, None] for table in (angles.cos(), angles.sin()))
    first, second, rest = x.split((turned // 2, turned // 2, width - turned), -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def _frequencies(config: Config, rope: Config, turned: int, tokens: int) -> tuple[Tensor, float]:
    """Of each pair of dimensions, and the factor of cosine and sine."""
    base, half = rope["rope_theta"], torch.arange(turned // 2, dtype=torch.float64)
    plain = base ** (-2 * half / turned)
    kind = rope.get("rope_type", "default")
    field = "original_max_position_embeddings"
    original: Any = rope.get(field, config.get(field))
    if kind == "linear":
        return plain / rope["factor"], 1.0
    if kind == "llama3":
        turns = original * plain / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return kept * plain + (1 - kept) * plain / rope["factor"], 1.0
    if kind == "yarn":
        first, last = (
            turned * math.log(original / (rope[beta] * 2 * math.pi)) / (2 * math.log(base))
            for beta in ("beta_fast", "beta_slow")
        )
        first, last = max(math.floor(first), 0), min(math.ceil(last), turned - 1)
        slowed = ((half - first) / max(last - first, 0.001)).clamp(0, 1)
        factor = 0.1 * math.log(rope["factor"]) + 1
        return (1 - slowed) * plain + slowed * plain / rope["factor"], factor
    if kind == "longrope":
        name = "long_factor" if tokens > original else "short_factor"
        longer = config["max_position_embeddings"] / original
        factor = math.sqrt(1 + math.log(longer) / math.log(original))
        return plain / torch.tensor(rope[name], dtype=torch.float64), factor
    return plain, 1.0
