"""The cases of the golden gradients: configurations of odd shapes, weights from a stated generator,
rows, and the pairs that learn.

A weight is SHAKE-256 of "CASE/TENSOR", read as unsigned 32-bit little-endian integers u. Each gives
a number (2 (u + 1/2) / 2^32 - 1) sqrt(3) of mean 0 and variance 1, which is scaled and rounded to
float32. So a host in any language has the same model without a file.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ATTENTION = ALL[:4]
BASE = {
    "hidden_size": 20, "intermediate_size": 27, "num_hidden_layers": 2, "num_attention_heads": 5,
    "num_key_value_heads": 1, "vocab_size": 261, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "eos_token_id": 257, "pad_token_id": 256, "bos_token_id": None, "dtype": "float32",
}  # fmt: skip
MOE = {"moe_intermediate_size": 9, "num_experts": 5, "num_experts_per_tok": 2,
       "decoder_sparse_step": 1, "mlp_only_layers": []}  # fmt: skip
GEMMA = {"head_dim": 6, "query_pre_attn_scalar": 11, "sliding_window": 5, "num_hidden_layers": 3,
         "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
         "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh"}  # fmt: skip
GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.6, "attention_multiplier": 0.3,
           "logits_scaling": 2.0}  # fmt: skip
LFM2 = {"conv_L_cache": 3, "layer_types": ["conv", "full_attention", "conv"], "norm_eps": 1e-5,
        "num_hidden_layers": 3, "block_auto_adjust_ff_dim": False, "block_dim": 20,
        "hidden_size": 20}  # fmt: skip


def _rope(kind: str, theta: float = 1e4, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


LLAMA3 = _rope("llama3", 5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
               original_max_position_embeddings=64)  # fmt: skip
YARN = _rope("yarn", factor=4.0, beta_fast=4, beta_slow=1, original_max_position_embeddings=64)
LONGROPE = {"original_max_position_embeddings": 12, **_rope(
    "longrope", short_factor=[1.0, 1.1, 1.2], long_factor=[2.0, 2.5, 3.0],
    partial_rotary_factor=0.75)}  # fmt: skip
TWO_BASES = {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
    }
}


@dataclass(frozen=True)
class Case:
    """One model, one batch and one adapter.

    Attributes:
        rows, tokens: of the batch; every row but the first is padded if there are several.
        fields: of `config.json`, over `BASE`.
        targets: names of linear layers that have a pair.
        holes: whether nothing learns every third token, as between the turns of a chat.
    """

    name: str
    family: str
    fields: dict[str, Any]
    rows: int
    tokens: int
    rank: int = 2
    alpha: float = 3.0
    targets: tuple[str, ...] = ALL
    holes: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """Its `config.json`."""
        return {"model_type": self.family, **BASE, **self.fields}

    def numbers(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Numbers of mean 0 and variance 1 in float64; see the module."""
        count = int(np.prod(shape))
        raw = hashlib.shake_256(f"{self.name}/{name}".encode()).digest(4 * count)
        u = np.frombuffer(raw, "<u4").astype(np.float64)
        return ((2 * (u + 0.5) / 2.0**32 - 1) * np.sqrt(3)).reshape(shape)

    def weights(self) -> dict[str, np.ndarray]:
        """Every weight of a published checkpoint of this configuration, float32."""
        return {name: self._weight(name, shape) for name, shape in self._shapes().items()}

    def adapter(self) -> dict[str, np.ndarray]:
        """A and B of each pair by PEFT's names, float32; no B is zero."""
        pairs = {}
        for name, shape in self._shapes().items():
            path = name.removesuffix(".weight")
            if len(shape) == 2 and path.rpartition(".")[2] in self.targets:
                outputs, inputs = shape
                a = self.numbers(f"{path}.lora_A", (self.rank, inputs)) / np.sqrt(inputs)
                b = self.numbers(f"{path}.lora_B", (outputs, self.rank)) / np.sqrt(self.rank)
                pairs[f"{path}.lora_A.weight"] = a.astype(np.float32)
                pairs[f"{path}.lora_B.weight"] = (0.3 * b).astype(np.float32)
        return pairs

    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and labels, int64 [rows, tokens]: prompts are not learned, rows end early."""
        raw = hashlib.shake_256(f"{self.name}/rows".encode()).digest(2 * self.rows * self.tokens)
        ids = np.frombuffer(raw, "<u2").reshape(self.rows, self.tokens).astype(np.int64) % 250
        labels = ids.copy()
        for row in range(self.rows):
            labels[row, : 1 + row % 3] = -100
            if self.holes:
                labels[row, row % 3 :: 3] = -100
            if row:
                end = max(3 + row % 3, self.tokens - 1 - 2 * row)
                ids[row, end:], labels[row, end:] = self.config["pad_token_id"], -100
        return ids, labels

    def _weight(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        values = self.numbers(name, shape)
        if len(shape) > 1:
            values = values / np.sqrt(shape[-1])
        elif name.endswith("norm.weight"):
            values = 0.1 * values + (not self.family.startswith("gemma"))
        else:
            values = 0.1 * values
        return values.astype(np.float32)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        config = self.config
        hidden, last = config["hidden_size"], "model.norm"
        if self.family == "lfm2":
            last = "model.embedding_norm"
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (config["vocab_size"], hidden)
        }
        for layer in range(config["num_hidden_layers"]):
            for name, shape in self._layer(layer).items():
                shapes[f"model.layers.{layer}.{name}"] = shape
        shapes[f"{last}.weight"] = (hidden,)
        if not config["tie_word_embeddings"]:
            shapes["lm_head.weight"] = (config["vocab_size"], hidden)
        return shapes

    def _layer(self, layer: int) -> dict[str, tuple[int, ...]]:
        config = self.config
        hidden, shapes = config["hidden_size"], dict[str, tuple[int, ...]]()
        for name in self._norms():
            shapes[f"{name}.weight"] = (hidden,)
        if config.get("layer_types", [""] * (layer + 1))[layer] == "conv":
            shapes["conv.conv.weight"] = (hidden, 1, config["conv_L_cache"])
            shapes["conv.in_proj.weight"] = (3 * hidden, hidden)
            shapes["conv.out_proj.weight"] = (hidden, hidden)
        else:
            shapes |= self._attention()
        return shapes | self._mlp()

    def _norms(self) -> tuple[str, ...]:
        after = ("post_attention_layernorm", "post_feedforward_layernorm")
        if self.family == "lfm2":
            return ("operator_norm", "ffn_norm")
        if self.family == "olmo2":
            return after
        if self.family.startswith("gemma"):
            return ("input_layernorm", "pre_feedforward_layernorm", *after)
        return ("input_layernorm", "post_attention_layernorm")

    def _attention(self) -> dict[str, tuple[int, ...]]:
        config = self.config
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        width = config.get("head_dim") or hidden // heads
        q, kv = heads * width, config["num_key_value_heads"] * width
        out = "out_proj" if self.family == "lfm2" else "o_proj"
        linears = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden)}
        if self.family == "phi3":
            linears = {"qkv_proj": (q + 2 * kv, hidden)}
        linears[out] = (hidden, q)
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in linears.items():
            shapes[f"self_attn.{name}.weight"] = shape
            qwen2 = self.family.startswith("qwen2") and name != out
            if qwen2 or config.get("attention_bias"):
                shapes[f"self_attn.{name}.bias"] = shape[:1]
        if self.family in ("qwen3", "qwen3_moe", "gemma3_text"):
            shapes |= {f"self_attn.{name}_norm.weight": (width,) for name in "qk"}
        if self.family == "lfm2":
            shapes |= {f"self_attn.{name}_layernorm.weight": (width,) for name in "qk"}
        if self.family == "olmo2":
            shapes |= {"self_attn.q_norm.weight": (q,), "self_attn.k_norm.weight": (kv,)}
        return shapes

    def _mlp(self) -> dict[str, tuple[int, ...]]:
        config = self.config
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        if self.family == "lfm2":
            return _gated("feed_forward", ("w1", "w3", "w2"), hidden, inner)
        if self.family == "phi3":
            up = {"mlp.gate_up_proj.weight": (2 * inner, hidden)}
            return {**up, "mlp.down_proj.weight": (hidden, inner)}
        names = ("gate_proj", "up_proj", "down_proj")
        if "num_experts" not in config:
            shapes = _gated("mlp", names, hidden, inner)
            if config.get("mlp_bias"):
                shapes |= {f"{name[:-6]}bias": shape[:1] for name, shape in shapes.items()}
            return shapes
        shapes = {"mlp.gate.weight": (config["num_experts"], hidden)}
        for expert in range(config["num_experts"]):
            inner = config["moe_intermediate_size"]
            shapes |= _gated(f"mlp.experts.{expert}", names, hidden, inner)
        if inner := config.get("shared_expert_intermediate_size"):
            shapes |= _gated("mlp.shared_expert", names, hidden, inner)
            shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
        return shapes


def _gated(at: str, names: tuple[str, ...], hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    gate, up, down = names
    return {
        f"{at}.{gate}.weight": (inner, hidden),
        f"{at}.{up}.weight": (inner, hidden),
        f"{at}.{down}.weight": (hidden, inner),
    }


UNTIED = {"tie_word_embeddings": False}
BIASES = {"attention_bias": True, "mlp_bias": True}
GROUPS = {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3}
CASES = (
    Case("llama", "llama", {}, 3, 13),
    Case("llama, biases", "llama", {**BIASES, **GROUPS}, 2, 11, rank=5),
    Case("llama, untied, one row", "llama", {**UNTIED, "vocab_size": 263}, 1, 9, rank=1),
    Case("llama, many labels", "llama", {**BIASES, **UNTIED, **GROUPS}, 5, 16, rank=3),
    Case("llama, one layer, no groups", "llama",
         {"num_hidden_layers": 1, "num_key_value_heads": 5}, 4, 7, rank=5, alpha=1.0),
    Case("llama, linear rotation", "llama", _rope("linear", factor=4.0), 2, 15, targets=ALL[:2]),
    Case("llama, llama3 rotation", "llama", {**LLAMA3, "head_dim": 16}, 2, 33, rank=1),
    Case("llama, another base", "llama", _rope("default", 73.0), 2, 19, targets=("k_proj",), rank=5),
    Case("llama, MLP only", "llama", {"intermediate_size": 1}, 3, 8, targets=ALL[4:]),
    Case("mistral", "mistral", {"sliding_window": None, **UNTIED}, 3, 10),
    Case("mistral, window", "mistral", {"sliding_window": 4}, 2, 17),
    Case("qwen2", "qwen2", {}, 3, 12, rank=5, alpha=16.0),
    Case("qwen2, untied, many labels", "qwen2", {**UNTIED, **GROUPS}, 3, 16, rank=1),
    Case("qwen2, yarn", "qwen2", {**YARN, "head_dim": 16, "hidden_size": 80}, 2, 21, rank=1,
         targets=ATTENTION),
    Case("qwen3", "qwen3", {"head_dim": 6}, 3, 14),
    Case("qwen3, biases", "qwen3", {"head_dim": 10, "attention_bias": True, **UNTIED}, 2, 5),
    Case("olmo2", "olmo2", {**UNTIED}, 2, 13),
    Case("olmo2, biases", "olmo2", {"attention_bias": True, **GROUPS}, 3, 6, rank=1),
    Case("phi3", "phi3", {"head_dim": 8, "partial_rotary_factor": 0.75, "sliding_window": None,
         **_rope("default", partial_rotary_factor=0.75)}, 3, 11,
         targets=("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
    Case("phi3, long rows", "phi3", {"hidden_size": 40, **LONGROPE, "sliding_window": 7, **UNTIED}, 2,
         18, rank=1, targets=("qkv_proj", "gate_up_proj")),
    Case("phi3, short rows", "phi3", {"hidden_size": 40, **LONGROPE, "sliding_window": None}, 2, 10,
         targets=("qkv_proj", "down_proj")),
    Case("granite", "granite", {**GRANITE}, 3, 9),
    Case("granite, biases", "granite", {**GRANITE, **BIASES, **UNTIED, **GROUPS}, 2, 12, rank=5),
    Case("gemma3_text", "gemma3_text", {**GEMMA, **TWO_BASES}, 2, 16),
    Case("gemma3_text, untied", "gemma3_text", {**GEMMA, **TWO_BASES, **UNTIED}, 1, 23, rank=1),
    Case("smollm3", "smollm3", {"no_rope_layers": [1, 0, 1], "num_hidden_layers": 3}, 2, 13),
    Case("lfm2", "lfm2", {**LFM2}, 3, 11, targets=(
        "in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "w1", "w2", "w3")),
    Case("lfm2, rows shorter than taps", "lfm2", {**LFM2, "conv_L_cache": 7}, 2, 4, rank=1, targets=(
        "in_proj", "out_proj", "q_proj", "w2")),
    Case("llama, labels with holes", "llama", {**UNTIED, "num_hidden_layers": 3}, 4, 15, rank=3,
         holes=True),
    Case("mistral, wide heads", "mistral", {"head_dim": 8, "num_key_value_heads": 5,
         "sliding_window": 3, **UNTIED}, 5, 9, rank=4, targets=("o_proj", "up_proj")),
    Case("qwen3, values and gates", "qwen3", {"head_dim": 6, "hidden_size": 25, **UNTIED}, 2, 17,
         rank=7, targets=("v_proj", "gate_proj")),
    Case("smollm3, biases", "smollm3", {"no_rope_layers": [0, 1], **BIASES, **GROUPS, **UNTIED}, 1,
         20, targets=("q_proj", "v_proj", "down_proj"), alpha=0.5),
    Case("gemma2, caps", "gemma2", {**GEMMA, "attn_logit_softcapping": 1.5,
         "final_logit_softcapping": 2.0}, 2, 12),
    Case("gemma2, no caps", "gemma2", {**GEMMA, "attn_logit_softcapping": None,
         "final_logit_softcapping": None}, 3, 7, rank=1),
    Case("qwen3_moe", "qwen3_moe", {**MOE, "head_dim": 6, "norm_topk_prob": True}, 3, 11,
         targets=ATTENTION),
    Case("qwen2_moe, shared expert", "qwen2_moe", {**MOE, "shared_expert_intermediate_size": 11,
         "norm_topk_prob": False}, 2, 14, rank=5, targets=ATTENTION),
)  # fmt: skip
GENERIC = ("gemma2",)
"""Families whose blocks only PyTorch runs, as transformers has them."""
BLOCKS = [case.name for case in CASES if case.family not in GENERIC]
"""Cases whose blocks are written by hand."""
HOSTED = [case.name for case in CASES if case.name in BLOCKS and "num_experts" not in case.config]
"""Cases that the hosts in C++ and Kotlin take."""
NO_BLOCKS = "gemma2: a decoder of any kind, whose blocks only PyTorch runs"
NO_EXPERTS = "mixtures: the host calls no experts"
IMPLEMENTATIONS = {
    "PyTorch": ([case.name for case in CASES], ""),
    "MLX": (BLOCKS, NO_BLOCKS),
    "functions of blocks, before they are lowered": (BLOCKS, NO_BLOCKS),
    "block programs in the ExecuTorch runtime, from Python": (BLOCKS, NO_BLOCKS),
    "the same, from the native host in C++": (HOSTED, f"{NO_BLOCKS}; {NO_EXPERTS}"),
    "the same, from the app's host in Kotlin": (HOSTED, f"{NO_BLOCKS}; {NO_EXPERTS}"),
}
"""What each runs, and why not the others."""


def markdown() -> str:
    """Each implementation of MeSP with the golden cases that it meets."""
    lines = ["| MeSP in | Cases | Left out |", "| --- | ---: | --- |"]
    for name, (taken, why) in IMPLEMENTATIONS.items():
        lines.append(f"| {name} | {len(taken)} of {len(CASES)} | {why or 'none'} |")
    return "\n".join(lines)
