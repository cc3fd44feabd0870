"""The base of families whose blocks have traits that Llama's does not have: transformers' own layer
computes the block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ondevice.models.families.base import Family
from ondevice.models.families.configuration import check_layer_types, read_size

if TYPE_CHECKING:
    from torch import Tensor


class TraitFamily(Family):
    """A block as transformers computes it, with its window's mask and its factors."""

    def embed(self, ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        if self.dims.traits.embedding_scale == 1.0:
            return super().embed(ids, position_ids)
        from torch import nn

        table = self.embedding
        # transformers' module may multiply by itself; one that stands for a packed table does not.
        rows = (
            nn.functional.embedding(ids, table.weight)
            if isinstance(table, nn.Embedding)
            else table(ids)
        )
        return self.place(rows)

    def place(self, rows: Tensor, position_ids: Tensor | None = None) -> Tensor:
        scale = self.dims.traits.embedding_scale
        if scale == 1.0:
            return rows
        if rows.is_cuda:  # a copy from the host could not be in a CUDA graph
            return rows * rows.new_full((), scale)
        return rows * rows.new_tensor(scale)

    def block(
        self, i: int, h: Tensor, position: tuple[Tensor, ...], mask: Tensor | None = None
    ) -> Tensor:
        """Compute block `i`, as `Family.block` does."""
        if self.dims.traits.mixers:
            h = h + self.attention_branch(i, h, position, mask)
            return h + self.mlp_branch(i, h)
        layer: Any = self.layer(i)
        mask = self._mask(i, h, mask)
        left = layer(h, position_embeddings=self.layer_position(i, position), attention_mask=mask)
        if isinstance(left, tuple):
            return left[0]
        return left

    def attention_branch(
        self, i: int, h: Tensor, position: Any, mask: Tensor | None = None
    ) -> Tensor:
        """Compute attention with the norms and the factor that the block has around it, without the
        residual."""
        layer: Any = self.layer(i)
        place, mask = self.layer_position(i, position), self._mask(i, h, mask)
        n = self._normed(layer, "before_attention", h)
        y = layer.self_attn(hidden_states=n, position_embeddings=place, attention_mask=mask)[0]
        return self._branch(self._normed(layer, "after_attention", y))

    def mlp_branch(self, i: int, h: Tensor) -> Tensor:
        """Compute the MLP with the norms and the factor around it, without the residual."""
        layer: Any = self.layer(i)
        return self._branch(
            self._normed(layer, "after_mlp", layer.mlp(self._normed(layer, "before_mlp", h)))
        )

    def packed(self, h: Tensor, position_ids: Tensor) -> tuple[Any, Tensor]:
        """Return what `Family.packed` does; for mixers that are not attention each token's place in
        its row is behind the tables: they begin again at a row's first token."""
        position, mask = super().packed(h, position_ids)
        if self.dims.traits.mixers:
            position = (*position, position_ids)
        return position, mask

    def _mask(self, i: int, h: Tensor, mask: Tensor | None) -> Tensor | None:
        """`mask` combined with the layer's window, if that hides something."""
        window = self.dims.traits.window(i)
        if not 0 < window < h.shape[1]:
            return mask
        if mask is None:
            return window_mask(h, window)
        return mask + window_mask(h, window)

    def _normed(self, layer: Any, place: str, x: Tensor) -> Tensor:
        module = dict(self.dims.traits.norms).get(place)
        if module is None:
            return x
        return layer.get_submodule(module)(x)

    def _branch(self, y: Tensor) -> Tensor:
        scale = self.dims.traits.residual_scale
        if scale == 1.0:
            return y
        return y * scale

    def final_norm(self, h: Tensor) -> Tensor:
        """Compute the norm before the head, with the factor of the logits: [B, T, hidden]."""
        normed = super().final_norm(h)
        scale = self.dims.traits.logit_scale
        if scale == 1.0:
            return normed
        return normed * scale


def window_mask(h: Tensor, window: int) -> Tensor:
    """Return an additive mask [1, 1, T, T]: a query sees `window` tokens, itself included."""
    import torch

    length = h.shape[1]
    seen = torch.ones(length, length, dtype=torch.bool, device=h.device)
    seen = seen.tril().triu(1 - window)
    least = torch.finfo(h.dtype).min
    return torch.zeros(length, length, dtype=h.dtype, device=h.device).masked_fill(~seen, least)[
        None, None
    ]


def sliding_windows(config: dict[str, Any], layers: int, where: str) -> tuple[int, ...]:
    """Read each layer's window from `layer_types` and `sliding_window`; () for none."""
    types = config.get("layer_types")
    if not types or "sliding_attention" not in types or config.get("sliding_window") is None:
        return ()
    check_layer_types(types, ("sliding_attention", "full_attention"), layers, where)
    window = read_size(config, "sliding_window", where)
    return tuple(window if kind == "sliding_attention" else 0 for kind in types)
