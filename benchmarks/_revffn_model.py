"""Models of a shape with random weights made where they stay, for benchmarks/revffn_memory.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ondevice.models.base import ModelDims
from ondevice.models.registry import family_for

FIELDS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
SHAPES: dict[str, tuple[str, int, tuple[int, ...], tuple[int, ...]]] = {
    "Qwen1.5-MoE-A2.7B": ("qwen2_moe", 24, (2048, 5632, 16, 16, 151936), (60, 4, 1408, 5632)),
    "narrow": ("llama", 12, (256, 512, 4, 2, 2048), ()),
    "tiny-moe": ("qwen2_moe", 3, (64, 128, 4, 2, 512), (6, 2, 32, 128)),
}
"""model_type; layers; hidden, intermediate, heads, key and value heads, vocabulary; of a mixture of experts: experts,
active ones, width of one, width of the shared one. Heads are not tied."""


def make(shape: str, layers: int | None = None, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """A model as methods take it (`LoadedModel` without tokenizer): normal weights of deviation 0.02, norms 1."""
    import transformers

    model_type, depth, sizes, experts = SHAPES[shape]
    family = family_for(model_type, shape)
    fields: dict[str, Any] = dict(zip(FIELDS, sizes, strict=True))
    fields |= dict(zip(EXPERTS, experts, strict=True)) if experts else {}
    fields |= {"num_hidden_layers": layers or depth, "tie_word_embeddings": False, "max_position_embeddings": 8192}
    config = family.tiny_config(**fields, attn_implementation="sdpa")
    name = {"llama": "LlamaForCausalLM", "qwen2_moe": "Qwen2MoeForCausalLM"}[model_type]
    with torch.device("meta"):
        model: Any = getattr(transformers, name)(config)
    torch.manual_seed(0)
    for path, parameter in list(model.named_parameters()):
        parent, _, leaf = path.rpartition(".")
        value = torch.empty(parameter.shape, dtype=dtype, device=device)
        plain = leaf == "bias" or "norm" in parent.rpartition(".")[2]
        value = value.fill_(float(leaf != "bias")) if plain else value.normal_(0, 0.02)
        model.get_submodule(parent)._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    model.eval()
    made = family(model)
    return SimpleNamespace(model=model, family=made, dims=made.dims, source=None, tokenizer=None)


def dims_of(shape: str) -> ModelDims:
    """The sizes of a shape, without weights."""
    with torch.device("meta"):
        return make(shape, device="meta").dims
