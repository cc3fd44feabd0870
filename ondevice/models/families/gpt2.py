"""`gpt2`: GPT-2 in all sizes and DistilGPT-2.

Its linear layers are transformers' Conv1D, whose weight is [inputs, outputs], with q, k and v in
one. An adapter goes next to them; quantised weights and hand-written backward passes, which take
nn.Linear's layout, are refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from ondevice.core.dims import ModelDims
from ondevice.core.errors import ModelError, Need
from ondevice.models.families.base import Family
from ondevice.models.families.configuration import UnknownTrait, read_size, refuse_quantised

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

ACTIVATIONS = ("gelu_new", "gelu", "gelu_pytorch_tanh", "relu")
_CONFIG_NAMES = {
    "num_hidden_layers": "n_layer",
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}


class Gpt2Dims(ModelDims):
    """Dimensions with GPT-2's four matrices a block, biases everywhere, and a table of
    positions."""

    gated: ClassVar[bool] = False

    def _part_shapes(self, layer: int) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of each of `Gpt2.linear_targets`, as the weights are stored too."""
        return {
            "attn.c_attn": (self.hidden, 3 * self.hidden),
            "attn.c_proj": (self.hidden, self.hidden),
            "mlp.c_fc": (self.hidden, self.intermediate),
            "mlp.c_proj": (self.intermediate, self.hidden),
        }

    def linear_shape(self, target: str) -> tuple[int, int]:
        """Return what `ModelDims.linear_shape` does; ModelError names the methods that work."""
        if target in self.linear_shapes:
            return self.linear_shapes[target]
        return _refuse_replacing(target)

    @property
    def default_targets(self) -> tuple[str, ...]:
        """Return the projection to queries, keys and values, as PEFT takes it."""
        return ("c_attn",)

    def _block_parameters(self, layer: int) -> int:
        """Parameters of one block: the two norms have biases."""
        return super()._block_parameters(layer) + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, the table of positions and the last norm's bias
        included."""
        return super().parameters + (self.max_positions + 1) * self.hidden


class Gpt2(Family):
    """Layer norms, learned positions that `place` adds, and an MLP of two matrices."""

    model_type = "gpt2"
    stores_inputs_first = True
    linear_targets = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    linear_parents = {
        "attn.c_attn": "attn",
        "attn.c_proj": "attn",
        "mlp.c_fc": "mlp",
        "mlp.c_proj": "mlp",
    }

    @classmethod
    def dims_from_config(cls, config: dict[str, Any], where: str = "config.json") -> ModelDims:
        refuse_quantised(config, where)
        hidden = read_size(config, "n_embd", where)
        heads = read_size(config, "n_head", where)
        if hidden % heads:
            raise ModelError(
                f"{where}: field 'n_head'",
                expected=f"a divisor of n_embd ({hidden})",
                received=heads,
            )
        activation = config.get("activation_function", "gelu_new")
        if activation not in ACTIVATIONS:
            expected = ", ".join(ACTIVATIONS)
            raise UnknownTrait(
                f"{where}: field 'activation_function'", expected=expected, received=activation
            )
        if config.get("add_cross_attention"):
            raise ModelError(
                f"{where}: field 'add_cross_attention'",
                expected="false: a decoder without an encoder",
                received=True,
            )
        return Gpt2Dims(
            family="gpt2",
            layers=read_size(config, "n_layer", where),
            hidden=hidden,
            intermediate=read_size(config, "n_inner", where, 4 * hidden),
            heads=heads,
            kv_heads=heads,
            head_dim=hidden // heads,
            vocab=read_size(config, "vocab_size", where),
            tied=bool(config.get("tie_word_embeddings", True)),
            qkv_bias=True,
            rope_theta=0.0,
            norm_eps=float(config.get("layer_norm_epsilon", 1e-5)),
            max_positions=read_size(config, "n_positions", where, 1024),
            o_bias=True,
            mlp_bias=True,
            rope_type="none",
        )

    @classmethod
    def tiny_config(cls, **sizes: Any) -> dict[str, Any]:
        """Return what `Family.tiny_config` does, under GPT-2's names."""
        sizes.pop("num_key_value_heads", None)
        return {_CONFIG_NAMES.get(name, name): value for name, value in sizes.items()}

    @classmethod
    def weight_shapes(cls, dims: ModelDims) -> dict[str, tuple[int, ...]]:
        """Map every weight's name in transformers to its shape, without a tied head."""
        shapes: dict[str, tuple[int, ...]] = {
            "transformer.wte.weight": (dims.vocab, dims.hidden),
            "transformer.wpe.weight": (dims.max_positions, dims.hidden),
        }
        norms = [
            f"transformer.h.{i}.{norm}" for i in range(dims.layers) for norm in ("ln_1", "ln_2")
        ]
        for norm in [*norms, "transformer.ln_f"]:
            shapes[f"{norm}.weight"] = shapes[f"{norm}.bias"] = (dims.hidden,)
        for i in range(dims.layers):
            for target, shape in dims.linear_shapes.items():
                shapes[f"transformer.h.{i}.{target}.weight"] = shape
                shapes[f"transformer.h.{i}.{target}.bias"] = (shape[1],)
        if not dims.tied:
            shapes["lm_head.weight"] = (dims.vocab, dims.hidden)
        return shapes

    @property
    def embedding(self) -> nn.Embedding:
        """The token embedding [vocab, hidden]; the positions' is `model.transformer.wpe`."""
        return self.model.transformer.wte

    def layer(self, i: int) -> nn.Module:
        """Return transformers' own module of block `i`."""
        return self.model.transformer.h[i]

    def place(self, rows: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Return rows of the token embedding and their positions: [B, T, hidden].

        Raises:
            ModelError: the sequence is longer than the table of positions.
        """
        import torch

        length = rows.shape[1] if position_ids is None else int(position_ids.max()) + 1
        if length > self.dims.max_positions:
            raise ModelError(
                "the sequence is longer than the model's table of positions",
                expected=f"at most {self.dims.max_positions} tokens",
                received=f"{length} tokens",
                hint=f"set data.max_length_tokens to {self.dims.max_positions} or less",
            )
        at = position_ids
        if position_ids is None:
            at = torch.arange(length, device=rows.device)
        return rows + self.model.transformer.wpe(at)

    def positions(
        self, length: int, device: torch.device | str, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return blocks take no positions: two tensors [1, length, 0]."""
        import torch

        empty = torch.empty(1, length, 0, device=device, dtype=dtype)
        return empty, empty

    def attention_branch(
        self, i: int, h: Tensor, position: tuple[Tensor, Tensor], mask: Tensor | None = None
    ) -> Tensor:
        """Compute attention(norm(h)) of block `i`: [B, T, hidden]; `position` is not read."""
        layer: Any = self.layer(i)
        return layer.attn(layer.ln_1(h), attention_mask=mask)[0]

    def mlp_branch(self, i: int, h: Tensor) -> Tensor:
        """Compute mlp(norm(h)) of block `i`, without the residual: [B, T, hidden]."""
        layer: Any = self.layer(i)
        return layer.mlp(layer.ln_2(h))

    def final_norm(self, h: Tensor) -> Tensor:
        """Compute the norm before the head: [B, T, hidden]."""
        return self.model.transformer.ln_f(h)

    def linear(self, i: int, target: str) -> nn.Module:
        """Refuse with ModelError: a Conv1D cannot be handed out as a linear layer."""
        _refuse_replacing(target)

    def set_linear(self, i: int, target: str, module: nn.Module) -> None:
        """Refuse, as `linear` does."""
        _refuse_replacing(target)

    def linear_name(self, i: int, target: str) -> str:
        """Return its full name in state dictionaries; ModelError for another target."""
        if target in self.linear_targets:
            return f"transformer.h.{i}.{target}"
        return _refuse_replacing(target)


def _refuse_replacing(target: str) -> NoReturn:
    raise ModelError(
        "the layers of a gpt2 model are Conv1D, not nn.Linear: no packed weights and no program of a step take them",
        expected="a method that runs the layers as they are",
        received=f"linear layer {target}",
        hint="choose another method, or a model of another family",
        needs=Need.ANY_DECODER,
    )


FAMILY = Gpt2
