"""Encoders with a classification head: BERT, RoBERTa, XLM-RoBERTa, CamemBERT, transformers'
`ForSequenceClassification`.

To everything that trains a decoder it is one whose head has a row for each class: what the head
says at the first token (`<s>`, `[CLS]`) is compared with the label behind it, so a row's class stands at the
second place of its labels (`ondevice.data.encode`). Blocks see both sides, and a mask hides the
padding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from ondevice.core.dims import ModelDims
from ondevice.core.errors import ModelError
from ondevice.models.families.base import Family
from ondevice.models.families.configuration import (
    UnknownTrait,
    architectures,
    read_size,
    refuse_quantised,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

HEAD = ("classifier.", "bert.pooler.")
"""How names of the head's weights begin; a masked language model has none of them."""
_COUNTED_FROM_0 = ("bert",)
"""Types whose first position is row 0 of their table; others leave rows for the padding token."""


@dataclass(frozen=True)
class ClassifierDims(ModelDims):
    """Dimensions with BERT's six matrices a block, biases everywhere, a table of positions, and a
    head of two layers.

    Attributes:
        type_vocab: rows of the table of token types.
        first_position: row of the first position in the table of positions; the padding token's
            number is before it.
    """

    gated: ClassVar[bool] = False

    type_vocab: int = 1
    first_position: int = 2

    def _part_shapes(self, layer: int) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of each linear layer of a block."""
        square = (self.hidden, self.hidden)
        return {
            **{f"attention.self.{name}": square for name in ("query", "key", "value")},
            "attention.output.dense": square,
            "intermediate.dense": (self.hidden, self.intermediate),
            "output.dense": (self.intermediate, self.hidden),
        }

    def _block_parameters(self, layer: int) -> int:
        """Parameters of one block: matrices and their biases, and two norms with theirs."""
        return (
            sum(inputs * outputs + outputs for inputs, outputs in self.linear_shapes.values())
            + 4 * self.hidden
        )

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        tables = self.vocab + self.max_positions + self.first_position + self.type_vocab
        head = self.hidden * (self.hidden + 1) + self.classes * (self.hidden + 1)
        return (tables + 2) * self.hidden + self.layers * self.block_parameters + head


class Classifier(Family):
    """Post-norm blocks that see both sides, and a head on the first token."""

    model_type = "roberta"
    linear_targets = ()
    dims: ClassifierDims

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.dims = replace(self.dims, classes=int(model.config.num_labels))

    @classmethod
    def dims_from_config(cls, config: dict[str, Any], where: str = "config.json") -> ModelDims:
        refuse_quantised(config, where)
        hidden = read_size(config, "hidden_size", where)
        heads = read_size(config, "num_attention_heads", where)
        positions = config.get("position_embedding_type", "absolute")
        if positions not in ("absolute", None):
            raise UnknownTrait(
                f"{where}: field 'position_embedding_type'", expected="absolute", received=positions
            )
        labels = config.get("id2label")
        first = int(config.get("pad_token_id", 1)) + 1
        if config["model_type"] in _COUNTED_FROM_0:
            first = 0
        return ClassifierDims(
            family=str(config["model_type"]),
            layers=read_size(config, "num_hidden_layers", where),
            hidden=hidden,
            intermediate=read_size(config, "intermediate_size", where),
            heads=heads,
            kv_heads=heads,
            head_dim=hidden // heads,
            vocab=read_size(config, "vocab_size", where),
            tied=True,
            qkv_bias=True,
            rope_theta=0.0,
            norm_eps=float(config.get("layer_norm_eps", 1e-5)),
            max_positions=read_size(config, "max_position_embeddings", where, 514) - first,
            o_bias=True,
            mlp_bias=True,
            rope_type="none",
            classes=len(labels) if labels else read_size(config, "num_labels", where, 2),
            type_vocab=read_size(config, "type_vocab_size", where, 1),
            first_position=first,
        )

    @classmethod
    def weight_shapes(cls, dims: ModelDims) -> dict[str, tuple[int, ...]]:
        """Return nothing: encoder files name tensors differently, and transformers checks the
        files."""
        return {}

    @property
    def embedding(self) -> nn.Embedding:
        return self.model.base_model.embeddings.word_embeddings

    @property
    def head_weight(self) -> Tensor:
        """The token embedding: the head of classes has no row for each token."""
        return self.embedding.weight

    def layer(self, i: int) -> nn.Module:
        return self.model.base_model.encoder.layer[i]

    def place(self, rows: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Add positions, counted from `dims.first_position`, and the first token type; then the
        norm.

        Raises:
            ModelError: the sequence is longer than the table of positions.
        """
        import torch

        length = rows.shape[1]
        parts = self.model.base_model.embeddings
        if length > self.dims.max_positions or position_ids is not None:
            raise ModelError(
                "the sequence is longer than the model's table of positions",
                expected=f"at most {self.dims.max_positions} tokens",
                received=f"{length} tokens",
                hint=f"set data.max_length_tokens to {self.dims.max_positions} or less",
            )
        first = self.dims.first_position
        at = torch.arange(first, first + length, device=rows.device)
        types = parts.token_type_embeddings.weight[0]
        return parts.LayerNorm(rows + types + parts.position_embeddings.weight[at])

    def positions(
        self, length: int, device: torch.device | str, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Blocks take no positions: two tensors [1, length, 0]."""
        import torch

        empty = torch.empty(1, length, 0, device=device, dtype=dtype)
        return empty, empty

    def padding_mask(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Return what hides padding from attention: additive [B, 1, T, T]."""
        import torch

        hidden = torch.zeros(ids.shape, dtype=dtype, device=ids.device)
        hidden.masked_fill_(ids == self.model.config.pad_token_id, torch.finfo(dtype).min)
        return hidden[:, None, None, :].expand(-1, 1, ids.shape[1], -1)

    def block(
        self, i: int, h: Tensor, position: tuple[Tensor, Tensor], mask: Tensor | None = None
    ) -> Tensor:
        left: Any = self.layer(i)(h, attention_mask=mask)
        if isinstance(left, tuple):
            return left[0]
        return left

    def final_norm(self, h: Tensor) -> Tensor:
        """Nothing: a block ends with its norm."""
        return h

    def takes_branches(self, length: int) -> bool:
        """Return False: an encoder has no continuations."""
        return False

    def hidden(
        self, ids: Tensor, mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        if mask is not None or position_ids is not None:
            raise ModelError("an encoder computes one row a sequence", hint="leave --packing out")
        h = self.embed(ids)
        mask = self.padding_mask(ids, h.dtype)
        position = self.positions(ids.shape[1], h.device, h.dtype)
        for i in range(self.dims.layers):
            h = self.block(i, h, position, mask)
        return h

    def logits(self, first_ND: Tensor) -> Tensor:
        """Return what the head says of first tokens: [N, hidden] -> float32 [N, classes]."""
        first = first_ND[:, None]
        pooler = self.model.base_model.pooler  # BERT's; RoBERTa's head has such a layer inside
        if pooler is not None:
            first = pooler(first)
        return self.model.classifier(first).float()

    def class_nll(self, first_ND: Tensor, classes_N: Tensor) -> Tensor:
        """Return negative log likelihood of classes int64 [N], float32 [N]; 0 for class -100."""
        from torch.nn.functional import cross_entropy

        return cross_entropy(self.logits(first_ND), classes_N, reduction="none", ignore_index=-100)

    def token_nll(self, hidden_ND: Tensor, labels_N: Tensor, tiles: int) -> Tensor:
        at = (labels_N >= 0).nonzero()[:, 0]
        return _spread(self.class_nll(hidden_ND[at], labels_N[at]), at, len(labels_N))

    def answer_nll(self, hidden_ND: Tensor, places_N: Tensor, answers_A: Tensor) -> Tensor:
        from torch.nn.functional import cross_entropy

        at = (places_N >= 0).nonzero()[:, 0]
        nll = cross_entropy(
            self.logits(hidden_ND[at])[:, answers_A], places_N[at], reduction="none"
        )
        return _spread(nll, at, len(places_N))

    def linear(self, i: int, target: str) -> nn.Module:
        _refuse(target)

    def set_linear(self, i: int, target: str, module: nn.Module) -> None:
        _refuse(target)

    def linear_name(self, i: int, target: str) -> str:
        _refuse(target)


def _spread(values: Tensor, at: Tensor, count: int) -> Tensor:
    """Return [count] with `values` at those places, else 0."""
    return values.new_zeros(count).index_put((at,), values)


def _refuse(target: str) -> NoReturn:
    raise ModelError("an encoder's layers take no adapter here", received=f"linear layer {target}")


def has_head(config: dict[str, Any], where: str) -> bool:
    """Return True if the weights have a classification head; errors are those of `architectures`."""
    names = architectures(config, where)
    return any(name.endswith("ForSequenceClassification") for name in names)
