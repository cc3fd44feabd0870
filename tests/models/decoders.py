"""Tiny configurations of many decoders of the installed transformers, from their own classes and a table of sizes."""

from __future__ import annotations

from typing import Any

SIZES = {
    "vocab_size": 260, "pad_token_id": 256, "eos_token_id": 257, "bos_token_id": 257, "embedding_size": 16,
    "hidden_size": 16, "n_embd": 16, "d_model": 16, "word_embed_proj_dim": 16, "lru_width": 16,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "decoder_layers": 2, "encoder_layers": 1,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "num_key_value_heads": 2, "num_global_key_value_heads": 2, "head_dim": 4,
    "global_head_dim": 4, "rotary_dim": 2, "intermediate_size": 32, "n_inner": 32, "ffn_dim": 32,
    "decoder_ffn_dim": 32, "encoder_ffn_dim": 32, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 16,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "max_position_embeddings": 64, "n_positions": 64, "context_length": 64, "sliding_window": 6,
    "window_size": 6, "attention_window_size": 6, "state_size": 4, "d_state": 4, "mamba_d_state": 4,
    "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_expand": 2, "mamba_chunk_size": 8,
    "chunk_size": 8, "time_step_rank": 4, "attention_hidden_size": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 2, "linear_key_head_dim": 4, "linear_value_head_dim": 4, "kv_lora_rank": 8,
    "q_lora_rank": 8, "qk_rope_head_dim": 2, "qk_nope_head_dim": 4, "v_head_dim": 4,
    "hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 260, "first_k_dense_replace": 1,
    "num_dense_layers": 1,
}  # fmt: skip
"""Fields by any type's name for them; a configuration takes those that it has."""

DENSE = """apertus biogpt bloom cohere exaone4 falcon gemma gemma2 glm4 gpt2 gpt_neox granite llama nanochat nemotron
olmo2 opt phi phi3 qwen3 smollm3 stablelm"""
WINDOWED = "cohere2 gemma3_text gemma4_text mistral"
EXPERTS = "deepseek_v3 gpt_oss mixtral olmoe qwen2_moe qwen3_moe"
HYBRID = "bamba granitemoehybrid jamba lfm2 qwen3_5_text qwen3_next"
RECURRENT = "falcon_mamba mamba mamba2 recurrent_gemma rwkv xlstm"
DECODERS = tuple(" ".join((DENSE, WINDOWED, EXPERTS, HYBRID, RECURRENT)).split())
OWN: dict[str, dict[str, Any]] = {
    "apertus": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "deepseek_v3": {"head_dim": 2, "num_key_value_heads": 4},
    "gemma4_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 8, "n_groups": 1},
    "mistral": {"sliding_window": 64},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
}
"""What fits one type alone."""


def tiny_config(model_type: str, **fields: Any) -> dict[str, Any]:
    """Return a `config.json` of a decoder of that type, of a few thousand parameters."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    known = kind().to_dict()
    sizes = {name: value for name, value in SIZES.items() if name in known}
    return kind(**{**sizes, **OWN.get(model_type, {}), **fields}).to_dict()
