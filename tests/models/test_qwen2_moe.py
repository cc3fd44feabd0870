"""The peculiarities of `qwen2_moe` and `qwen3_moe`: experts, blocks without them, what else runs, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from ondevice.artifact.adapter import Adapter
from ondevice.core.config import ExportConfig, ModelConfig
from ondevice.core.dims import MoeDims
from ondevice.core.errors import ArtifactError, ConfigError, ModelError
from ondevice.core.registry import method_config, open_session
from ondevice.core.registry import target as find_target
from ondevice.exporters.base import ExportJob
from ondevice.models import LoadedModel, load_model, read_dims, save_tiny, tiny_model
from ondevice.models.families.qwen2_moe import Qwen2Moe
from ondevice.models.save import save_weights
from ondevice.nn.adapters import apply_adapter
from ondevice.planning.estimate import plan

FORMS = {
    "every block": {},
    "normalised weights": {"norm_topk_prob": True, "num_experts_per_tok": 3},
    "some without experts": {"layers": 4, "mlp_only_layers": [2], "decoder_sparse_step": 2},
    "one expert a token": {"num_experts_per_tok": 1},
    "all experts, odd widths": {
        "num_experts": 3,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 7,
        "tied": False,
    },
    "no bias": {"qkv_bias": False},
    "qwen3_moe": {"family": "qwen3_moe", "num_experts_per_tok": 3},
    "qwen3_moe, not normalised, some without": {
        "family": "qwen3_moe",
        "norm_topk_prob": False,
        "mlp_only_layers": [1],
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_logits_and_gradients_are_transformers_own(form: str) -> None:
    sizes = {"family": "qwen2_moe", **FORMS[form]}
    loaded = tiny_model(sizes.pop("family"), 3, **sizes)
    loaded.model.set_experts_implementation(
        "eager"
    )  # its grouped product takes whole 16 bytes only
    model, ids = (
        loaded.model,
        torch.randint(0, 256, (2, 19), generator=torch.Generator().manual_seed(1)),
    )
    model.requires_grad_(True)
    actual = loaded.family.hidden(ids) @ loaded.family.head_weight.T
    expected = model(ids).logits
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
    into = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    named = dict(model.named_parameters())
    pairs = [torch.autograd.grad(out, list(named.values()), into) for out in (actual, expected)]
    for name, mine, theirs in zip(named, *pairs, strict=True):
        assert theirs.abs().max() > 0, name
        assert (mine - theirs).norm() <= 1e-4 * theirs.norm(), name


def test_dimensions_of_the_papers_model() -> None:
    """Qwen1.5-MoE-A2.7B: 14.3 billion parameters, of which 2.7 billion are active (with both embeddings)."""
    config = {
        "num_hidden_layers": 24, "hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16,
        "num_key_value_heads": 16, "vocab_size": 151936, "tie_word_embeddings": False, "num_experts": 60,
        "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
    }  # fmt: skip
    dims = Qwen2Moe.dims_from_config(config)
    assert isinstance(dims, MoeDims)
    assert (dims.experts, dims.active_experts, dims.dense_layers) == (60, 4, ())
    assert dims.parameters == 14_315_784_192
    active = dims.active_matrices + 2 * dims.vocab * dims.hidden
    assert round(active / 1e9, 1) == 2.7
    assert dims.intermediate == 4 * 1408 + 5632
    assert Qwen2Moe.dims_from_config({**config, "decoder_sparse_step": 2}).dense_layers == tuple(
        range(0, 24, 2)
    )


REFUSED = {
    "more active than there are": ({"num_experts_per_tok": 9}, "'num_experts_per_tok'"),
    "no block with experts": ({"mlp_only_layers": [0, 1]}, "no layer has experts"),
    "half an expert": ({"num_experts": 0.5}, "'num_experts'"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_model_that_the_block_does_not_do_is_refused(case: str, tmp_path: Path) -> None:
    fields, words = REFUSED[case]
    folder = save_tiny(tmp_path / "m", "qwen2_moe")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(ModelError) as caught:
        read_dims(str(folder))
    assert words in str(caught.value)


def test_folders_of_both_layouts_load(tmp_path: Path) -> None:
    """The hub's files have a tensor an expert; what is saved here has transformers' own names."""
    built = tiny_model("qwen2_moe", 5)
    hub = load_model(str(save_tiny(tmp_path / "hub", "qwen2_moe", 5)))
    save_weights(
        tmp_path / "own", {name: p.detach() for name, p in built.model.named_parameters()}, built
    )
    own = load_model(str(tmp_path / "own"))
    expected = built.model.state_dict()
    for loaded in (hub, own):
        state = loaded.model.state_dict()
        assert state.keys() == expected.keys() and all(
            torch.equal(state[name], expected[name]) for name in state
        )


def test_the_choice_of_experts_can_be_watched() -> None:
    loaded = tiny_model("qwen2_moe", layers=3, mlp_only_layers=[1])
    seen: dict[int, torch.Tensor] = {}
    loaded.family.on_routing = seen.__setitem__  # type: ignore[attr-defined]
    loaded.family.hidden(torch.arange(10).reshape(2, 5))
    assert sorted(seen) == [0, 2] and all(ids.shape == (10, 2) for ids in seen.values())


BATCH = np.arange(24, dtype=np.int64).reshape(2, 12)


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize(
    "name", ["lora", "lora-fa", "mesp", "prge", "mezo", "full", "slideformer", "lsp"]
)
def test_methods_that_train_it(name: str, family: str) -> None:
    loaded = tiny_model(family)
    session = open_session(loaded, method_config(name), 0)
    before, _ = session.evaluate(BATCH, BATCH)
    for step in range(3):
        assert np.isfinite(
            session.step(
                BATCH, BATCH, step, 1e-2 if "lora" in name or name == "mesp" else 1e-3
            ).loss
        )
    after, count = session.evaluate(BATCH, BATCH)
    session.close()
    assert count.tolist() == [11, 11] and not np.array_equal(before, after)
    if name in ("lora", "mesp", "full", "slideformer", "lsp"):
        assert after.sum() < before.sum()


def test_slideformer_moves_experts_as_plain_training_does() -> None:
    losses = {}
    for name in ("full", "slideformer"):
        settings = {"compute": "float32", "optimizer": "torch"} if name == "slideformer" else {}
        loaded = tiny_model("qwen2_moe", layers=3, mlp_only_layers=[1])
        session = open_session(loaded, method_config(name, settings), 0)
        losses[name] = [session.step(BATCH, BATCH, step, 1e-3).loss for step in range(4)]
        session.close()
    np.testing.assert_allclose(losses["slideformer"], losses["full"], rtol=2e-5)


def adapter(loaded: LoadedModel) -> None:
    name = "model.layers.0.mlp.shared_expert.gate_proj"
    pair = {
        f"{name}.lora_A.weight": np.ones((2, 64), "f4"),
        f"{name}.lora_B.weight": np.ones((128, 2), "f4"),
    }
    apply_adapter(loaded, Adapter(pair, 2, 2.0, ("gate_proj",), ""))


def test_adapters_beside_experts_are_refused_with_what_does_work() -> None:
    mlp = {"target_modules": ["q_proj", "gate_proj"]}

    def planned(model: LoadedModel) -> None:
        plan(model.dims, method_config("prge", mlp), batch_size=1, length_tokens=8)

    for words, call in (
        (
            "gate_proj takes no adapter",
            lambda model: open_session(model, method_config("lora", mlp), 0),
        ),
        (
            "gate_proj takes no adapter",
            lambda model: open_session(model, method_config("prge", mlp), 0),
        ),
        ("gate_proj takes no adapter", planned),
        (
            "gate_proj takes no adapter",
            lambda model: open_session(model, method_config("mesp", mlp), 0),
        ),
        ("not a linear layer", adapter),
    ):
        with pytest.raises((ModelError, ArtifactError)) as caught:
            call(tiny_model("qwen2_moe"))
        assert words in str(caught.value)


def test_the_plan_counts_all_experts_as_weights_and_the_chosen_as_work() -> None:
    sizes = {"layers": 2, "num_experts": 32, "num_experts_per_tok": 2}
    many, few = (tiny_model("qwen2_moe", **{**sizes, "num_experts": n}).dims for n in (32, 4))
    assert many.matrices > 3 * few.matrices
    assert many.active_matrices - few.active_matrices == 2 * 28 * 64  # the routers
    planned = plan(many, method_config("full"), batch_size=1, length_tokens=16)
    assert planned.parts["weights"] >= 4 * many.matrices


@pytest.mark.parametrize("target", ["android-cpu", "android-npu"])
def test_a_program_of_it_is_refused_before_weights_are_loaded(target: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "m", "qwen2_moe")
    (folder / "model.safetensors").unlink()
    job = ExportJob(ModelConfig(source=str(folder)), method_config("prge"), ExportConfig())
    assert any(
        "experts that each token chooses" in problem for problem in find_target(target).check(job)
    )
    with pytest.raises(ConfigError):
        find_target(target).export(job, tmp_path / "out")
