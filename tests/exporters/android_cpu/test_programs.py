"""Exported training programs in the real runtime against eager PyTorch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ondevice.api.export import export
from ondevice.api.open import open_artifact
from ondevice.api.phone import push
from ondevice.api.verify import verify
from ondevice.artifact.adapter import load_adapter, save_adapter
from ondevice.artifact.manifest import read_manifest
from ondevice.core.errors import ArtifactError, CheckpointError
from ondevice.exporters.base import random_batches
from ondevice.methods.prge.program import build_program
from ondevice.models import load_model
from tests.conformance.table import TABLE
from tests.eager_program import computing_in_pytorch
from tests.methods.prge.refreshes import hold_two_refreshes
from tests.program_tables import PROGRAMS
from tests.programs import config, marks, model, program, report

pytest.importorskip("executorch.exir")
STOCK = {"aten", "dim_order_ops"}
"""Namespaces of the portable kernels that every build of the runtime has."""
SLOW = {"8da4w", "q4 untied, tiled, labelled"}
OF_THE_TABLE = {row.program for row in TABLE}
"""What tests/conformance holds against eager PyTorch, step for step and after a restart."""
EVERY = {
    name: pytest.param(name, marks=[*marks(name), *([pytest.mark.slow] if name in SLOW else [])])
    for name in PROGRAMS
}
REPLAYED = [
    EVERY[name]
    for name in ("fused loss, one-sided", "subspace, stateful", "q4 untied, tiled, labelled")
]
VERIFIED = [EVERY[name] for name in PROGRAMS if name not in OF_THE_TABLE or name == "functional"]


@pytest.mark.parametrize("name", VERIFIED)
def test_verify_holds_a_program_against_eager(name) -> None:
    result = verify(program(name), steps=7)
    loose = name == "8da4w"
    assert result["ok"] and result["steps"] == 7 and json.dumps(result)
    assert result["max_rel_loss_error"] <= (5e-2 if loose else 1e-4)
    assert result["max_rel_loss_error_replayed"] <= (5e-2 if loose else 2e-6)
    assert result["update_error"] <= 1  # see `prge.rounding`
    if config(name).method.optimizer == "adam":  # no product of gradients, which may be large
        assert result["max_abs_adapter_error"] <= 1e-6
    assert result["gradient_correlation"] >= (0.9 if loose else 0.99999)


@pytest.mark.parametrize("name", EVERY.values())
def test_the_manifest_says_what_the_program_is(name) -> None:
    manifest, settings = read_manifest(program(name)), config(name)
    state, stateful = manifest.program_spec.state, settings.export.form == "stateful"
    names = ["adapter", "subspace", "moments"] if settings.method.factors else ["adapter"]
    names += ["moments"] if settings.method.optimizer == "adam" else []
    assert [
        tensor.name for tensor in state
    ] == names and manifest.quantize == settings.export.quantize
    assert {tensor.kept for tensor in state} == {"program" if stateful else "host"}
    assert manifest.lengths_tokens == tuple(sorted(settings.export.lengths_tokens))
    assert (
        manifest.method == settings.method.model_dump(mode="json") and manifest.generator.seed == 4
    )
    assert set(manifest.files) >= {"program.pte", "README.md", "tokenizer/tokenizer.json"}
    assert (
        manifest.check["adapter_round_trip"] is True
        and manifest.check["max_rel_loss_error_replayed"] < 1e-2
    )
    assert bool(manifest.custom_ops) == settings.export.uses_ops
    kinds = {"train_step", "evaluate", "apply_update"}
    kinds |= (
        {f"{access}_{name}" for access in ("get", "set") for name in names} if stateful else set()
    )
    kinds |= {"next_token"} if settings.export.next_token else set()
    if len(manifest.lengths_tokens) == 2:
        kinds |= {"train_step_16", "evaluate_16"}
    assert manifest.program_spec.methods.keys() == kinds
    inputs = [port.name for port in manifest.program_spec.methods["train_step"].inputs]
    assert ("adapter" in inputs) == (not stateful)
    readme = (program(name) / "README.md").read_text()
    assert "train_step" in readme and ("set_adapter" in readme) == (stateful)


def test_weights_are_stored_once() -> None:
    parameters = load_model(str(model("tied llama"))).dims.parameters
    assert parameters > 4001 * 32  # most of them are the tied embedding
    # a second copy of the weights, for the other method or for the head, would be 0.5 MB more
    assert report("functional").program_bytes < parameters * 4 * 1.15 + 150_000
    manifest = read_manifest(program("functional"))
    assert (
        report("functional").program_bytes
        == (program("functional") / manifest.program).stat().st_size
    )


def test_four_bits_are_a_fraction_of_the_bytes() -> None:
    body = load_model(str(model("one layer"))).dims.block_parameters
    quantized = report("q4").program_bytes
    assert (
        quantized < body * 5.1 / 8 + 261 * 36 + 120_000
    )  # 4 bits, and 16 + 16 for each group of 32


def test_no_custom_op_is_in_a_program_for_a_stock_runtime() -> None:
    manifest = read_manifest(program("functional"))
    assert manifest.custom_ops == () and manifest.generator.lowering == "aten"
    ops = {op for method in manifest.program_spec.methods.values() for op in method.ops}
    assert {op.split("::")[0] for op in ops} <= STOCK, ops
    assert manifest.program_spec.methods["train_step"].delegates >= 1


@pytest.mark.parametrize("name", REPLAYED)
def test_a_restart_goes_on_with_the_same_bits(name) -> None:
    straight, first, second = (open_artifact(program(name)) for _ in range(3))
    batches = list(random_batches(straight, 200, 7))
    results = [straight.step(*batch, step, 0.05) for step, batch in enumerate(batches)]
    assert [first.step(*batch, step, 0.05) for step, batch in enumerate(batches[:3])] == results[:3]
    second.load_state(first.state())
    assert [
        second.step(*batch, step + 3, 0.05) for step, batch in enumerate(batches[3:])
    ] == results[3:]
    assert (
        second.flat().tobytes() == straight.flat().tobytes() and np.abs(straight.flat()).max() > 0
    )
    with pytest.raises(CheckpointError) as error:
        second.load_state({"adapter": np.zeros(3, np.float32), "seed": np.array([4])})
    assert error.value.received == "float32 [3]"


def test_a_program_takes_new_subspaces_as_eager_does(tmp_path) -> None:
    def opened() -> Any:
        return open_artifact(program("subspace, answers"))

    hold_two_refreshes(config("subspace, answers"), opened, tmp_path)


@pytest.mark.parametrize("name", REPLAYED)
def test_a_replay_of_the_scalars_gives_the_same_bits(name) -> None:
    trained, replayed = open_artifact(program(name)), open_artifact(program(name))
    for step, batch in enumerate(random_batches(trained, 200, 5)):
        result = trained.step(*batch, step, 0.05)
        replayed.apply_update(result.projected_gradients, step, 0.05)
    assert replayed.flat().tobytes() == trained.flat().tobytes()


@pytest.mark.parametrize("name", ["functional", "stateful"])
def test_the_adapter_goes_out_and_in_before_any_method_is_loaded(name, tmp_path) -> None:
    trained, other = open_artifact(program(name)), open_artifact(program(name))
    for step, batch in enumerate(random_batches(trained, 200, 3)):
        trained.step(*batch, step, 0.05)
    save_adapter(trained.adapter(), tmp_path / "adapter")
    other.load_adapter(load_adapter(tmp_path / "adapter"))
    random = np.random.default_rng(0)
    for length in trained.lengths_tokens:  # each bucket is a method that is loaded now
        ids = random.integers(0, 200, (trained.eval_batch_size, length))
        for ours, theirs in zip(trained.evaluate(ids, ids), other.evaluate(ids, ids), strict=True):
            assert ours.tobytes() == theirs.tobytes()
        assert trained.evaluate(ids, ids)[1].tolist() == [length - 1] * len(ids)
    ids = random.integers(0, 200, (trained.batch_size, 16))
    assert other.step(ids, ids, 9, 0.05) == trained.step(ids, ids, 9, 0.05)


def test_what_the_program_does_not_take_is_named() -> None:
    session = open_artifact(program("functional"))
    ids = np.zeros((2, 16), np.int64)
    with pytest.raises(ArtifactError) as error:
        session.step(np.zeros((2, 17), np.int64), np.zeros((2, 17), np.int64), 0, 0.1)
    assert error.value.received == 17
    with pytest.raises(ArtifactError) as error:
        session.step(ids[:1], ids[:1], 0, 0.1)
    assert (error.value.expected, error.value.received) == (2, 1)
    assert np.isfinite(session.step(ids, ids, 0, 0.1).loss)


def test_eight_bit_activations_are_warned_about(tmp_path: Path) -> None:
    """Of its functions before they are lowered; the nightly job lowers them and verifies them."""
    with computing_in_pytorch(checked=True):
        found = export(config("8da4w"), tmp_path / "program")
    (warning,) = found.warnings
    measured = found.check["gradient_correlation_float32"]
    assert f"correlate {measured:.2f} with float32" in warning and "q4" in warning
    # 4 bits and 8 bits of this model change its gradients, and do not turn them round
    assert 0.3 < measured < 0.9999 and found.check["gradient_correlation"] > 0.9
    assert report("q4").warnings == ()


def test_the_next_token_is_eager_s_before_and_after() -> None:
    settings, session = config("functional"), open_artifact(program("functional"))
    loaded = load_model(settings.model.source)
    eager = build_program(loaded, settings.method, settings.export, settings.train.seed)
    random = np.random.default_rng(1)
    ids = random.integers(0, 4001, (1, 16))
    for length, scale in ((1, 0.0), (9, 0.0), (9, 0.3), (16, 0.3)):
        flat = (random.normal(size=session.manifest.program_spec.adapter_size) * scale).astype(
            np.float32
        )
        session.load_state({"adapter": flat, "seed": np.array([session.seed])})
        received = session.next_token(ids, length)
        with torch.inference_mode():
            hidden = eager.hidden(torch.from_numpy(ids), torch.from_numpy(flat))
            expected = (hidden[0, length - 1] @ loaded.family.head_weight.T).numpy()
        assert received.shape == (4001,) and received.argmax() == expected.argmax()
        np.testing.assert_allclose(received, expected, atol=1e-5 * np.abs(expected).max())
    padded = ids.copy()
    padded[:, 9:] = 7
    np.testing.assert_allclose(session.next_token(padded, 9), session.next_token(ids, 9), atol=1e-5)
    session.close()
    with pytest.raises(ArtifactError) as error:
        open_artifact(program("q4")).next_token(ids, 3)
    assert "export.next_token=true" in str(error.value.hint)


def test_a_program_that_keeps_its_state_is_not_pushed() -> None:
    with pytest.raises(ArtifactError) as error:
        push(program("stateful"))
    assert error.value.expected == "form functional"
