"""Programs with exact gradients, made for an inference runtime, against automatic differentiation."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ondevice.api import export as artifacts
from ondevice.api.open import open_artifact
from ondevice.api.phone import push
from ondevice.api.verify import verify
from ondevice.artifact.files import read_tensors
from ondevice.artifact.manifest import read_manifest
from ondevice.core.config import ExportConfig
from ondevice.core.errors import (
    ArtifactError,
    CheckpointError,
    ConfigError,
    MissingPackageError,
    ModelError,
)
from ondevice.core.registry import method_config, open_session, target
from ondevice.methods.mesp.config import ALL_TARGETS
from ondevice.methods.mesp.lora import FlatLayout
from ondevice.methods.mesp.program import EXECUTORCH
from ondevice.methods.mesp.torch import attention
from ondevice.methods.mesp.torch.program import MespProgram
from ondevice.models import load_model
from ondevice.models.tiny import tiny_model
from tests.methods.mesp.reference import errors, exact, learned, rows, session
from tests.methods.reference import batch
from tests.programs import EXACT, SEED, config, program

pytest.importorskip("executorch.exir")
STOCK = {"aten", "dim_order_ops"}


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from(
        [
            ("llama", {}),
            ("qwen2", {"tied": False}),
            ("llama", {"attention_bias": True, "mlp_bias": True}),
        ]
    ),
    st.sampled_from([(4, 2), (4, 4), (2, 1), (1, 1)]),
    st.lists(st.sampled_from(ALL_TARGETS), min_size=1, unique=True),
    st.integers(1, 7),
    st.integers(1, 3),
    st.integers(4, 30),
    st.sampled_from((1, 1 << 17)),
    st.integers(1, 5),
)
@example(("llama", {}), (4, 4), ["q_proj", "k_proj"], 1, 1, 4, 1, 1)
def test_the_pure_function_has_autograd_s_gradients(
    kind, heads, targets, rank, count, length, numbers, tiles
) -> None:
    """To 1e-4, or what autograd itself rounds in float32: tiny softmaxes of few tokens cancel."""
    family, sizes = kind[0], {**kind[1], "heads": heads[0], "kv_heads": heads[1], "vocab": 261}
    ids, labels = rows(count, length, rank)
    opened = session(
        tiny_model(family, **sizes), rank=rank, target_modules=tuple(targets), loss_tiles=tiles
    )
    start = opened.adapter().tensors
    _, theirs = exact(tiny_model(family, **sizes), start, opened.config.scale, ids, labels)
    before, attention.CHUNK_SCORES = attention.CHUNK_SCORES, numbers
    try:
        program = MespProgram(tiny_model(family, **sizes), opened.config, (length,))
        flat = torch.from_numpy(program.layout.to_flat(start))
        loss, grad = program.gradients(torch.from_numpy(ids), torch.from_numpy(labels), flat)
        with torch.no_grad():
            nll, tokens = program.evaluate(torch.from_numpy(ids), torch.from_numpy(labels), flat)
    finally:
        attention.CHUNK_SCORES = before
    peer = session(
        tiny_model(family, **sizes), rank=rank, target_modules=tuple(targets), gradients="autodiff"
    )
    rounded, wrong = (errors(gradients, theirs) for gradients in (learned(peer, ids, labels)[1],
                                                                  program.layout.to_tensors(grad.numpy())))  # fmt: skip
    for name in theirs:
        assert wrong[name] <= max(1e-4, 3 * rounded[name]), name
    wanted, count_of = opened.evaluate(ids, labels)
    np.testing.assert_allclose(nll.detach().numpy(), wanted, rtol=2e-5)
    assert tokens.tolist() == count_of.tolist()
    assert float(loss) == pytest.approx(wanted.sum() / count_of.sum(), rel=3e-6)


@pytest.mark.parametrize("name", EXACT)
def test_verify_holds_a_program_against_autodiff(name) -> None:
    result = verify(program(name), steps=6)
    assert result["ok"] and result["steps"] == 6 and json.dumps(result)
    assert result["max_rel_gradient_error"] <= 1e-5 and result["max_rel_loss_error"] <= 1e-5
    assert result["max_abs_adapter_error"] <= 1e-4


@pytest.mark.parametrize("name", EXACT)
def test_a_stock_runtime_runs_it_in_planned_memory(name) -> None:
    manifest = read_manifest(program(name))
    assert manifest.custom_ops == () and all(
        tensor.kept == "host" for tensor in manifest.program_spec.state
    )
    for method in manifest.program_spec.methods.values():
        assert {op.split("::")[0] for op in method.ops} <= STOCK
        assert method.delegates == 0
    step = manifest.program_spec.methods["train_step"]
    size = (manifest.program_spec.adapter_size,)
    assert {
        port.shape for port in (*step.inputs, *step.outputs) if port.name in ("adapter", "exp_avg")
    } == {size}
    assert manifest.generator.distribution == "none"
    assert all(
        entry.a_offset is not None and entry.a_offset < entry.offset
        for entry in manifest.program_spec.layout
    )
    adapter = manifest.program_spec.adapter
    assert (
        adapter is not None and adapter.first is not None and manifest.program_spec.frozen is None
    )
    start = read_tensors(program(name) / adapter.first)["adapter"]
    assert start.any() and start.tobytes() == open_artifact(program(name)).flat().tobytes()


def test_depth_adds_little_more_than_block_inputs_to_the_plan() -> None:
    """One arena for every block: one more block costs its inputs and its part of the adapter."""
    from ondevice.exporters.executorch.lower import lower_portable

    planned: list[tuple[int, int]] = []
    sizes: dict[str, Any] = {"hidden": 64, "intermediate": 512, "heads": 4, "kv_heads": 2}
    targets = ("q_proj", "down_proj")  # in either half of a block
    method = method_config(
        "mesp", {"rank": 1, "optimizer": "sgd", "loss_tiles": 1, "target_modules": targets}
    )
    for layers in (1, 2):
        loaded = tiny_model("llama", 1, layers=layers, **sizes)
        built = EXECUTORCH.build(loaded, method, ExportConfig(program="whole"), SEED)
        step = built.modules[0]
        assert step.name == "train_step"
        adapter = next(tensor for tensor in built.state if tensor.role == "adapter")
        planned.append((lower_portable([step]).planned_bytes["train_step"], adapter.shape[0] * 4))
    (one, small), (two, large) = planned
    inputs = 64 * 64 * 4
    assert two - one <= inputs + 4 * (large - small) and two < 1.25 * one


@pytest.mark.parametrize("name", EXACT)
def test_the_plan_knows_the_arena(name) -> None:
    from ondevice.methods.mesp.memory import program_memory
    from ondevice.models import read_dims

    manifest, settings = read_manifest(program(name)), config(name)
    dims = read_dims(settings.model.source)
    length = max(manifest.lengths_tokens)
    planned = program_memory(dims, settings.method, manifest.batch_size, length)  # type: ignore[arg-type]
    assert sum(planned.values()) == pytest.approx(
        manifest.program_spec.methods["train_step"].planned_bytes, rel=0.35
    )


def test_the_plan_knows_the_arena_of_smollm2() -> None:
    """66.3 MB for AdamW at 128 tokens and rank 8 (benchmarks.mesp.executorch_step)."""
    from ondevice.core.dims import ModelDims
    from ondevice.methods.mesp.memory import program_memory

    smollm = ModelDims("llama", 30, 576, 1536, 9, 3, 64, 49152, True, False, 1e5, 1e-5, 8192)
    planned = program_memory(smollm, method_config("mesp", {"loss_tiles": 24}), 1, 128)
    assert sum(planned.values()) == pytest.approx(66_320_000, rel=0.1)


def test_resumed_it_has_the_same_bits_and_refuses_another_s_state() -> None:
    straight, second = open_artifact(program("exact")), open_artifact(program("exact"))
    given_rows = [batch(2, 24, seed=step) for step in range(4)]
    losses = [straight.step(*given_rows[step], step, 1e-2).loss for step in range(4)]
    assert [second.step(*given_rows[step], step, 1e-2).loss for step in range(2)] == losses[:2]
    state, third = second.state(), open_artifact(program("exact"))
    third.load_state(state)
    assert [third.step(*given_rows[step], step, 1e-2).loss for step in range(2, 4)] == losses[2:]
    ours, theirs = straight.state(), third.state()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)
    for lacking, words in (
        ("exp_avg", "exp_avg"),
        ("optimizer_step", "optimizer_step"),
        ("adapter", "adapter"),
    ):
        with pytest.raises(CheckpointError, match=words):
            third.load_state({name: value for name, value in state.items() if name != lacking})
    with pytest.raises(ConfigError, match="replay"):
        third.apply_update((1.0,), 0, 1e-2)


def test_its_adapter_is_eager_s_and_says_the_same_next_token() -> None:
    opened = open_artifact(program("exact"))
    for step in range(2):
        opened.step(*batch(2, 24, seed=step), step, 1e-2)
    source = config("exact").model.source
    eager = open_session(load_model(source), method_config("mesp", {"rank": 4}), 4)
    eager.load_adapter(opened.adapter())
    ids, labels = batch(2, 24, seed=8)
    np.testing.assert_allclose(
        opened.evaluate(ids, labels)[0], eager.evaluate(ids, labels)[0], rtol=1e-5
    )
    one, length = ids[:1], 9
    logits = opened.next_token(one, length)
    last = labels[:1].copy()
    last[:] = -100
    for token in (3, 77):
        asked = one.copy()
        asked[0, length] = last[0, length] = token
        nll = eager.evaluate(asked, last)[0][0]
        assert np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[
            token
        ] == pytest.approx(nll, rel=1e-4)
    with pytest.raises(ArtifactError, match="rank"):
        opened.load_adapter(session(load_model(source), rank=3).adapter())


def test_what_a_program_cannot_be_is_listed(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    changes: dict[str, Any] = {
        "export.quantize": "q4",
        "export.form": "stateful",
        "method.weight_placement": "streamed",
    }
    job = artifacts.export_jobs(config("exact", **changes))[0]
    problems = " ".join(target("android-cpu").check(job))
    for words in (
        "export.quantize is q4",
        "export.form is stateful",
        "method.weight_placement is streamed",
    ):
        assert words in problems
    job = artifacts.export_jobs(config("exact", **{"export.target": "android-npu"}))[0]
    assert "leave export.program at auto" in " ".join(target("android-npu").check(job))
    with pytest.raises(MissingPackageError, match="adb"):  # nothing but the tool is in the way
        push(program("exact"))
    with pytest.raises(ModelError, match="gpt2"):
        FlatLayout.build(session(tiny_model("gpt2")).parameters)
