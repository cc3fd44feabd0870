"""MeSP as functions of one block: exact gradients, weights that are never copied, and every way in
which a file or a step can fail."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ondevice.api.open import open_artifact
from ondevice.api.phone import push
from ondevice.api.verify import verify
from ondevice.artifact.files import write_tensors
from ondevice.artifact.manifest import MANIFEST_NAME, read_manifest
from ondevice.artifact.weights import ALIGNMENT_BYTES, WEIGHTS_NAME, MappedWeights, write_weights
from ondevice.core.errors import ArtifactError, CheckpointError, MissingPackageError, TrainingError
from ondevice.core.program import FUSED
from ondevice.core.registry import method_config, open_session
from ondevice.exporters.executorch import blocks
from ondevice.models import load_model
from tests.conformance.table import TABLE
from tests.methods.reference import batch
from tests.program_tables import BLOCKS
from tests.programs import model, parameters, program

pytest.importorskip("executorch.exir")
EXACT_BLOCKS = [name for name in BLOCKS if "8da" not in name]
OF_THE_TABLE = {row.program for row in TABLE}
"""What tests/conformance holds against autodiff, as each export does before it is written."""
VERIFIED = [name for name in EXACT_BLOCKS if name not in OF_THE_TABLE or name == "blocks"]
STOCK = {"aten", "dim_order_ops", "executorch_prim", "quantized_decomposed"}


def opened(name: str = "blocks", folder: Path | None = None) -> Any:
    return open_artifact(program(name) if folder is None else folder)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the artifact whose weights may be damaged; the manifest's hashes are not in the
    way."""
    folder = tmp_path / "näme with space"
    shutil.copytree(program("blocks"), folder)
    return folder


def damaged(folder: Path) -> Any:
    """A session over a folder whose files are not held against their hashes."""
    from ondevice.exporters.executorch.blocks import BlocksSession

    return BlocksSession(folder, read_manifest(folder, check_files=False))


@pytest.mark.parametrize("name", parameters(VERIFIED))
def test_verify_holds_a_program_against_autodiff(name) -> None:
    result = verify(program(name), steps=6)
    assert result["ok"] and result["steps"] == 6 and json.dumps(result)
    assert result["max_rel_gradient_error"] <= 1e-5 and result["max_rel_loss_error"] <= 1e-5
    assert result["min_gradient_cosine"] >= 1 - 1e-6 and result["max_abs_adapter_error"] <= 1e-4


@pytest.mark.parametrize("name", parameters(EXACT_BLOCKS))
def test_one_small_program_of_a_stock_runtime_serves_every_depth(name) -> None:
    manifest, weights = read_manifest(program(name)), MappedWeights(program(name) / WEIGHTS_NAME)
    spec = manifest.program_spec
    assert spec.shape == "blocks" and spec.weights == WEIGHTS_NAME and manifest.custom_ops == ()
    stock = {key: method for key, method in spec.methods.items() if not key.startswith(FUSED)}
    assert all(op.split("::")[0] in STOCK for method in stock.values() for op in method.ops)
    trained = [
        method
        for key, method in spec.methods.items()
        if key.startswith(("block_backward", "head_gradient"))
    ]
    assert {method.delegates > 0 for method in trained} == {manifest.quantize == "none"}, (
        "XNNPACK packs for many rows"
    )
    assert manifest.quantize != "none" or all(
        "aten::mm.out" not in method.ops for method in trained
    ), "g W is outside"
    assert all(
        method.delegates == 0
        for key, method in spec.methods.items()
        if key.endswith(("logits", "decode"))
    )
    assert {f"{layer}" for layer in range(spec.layers)} == {
        key.split(".")[2] for key in weights if ".layers." in key
    }
    content = (program(name) / manifest.program).read_bytes()
    for key in weights:
        if key.endswith("proj.weight") or "embed" in key:
            assert np.asarray(weights.whole(key)).tobytes()[:64] not in content, (
                f"{key} is in the program, too"
            )
    (block,) = (
        method
        for key, method in spec.methods.items()
        if key == f"block_forward_{manifest.batch_size}x{max(manifest.lengths_tokens)}"
    )
    assert next(port.name for port in block.inputs if port.role == "frozen").startswith(
        "model.layers.{layer}."
    )


def test_weights_are_handed_over_where_the_file_is_mapped() -> None:
    session = opened()
    start = np.frombuffer(session.weights._map, np.uint8).ctypes.data
    end = start + len(session.weights._map)
    for name, tensor in session._frozen_tensors.items():
        assert (
            start <= tensor.data_ptr() < end
            and tensor.data_ptr() % ALIGNMENT_BYTES == start % ALIGNMENT_BYTES
        ), name
    frozen = {name for method in session.spec.methods.values() for port in method.inputs if port.role == "frozen"
              for name in [port.name.format(layer=layer) for layer in range(session.spec.layers)]}  # fmt: skip
    assert frozen == set(session._frozen_tensors)


def test_evaluation_and_the_next_token_are_eager_s() -> None:
    session = opened()
    for step in range(2):
        session.step(*batch(2, 24, seed=step), step, 1e-2)
    eager = open_session(
        load_model(str(model("two layers"))), method_config("mesp", {"rank": 4}), 4
    )
    eager.load_adapter(session.adapter())
    for length in (16, 24):
        ids, labels = batch(3, length, seed=8)
        for ours, theirs in zip(session.evaluate(ids, labels), eager.evaluate(ids, labels)):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    ids, length = batch(1, 24, seed=9)[0], 9
    logits = session.next_token(ids, length)
    labels = np.full_like(ids, -100)
    for token in (3, 77, session.spec.vocab - 1):
        ids[0, length] = labels[0, length] = token
        wanted = eager.evaluate(ids, labels)[0][0]
        mine = np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[token]
        assert mine == pytest.approx(wanted, rel=1e-4)
    assert "head_logits" not in opened("blocks, sgd").spec.methods
    with pytest.raises(ArtifactError) as caught:
        opened("blocks, sgd").next_token(batch(1, 16)[0], 3)
    assert "next_token=true" in str(caught.value.hint)


def test_rows_without_a_label_count_nothing_and_many_labels_go_through_the_head_in_turn() -> None:
    session = opened()
    eager = open_session(
        load_model(str(model("two layers"))), method_config("mesp", {"rank": 4}), 4
    )
    eager.load_adapter(session.adapter())
    ids, labels = batch(3, 24, seed=1)
    labels[0] = -100
    labels[1:] = ids[1:]  # 46 labels: more than the head takes at once
    assert session.head.rows < 46
    for ours, theirs in zip(session.evaluate(ids, labels), eager.evaluate(ids, labels)):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    before = session.state()
    result = session.step(ids[:2], np.full_like(ids[:2], -100), 0, 1e-2)
    assert result.loss == 0.0 and np.array_equal(session.state()["adapter"], before["adapter"])


def test_resumed_it_has_the_same_bits_and_refuses_another_s_state() -> None:
    straight, second, third = opened(), opened(), opened()
    rows = [batch(2, (16, 24)[step % 2], seed=step) for step in range(4)]
    losses = [straight.step(*rows[step], step, 1e-2).loss for step in range(4)]
    assert [second.step(*rows[step], step, 1e-2).loss for step in range(2)] == losses[:2]
    state = second.state()
    kept = {name: value.copy() for name, value in state.items()}
    third.load_state(state)
    assert [third.step(*rows[step], step, 1e-2).loss for step in range(2, 4)] == losses[2:]
    ours, theirs = straight.state(), third.state()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)
    assert all(state[name].tobytes() == kept[name].tobytes() for name in kept), (
        "a loaded state is the caller's"
    )
    with pytest.raises(CheckpointError) as error:
        third.load_state({name: value for name, value in state.items() if name != "exp_avg"})
    assert "exp_avg" in error.value.message


def test_a_wrong_weights_file_is_an_error_that_says_what_is_wrong(copy) -> None:
    path = copy / WEIGHTS_NAME
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ArtifactError) as caught:
        damaged(copy)
    assert str(len(whole) // 2) in str(caught.value)
    path.write_bytes(b"\x00" * 100)
    with pytest.raises(ArtifactError):
        damaged(copy)
    path.unlink()
    with pytest.raises(ArtifactError) as caught:
        damaged(copy)
    assert WEIGHTS_NAME in str(caught.value)
    other = MappedWeights(program("blocks, sgd") / WEIGHTS_NAME)  # another model's
    shutil.copy(other.path, path)
    with pytest.raises(ArtifactError) as caught:
        damaged(copy)
    assert "float32" in str(caught.value)
    shutil.copy(program("blocks, int8") / WEIGHTS_NAME, path)  # the same model's, in 8 bits
    with pytest.raises(ArtifactError) as caught:
        damaged(copy)
    assert "float32" in str(caught.value) and "int8" in str(caught.value)
    write_tensors(path, {"x": np.zeros(3, np.float32), "y": np.zeros(3, np.float32)})
    with pytest.raises(ArtifactError) as caught:
        MappedWeights(path)
    assert caught.value.expected is not None and isinstance(caught.value.received, int)
    with pytest.raises(ArtifactError) as caught:
        open_artifact(copy)  # and before all of these, the manifest's hash
    assert WEIGHTS_NAME in caught.value.message


def test_weights_come_back_aligned_and_in_order(tmp_path) -> None:
    random = np.random.default_rng(0)
    tensors = {"b": random.normal(size=(3, 5)).astype(np.float32), "a": random.integers(-9, 9, 7).astype(np.int8),
               "é": random.normal(size=1).astype(np.float32)}  # fmt: skip
    write_weights(tmp_path / "w", tensors)
    mapped = MappedWeights(tmp_path / "w")
    for name, value in tensors.items():
        np.testing.assert_array_equal(mapped.tensor(name, value.shape, str(value.dtype)), value)
    from safetensors.numpy import load_file

    assert set(tensors) <= set(load_file(tmp_path / "w"))
    with pytest.raises(ArtifactError):
        mapped.tensor("b", (3, 5), "int8")
    with pytest.raises(ArtifactError):
        mapped.tensor("b", (3, 6), "float32")


def test_a_step_that_fails_leaves_no_half_state(monkeypatch) -> None:
    session, rows = opened(), batch(2, 16)
    before = session.state()
    run, calls = session._call_block, []

    def memory_ends(name: str, *arguments: Any, **more: Any) -> Any:
        calls.append(name)
        if (
            name.startswith("block_backward")
            and sum(call.startswith("block_backward") for call in calls) == 2
        ):
            raise MemoryError("no more")
        return run(name, *arguments, **more)

    monkeypatch.setattr(session, "_call_block", memory_ends)
    with pytest.raises(MemoryError):
        session.step(*rows, 0, 1e-2)
    monkeypatch.undo()
    for forbidden in (
        session.state,
        lambda: session.step(*rows, 1, 1e-2),
        lambda: session.evaluate(*batch(3, 16)),
    ):
        with pytest.raises(TrainingError) as error:
            forbidden()
        assert "last checkpoint" in str(error.value.hint)
    session.load_state(before)
    straight = opened()
    assert session.step(*rows, 0, 1e-2).loss == straight.step(*rows, 0, 1e-2).loss
    assert session.state()["adapter"].tobytes() == straight.state()["adapter"].tobytes()


def test_a_loss_that_is_no_number_updates_nothing() -> None:
    session, rows = opened(), batch(2, 16)
    state = session.state()
    broken = {**state, "adapter": np.full_like(state["adapter"], np.nan)}
    session.load_state(broken)
    with pytest.raises(TrainingError) as error:
        session.step(*rows, 0, 1e-2)
    assert np.isnan(error.value.received)
    session.load_state(state)  # and goes on from what a checkpoint has
    assert np.isfinite(session.step(*rows, 0, 1e-2).loss)


def test_other_shapes_are_refused_by_name() -> None:
    session = opened()
    with pytest.raises(ArtifactError) as error:
        session.step(*batch(2, 17), 0, 1e-2)
    assert error.value.received == 17
    with pytest.raises(ArtifactError) as error:
        session.step(*batch(3, 16), 0, 1e-2)
    assert (error.value.expected, error.value.received) == (2, 3)


def test_the_app_refuses_a_program_that_lacks_a_function(copy) -> None:
    for name in ("blocks", "blocks, int8", "blocks, q4", "blocks, 8da8w", "blocks, 8da4w"):
        with pytest.raises(MissingPackageError):  # nothing but the tool is in the way
            push(program(name))
    path = copy / MANIFEST_NAME
    manifest = json.loads(path.read_text())
    methods = manifest["program_spec"]["methods"]
    for name in [name for name in methods if name.startswith("block_backward")]:
        del methods[name]
    path.write_text(json.dumps(manifest))
    with pytest.raises(ArtifactError) as error:
        push(copy)
    assert error.value.expected == "a program of whole steps, or of blocks"


def test_gelu_in_its_tanh_form_stays_outside_xnnpack() -> None:
    torch = pytest.importorskip("torch")
    from ondevice.core.manifest import port
    from ondevice.core.program import ProgramModule
    from ondevice.exporters.executorch.lower import lower_portable

    hidden = (port("hidden", "hidden", (16, 8)),)
    method = ProgramModule("gelu", torch.nn.GELU(approximate="tanh"), hidden, hidden)
    lowered = lower_portable([method], packed_from_rows=16)
    assert (lowered.delegates, lowered.ops["gelu"]) == ({"gelu": 0}, ["aten::gelu.out"])


IN_OPS = [
    *("blocks", "blocks, int8", "blocks, q4", "blocks, 8da8w", "blocks, 8da4w"),
    "blocks of gemma3_text",
]


@pytest.mark.parametrize("name", parameters(IN_OPS))
def test_functions_in_this_projects_ops_learn_what_those_of_the_stock_runtime_do(name) -> None:
    folder = program(name)
    manifest = read_manifest(folder)
    limit = 3e-2 if manifest.quantize.startswith("8da") else 1e-5  # another rounding of activations
    results = []
    for stock in (False, True):
        session = blocks.BlocksSession(folder, manifest, stock=stock)
        assert session.fused is not stock
        rows, length = manifest.batch_size, max(manifest.lengths_tokens)
        losses = [
            session.step(*batch(rows, length, seed=number), number, 1e-2).loss
            for number in range(3)
        ]
        nll, counts = session.evaluate(*batch(manifest.eval_batch_size, length, seed=7))
        results.append((np.array(losses), nll, counts, session.flat().copy()))
        session.close()
    (losses, nll, counts, flat), (stock_losses, stock_nll, stock_counts, stock_flat) = results
    np.testing.assert_allclose(losses, stock_losses, rtol=limit)
    np.testing.assert_allclose(nll, stock_nll, rtol=limit)
    assert (counts == stock_counts).all()
    assert np.linalg.norm(flat - stock_flat) <= max(limit, 1e-4) * np.linalg.norm(stock_flat)


def test_a_machine_without_a_compiler_runs_the_stock_functions_and_says_so(
    monkeypatch, caplog
) -> None:
    def no_compiler() -> None:
        raise MissingPackageError("no C++ compiler was found")

    from ondevice.exporters.executorch import session as sessions

    monkeypatch.setattr(sessions, "load_executorch_ops", no_compiler)
    session = opened()
    assert not session.fused and "stock runtime's kernels" in caplog.text
    assert np.isfinite(session.step(*batch(2, 16), 0, 1e-3).loss)
