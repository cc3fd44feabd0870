"""Any decoder that transformers' AutoModelForCausalLM builds and that has no file in this folder.

Its blocks are unknown, so the model runs as one: methods that only adapt linear layers, or move
parameters in they are, take it; a method that computes blocks itself does not. Its sizes are
`AnyDims`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ondevice.core.dims import ModelDims
from ondevice.core.errors import ModelError
from ondevice.models.families.any_dims import AnyDims, dims_of_config, dims_of_model, find_blocks
from ondevice.models.families.base import Family
from ondevice.models.families.configuration import refuse_quantised
from ondevice.models.families.vision import SeenPicture, with_pictures

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from ondevice.data.pictures import Pictures

PROBE_TOKENS = 6
PROBE_LOGITS = 60.0
"""Size of the logits at which a head is probed: a soft cap (30 in Gemma 2) shows there, and not
near 0."""
LOSS_ROWS = 256
"""Rows of logits that are in float32 at once, if the loss is computed from logits."""


class AnyDecoder(Family):
    """A model that runs whole, with the linear layers that were found in its blocks."""

    model_type = "*"
    linear_targets = ()
    dims: AnyDims

    def __init__(self, model: PreTrainedModel, trait: str = "") -> None:
        self.model: Any = model
        self.pictures: Pictures | None = None
        self._seen: dict[int, SeenPicture] = {}
        self.dims = replace(dims_of_model(model, model.config.to_dict()), trait=trait)

    @classmethod
    def dims_from_config(cls, config: dict[str, Any], where: str = "config.json") -> AnyDims:
        """Read a `config.json` of any type by building the model without memory.

        Raises:
            ModelError: transformers cannot build it, it is not a decoder, or its weights are
                quantised.
        """
        refuse_quantised(config, where)
        return dims_of_config(json.dumps(config, sort_keys=True), where)

    @classmethod
    def weight_shapes(cls, dims: ModelDims) -> dict[str, tuple[int, ...]]:
        """Return nothing: files and modules may name a tensor differently, and transformers checks
        the files."""
        return {}

    @property
    def embedding(self) -> nn.Embedding:
        return self.model.get_input_embeddings()

    @property
    def head_weight(self) -> Tensor:
        """The output head [vocab, hidden] if it is one matrix, else the embedding."""
        return (self.model.get_output_embeddings() or self.embedding).weight

    def layer(self, i: int) -> nn.Module:
        return self._blocks[1][i]

    def linear_name(self, i: int, target: str) -> str:
        return f"{self._blocks[0]}.{i}.{target}"

    def linear(self, i: int, target: str) -> nn.Module:
        """Raise ModelError; `module` returns a layer by its full name."""
        raise self.dims.unknown(f"{target} of every block")

    def set_linear(self, i: int, target: str, module: nn.Module) -> None:
        """Refuse, as `linear` does; `replace` puts a module in a layer's place."""
        raise self.dims.unknown(f"{target} of every block")

    def block(self, i: int, h: Tensor, position: Any, mask: Tensor | None = None) -> Tensor:
        """Refuse with ModelError: a block may need more than the residual stream."""
        raise self.dims.unknown("computing a single block")

    def positions(
        self, length: int, device: torch.device | str, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Refuse, as `block` does."""
        raise self.dims.unknown("computing a single block")

    def takes_branches(self, length: int) -> bool:
        """Return False: a block may carry a state from token to token."""
        return False

    def hidden(
        self, ids: Tensor, mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """Run the model: [B, T, hidden] before the head, or the logits [B, T, vocab] if the head is
        more than a matrix.

        Raises:
            ModelError: `mask` or `position_ids` is given, or the model is not a causal decoder.
        """
        if mask is not None or position_ids is not None:
            raise self.dims.unknown("a mask of one's own")
        inputs: dict[str, Any] = {"input_ids": ids}
        if self.pictures is not None and self.pictures.any:
            inputs = with_pictures(self.model, self.pictures, ids, self._seen)
        if self.head_is_plain:
            return self.model.base_model(**inputs, use_cache=False)[0]
        return self.model(**inputs, use_cache=False).logits

    def token_nll(self, hidden_ND: Tensor, labels_N: Tensor, tiles: int) -> Tensor:
        """Return `cross_entropy.token_nll` of what `hidden` gave."""
        if self.head_is_plain:
            return super().token_nll(hidden_ND, labels_N, tiles)
        import torch
        from torch.nn import functional as F

        from ondevice.nn.cross_entropy import wide

        parts = [
            F.cross_entropy(wide(logits), labels, reduction="none", ignore_index=-100)
            for logits, labels in zip(
                hidden_ND.split(LOSS_ROWS), labels_N.split(LOSS_ROWS), strict=True
            )
        ]
        return torch.cat(parts)

    def answer_nll(self, hidden_ND: Tensor, places_N: Tensor, answers_A: Tensor) -> Tensor:
        """Compute it from logits if the head is more than a product."""
        if self.head_is_plain:
            return super().answer_nll(hidden_ND, places_N, answers_A)
        return self.token_nll(hidden_ND[:, answers_A], places_N, 1)

    def check_adapted(self, names: list[str]) -> None:
        """Check that the model calls these layers: an adapter of a weight that it reads directly
        changes nothing.

        Raises:
            ModelError: naming the first layer that is not called.
        """
        _ = self.head_is_plain  # asked now, while the layers are the model's own
        called: set[str] = set()

        def watch(name: str) -> Any:
            return self.module(name).register_forward_pre_hook(lambda *_: called.add(name))

        hooks = [watch(name) for name in names]
        try:
            self._run(_probe_ids(self.dims.vocab).to(self.head_weight.device))
        finally:
            for hook in hooks:
                hook.remove()
        # An expert that no token of the probe was sent to is not called either, and is not at
        # fault.
        for name in names:
            if name not in called and ".experts." not in name:
                raise ModelError(
                    f"an adapter of {name} would change nothing: {self.dims.family} reads its weight directly",
                    expected="linear layers that the model calls",
                    received=name.rsplit(".", 1)[-1],
                    hint="leave it out of method.target_modules",
                )

    @cached_property
    def _blocks(self) -> tuple[str, nn.ModuleList]:
        return find_blocks(self.model)

    def _run(self, ids: Tensor) -> Tensor:
        import torch

        with torch.no_grad():
            return self.model(input_ids=ids, use_cache=False).logits

    @cached_property
    def head_is_plain(self) -> bool:
        """True if logits are the base model's hidden states times one matrix: no bias, scale or
        soft cap.

        Raises:
            ModelError: an earlier position sees a later token.
        """
        import torch

        ids = _probe_ids(self.dims.vocab).to(self.head_weight.device)
        changed = ids.clone()
        changed[:, -1] = (changed[:, -1] + 1) % self.dims.vocab
        logits = self._run(ids)
        other = self._run(changed)
        earlier = (logits[:, :-1] - other[:, :-1]).abs().max()
        # Another last token may change the last bits of the others if rows are grouped by expert.
        if not float(earlier) <= 64 * torch.finfo(logits.dtype).eps * float(logits.abs().max()):
            raise ModelError(
                f"{self.dims.family} as configured is not a causal decoder: a position sees later tokens",
                expected="a decoder (is_decoder true in config.json, for types that are also encoders)",
                received=f"logits that change by {float(earlier):.3g}",
            )
        head = self.model.get_output_embeddings()
        base = self.model.base_model
        if not isinstance(head, torch.nn.Linear) or head.bias is not None or base is self.model:
            return False
        seen: list[Tensor] = []

        def enlarge(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            seen.append(inputs[0])
            return (inputs[0] * (PROBE_LOGITS / logits.abs().max()), *inputs[1:])

        hook = head.register_forward_pre_hook(enlarge)
        try:
            large = self._run(ids)
        finally:
            hook.remove()
        with torch.no_grad():
            hidden = base(input_ids=ids, use_cache=False)[0]
            if (
                len(seen) != 1
                or seen[0].shape != hidden.shape
                or not torch.allclose(seen[0], hidden)
            ):
                return False
            expected = head(hidden * (PROBE_LOGITS / logits.abs().max()))
        return bool((large - expected).abs().max() <= 1e-3 * PROBE_LOGITS)


def _probe_ids(vocab: int) -> Tensor:
    import torch

    return torch.arange(1, PROBE_TOKENS + 1)[None] * 7 % vocab
