"""The session: AdamW and SGD, resume, micro-batches, streaming, adapters, and what is refused."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

mx = pytest.importorskip("mlx.core")

from benchmarks.mesp import baselines_mlx as baselines  # noqa: E402
from ondevice.core.errors import (  # noqa: E402
    ArtifactError,
    CheckpointError,
    ConfigError,
    ModelError,
    TrainingError,
)
from ondevice.core.registry import method_config, open_session  # noqa: E402
from ondevice.core.session import Replaying  # noqa: E402
from ondevice.methods.mesp.mlx.session import Optimizer  # noqa: E402
from ondevice.methods.mesp.mlx.weights import block_file  # noqa: E402
from ondevice.models import open_model, save_tiny  # noqa: E402
from tests.methods.mesp.mlx.models import dims, random_model  # noqa: E402
from tests.methods.reference import batch  # noqa: E402


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> Path:
    """Streamed weights are converted into the cache."""
    monkeypatch.setenv("ONDEVICE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("mesp") / "model", "qwen2", layers=3, tied=False)


def opened(folder: Path, dtype: str = "float32", baseline: str | None = None, **values: Any) -> Any:
    """A session; with `baseline` one whose gradients are those of automatic differentiation."""
    session: Any = open_session(
        open_model(str(folder), dtype=dtype),
        method_config("mesp", {"rank": 4, **values}),
        3,
        backend="mlx",
    )
    if baseline is not None:
        session.model.forward_backward = partial(getattr(baselines, baseline), session.model)
    return session


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].tobytes() == other[name].tobytes() for name in one
    )


@pytest.mark.parametrize(
    "values", [{}, {"weight_decay": 0.1, "beta1": 0.8, "beta2": 0.9, "eps": 1e-3}]
)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_optimizer_updates_as_the_one_of_torch_does(optimizer, values) -> None:
    config, random = (
        method_config("mesp", {"optimizer": optimizer, **values}),
        np.random.default_rng(0),
    )
    value, parameter = (
        random.standard_normal((5, 7)).astype(np.float32),
        torch.nn.Parameter(torch.zeros(5, 7)),
    )
    ours, actual = Optimizer(config, random_model(dims()).interpreter.functions), mx.array(value)
    parameter.data.copy_(torch.from_numpy(value))
    options = {
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "weight_decay": config.weight_decay,
    }
    adamw = torch.optim.AdamW([parameter], lr=1.0, foreach=False, **options)
    for step in range(5):
        rate, gradient = 0.1 / (step + 1), random.standard_normal((5, 7)).astype(np.float32)
        ours.begin(rate)
        actual = ours.update("w", actual, mx.array(gradient))
        if optimizer == "adamw":
            adamw.param_groups[0]["lr"], parameter.grad = rate, torch.from_numpy(gradient)
            adamw.step()
        else:
            parameter.data.mul_(1 - rate * config.weight_decay).sub_(
                torch.from_numpy(gradient), alpha=rate
            )
        np.testing.assert_allclose(
            np.array(actual), parameter.detach().numpy(), rtol=2e-5, atol=1e-6
        )


@pytest.mark.parametrize(
    "values", [{}, {"optimizer": "sgd"}, {"bits": 4, "weight_placement": "streamed"}]
)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(folder, values) -> None:
    straight, first = opened(folder, **values), opened(folder, **values)
    batches = [batch(2, seed=step) for step in range(5)]
    results = [straight.step(*batches[step], step, 1e-3) for step in range(5)]
    for step in range(2):
        first.step(*batches[step], step, 1e-3)
    second = open_session(open_model(str(folder)), first.config, 99, backend="mlx")
    second.load_state({name: value.copy() for name, value in first.state().items()})
    for step in range(2, 5):
        assert second.step(*batches[step], step, 1e-3) == results[step]
    assert same(second.state(), straight.state())


@pytest.mark.parametrize(
    "values",
    [{"weight_placement": "streamed"}, {"micro_batch_size": 1}, {"micro_batch_size": 2},
     {"loss_chunk_tokens": 2, "loss_tiles": 5}, {"mlp_tiles": 1}, {"baseline": "blockwise"}, {"baseline": "checkpoint"},
     {"baseline": "autodiff"}, {"baseline": "blockwise", "weight_placement": "streamed", "micro_batch_size": 2}],
)  # fmt: skip
def test_settings_that_change_memory_change_no_number(folder, values) -> None:
    plain, other = opened(folder), opened(folder, **values)
    for step in range(3):
        ids, labels = batch(3, seed=step)
        assert other.step(ids, labels, step, 1e-2).loss == pytest.approx(
            plain.step(ids, labels, step, 1e-2).loss, rel=1e-4
        )
    ours, theirs = plain.adapter().tensors, other.adapter().tensors
    for name, value in ours.items():
        np.testing.assert_allclose(theirs[name], value, atol=2e-3, err_msg=name)
    if values == {"weight_placement": "streamed"}:
        assert same(ours, theirs)


def test_the_curve_of_60_steps_is_the_checkpointed_one(tmp_path) -> None:
    """Table 11; SGD as in the paper."""
    folder = save_tiny(tmp_path / "model", "qwen2", layers=2, tied=False)
    ours = opened(folder, optimizer="sgd")
    theirs = opened(folder, optimizer="sgd", baseline="checkpoint")
    losses = []
    for step in range(60):
        ids, labels = batch(1, seed=step % 3)
        losses.append(
            (ours.step(ids, labels, step, 0.05).loss, theirs.step(ids, labels, step, 0.05).loss)
        )
    actual = np.array(losses)
    assert actual[-3:].mean() < 0.5 * actual[:3].mean()
    np.testing.assert_allclose(actual[:, 0], actual[:, 1], rtol=1e-4)


def test_rows_of_an_evaluation_are_those_of_a_step(folder) -> None:
    session = opened(folder)
    ids, labels = batch(3)
    nll, count = session.evaluate(ids, labels)
    assert nll.dtype == np.float32 and count.dtype == np.int64
    assert count.tolist() == (labels[:, 1:] >= 0).sum(1).tolist()
    assert session.step(ids, labels, 0, 1e-2).loss == pytest.approx(
        nll.sum() / count.sum(), rel=1e-5
    )
    nothing = session.evaluate(ids, np.full_like(labels, -100))
    assert not nothing[0].any() and not nothing[1].any()
    assert np.isnan(session.step(ids, np.full_like(labels, -100), 1, 1e-2).loss)


def test_the_last_chunk_of_a_loss_need_not_be_full(folder) -> None:
    """Four labels in chunks of three; a label at a row's begin is nobody's next token."""
    ids, _ = batch(2)
    labels = np.full_like(ids, -100)
    for row, place in ((0, 0), (0, 3), (0, 5), (1, 2), (1, 4)):
        labels[row, place] = ids[row, place]
    whole, chunks = opened(folder), opened(folder, loss_chunk_tokens=3)
    filled = opened(folder, loss_chunk_tokens=3)
    filled.model.fixed_chunks = True  # as a program's session has them
    expected, *others = (session.evaluate(ids, labels) for session in (whole, chunks, filled))
    loss = whole.step(ids, labels, 0, 1e-2).loss
    for session, received in zip((chunks, filled), others, strict=True):
        assert received[1].tolist() == expected[1].tolist() == [2, 2]
        np.testing.assert_allclose(received[0], expected[0], rtol=1e-5)
        assert session.step(ids, labels, 0, 1e-2).loss == pytest.approx(loss, rel=1e-5)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no such advice")
def test_the_next_block_of_either_pass_is_read_ahead(folder, monkeypatch) -> None:
    session = opened(folder, weight_placement="streamed")
    blocks = session.model.weights.blocks
    layers = {block.file.file.fileno(): layer for layer, block in enumerate(blocks)}
    ahead: list[int] = []
    advise = os.posix_fadvise

    def note(number: int, *rest: int) -> None:
        advise(number, *rest)
        ahead.append(layers[number])

    monkeypatch.setattr(os, "posix_fadvise", note)
    session.step(*batch(2), 0, 1e-2)
    assert ahead == [1, 2, 1, 0]


def test_the_adapter_goes_out_and_in_and_to_torch(folder) -> None:
    session, other = opened(folder), opened(folder)
    for step in range(2):
        session.step(*batch(2, seed=step), step, 1e-2)
    other.load_adapter(session.adapter())
    ids, labels = batch(3, seed=9)
    assert other.evaluate(ids, labels)[0].tobytes() == session.evaluate(ids, labels)[0].tobytes()
    from ondevice.models import load_model

    config = method_config(
        "lora", {"rank": 4, "alpha": 16.0, "target_modules": session.config.target_modules}
    )
    in_torch = open_session(load_model(str(folder)), config, 0)
    in_torch.load_adapter(session.adapter())
    np.testing.assert_allclose(
        in_torch.evaluate(ids, labels)[0], session.evaluate(ids, labels)[0], rtol=2e-5
    )
    for values in ({"rank": 3}, {"alpha": 7.0}, {"target_modules": ("q_proj",)}):
        with pytest.raises(ArtifactError):
            opened(folder, **values).load_adapter(session.adapter())


def test_four_bits_are_those_of_mlx(folder) -> None:
    """Packed at load and dequantised by hand, the model is the same."""
    packed, files = opened(folder, bits=4), open_model(str(folder))
    held = packed.model.weights.blocks[1].arrays
    original = mx.load(str(files.folder / "model.safetensors"))["model.layers.1.mlp.up_proj.weight"]
    expected = mx.quantize(original, group_size=64, bits=4)
    for name, value in zip(("weight", "scales", "biases"), expected):
        assert mx.array_equal(held[f"up_proj.{name}"], value).item()
    assert packed.evaluate(*batch(2))[0][0] != opened(folder).evaluate(*batch(2))[0][0]


def test_streamed_weights_are_converted_once_and_a_truncated_file_is_named(
    folder, own_cache
) -> None:
    first = opened(folder, weight_placement="streamed", bits=4)
    (folder_of_blocks,) = (own_cache / "models" / "mlx").iterdir()
    times = {path.name: path.stat().st_mtime_ns for path in folder_of_blocks.iterdir()}
    second = opened(folder, weight_placement="streamed", bits=4)
    assert {path.name: path.stat().st_mtime_ns for path in folder_of_blocks.iterdir()} == times
    second.step(*batch(1), 0, 1e-3)
    truncated = folder_of_blocks / block_file(1)
    whole = truncated.read_bytes()
    truncated.write_bytes(
        whole[: len(whole) // 2]
    )  # the file that is open is cut off under the running session
    with pytest.raises(ModelError) as raised:
        second.step(*batch(1), 1, 1e-3)
    assert block_file(1) in raised.value.message and "resume" in str(raised.value.hint)
    with pytest.raises(ModelError) as raised:
        opened(folder, weight_placement="streamed", bits=4)
    assert raised.value.expected == f"{len(whole)} bytes"
    truncated.write_bytes(whole)
    assert opened(folder, weight_placement="streamed", bits=4).step(
        *batch(1), 0, 1e-3
    ) == first.step(*batch(1), 0, 1e-3)


@pytest.mark.parametrize("values", [{}, {"micro_batch_size": 1}])
def test_a_step_that_failed_half_way_leaves_no_state_to_save(folder, monkeypatch, values) -> None:
    session, other = opened(folder, **values), opened(folder, **values)
    for one in (session, other):
        one.step(*batch(2), 0, 1e-2)
    state, update, done = session.state(), session.optimizer.update, []

    def fails(*arguments: Any) -> Any:
        if len(done) == 5:
            raise MemoryError
        done.append(arguments)
        return update(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(session.optimizer, "update", fails)
        with pytest.raises(MemoryError):
            session.step(*batch(2, seed=1), 1, 1e-2)
    for call in (session.state, lambda: session.step(*batch(2, seed=1), 1, 1e-2)):
        with pytest.raises(TrainingError) as raised:
            call()
        assert "last checkpoint" in str(raised.value.hint)
    session.load_state(state)
    assert session.step(*batch(2, seed=1), 1, 1e-2) == other.step(*batch(2, seed=1), 1, 1e-2)
    assert same(session.state(), other.state())


def test_a_full_disk_leaves_no_half_converted_model(folder, own_cache, monkeypatch) -> None:
    from ondevice.core.errors import StorageError
    from ondevice.methods.mesp.mlx import weights

    def full(path: str, arrays: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights.mx, "save_safetensors", full)
    with pytest.raises(StorageError):
        opened(folder, weight_placement="streamed")
    monkeypatch.undo()
    monkeypatch.setenv("ONDEVICE_CACHE", str(own_cache))
    opened(folder, weight_placement="streamed").step(*batch(1), 0, 1e-3)


def test_foreign_state_settings_for_torch_and_damaged_weights_are_refused(folder, tmp_path) -> None:
    session = opened(folder)
    assert not isinstance(session, Replaying)
    session.step(*batch(1), 0, 1e-3)
    state = session.state()
    with pytest.raises(CheckpointError):
        opened(folder).load_state(
            {name: value for name, value in state.items() if not name.startswith("exp_avg_sq/")}
        )
    with pytest.raises(CheckpointError) as raised:
        opened(folder, rank=5).load_state(state)
    assert raised.value.expected[0] == 5 and raised.value.received[0] == 4
    for values in ({"activations": "host"}, {"kernels": "torch"}, {"mlp_chunk_tokens": 4}):
        with pytest.raises(ConfigError) as raised:
            opened(folder, **values)
        assert str(raised.value.expected).endswith("with MLX")
    odd = save_tiny(tmp_path / "odd", "llama", hidden=96, heads=3, kv_heads=3)
    with pytest.raises(ConfigError) as raised:
        opened(odd, bits=4)
    assert raised.value.received == "96 inputs" and "method.bits" in str(raised.value.hint)
    weights = tmp_path / "odd" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError) as raised:
        opened(odd)
    assert "truncated" in str(raised.value.received)


def test_half_precision_trains_its_adapter_in_float32(folder) -> None:
    session = opened(folder, dtype="bfloat16", bits=4)
    losses = [session.step(*batch(2, seed=1), step, 1e-2).loss for step in range(4)]
    assert losses[-1] < losses[0]
    assert {value.dtype for value in session.state().values()} == {
        np.dtype("float32"),
        np.dtype("int64"),
    }


@pytest.fixture(scope="module", params=[(4, 64), (8, 32)])
def packed(request, tmp_path_factory) -> Path:
    """A model that mlx-lm has packed."""
    utils = pytest.importorskip("mlx_lm.utils")
    place = tmp_path_factory.mktemp("packed")
    folder = save_tiny(place / "model", "qwen2", layers=2)
    model, config = utils.load_model(folder)
    bits, group = request.param
    model, config = utils.quantize_model(model, config, group_size=group, bits=bits)
    utils.save_model(place / "packed", model)
    utils.save_config(config, config_path=place / "packed/config.json")
    for path in folder.glob("tokenizer*"):
        shutil.copy(path, place / "packed" / path.name)
    return place / "packed"


@pytest.mark.parametrize("placement", ["resident", "streamed"])
def test_a_model_that_mlx_lm_packed_keeps_its_numbers(packed, placement) -> None:
    utils = pytest.importorskip("mlx_lm.utils")
    config = json.loads((packed / "config.json").read_text())
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]  # where mlx-lm looks for it
    (packed / "config.json").write_text(json.dumps(config))
    files = open_model(str(packed), packed=True)
    session = open_session(
        files, method_config("mesp", {"rank": 4, "weight_placement": placement}), 3, backend="mlx"
    )
    ids, labels = batch(2)
    labels[:] = ids
    logits = utils.load_model(packed)[0](mx.array(ids)).astype(mx.float32)[:, :-1]
    expected = (
        mx.logsumexp(logits, -1)
        - mx.take_along_axis(logits, mx.array(ids[:, 1:, None]), -1)[..., 0]
    )
    np.testing.assert_allclose(
        session.evaluate(ids, labels)[0], np.array(expected.sum(1)), rtol=1e-5
    )
    losses = [session.step(ids, labels, step, 1e-2).loss for step in range(3)]
    assert losses[-1] < losses[0]


def test_a_packed_model_is_refused_if_it_cannot_be_read(packed, tmp_path) -> None:
    with pytest.raises(ModelError):
        open_model(str(packed))
    config = json.loads((packed / "config.json").read_text())
    shutil.copytree(packed, tmp_path / "mixed")
    config["quantization"]["model.layers.0.mlp.up_proj"] = {"bits": 8, "group_size": 64}
    (tmp_path / "mixed/config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError) as raised:
        open_model(str(tmp_path / "mixed"), packed=True)
    assert "up_proj" in str(raised.value.received)


def test_a_tokenizer_of_another_model_is_refused(tmp_path) -> None:
    folder = save_tiny(tmp_path / "model", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 200}))
    with pytest.raises(ModelError):
        open_model(str(folder))


def test_the_gradient_of_all_matrices_is_clipped_together(folder) -> None:
    ids, labels = batch(2)

    def moments(limit: float | None) -> np.ndarray:
        session = opened(folder, max_grad_norm=limit)
        session.step(ids, labels, 0, 1e-3)
        state = session.state()
        return np.concatenate(
            [state[key].ravel() for key in sorted(state) if key.startswith("exp_avg/")]
        )

    whole, clipped = moments(None), moments(0.01)
    norm = 10 * float(np.linalg.norm(whole))  # a first moment is a tenth of the gradient
    assert norm > 0.02
    np.testing.assert_allclose(moments(1e9), whole, rtol=1e-6)
    np.testing.assert_allclose(clipped, whole * 0.01 / norm, rtol=1e-3, atol=1e-9)
