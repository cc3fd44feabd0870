"""The base of families whose blocks have traits that Llama's has not: transformers' own layer computes the block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ondevice.models.base import Family, UnknownTrait, read_size
from ondevice.models.traits import check_length, check_traits

if TYPE_CHECKING:
    from torch import Tensor


class TraitFamily(Family):
    """A block as transformers computes it, under the mask of its window; embedding and head with their factors."""

    def embed(self, ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if self.dims.traits.embedding_scale == 1.0:
            return super().embed(ids, position_ids)
        from torch.nn.functional import embedding  # a module may multiply by itself

        return self.place(embedding(ids, self.embedding.weight))

    def place(self, rows: Tensor, position_ids: Tensor | None = None) -> Tensor:
        scale = self.dims.traits.embedding_scale
        return rows if scale == 1.0 else rows * rows.new_tensor(scale)

    def block(self, i: int, h: Tensor, position: tuple[Tensor, ...], mask: Tensor | None = None) -> Tensor:
        """Compute block `i`, as `Family.block` does."""
        layer: Any = self.layer(i)
        window = self.dims.traits.window(i)
        if window and window < h.shape[1]:
            mask = window_mask(h, window) if mask is None else mask + window_mask(h, window)
        left = layer(h, position_embeddings=self.layer_position(i, position), attention_mask=mask)
        return left[0] if isinstance(left, tuple) else left

    def attention_branch(self, i: int, h: Tensor, position: Any, mask: Tensor | None = None) -> Tensor:
        """Compute the branch of a block that is Llama's within its window, as `Family.attention_branch` does.

        Raises:
            ModelError: the block has other traits, or the sequence is longer than its window.
        """
        check_traits(self.dims, "a branch alone", ("windows",))
        check_length(self.dims, h.shape[1])
        return super().attention_branch(i, h, position, mask)

    def mlp_branch(self, i: int, h: Tensor) -> Tensor:
        """Compute the other branch of such a block."""
        check_traits(self.dims, "a branch alone", ("windows",))
        return super().mlp_branch(i, h)

    def final_norm(self, h: Tensor) -> Tensor:
        """Compute the norm before the head, with the factor of the logits: [B, T, hidden]."""
        normed = self.model.model.norm(h)
        scale = self.dims.traits.logit_scale
        return normed if scale == 1.0 else normed * scale


def window_mask(h: Tensor, window: int) -> Tensor:
    """Return an additive mask [1, 1, T, T]: a query sees `window` tokens, itself included."""
    import torch

    length = h.shape[1]
    seen = torch.ones(length, length, dtype=torch.bool, device=h.device)
    seen = seen.tril().triu(1 - window)
    least = torch.finfo(h.dtype).min
    return torch.zeros(length, length, dtype=h.dtype, device=h.device).masked_fill(~seen, least)[None, None]


def sliding_windows(config: dict[str, Any], layers: int, where: str) -> tuple[int, ...]:
    """Read the window of each layer from `layer_types` and `sliding_window`; () where no layer has one."""
    types = config.get("layer_types")
    if not types or "sliding_attention" not in types or config.get("sliding_window") is None:
        return ()
    if len(types) != layers or set(types) - {"sliding_attention", "full_attention"}:
        expected = f"{layers} of sliding_attention and full_attention"
        raise UnknownTrait(f"{where}: field 'layer_types'", expected=expected, received=", ".join(sorted(set(types))))
    window = read_size(config, "sliding_window", where)
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)
