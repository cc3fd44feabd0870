"""The sizes of a decoder whose blocks are not known, from the model built without memory (torch's
meta device).

Linear layers are found by their modules, so counts are exact; sizes that the configuration omits
are guessed, and reported.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from ondevice.core.dims import ModelDims
from ondevice.core.errors import MissingPackageError, ModelError, Need
from ondevice.core.traits import EXPERT_PARAMETERS, Linear, is_expert_parameter
from ondevice.models.families.configuration import (
    auto_class,
    check_decodes,
    config_object,
    language_model,
    quiet_transformers,
)

ATTENTION = (
    "q_proj", "v_proj", "kv_proj", "q_b_proj", "kv_b_proj", "query_key_value", "qkv_proj", "Wqkv", "c_attn",
    "linear_x", "linear_y", "query", "value", "key", "receptance", "q", "k", "v", "Wq", "Wv",
)  # fmt: skip
"""Names of the projections into attention, or into its replacement, in addition to those that begin
with in_proj: the default if q_proj and v_proj are not both present."""
ROUTERS = ("router", "gate", "shared_expert_gate")
"""Linear layers that send tokens to experts; they are not a default for an adapter."""
CROSS_ATTENTION = ("encoder_attn", "crossattention", "cross_attn")
"""Modules that attend to an encoder, which a decoder without one does not have."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_selected_experts", "moe_k", "moe_topk")
"""Fields of configurations: how many experts there are (`EXPERTS`), and how many a token passes
through."""


@dataclass(frozen=True)
class AnyDims(ModelDims):
    """Sizes of a decoder whose blocks are not known.

    Attributes:
        linears: the linear layers of the blocks; those of one block need not be another's.
        experts_found: parameters with a matrix for each expert.
        experts_refused: why there are experts, and none found.
        parameter_count: of the whole model, tied ones once; `block_counts` of each block.
        matrix_count: of all matrices in the blocks, experts included.
        active_experts: of `experts`, those that a token passes through.
        guessed: sentences on sizes that the configuration does not say.
        blocks: the list of blocks, by its name in the model.
        trait: what a family of this type does not do, in its words; empty if no family has this
            type.
    """

    whole: ClassVar[bool] = True

    linears: tuple[Linear, ...] = ()
    experts_found: tuple[Linear, ...] = ()
    experts_refused: str = ""
    parameter_count: int = 0
    block_counts: tuple[int, ...] = ()
    matrix_count: int = 0
    active_count: int = 0
    active_experts: int = 0
    guessed: tuple[str, ...] = ()
    blocks: str = ""
    trait: str = ""

    @property
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) by the last part of the name, the largest if blocks differ."""
        shapes: dict[str, tuple[int, int]] = {}
        for linear in self.linears:
            name = linear.target.rsplit(".", 1)[-1]
            shape = (linear.inputs, linear.outputs)
            shapes[name] = max(
                shapes.get(name, shape), shape, key=lambda sides: sides[0] * sides[1]
            )
        return shapes

    def linear_shape(self, target: str) -> tuple[int, int]:
        """Refuse with ModelError: blocks may have no such layer, or several; ask `adapted`."""
        raise self.unknown(f"a shape of {target} for every block")

    @property
    def linear_list(self) -> tuple[Linear, ...]:
        return self.linears

    @property
    def expert_list(self) -> tuple[Linear, ...]:
        return self.experts_found

    def resolve_targets(self, config: Any) -> tuple[str, ...]:
        """Resolve as `ModelDims` does; ModelError if experts cannot be adapted."""
        asked = [
            name for name in getattr(config, "target_modules", ()) if is_expert_parameter(name)
        ]
        if asked and self.experts_refused:
            expected = ", ".join(self.linear_shapes)
            raise ModelError(
                self.experts_refused, expected=expected, received=asked[0], hint="leave it out"
            )
        return super().resolve_targets(config)

    @property
    def default_targets(self) -> tuple[str, ...]:
        names = list(self.linear_shapes)
        known = tuple(name for name in names if name in ATTENTION or name.startswith("in_proj"))
        return known or tuple(name for name in names if name not in ROUTERS)

    @property
    def block_parameters(self) -> int:
        return max(self.block_counts, default=0)

    @property
    def matrices(self) -> int:
        return self.matrix_count

    @property
    def active_matrices(self) -> int:
        return self.active_count

    @property
    def parameters(self) -> int:
        return self.parameter_count

    def unknown(self, wanted: str) -> ModelError:
        """Build the refusal; it asks for a method that needs to know no block."""
        return ModelError(
            self.trait or f"the blocks of {self.family} models are not known here",
            expected=f"blocks that {wanted} knows, or a method that takes every decoder",
            received=f"model_type {self.family!r}, {wanted}",
            hint="choose another method, or add the type: develop/add-a-model.md",
            needs=Need.ANY_DECODER,
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for a plan."""
        own = f"{self.family} is computed whole, by transformers: memory of its activations is estimated as Llama's"
        return tuple(filter(None, (own, self.trait, *self.guessed)))


@lru_cache(maxsize=16)
def dims_of_config(config: str, where: str) -> AnyDims:
    import torch

    values = json.loads(config)
    try:
        with quiet_transformers(), torch.device("meta"):
            built = config_object(values)
            check_decodes(built, where)
            model = auto_class(values["model_type"]).from_config(built)
    except ModelError:
        raise
    except ImportError as error:  # a tower may be another package's
        raise MissingPackageError(
            f"{where}: transformers needs another package for this {values['model_type']} model",
            received=str(error).strip().splitlines()[0],
            hint="install it, or choose a checkpoint of the text model",
        ) from None
    except Exception as error:  # whatever transformers raises about a configuration
        _check_rope_type(error, values, where)
        raise ModelError(
            f"{where}: transformers cannot build this {values.get('model_type')} model",
            expected="a configuration that transformers builds a decoder of",
            received=f"{type(error).__name__}: {str(error).strip()[:300]}",
            hint="check config.json, or copy it again",
        ) from None
    return dims_of_model(model, values)


def _check_rope_type(error: Exception, values: dict[str, Any], where: str) -> None:
    """Name a rotary embedding that transformers looked for in vain."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    wanted = rope.get("rope_type") or rope.get("type")
    if isinstance(error, KeyError) and error.args == (wanted,):
        raise ModelError(
            f"{where}: unknown rope_type",
            expected=", ".join(("default", *ROPE_INIT_FUNCTIONS)),
            received=wanted,
            hint="a newer transformers may know it: pip install -U transformers",
        ) from None


def find_blocks(model: Any) -> tuple[str, Any]:
    """Find the list of blocks: the one of `num_hidden_layers` modules, else the largest list.

    Raises:
        ModelError: the model has no list of modules.
    """
    from torch import nn

    depth = getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", None)
    inside = set(language_model(model).modules())
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and module in inside
    ]
    if not lists:
        raise ModelError(f"no list of blocks was found in a {model.config.model_type} model")

    def size(item: tuple[str, Any]) -> tuple[bool, int]:
        return len(item[1]) == depth, sum(parameter.numel() for parameter in item[1].parameters())

    return max(lists, key=size)


def dims_of_model(model: Any, config: dict[str, Any]) -> AnyDims:
    """Read the sizes of a built model, whose parameters need no memory."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    text = model.config.get_text_config(decoder=True)
    blocks_name, blocks = find_blocks(model)
    linears = []
    for name, module in blocks.named_modules():
        if isinstance(module, nn.Linear):
            sides = module.in_features, module.out_features
        elif isinstance(module, Conv1D):
            sides = module.nx, module.nf
        else:
            continue
        layer, _, path = name.partition(".")
        if any(part in CROSS_ATTENTION for part in path.split(".")):
            continue  # a decoder has no encoder to attend to
        linears.append(Linear(int(layer), path, *sides))
    experts_found, experts_refused = _find_experts(
        blocks, str(config.get("model_type", text.model_type))
    )
    guessed: list[str] = []

    def size(field: str, names: tuple[str, ...], guess: int) -> int:
        for name in (field, *names):
            if value := _number(text, name):
                return value
        guessed.append(
            f"guessed: {field} {guess}, which the configuration of {text.model_type} does not say"
        )
        return guess

    embedding = model.get_input_embeddings().weight
    hidden = size("hidden_size", ("n_embd", "d_model"), embedding.shape[1])
    heads = size("num_attention_heads", ("n_head", "num_heads"), max(1, hidden // 64))
    widest = max([hidden, *(linear.outputs for linear in linears)])
    wide = size(
        "intermediate_size",
        ("n_inner", "ffn_dim", "ffn_hidden_size", "moe_intermediate_size"),
        widest,
    )
    expert_numbers = sum(
        p.numel() for p in blocks.parameters() if p.ndim == 3 and p.shape[1] > 1 and p.shape[2] > 1
    )
    matrices = expert_numbers + sum(p.numel() for p in blocks.parameters() if p.ndim == 2)
    experts = next((n for field in EXPERTS if (n := _number(text, field))), 0)
    chosen = next((n for field in CHOSEN if (n := _number(text, field))), 1)
    share = 1.0
    if experts:
        share = chosen / experts
    if experts and expert_numbers:
        narrow = _number(text, "moe_intermediate_size") or wide
        wide = max(chosen * narrow, 1)
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is embedding
    return AnyDims(
        family=str(config.get("model_type", text.model_type)),
        layers=len(blocks),
        hidden=hidden,
        intermediate=wide,
        heads=heads,
        kv_heads=_number(text, "num_key_value_heads") or heads,
        head_dim=_number(text, "head_dim") or max(1, hidden // heads),
        vocab=embedding.shape[0],
        tied=tied,
        qkv_bias=False,
        rope_theta=0.0,
        norm_eps=0.0,
        max_positions=size(
            "max_position_embeddings", ("n_positions", "max_seq_len", "context_length"), 2048
        ),
        rope_type="none",
        experts=experts if expert_numbers else 0,
        linears=tuple(linears),
        experts_found=experts_found,
        experts_refused=experts_refused,
        parameter_count=sum(parameter.numel() for parameter in model.parameters()),
        block_counts=tuple(sum(p.numel() for p in block.parameters()) for block in blocks),
        matrix_count=matrices,
        active_count=int(matrices - expert_numbers * (1 - share)),
        active_experts=chosen if experts and expert_numbers else 0,
        guessed=tuple(guessed),
        blocks=blocks_name,
    )


def _find_experts(blocks: Any, family: str) -> tuple[tuple[Linear, ...], str]:
    """List the experts' parameters [experts, outputs, inputs], or why they take no pairs."""
    linears = []
    refused = ""
    for name, module in blocks.named_modules():
        held = {
            key: p
            for key, p in module.named_parameters(recurse=False)
            if key in EXPERT_PARAMETERS and p.ndim == 3
        }
        if not held or not name.endswith(".experts"):
            continue
        first = next(iter(held.values()))
        turned = "down_proj" not in held or held["down_proj"].shape[1] != first.shape[2]
        ordered = list(held) == [key for key in EXPERT_PARAMETERS if key in held]
        if turned or getattr(module, "is_transposed", False) or not ordered:
            layout = "[experts, inputs, outputs]" if ordered else ", ".join(held)
            refused = f"the experts of {family} models are stored as {layout}, which takes no pairs"
            continue
        layer, _, path = name.partition(".")
        for key, p in held.items():
            linears.append(Linear(int(layer), f"{path}.{key}", p.shape[2], p.shape[1], p.shape[0]))
    return tuple(linears), refused


def _number(config: Any, field: str) -> int:
    """Return a size, the largest if layers differ; 0 if the configuration has none."""
    values = [config, *(getattr(config, "per_layer_config", None) or ())]
    numbers = []
    for part in values:
        try:
            value = getattr(part, field, None)
        except Exception:
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            numbers.append(value)
    return max(numbers, default=0)
