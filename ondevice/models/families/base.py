"""The base of a model family: the parts of a block, and the names of its weights.

A family is one file named for the Hugging Face `model_type`, over transformers' own modules and
weights; `configuration` reads what such a file needs of its configuration.
Importing this module loads neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from ondevice.core.dims import ModelDims
from ondevice.core.errors import ModelError
from ondevice.gguf.family import GGUFFamily

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from transformers import PreTrainedModel


BLOCKS = "model.layers"
"""The list of blocks in a model of text."""


class Family(GGUFFamily):
    """A pre-norm decoder over transformers' modules: h += attention(norm(h)); h += mlp(norm(h)).

    A subclass names the `model_type`, reads its configuration, and overrides what differs. The
    module that holds it sets `FAMILY`.
    """

    model_type: ClassVar[str]
    linear_targets: ClassVar[tuple[str, ...]] = (
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    )  # fmt: skip
    linear_parents: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn"),
        **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp"),
    }

    input_tensors: ClassVar[tuple[str, ...]] = ()
    """Of the layers' inputs (`BlockTraits.layer_input`): the tokens' embeddings for all layers, the
    projection of their embedding, and the factor of its norm."""
    last_norm: ClassVar[str] = "model.norm"
    """The norm before the head, by its full name."""
    rotary: ClassVar[str] = "rotary_emb"
    """The module in `model.model` that gives cos and sin of positions."""
    blocks: ClassVar[str] = BLOCKS
    """The list of blocks in the names that adapters have: of a checkpoint's language model, its
    place in the whole checkpoint."""
    stores_inputs_first: ClassVar[bool] = False
    """Its linear layers' weights are [inputs, outputs]."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model: Any = model  # transformers' parts are not typed per architecture
        self.dims = self.dims_from_config(model.config.to_dict())

    @classmethod
    def dims_from_config(cls, config: dict[str, Any], where: str = "config.json") -> ModelDims:
        """Read a `config.json`; `where` names it in errors.

        Raises:
            ModelError: a field is missing, or asks for something this family does not do.
        """
        raise NotImplementedError

    @classmethod
    def tiny_config(cls, **sizes: Any) -> dict[str, Any]:
        """Return fields of a `config.json` of these sizes (by Llama's names), for tests."""
        return sizes

    @classmethod
    def mlx_lm_fields(cls, dims: ModelDims) -> dict[str, Any]:
        """Return fields of a `config.json` that mlx-lm reads, and transformers writes otherwise."""
        return {}

    @classmethod
    def weight_shapes(cls, dims: ModelDims) -> dict[str, tuple[int, ...]]:
        """Map every weight's name in transformers to its shape, without a tied head."""
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (dims.vocab, dims.hidden)
        }
        for i in range(dims.layers):
            for place, module in dims.traits.norms_of(i):
                shapes[f"model.layers.{i}.{module}.weight"] = (dims.norm_width(place, i),)
            for name, shape in dims.mixer_tensors(i).values():
                shapes[f"model.layers.{i}.{name}"] = shape
            for one in dims.block_linears(i).values():
                name = cls.weight_path(i, one.target)
                shapes[f"{name}.weight"] = (one.outputs, one.inputs)
                if dims.linear_bias(one.target):
                    shapes[f"{name}.bias"] = (one.outputs,)
        shapes[f"{cls.last_norm}.weight"] = (dims.hidden,)
        if not dims.tied:
            shapes["lm_head.weight"] = (dims.vocab, dims.hidden)
        return shapes

    @classmethod
    def weight_path(cls, i: int | str, target: str) -> str:
        """Return the full name of linear layer `target` of block `i`, in the files of transformers."""
        return f"model.layers.{i}.{_within(cls.linear_parents[target], target)}"

    @classmethod
    def adapter_name(cls, name: str) -> str:
        """Return a linear layer's name in an adapter, from its name in the model."""
        if name.startswith(f"{BLOCKS}."):
            return cls.blocks + name.removeprefix(BLOCKS)
        return name

    @classmethod
    def own_name(cls, name: str) -> str:
        """Return a module's name in the model, from its name in an adapter."""
        if name.startswith(f"{cls.blocks}."):
            return BLOCKS + name.removeprefix(cls.blocks)
        return name

    def targets(self, i: int) -> tuple[str, ...]:
        """Return those of `linear_targets` that block `i` has."""
        own = {one.target for one in self.dims.block_linears(i).values()}
        return tuple(target for target in self.linear_targets if target in own)

    @property
    def embedding(self) -> nn.Embedding:
        """The input embedding, weight [vocab, hidden]."""
        return self.model.model.embed_tokens

    @property
    def head_weight(self) -> Tensor:
        """The output head [vocab, hidden]; the same storage as the embedding's if they are tied."""
        return self.model.lm_head.weight

    def layer(self, i: int) -> nn.Module:
        """Return transformers' own module of block `i`."""
        return self.model.model.layers[i]

    def embed(self, ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Embed token ids: int64 [B, T] -> [B, T, hidden]; for `position_ids` see `hidden`."""
        return self.place(self.embedding(ids), position_ids)

    def place(self, rows: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Return the first block's input [B, T, hidden]: embedding rows, with learned positions
        added."""
        return rows

    def positions(
        self, length: int, device: torch.device | str, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Compute cos and sin of the first positions, each [1, length, head_dim] in `dtype`."""
        import torch

        like = torch.empty(
            0, device=device, dtype=dtype
        )  # transformers takes device and dtype from a tensor
        return self.rotary_module(like, torch.arange(length, device=device)[None])

    @property
    def rotary_module(self) -> Any:
        """transformers' module of `rotary`."""
        return getattr(self.model.model, self.rotary)

    def layer_position(self, i: int, position: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Return cos and sin of block `i`, out of what `positions` gave."""
        return position[0], position[1]

    def block(
        self, i: int, h: Tensor, position: tuple[Tensor, Tensor], mask: Tensor | None = None
    ) -> Tensor:
        """Compute block `i`: [B, T, hidden] -> [B, T, hidden].

        Args:
            position: from `positions`, which refuses a length that the family does not do.
            mask: additive float [1 or B, 1, T, T], or None for the causal mask.
        """
        h = h + self.attention_branch(i, h, position, mask)
        return h + self.mlp_branch(i, h)

    def attention_branch(
        self, i: int, h: Tensor, position: tuple[Tensor, Tensor], mask: Tensor | None = None
    ) -> Tensor:
        """Compute attention(norm(h)) of block `i`, without the residual: [B, T, hidden]."""
        layer: Any = self.layer(i)
        normed = layer.input_layernorm(h)
        return layer.self_attn(
            hidden_states=normed, position_embeddings=position, attention_mask=mask
        )[0]

    def mlp_branch(self, i: int, h: Tensor) -> Tensor:
        """Compute mlp(norm(h)) of block `i`, without the residual: [B, T, hidden]."""
        layer: Any = self.layer(i)
        return layer.mlp(layer.post_attention_layernorm(h))

    def mlp_of(self, i: int, x_ND: Tensor) -> Tensor:
        """Compute block `i`'s MLP of tokens that are normed: [N, hidden] -> [N, hidden]."""
        layer: Any = self.layer(i)
        return layer.mlp(x_ND)

    def final_norm(self, h: Tensor) -> Tensor:
        """Compute the norm before the head: [B, T, hidden]."""
        return self.model.get_submodule(self.last_norm)(h)

    def padding_mask(self, ids: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the blocks' mask of rows int64 [B, T] padded on the right; None for the causal
        mask, which hides later tokens."""
        return None

    def class_nll(self, first_ND: Tensor, classes_N: Tensor) -> Tensor:
        """Compute the negative log likelihood of rows' classes from their first positions, by a
        head of `dims.classes`."""
        raise ModelError(f"a {self.model_type} model has no classification head")

    def linear(self, i: int, target: str) -> nn.Module:
        """Return linear layer `target` of block `i`, or the module that replaces it."""
        return self.layer(i).get_submodule(_within(self._parent(target), target))

    def set_linear(self, i: int, target: str, module: nn.Module) -> None:
        """Replace that linear layer by `module`."""
        parent, _, name = _within(self._parent(target), target).rpartition(".")
        setattr(self.layer(i).get_submodule(parent), name, module)

    def linear_name(self, i: int, target: str) -> str:
        """Return the full name of that linear layer, as in PEFT adapters."""
        return f"{self.blocks}.{i}.{_within(self._parent(target), target)}"

    def module(self, name: str) -> nn.Module:
        """Return a linear layer, or what replaces it, by its full name."""
        return self.model.get_submodule(self.own_name(name))

    def replace(self, name: str, module: nn.Module) -> None:
        """Replace the layer of that full name by `module`."""
        parent, _, last = self.own_name(name).rpartition(".")
        setattr(self.model.get_submodule(parent), last, module)

    def check_adapted(self, names: list[str]) -> None:
        """Check that adapters of these layers change the output; ModelError if not."""

    def packed(self, h: Tensor, position_ids: Tensor) -> tuple[Any, Tensor]:
        """Return what blocks take for several rows in one sequence: positions of each row, and the
        mask between rows.

        Args:
            h: the first block's input, [B, T, hidden].
            position_ids: int64 [B, T], each token's position in its row.
        """
        from ondevice.nn.row_mask import of_rows, row_mask

        tables: Any = self.positions(h.shape[1], h.device, h.dtype)
        return tuple(of_rows(table, position_ids) for table in tables), row_mask(
            position_ids, h.dtype
        )

    def takes_branches(self, length: int) -> bool:
        """Return whether `branched_hidden` takes sequences of so many tokens: no window of
        attention, which counts tokens of the sequence, hides one of them, and no convolution
        reads another branch."""
        traits = self.dims.traits
        return not traits.mixers and length <= traits.shortest_window(length)

    def branched_hidden(self, ids: Tensor, position_ids: Tensor, branches: Tensor) -> Tensor:
        """Compute `hidden` of prompts with their continuations, each int64 [B, T]; see
        `core.session.Branching`."""
        h = self.embed(ids, position_ids)
        return self._through_blocks(h, *self.branched(h, position_ids, branches))

    def branched(self, h: Tensor, position_ids: Tensor, branches: Tensor) -> tuple[Any, Tensor]:
        """Return what blocks take for prompts with their continuations; see `packed`."""
        from ondevice.nn.row_mask import branch_mask, of_rows

        tables: Any = self.positions(int(position_ids.max()) + 1, h.device, h.dtype)
        position = tuple(of_rows(table, position_ids) for table in tables)
        return position, branch_mask(branches, h.dtype)

    def hidden(
        self, ids: Tensor, mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> Tensor:
        """Compute embedding, all blocks and the final norm: int64 [B, T] -> [B, T, hidden].

        Args:
            mask: additive float [1, 1, T, T], or None for the causal mask.
            position_ids: int64 [B, T] if a sequence has several rows: each token's position in its
                row, and the mask keeps the rows apart.
        """
        h = self.embed(ids, position_ids)
        if position_ids is None:
            position = self.positions(ids.shape[1], h.device, h.dtype)
        else:
            position, mask = self.packed(h, position_ids)
        return self._through_blocks(h, position, mask)

    def token_nll(self, hidden_ND: Tensor, labels_N: Tensor, tiles: int) -> Tensor:
        """Compute labels' negative log likelihood; see `ondevice.nn.cross_entropy.token_nll`."""
        cap = self.dims.traits.logit_cap
        return _token_nll(hidden_ND, self.head_weight, labels_N, tiles, cap)

    def answer_nll(self, hidden_ND: Tensor, places_N: Tensor, answers_A: Tensor) -> Tensor:
        """Compute it among the tokens int64 [A]; `places_N` indexes them, and -100 is ignored."""
        cap = self.dims.traits.logit_cap
        return _token_nll(hidden_ND, self.head_weight[answers_A], places_N, 1, cap)

    def _through_blocks(self, h: Tensor, position: Any, mask: Tensor | None) -> Tensor:
        for i in range(self.dims.layers):
            h = self.block(i, h, position, mask)
        return self.final_norm(h)

    def _parent(self, target: str) -> str:
        if target not in self.linear_parents:
            raise ModelError(
                "unknown linear layer", expected=", ".join(self.linear_targets), received=target
            )
        return self.linear_parents[target]


def _token_nll(hidden_ND: Tensor, head: Tensor, labels_N: Tensor, tiles: int, cap: float) -> Tensor:
    from ondevice.nn.cross_entropy import token_nll

    return token_nll(hidden_ND, head, labels_N, tiles, cap)


def _within(parent: str, target: str) -> str:
    """Return a linear layer's path in its block; without a parent the target says it."""
    return f"{parent}.{target}" if parent else target


def in_checkpoint(family: type[Family], blocks: str) -> type[Family]:
    """Return a family whose adapters have the names of a whole checkpoint; see `Family.blocks`."""
    if blocks == family.blocks:
        return family
    return type(family.__name__, (family,), {"blocks": blocks})
