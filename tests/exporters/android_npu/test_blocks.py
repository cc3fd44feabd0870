"""MeSP's blocks on the NPU: exact gradients in QNN's simulator against float32 autodiff, and steps
that overflow."""

from __future__ import annotations

import json
import logging
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ondevice.api import export as artifacts
from ondevice.api.chat import open_chat
from ondevice.api.open import open_artifact
from ondevice.api.verify import verify
from ondevice.artifact.manifest import read_manifest
from ondevice.artifact.weights import WEIGHTS_NAME, MappedWeights
from ondevice.core.errors import (
    ArtifactError,
    CheckpointError,
    ConfigError,
    TrainingError,
    VerificationError,
)
from ondevice.core.registry import method_config, open_session
from ondevice.core.registry import target as find_target
from ondevice.exporters.executorch import blocks
from ondevice.generation.generator import generate
from ondevice.methods.mesp import npu
from ondevice.methods.mesp.block_functions import BlockFunctions
from ondevice.methods.mesp.torch.weights import halves
from ondevice.models import load_model, save_tiny
from ondevice.nn.adapters import adapted
from tests.methods.reference import batch
from tests.program_tables import NPU_BLOCKS
from tests.programs import config, marks, model, needs_qnn, program

pytest.importorskip("executorch.exir")
from ondevice.exporters.executorch.blocks_model import BlocksModel

LENGTH, RATE = 16, 1e-2


@pytest.fixture(autouse=True)
def qnn_extra() -> None:
    needs_qnn()


@pytest.fixture
def session() -> Any:
    opened = open_artifact(program("npu blocks"))
    yield opened
    opened.close()


def rows(seed: int) -> tuple[np.ndarray, np.ndarray]:
    return batch(2, LENGTH, seed=seed)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=marks(name) + [pytest.mark.slow] * ("blocks of" in name))
        for name in NPU_BLOCKS
    ],
)
def test_every_gradient_in_the_simulator_is_float32_s(name) -> None:
    result = verify(program(name))
    assert result["ok"] and json.dumps(result) and result["backend"] == "qnn-htp-simulator"
    assert result["min_gradient_cosine"] >= 0.9995 and result["max_rel_loss_error"] <= 2e-3
    assert result["soc"] == config(name).export.soc[0] and result["broken"] == []


def test_each_layer_has_its_weights_in_a_file_of_its_own() -> None:
    folder = program("npu blocks")
    manifest = read_manifest(folder)
    spec = manifest.program_spec
    assert (
        manifest.soc == "SM8650"
        and spec.shape == "blocks"
        and spec.loss_scale == 1024.0
        and spec.layers == 2
    )
    assert manifest.batch_size == manifest.eval_batch_size == 2
    for name in ("block_forward_2x16", "block_backward_2x16"):
        method = spec.methods[name]
        assert method.program == "layers/{layer}.pte" and method.delegates == 1
        assert not any(port.role == "frozen" for port in method.inputs)
        assert {share.backend: share.calls for share in manifest.partition[name]}["QnnBackend"] == 1
    kernels = {op.split("::")[0] for method in spec.methods.values() for op in method.ops}
    assert kernels <= {"aten", "dim_order_ops", "executorch_prim"}, "a stock runtime lacks some"
    assert not any(".layers." in name for name in MappedWeights(folder / WEIGHTS_NAME)), (
        "they are in the delegates"
    )
    first, second = ((folder / "layers" / f"{layer}.pte").read_bytes() for layer in range(2))
    assert first != second and {f"layers/{layer}.pte" for layer in range(2)} <= set(manifest.files)
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert "layers/" in text and "loss_scale" in text and "SM8650" in text


def test_evaluation_is_eager_s(session) -> None:
    session.step(*rows(0), 0, RATE)
    eager = open_session(load_model(str(model("wide"))), method_config("mesp", {"rank": 4}), 4)
    eager.load_adapter(session.adapter())
    ids, labels = rows(8)
    labels[0, : LENGTH // 2] = -100
    for ours, theirs in zip(session.evaluate(ids, labels), eager.evaluate(ids, labels)):
        np.testing.assert_allclose(ours, theirs, rtol=2e-3)


def test_the_next_token_is_eager_s() -> None:
    session = open_artifact(program("npu blocks, sgd"))
    ids, length = batch(1, LENGTH, seed=9)[0], 9
    logits = session.next_token(ids, length)
    loaded = load_model(str(model("wide qwen2")))
    with torch.inference_mode():
        expected = loaded.model(torch.from_numpy(ids[:, :length])).logits[0, -1].numpy()
    np.testing.assert_allclose(logits, expected, atol=2e-2 * np.abs(expected).max())
    session.close()


def test_a_prompt_is_read_in_blocks_up_to_the_end_of_the_context(session) -> None:
    """33 tokens are more than a call takes; those of the answer go through the same function, one
    by one."""
    adapter = session.adapter()
    rng = np.random.default_rng(0)
    changed = {
        n: (rng.normal(size=v.shape) / 8).astype(np.float32) for n, v in adapter.tensors.items()
    }
    adapter = replace(
        adapter, tensors=adapter.tensors | {n: v for n, v in changed.items() if ".lora_B." in n}
    )
    loaded, ids = load_model(str(model("wide"))), rng.integers(40, 200, 40).tolist()
    logits = {}
    for name, used in (("adapted", adapter), ("base", None)):
        session.restart() if used is None else session.load_adapter(used)
        writer = BlocksModel(session)
        logits[name] = np.stack(
            [writer.feed(ids[:33]), *(writer.feed([token]) for token in ids[33:])]
        )
        with adapted(loaded, used) if used else nullcontext(), torch.no_grad():
            expected = loaded.model(torch.tensor([ids])).logits[0, 32:].numpy()
        np.testing.assert_allclose(
            logits[name], expected, rtol=0, atol=1e-2 * np.abs(expected).max()
        )
    assert np.abs(logits["base"] - logits["adapted"]).max() > 0.1 * np.abs(logits["base"]).max()
    with pytest.raises(ConfigError) as error:
        writer.feed([1])
    assert "tokens in all" in error.value.expected
    writer.read = 33  # a conversation that goes on otherwise
    np.testing.assert_allclose(
        writer.feed(ids[33:]), expected[-1], rtol=0, atol=1e-2 * np.abs(expected).max()
    )
    many = {n: v * 1e6 for n, v in adapter.tensors.items()}
    session.load_adapter(replace(adapter, tensors=many))
    with pytest.raises(ArtifactError) as error:
        BlocksModel(session).feed(ids[:3])
    assert "inf or nan" in error.value.received


def test_chat_answers_on_the_npu_as_eager_does() -> None:
    chat, messages = open_chat(str(program("npu blocks"))), [{"role": "user", "content": "Hi"}]
    loaded = load_model(str(model("wide")))
    assert chat.generate(messages, max_new_tokens=6) == generate(loaded, messages, max_new_tokens=6)
    manifest = read_manifest(program("npu blocks"))
    assert 0 < manifest.check["max_rel_logit_error"] < 1e-2
    assert manifest.program_spec.methods["block_prefill"].program == "layers/{layer}.pte"
    assert not {"block_decode", "embed_decode", "embed_1x16"} & set(manifest.program_spec.methods)


def test_a_step_that_overflows_is_left_out_and_the_scale_halved(
    session, caplog, monkeypatch
) -> None:
    session.step(*rows(0), 0, RATE)  # so that moments are not zero
    before = session.state()
    session.loss_scale = before_scale = 2.0**40
    with caplog.at_level(logging.WARNING):
        result = session.step(*rows(1), 1, RATE)
    after = session.state()
    assert (
        np.isfinite(result.loss)
        and session.loss_scale == before_scale / 2 == after["loss_scale"][0]
    )
    assert "nothing was updated" in caplog.text and "loss scale" in caplog.text
    for name in ("adapter", "exp_avg", "exp_avg_sq", "optimizer_step"):
        assert after[name].tobytes() == before[name].tobytes(), name
    session.loss_scale = 1024.0
    session.step(*rows(1), 1, RATE)
    other = open_artifact(program("npu blocks"))
    other.load_state(before)
    other.step(*rows(1), 1, RATE)
    assert other.state()["adapter"].tobytes() == session.state()["adapter"].tobytes()
    monkeypatch.setattr(blocks, "SMALLEST_LOSS_SCALE", 2.0**40)
    kept, session.loss_scale = session.state(), 2.0**40
    with pytest.raises(TrainingError) as caught:
        session.step(*rows(2), 2, RATE)
    assert "lower learning rate" in str(caught.value.hint)
    assert session.state()["adapter"].tobytes() == kept["adapter"].tobytes()
    other.close()


def test_the_gradient_does_not_depend_on_the_scale(session) -> None:
    start, moments = session.state(), []
    for scale in (64.0, 1024.0):
        session.load_state({**start, "loss_scale": np.array([scale], np.float32)})
        session.step(*rows(0), 0, 0.0)
        moments.append(session.state()["exp_avg"].astype(np.float64))
    small, large = moments
    assert np.linalg.norm(small - large) <= 2e-3 * np.linalg.norm(large)


def test_a_resume_has_the_same_bits_and_the_same_scale(session) -> None:
    other = open_artifact(program("npu blocks"))
    session.loss_scale = 256.0
    losses = [session.step(*rows(step), step, RATE).loss for step in range(2)]
    state = session.state()
    losses += [session.step(*rows(2), 2, RATE).loss]
    with pytest.raises(CheckpointError) as error:
        other.load_state({name: value for name, value in state.items() if name != "loss_scale"})
    assert "loss_scale" in str(error.value)
    other.load_state(state)
    assert other.loss_scale == 256.0 and other.step(*rows(2), 2, RATE).loss == losses[2]
    ours, theirs = session.state(), other.state()
    assert ours.keys() == theirs.keys() and all(
        ours[name].tobytes() == theirs[name].tobytes() for name in ours
    )
    other.restart()
    assert other.loss_scale == 1024.0
    other.close()


def test_a_layer_that_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    from ondevice.exporters.android_npu.session import NpuBlocksSession

    folder = tmp_path / "näme with space"
    shutil.copytree(program("npu blocks"), folder)
    layer = folder / "layers" / "1.pte"
    whole = layer.read_bytes()
    for content in (whole[: len(whole) // 2], b"no program"):
        layer.write_bytes(content)
        with pytest.raises(ArtifactError) as caught:
            open_artifact(folder)
        assert "layers/1.pte" in caught.value.message
        damaged = NpuBlocksSession(folder, read_manifest(folder, check_files=False))
        with pytest.raises(ArtifactError) as caught:
            damaged.evaluate(*rows(0))
        assert "1.pte" in str(caught.value) and "export it again" in str(caught.value.hint)
        damaged.close()
    layer.unlink()
    with pytest.raises(ArtifactError) as caught:
        open_artifact(folder)
    assert "1.pte" in str(caught.value)


def test_a_wrong_program_is_not_ok(monkeypatch) -> None:
    from ondevice.exporters.android_npu.session import NpuBlocksSession

    run = NpuBlocksSession._call_block

    def swapped(
        self, name: str, given: dict[str, Any], layer: int = 0, first: int = 0
    ) -> dict[str, Any]:
        return run(self, name, given, 1 - layer if name.startswith("block_") else layer, first)

    monkeypatch.setattr(
        NpuBlocksSession, "_call_block", swapped
    )  # each layer with the other's weights and adapter
    result = verify(program("npu blocks"))
    assert not result["ok"] and any("min_gradient_cosine" in line for line in result["broken"])
    assert any("does not generate what eager PyTorch does" in line for line in result["broken"])


def test_layers_turn_each_by_its_own_table() -> None:
    """The compiled graph is one, and rotation a constant of each layer: Gemma's tables have two
    bases, and a layer of SmolLM3 turns by an angle of 0."""
    for source, turns in (
        ("wide gemma3_text", (True, True)),
        ("two layers of smollm3", (True, False)),
    ):
        loaded = load_model(str(model(source)))
        functions = BlockFunctions(loaded, config("npu blocks of qwen3").method)
        tables = loaded.family.positions(LENGTH, "cpu", torch.float32)
        bodies = [npu.ForwardBody(functions, layer, 1, LENGTH) for layer in range(2)]
        assert not torch.equal(bodies[0].sin, bodies[1].sin)
        for layer, body in enumerate(bodies):
            cos, sin = halves(loaded.family.layer_position(layer, tables))
            assert torch.equal(body.sin, sin if turns[layer] else torch.zeros_like(sin))
            assert torch.equal(body.cos, cos if turns[layer] else torch.ones_like(cos))


@pytest.mark.parametrize("name", ["npu", "npu blocks"])
@pytest.mark.parametrize(
    ("family", "word"),
    [("granite", "a factor of"), ("olmo2", "over all heads"), ("lfm2", "convol")],
)
def test_traits_that_were_not_compared_are_refused_by_name(tmp_path, family, word, name) -> None:
    folder = save_tiny(tmp_path / family, family, hidden=64, heads=2)
    (job,) = artifacts.export_jobs(config(name, **{"model.source": str(folder)}))
    problems = find_target("android-npu").check(job)
    assert any(word in problem and "for the NPU" in problem for problem in problems)


def test_a_window_shorter_than_the_rows_is_refused() -> None:
    (job,) = artifacts.export_jobs(config("npu gemma3_text", **{"export.lengths_tokens": [17]}))
    (problem,) = find_target("android-npu").check(job)
    assert "a sliding window" in problem


def test_code_of_other_delegates_is_refused() -> None:
    from ondevice.exporters.android_npu.layers import with_code

    content = (program("npu blocks") / "layers" / "0.pte").read_bytes()
    with pytest.raises(VerificationError) as error:
        with_code(content, {b"another": b"code"})
    assert error.value.expected == "1 delegates"


def test_every_reason_is_listed_at_once() -> None:
    wrong = config(
        "npu blocks",
        **{
            "export.next_token": True,
            "export.quantize": "w8",
            "export.lengths_tokens": [16, 24],
            "method.bits": 4,
        },
    )
    problems = " ".join(find_target("android-npu").check(artifacts.export_jobs(wrong)[0]))
    for word in (
        "next_token needs batch_size 1",
        "float16 weights",
        "one length",
        "bits",
    ):
        assert word in problems, word
    with pytest.raises(ConfigError):
        verify(program("npu blocks"), directions=8)
