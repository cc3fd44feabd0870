"""Steps, resume, streaming, adapters and bad input of MeSP's torch session."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ondevice.artifact.adapter import load_adapter, save_adapter
from ondevice.core.errors import (
    ArtifactError,
    CheckpointError,
    ConfigError,
    DataError,
    ModelError,
    TrainingError,
)
from ondevice.core.registry import method_config, open_session
from ondevice.core.session import Replaying
from ondevice.models import open_model, save_tiny
from ondevice.models.load import tiny_model
from ondevice.nn.cross_entropy import Loss
from tests.methods.mesp.reference import (
    errors,
    exact,
    learned,
    opened_with,
    rows,
    session,
    sums_rounding,
)
from tests.methods.reference import in_double
from tests.sampling import part_of

SIZES = {"layers": 3, "vocab": 263}


@pytest.fixture(scope="module", params=[("llama", True), ("qwen2", False)], ids=["tied", "untied"])
def folder(request, tmp_path_factory) -> Path:
    family, tied = request.param
    return save_tiny(tmp_path_factory.mktemp("model") / family, family, 1, tied=tied, **SIZES)


def train(opened: Any, steps: int, rate: float = 1e-2, first: int = 0) -> list[float]:
    return [opened.step(*rows(3, 20, step), step, rate).loss for step in range(first, steps)]


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd", marks=pytest.mark.nightly)])
def test_the_loss_curve_of_200_steps_is_the_checkpointed_one(optimizer) -> None:
    """The paper's Table 11: losses agree in every digit that it gives, here to float32 noise: the checkpointed run is
    in float64, so that the noise is one run's and not two's."""
    curves = {}
    for gradients in ("manual", "checkpoint"):
        loaded = tiny_model()
        if gradients == "checkpoint":
            in_double(loaded.model)
        opened = opened_with(gradients, loaded, method_config("mesp", {"optimizer": optimizer}), 3)
        rate = 1e-3 if optimizer == "adamw" else 0.02
        curves[gradients] = [
            opened.step(*rows(2, 16, step % 8), step, rate).loss for step in range(200)
        ]
    np.testing.assert_allclose(curves["manual"], curves["checkpoint"], rtol=1e-4)
    assert np.mean(curves["manual"][-8:]) < 0.8 * np.mean(curves["manual"][:8])


@pytest.mark.parametrize(
    "chosen", [{}, {"optimizer": "sgd"}, {"micro_batch_size": 2}, {"gradients": "blockwise"}]
)
def test_a_resumed_run_has_the_same_bits(chosen) -> None:
    straight, first, second = (session(tiny_model(), **chosen) for _ in range(3))
    losses = train(straight, 5)
    assert train(first, 2) == losses[:2]
    second.load_state({name: value.copy() for name, value in first.state().items()})
    assert train(second, 5, first=2) == losses[2:]
    ours, theirs = straight.state(), second.state()
    assert ours.keys() == theirs.keys() and all(
        ours[name].tobytes() == theirs[name].tobytes() for name in ours
    )


@pytest.mark.parametrize("gradients", ["manual", "blockwise"])
def test_streamed_weights_match_resident_weights_bit_for_bit(folder, gradients) -> None:
    from ondevice.models import load_model

    chosen = {"gradients": gradients, "loss_tiles": 3}
    resident = session(load_model(str(folder)), **chosen)
    streamed = session(open_model(str(folder)), weight_placement="streamed", **chosen)
    assert train(resident, 3) == train(streamed, 3)
    ids, labels = rows(2, 24, 9)
    assert (
        resident.evaluate(ids, labels)[0].tobytes() == streamed.evaluate(ids, labels)[0].tobytes()
    )
    ours, theirs = resident.state(), streamed.state()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)
    streamed.close()


@pytest.mark.parametrize("once", [True, False])
def test_one_form_of_the_loss_gives_the_same_bits_and_another_differs_by_rounding(
    folder, once
) -> None:
    """On a GPU, weights in memory have the loss from whole logits, and streamed ones from tiles."""
    from ondevice.models import load_model

    resident = session(load_model(str(folder)), loss_tiles=3)
    streamed = session(open_model(str(folder)), weight_placement="streamed", loss_tiles=3)
    resident.model.loss.once = once
    ids, labels = rows(2, 24, 9)
    wanted, theirs = learned(streamed, ids, labels)
    loss, ours = learned(resident, ids, labels)
    assert loss == pytest.approx(wanted, rel=sums_rounding(labels, resident.model.dims.vocab))
    assert max(errors(ours, theirs).values()) <= 1e-5
    resident.load_state(streamed.state())
    streamed.model.loss.once = once
    assert train(resident, 3) == train(streamed, 3)
    ours, theirs = resident.state(), streamed.state()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)
    streamed.close()


def test_files_in_another_precision_are_read_as_asked(folder, tmp_path) -> None:
    from ondevice.models import load_model

    half = tmp_path / "half"
    load_model(str(folder), dtype="bfloat16").model.save_pretrained(half)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (half / name).write_bytes((folder / name).read_bytes())
    resident = session(load_model(str(half)))
    streamed = session(open_model(str(half)), weight_placement="streamed")
    assert train(resident, 2) == train(streamed, 2)
    streamed.close()


@settings(
    max_examples=part_of(15),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.integers(1, 3),
    st.integers(2, 24),
    st.integers(1, 6),
    st.sampled_from((None, 3)),
    st.integers(0, 99),
)
def test_an_evaluation_matches_torch_cross_entropy(count, length, tiles, chunk, seed) -> None:
    opened = session(
        tiny_model("qwen2"), loss_tiles=tiles, loss_chunk_tokens=chunk, mlp_chunk_tokens=chunk
    )
    ids, labels = rows(count, length, seed)
    nll, actual = opened.evaluate(ids, labels)
    loss, _ = exact(tiny_model("qwen2"), opened.adapter().tensors, 2.0, ids, labels)
    assert nll.sum() / actual.sum() == pytest.approx(loss, rel=3e-6)
    assert actual.tolist() == (labels[:, 1:] >= 0).sum(1).tolist() and nll.dtype == np.float32


def test_peft_loads_the_adapter_with_the_same_loss(tmp_path) -> None:
    """The same logits through peft as through this session's own forward pass."""
    from peft import PeftModel

    opened = session(tiny_model("qwen2"), rank=5, alpha=7.0)
    train(opened, 2)
    save_adapter(opened.adapter(), tmp_path / "adapter")
    ids, labels = rows(2, 16, 3)
    model = PeftModel.from_pretrained(tiny_model("qwen2").model, str(tmp_path / "adapter"))
    logits = model(torch.from_numpy(ids), use_cache=False).logits[:, :-1]
    wanted = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(labels[:, 1:]).flatten()
    )
    nll, count = opened.evaluate(ids, labels)
    assert nll.sum() / count.sum() == pytest.approx(float(wanted.detach()), rel=3e-6)
    other = open_session(tiny_model("qwen2"), method_config("mesp", {"rank": 5, "alpha": 7.0}), 9)
    other.load_adapter(load_adapter(tmp_path / "adapter"))
    assert other.evaluate(ids, labels)[0].tobytes() == nll.tobytes()


def test_an_adapter_of_another_shape_is_refused() -> None:
    adapter = session(tiny_model()).adapter()
    for chosen, words in (
        ({"rank": 4}, "rank"),
        ({"alpha": 3.0}, "alpha"),
        ({"target_modules": ("q_proj",)}, "layers that"),
    ):
        other = session(tiny_model(), **chosen)
        before = other.adapter().tensors
        with pytest.raises(ArtifactError) as refused:
            other.load_adapter(adapter)
        assert words in str(refused.value)
        assert all(
            before[name].tobytes() == value.tobytes()
            for name, value in other.adapter().tensors.items()
        )
    with pytest.raises(ArtifactError):
        session(tiny_model(kv_heads=4)).load_adapter(adapter)


def test_a_checkpoint_of_another_run_changes_nothing() -> None:
    first, other = session(tiny_model()), session(tiny_model(), rank=4)
    train(first, 1)
    state, before = first.state(), other.state()
    with pytest.raises(CheckpointError) as refused:
        other.load_state(state)
    assert refused.value.expected[0] == 4 and refused.value.received[0] == 8
    for opened, missing in ((session(tiny_model()), "exp_avg/"), (other, "optimizer_step")):
        rest = {name: v for name, v in state.items() if not name.startswith(missing)}
        with pytest.raises(CheckpointError) as refused:
            opened.load_state(rest)
        assert missing in str(refused.value)
    assert all(before[name].tobytes() == value.tobytes() for name, value in other.state().items())


def test_a_token_outside_the_vocabulary_is_refused() -> None:
    ids, labels = rows(2, 8, 0)
    ids[1, 3] = 260
    opened = session(tiny_model())
    for call in (lambda: opened.step(ids, labels, 0, 1e-3), lambda: opened.evaluate(ids, labels)):
        with pytest.raises(DataError) as refused:
            call()
        assert refused.value.received == 260
    assert np.isfinite(train(opened, 1)[0])


def test_files_that_are_truncated_are_refused_before_and_while_they_are_read(tmp_path) -> None:
    folder = save_tiny(tmp_path / "model", "llama", 1, **SIZES)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1000])
    with pytest.raises(ModelError) as refused:
        open_model(str(folder))
    assert "model.safetensors" in refused.value.message
    weights.write_bytes(whole)
    opened = session(open_model(str(folder)), weight_placement="streamed")
    train(opened, 1)
    state = opened.state()
    with open(weights, "r+b") as file:
        file.truncate(len(whole) // 2)
    with pytest.raises(ModelError):
        train(opened, 2, first=1)
    with open(weights, "r+b") as file:
        file.write(whole)
    with pytest.raises(TrainingError) as refused:
        opened.state()
    assert "resume" in str(refused.value.hint)
    opened.load_state(state)
    assert np.isfinite(train(opened, 2, first=1)[0])
    opened.close()


def test_files_that_lack_a_tensor_are_refused(tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    folder = save_tiny(tmp_path / "model", "llama", 1, **SIZES)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError) as refused:
        session(open_model(str(folder)), weight_placement="streamed")
    assert refused.value.expected == "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(("recompute", "said"), [("all", False), ("none", True), ((1, 0, 0), True)])
def test_memory_that_runs_out_loses_nothing(recompute, said, monkeypatch) -> None:
    """Another process took it, or it is in pieces; what a step keeps is the first that can go."""
    from ondevice.core.errors import DoesNotFitError

    opened = session(tiny_model(), micro_batch_size=1, recompute=recompute)
    train(opened, 1)
    state = opened.state()

    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has 80 GiB"
        )

    with monkeypatch.context() as patch:
        patch.setattr(Loss, "backward", fails)
        with pytest.raises(DoesNotFitError) as error:
            train(opened, 2, first=1)
    assert "mlp_chunk_tokens" in str(error.value) and "checkpoint" in str(error.value)
    assert ("method.recompute: all" in str(error.value)) == said
    opened.load_state(state)
    other = session(tiny_model(), micro_batch_size=1, recompute="all")
    train(other, 1)
    assert train(opened, 2, first=1) == train(other, 2, first=1)


def test_a_cpu_that_has_no_memory_left_loses_nothing(folder, monkeypatch) -> None:
    """An error of torch's own allocator, in the middle of a step whose weights are streamed."""
    from ondevice.core.errors import DoesNotFitError
    from ondevice.methods.mesp.torch.optimizer import Optimizer

    opened, other = (
        session(open_model(str(folder)), weight_placement="streamed") for _ in range(2)
    )
    assert train(opened, 1) == train(other, 1)
    state, flush = opened.state(), Optimizer.flush

    def fails(self: Any) -> None:
        flush(self)
        torch.empty(1 << 60, dtype=torch.uint8)

    with monkeypatch.context() as patch:
        patch.setattr(Optimizer, "flush", fails)
        with pytest.raises(DoesNotFitError) as error:
            train(opened, 2, first=1)
    assert "can't allocate memory" in str(error.value) and "mlp_chunk_tokens" in str(error.value)
    with pytest.raises(TrainingError) as refused:
        opened.state()
    assert "resume" in str(refused.value.hint)
    opened.load_state(state)
    assert train(opened, 3, first=1) == train(other, 3, first=1)
    ours, theirs = opened.state(), other.state()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)
    for one in (opened, other):
        one.close()


@pytest.mark.parametrize(("asked", "device", "package", "taken"), [
    ("auto", "cuda", True, "triton"), ("auto", "cuda", False, "torch"), ("auto", "cpu", True, "torch"),
    ("torch", "cuda", True, "torch"), ("triton", "cuda", True, "triton"),
    ("triton", "cuda", False, None), ("triton", "cpu", True, None),
])  # fmt: skip
def test_triton_is_taken_on_a_gpu_where_it_is_installed(
    asked, device, package, taken, monkeypatch
) -> None:
    from ondevice.core.errors import MissingPackageError
    from ondevice.methods.mesp.torch.model import choose

    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name: object() if package else None,
    )
    if taken is None:
        with pytest.raises(MissingPackageError) as refused:
            choose(asked, device)
        assert "triton" in refused.value.expected
    else:
        assert choose(asked, device).name == taken


def test_settings_that_exclude_each_other_are_refused() -> None:
    for values, words in (
        ({"gradients": "autodiff"}, "automatic differentiation"),
        ({"gradients": "manual"}, "leave the key out"),
        ({"target_modules": ["q_proj", "q_proj"]}, "twice"),
    ):
        with pytest.raises(ConfigError) as refused:
            method_config("mesp", values)
        assert words in refused.value.message
    with pytest.raises(ConfigError) as refused:
        session(tiny_model(), weight_placement="streamed")
    assert "open_model" in refused.value.expected
    with pytest.raises(ConfigError) as refused:
        session(tiny_model(), bits=4)
    assert refused.value.received == "cpu"
    with pytest.raises(ModelError) as refused:
        session(tiny_model("gpt2"))
    assert refused.value.received == "gpt2"
    with pytest.raises(ModelError):
        open_model("tiny:llama")
    assert not isinstance(session(tiny_model()), Replaying)


@pytest.mark.parametrize("family", ["llama", "phi3", "qwen2"])
def test_8_bit_weights_give_the_gradients_over_the_rounded_weights(family: str) -> None:
    ids, labels = rows(3, 24, 2)
    packed = session(tiny_model(family), bits=8)
    matrix = packed.weights.blocks[0].linears["o_proj"][0]
    assert matrix.weight.dtype == torch.int8
    start = packed.adapter().tensors
    loss, ours = learned(packed, ids, labels)
    rounded = tiny_model(family)
    for layer in range(rounded.dims.layers):
        for target in rounded.family.targets(layer):
            linear: Any = rounded.family.linear(layer, target)
            scale = linear.weight.data.abs().amax(1, keepdim=True) / 127
            linear.weight.data = (linear.weight.data / scale).round() * scale
    wanted, theirs = exact(rounded, start, 2.0, ids, labels)
    assert loss == pytest.approx(wanted, rel=1e-5)
    assert max(errors(ours, theirs).values()) <= 1e-5


def test_micro_batches_give_the_gradients_of_the_whole_batch() -> None:
    ids, labels = rows(5, 24, 2)
    (_, whole), (_, parts) = (
        learned(session(tiny_model(), micro_batch_size=n), ids, labels) for n in (None, 2)
    )
    assert max(errors(parts, whole).values()) < 3e-6


@pytest.mark.parametrize("placement", ["resident", "streamed"])
def test_a_run_on_the_command_line(tmp_path, placement) -> None:
    from ondevice.api.runfile import RunConfig
    from ondevice.api.train import train as train_run

    folder = save_tiny(tmp_path / "model", "qwen2", 1)
    data = tmp_path / "rows.jsonl"
    data.write_text(
        "\n".join(json.dumps({"prompt": f"{n}+1=", "completion": str(n + 1)}) for n in range(8))
    )
    values: dict[str, Any] = {
        "model": {"source": str(folder)},
        "data": {"path": data, "max_length_tokens": 32},
        "method": {"name": "mesp", "weight_placement": placement},
        "train": {"steps": 4, "batch_size": 2, "checkpoint_every": 2, "out": tmp_path / "run"},
    }
    straight = train_run(RunConfig.parse(values))
    values["train"] |= {"steps": 2, "out": tmp_path / "other"}
    train_run(RunConfig.parse(values))
    values["train"] |= {"steps": 4}
    resumed = train_run(RunConfig.parse(values), resume=True)
    ours, theirs = (
        load_adapter(run.adapter).tensors for run in (straight, resumed) if run.adapter is not None
    )
    assert (
        all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)
        and ours.keys() == theirs.keys()
    )
