"""Attention with queries from one stream and keys and values from another (Eq. 1), over a family's own layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, cat
from torch.nn.functional import scaled_dot_product_attention

from ondevice.errors import ModelError

if TYPE_CHECKING:
    from ondevice.models import Family


def attention_between(
    family: Family, i: int, queries_BTD: Tensor, keys_BTD: Tensor, position: tuple[Tensor, Tensor]
) -> Tensor:
    """Causal attention of block `i`, norm and output projection included: [B, T, hidden].

    With both inputs the same it is the family's `attention_branch`.

    Raises:
        ModelError: the family has no separate q, k and v.
    """
    layer: Any = family.layer(i)
    if "q_proj" not in family.linear_targets:
        raise ModelError(
            f"coupling: paper needs separate queries, keys and values, which {family.dims.family} has not",
            expected="llama, mistral, qwen2 or qwen2_moe",
            received=family.dims.family,
            hint="coupling: full or exact",
        )
    dims = family.dims
    queries, keys = layer.input_layernorm(queries_BTD), layer.input_layernorm(keys_BTD)
    attention = layer.self_attn
    q = _heads(attention.q_proj(queries), dims.heads)
    k, v = (_heads(project(keys), dims.kv_heads) for project in (attention.k_proj, attention.v_proj))
    cos, sin = (table[:, None] for table in position)
    q, k = (x * cos + _rotated(x) * sin for x in (q, k))
    mixed = scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=attention.scaling, enable_gqa=dims.kv_heads != dims.heads
    )
    return attention.o_proj(mixed.transpose(1, 2).flatten(2))


def _heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def _rotated(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return cat((-second, first), -1)
