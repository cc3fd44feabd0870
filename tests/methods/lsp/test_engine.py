"""The engine against the same method in memory, and against itself with other schedules and places for weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from benchmarks.lsp.adamw import LspAdamW  # noqa: E402
from ondevice.core.errors import ModelError  # noqa: E402
from ondevice.methods.lsp import engine as lsp_engine  # noqa: E402
from ondevice.methods.lsp.config import LspConfig, ProjectorConfig  # noqa: E402
from ondevice.methods.lsp.engine import LspEngine  # noqa: E402
from ondevice.methods.lsp.projected import split  # noqa: E402
from ondevice.models.load import tiny_model  # noqa: E402
from ondevice.offload import engine as offload_engine  # noqa: E402
from ondevice.offload.presumed import Presumed  # noqa: E402
from ondevice.offload.updater import Updater  # noqa: E402
from tests.methods.slideformer.reference import batches  # noqa: E402
from tests.offload.faults import LaggingDevice, LateDevice  # noqa: E402

PROJECTORS: dict[str, Any] = {
    "learned": True,
    "subspace": 24,
    "nonzeros": 4,
    "check_every": 5,
    "learn_rounds": 1,
    "learn_steps": 2,
}
ADAM: dict[str, Any] = {"weight_decay": 0.1, "eps": 1e-4}
RATE, STEPS = 1e-2, 8
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"layers": 3, "tied": False}),
    "tied": ("llama", {"layers": 3}),
    "qwen2": ("qwen2", {"layers": 2, "tied": False}),
    "gpt2": ("gpt2", {"layers": 2}),
    "granitemoe": ("granitemoe", {"layers": 2}),
    "lfm2_moe": ("lfm2_moe", {"layers": 2, "tied": False}),
    "qwen2_moe": ("qwen2_moe", {"layers": 2}),
    "qwen3_moe": ("qwen3_moe", {"layers": 2, "tied": False}),
}
SAME: list[dict[str, Any]] = [
    {"schedule": "zero"}, {"weight_placement": "host", "window": 2}, {"weight_placement": "host", "window": 4},
    {"weight_dtype": "float32"},
    {"activations": "host"}, {"gradient_buffers": 2},
    {"disk_fraction": 1.0, "disk_masters": True}, {"max_grad_norm": 1e9, "clip": "global"},
    {"bus_limit_gb_per_s": 0.5},
]  # fmt: skip
"""Settings that change no bit."""


def settings(**values: Any) -> LspConfig:
    chosen = {
        "compute": "float32",
        "timeout_s": 120.0,
        "threads": 1,
        **PROJECTORS,
        **ADAM,
        **values,
    }
    return LspConfig(**chosen)


def train(
    name: str, data: list[Any], device: str = "cpu", **values: Any
) -> tuple[list[float], dict[str, Any], Any]:
    """Losses, weights and overlap of an engine that is opened and closed for it."""
    family, sizes = FAMILIES[name]
    engine = LspEngine(tiny_model(family, **sizes).family, settings(**values), device)
    try:
        losses = [engine.step(ids, labels, step, RATE) for step, (ids, labels) in enumerate(data)]
        engine.flush()
        return losses, engine.weights(), engine.overlap
    finally:
        engine.close()


def in_memory(
    name: str, data: list[Any], projectors: dict[str, Any], coded: bool = False
) -> tuple[list[float], dict[str, Any]]:
    family, sizes = FAMILIES[name]
    model = tiny_model(family, **sizes).model.float().requires_grad_(True)
    optimizer = LspAdamW(model, ProjectorConfig(**projectors), **ADAM)
    if coded:
        rest = id(model.model.norm.weight)
        optimizer.sent = lambda p, gradient: gradient if id(p) == rest else in_codes(gradient)
    losses = []
    for ids, labels in data:
        loss = model(torch.from_numpy(ids), labels=torch.from_numpy(labels)).loss
        loss.backward()
        losses.append(loss.item())
        optimizer.step(RATE)
    return losses, {key: value.detach() for key, value in model.named_parameters()}


def kept_as(weights: str) -> dict[str, str]:
    """Settings for weights in that type, or on the host."""
    return {"weight_placement": "host"} if weights == "host" else {"weight_dtype": weights}


def furthest(a: dict[str, Any], b: dict[str, Any]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


FOLLOWED = {**PROJECTORS, "learned": False, "projector_values": "followed", "check_every": 3}


@pytest.mark.parametrize("name", ["llama", "tied", "qwen3_moe"])
def test_followed_projectors_are_those_in_memory(name: str) -> None:
    """Across two refreshes."""
    data = batches(STEPS)
    losses, weights = in_memory(name, data, FOLLOWED)
    ours, trained, _ = train(name, data, **FOLLOWED)
    np.testing.assert_allclose(ours, losses, rtol=1e-4)
    assert furthest(trained, weights) < 5e-3


def in_codes(gradient: Any) -> Any:
    """A gradient as blocks of 32 numbers in 4 bits, written once more; each parameter begins a
    block of its own."""
    flat = gradient.double().reshape(-1)
    read = torch.zeros_like(flat)
    for low in range(0, len(flat), 32):
        block = flat[low : low + 32]
        scale = (block[block.abs().argmax()] / -8).to(torch.bfloat16).double()
        if scale:
            read[low : low + 32] = (block / scale).round().clamp(-8, 7) * scale
    return read.to(gradient.dtype).view(gradient.shape)


@pytest.mark.parametrize("name", ["llama", "tied", "qwen3_moe"])
def test_gradients_in_4_bits_are_those_in_memory(name: str) -> None:
    """Across a refresh, and compared with what the codes change: a last bit moves a code by one,
    which steps add up."""
    data = batches(4)
    losses, weights = in_memory(name, data, FOLLOWED, coded=True)
    ours, trained, _ = train(name, data, gradient_dtype="int4", **FOLLOWED)
    _, exact, _ = train(name, data, **FOLLOWED)
    np.testing.assert_allclose(ours, losses, rtol=1e-4)
    off = sum(float((trained[key] - weights[key]).norm()) for key in trained)
    assert off < 0.02 * sum(float((trained[key] - exact[key]).norm()) for key in trained)


def test_an_expert_without_tokens_follows_the_first_gradient_that_it_has() -> None:
    """A check of the first step cannot see it, and the next one is far away."""
    family, sizes = FAMILIES["qwen3_moe"]
    config = settings(**{**FOLLOWED, "check_every": 1000})
    engine = LspEngine(tiny_model(family, **sizes).family, config, "cpu")
    try:
        turns = []
        for step, (ids, _) in enumerate(batches(5, rows=1)):
            few = ids[:, : 2 + 2 * step]
            engine.step(few, few, step, RATE)
            turns.append([m.turn for part in engine.parts for _, m, _ in part.matrices])
    finally:
        engine.close()
    assert min(turns[0]) == 0 < max(turns[0])
    assert sum(turns[-1]) > sum(turns[0]) and max(turns[-1]) == 1


@pytest.mark.parametrize("name", ["llama", "tied", "qwen2"])
@pytest.mark.parametrize("optimizer", ["auto", "torch"])
def test_the_engine_is_the_method_in_memory(name: str, optimizer: str) -> None:
    """Across a refresh."""
    data = batches(STEPS)
    losses, weights = in_memory(name, data, PROJECTORS)
    ours, trained, _ = train(name, data, optimizer=optimizer)
    np.testing.assert_allclose(ours, losses, rtol=2e-5)
    assert furthest(trained, weights) < 2e-3


@pytest.mark.parametrize("name", ["granitemoe", "lfm2_moe", "qwen2_moe", "qwen3_moe"])
def test_each_expert_changes_in_a_subspace_of_its_own_as_in_memory(name: str) -> None:
    """Across a refresh; what crosses the bus of an expert's matrix is its change."""
    data = batches(STEPS)
    losses, weights = in_memory(name, data, PROJECTORS)
    family, sizes = FAMILIES[name]
    engine = LspEngine(tiny_model(family, **sizes).family, settings(), "cpu")
    try:
        ours = [engine.step(*batch, step, RATE) for step, batch in enumerate(data)]
        engine.flush()
        trained = engine.weights()
        names = {matrix.name for part in engine.parts for _, matrix, _ in part.matrices}
        numbers = [matrix.number for part in engine.parts for _, matrix, _ in part.matrices]
    finally:
        engine.close()
    np.testing.assert_allclose(ours, losses, rtol=2e-5)
    assert furthest(trained, weights) < 2e-3
    for side in ("gate_up_proj", "down_proj"):
        own = {
            one for one in names if one.startswith("model.layers.1.") and f".experts.{side}." in one
        }
        assert len(own) == 6
    assert len(set(numbers)) == len(numbers), "two matrices draw the same projectors"


@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe"])
def test_every_parameter_of_a_mixture_is_trained(name: str) -> None:
    """The router's weight is a matrix of no linear module; it is updated exactly as AdamW does."""
    family, sizes = FAMILIES[name]
    before = {
        key: value.detach().clone()
        for key, value in tiny_model(family, **sizes).model.named_parameters()
    }
    assert max(before["model.layers.0.mlp.gate.weight"].shape) > PROJECTORS["subspace"]
    _, trained, _ = train(name, batches(3))
    still = [key for key, value in trained.items() if torch.equal(value, before[key])]
    assert still == []
    exact = ProjectorConfig(**PROJECTORS | {"subspace": 1 << 20})
    _, adamw, _ = train(name, batches(1), subspace=exact.subspace)
    _, ours, _ = train(name, batches(1))
    for key in before:
        if ".mlp.gate.weight" in key:  # a first step depends on the first gradient only
            torch.testing.assert_close(ours[key], adamw[key], rtol=1e-4, atol=1e-6)


def test_a_projected_weight_of_no_linear_module_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    family = tiny_model("llama").family
    every = {id(parameter) for parameter in family.model.parameters()}
    monkeypatch.setattr(lsp_engine, "split", lambda *given: split(*given[:8], every, *given[9:]))
    monkeypatch.setattr(lsp_engine, "is_linear", lambda module: False)
    with pytest.raises(ModelError) as caught:
        LspEngine(family, settings(), "cpu")
    assert "self_attn.q_proj.weight" in caught.value.message


def test_drawn_projectors_stay_in_the_first_step() -> None:
    engine = LspEngine(tiny_model("llama").family, settings(learned=False, check_every=2), "cpu")
    try:
        matrices = [matrix for part in engine.parts for _, matrix, _ in part.matrices]
        for step, batch in enumerate(batches(3)):
            engine.step(*batch, step, RATE)
            assert {matrix.turn for matrix in matrices} == {step // 2}
    finally:
        engine.close()


def test_the_bias_is_checked_on_the_first_micro_batch_with_labels() -> None:
    [(ids, labels)] = batches(1, rows=4)
    labels[:2] = -100
    engine = LspEngine(tiny_model("llama").family, settings(micro_batch_size=2), "cpu")
    try:
        engine.step(ids, labels, 0, RATE)
        seen = {name: check.before for name, check in engine.bias_checks.items()}
    finally:
        engine.close()
    engine = LspEngine(tiny_model("llama").family, settings(), "cpu")
    try:
        engine.step(ids[2:], labels[2:], 0, RATE)
        expected = {name: check.before for name, check in engine.bias_checks.items()}
    finally:
        engine.close()
    assert min(expected.values()) > 0.1
    assert seen == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", ["llama", "tied"])
def test_a_head_in_tiles_is_trained_as_in_memory(name: str) -> None:
    """Of several tiles a check gathers the whole gradient; between checks no tile is kept."""
    data = batches(STEPS)
    losses, weights = in_memory(name, data, PROJECTORS)
    ours, trained, _ = train(name, data, loss_tiles=3)
    np.testing.assert_allclose(ours, losses, rtol=2e-5)
    assert furthest(trained, weights) < 2e-3


@pytest.mark.parametrize("name", ["llama", "tied", "gpt2"])
def test_schedules_and_placements_change_no_bit(name: str) -> None:
    data = batches(7)
    losses, weights, _ = train(name, data)
    for values in SAME:
        ours, trained, _ = train(name, data, **values)
        assert ours == losses and furthest(trained, weights) == 0, values


@pytest.mark.sampled
@pytest.mark.parametrize(
    "values",
    [{}, {"schedule": "zero"}, {"weight_placement": "host", "window": 2}, {"weight_dtype": "nf4"},
     {"activations": "host"},
     {"project": False}, {"project": False, "schedule": "zero"}, {"max_grad_norm": 0.1, "clip": "global"},
     {"micro_batch_size": 2, "compute": "bfloat16"}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("name", ["llama", "tied"])
def test_late_copies_give_the_same_bits(
    name: str, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The events between computation, copies and updates: every copy runs as late as it may, through a refresh."""
    data = batches(7, rows=3)
    losses, weights, _ = train(name, data, **values)
    device = LateDevice()
    monkeypatch.setattr(offload_engine, "open_device", lambda _: device)
    ours, trained, _ = train(name, data, **values)
    assert device.late > 7 * 2 * 3
    assert ours == losses and furthest(trained, weights) == 0


@pytest.mark.parametrize(
    "values", [{"schedule": "zero"}, {"max_grad_norm": 1e-2, "clip": "global"}], ids=str
)
def test_the_end_of_a_backward_pass_waits_for_what_is_still_computed(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates that begin together begin after the last gradient, also where all others have left long before it."""
    data = batches(3)
    losses, weights, _ = train("llama", data, **values)
    monkeypatch.setattr(offload_engine, "open_device", lambda _: LaggingDevice(0.05))
    ours, trained, _ = train("llama", data, timeout_s=10.0, **values)
    assert ours == losses and furthest(trained, weights) == 0


@pytest.mark.parametrize("limit", [1e9, 0.5])
def test_layers_updated_before_the_norm_is_known_change_no_bit(
    limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no step is clipped, and where some are."""
    data = batches(4)
    values = {"max_grad_norm": limit, "clip": "global", "check_every": 2}
    presumed = []
    begin = Presumed.begin

    def noting(self: Any, *rest: Any) -> Any:
        presumed.append(begin(self, *rest))
        return presumed[-1]

    monkeypatch.setattr(Presumed, "begin", noting)
    monkeypatch.setattr(Updater, "end_backward", pausing(Updater.end_backward))
    losses, weights, _ = train("llama", data, **values)
    if limit > 1:
        assert presumed and all(state is not None for state in presumed)
    monkeypatch.setattr(LspConfig, "presumed", 0)
    waits, trained, _ = train("llama", data, **values)
    assert waits == losses and furthest(trained, weights) == 0


def pausing(end: Any) -> Any:
    """End a backward pass when all gradients that came are looked at."""

    def late(self: Any) -> None:
        self.worker.submit("a pause", lambda: None, 1 << 30).wait()
        end(self)

    return late


@pytest.mark.parametrize("name", ["llama", "tied", "gpt2"])
def test_without_projectors_it_is_adamw(name: str) -> None:
    data = batches(STEPS)
    losses, weights = in_memory(name, data, {**PROJECTORS, "subspace": 10_000})
    results = [
        train(name, data, project=False, schedule=schedule) for schedule in ("zero", "layerwise")
    ]
    for ours, trained, _ in results:
        np.testing.assert_allclose(ours, losses, rtol=2e-5)
        assert furthest(trained, weights) < 2e-3
    assert results[0][0] == results[1][0] and furthest(results[0][1], results[1][1]) == 0


def test_micro_batches_add_up() -> None:
    """Drawn projectors, so that no look at a part of the batch comes between."""
    data, values = batches(4), {"learned": False, "check_every": 100, "threshold": 1e9}
    whole, _, _ = train("llama", data, **values)
    parts, _, _ = train("llama", data, micro_batch_size=2, **values)
    np.testing.assert_allclose(parts, whole, rtol=1e-4)


@pytest.mark.parametrize("weights", ["compute", "float32", "host", "int8", "nf4"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_new_projectors_leave_the_weights_as_they_are(weights: str, compute: str) -> None:
    """A step with a learning rate of almost zero that looks: what was learned before is kept, up to a rounding."""
    engine = LspEngine(
        tiny_model("llama", layers=2).family, settings(**kept_as(weights), compute=compute), "cpu"
    )
    data = batches(6)
    for step in range(5):
        engine.step(*data[step], step, RATE)
    engine.flush()
    before, turns = engine.weights(), [m.turn for part in engine.parts for _, m, _ in part.matrices]
    engine.step(*data[5], 5, 1e-30)
    engine.flush()
    after = engine.weights()
    assert all(
        m.turn == turn + 1
        for turn, m in zip(turns, (m for p in engine.parts for _, m, _ in p.matrices))
    )
    engine.close()
    exact = compute == "float32" or weights == "float32"
    table = {"model.embed_tokens.weight"} if compute == "bfloat16" else set()
    for name, value in before.items():
        allowed = 1e-6 if exact and name not in table else 2**-7
        assert float((after[name] - value).abs().max()) <= allowed * float(value.abs().max()), name


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_weight_decay_reaches_the_changes_that_a_quantised_base_cannot_take(kind: str) -> None:
    """With steps of length nothing, a weight shrinks by the decay only, its older changes too."""
    chosen = settings(weight_dtype=kind, check_every=2, threshold=0.0, weight_decay=0.5)
    engine = LspEngine(tiny_model("llama").family, chosen, "cpu")
    try:
        for step, batch in enumerate(batches(5)):
            engine.step(*batch, step, 0.1)
        engine.flush()
        assert all(part.older for part in engine.parts if part.unit.kind == "layer")
        before = {name: value.clone() for name, value in engine.weights().items()}
        still = engine.config.model_copy(update={"eps": 1e20})
        engine.updater.clipping.config = still
        engine.step(*batches(1)[0], 5, 0.1)
        engine.flush()
        after = engine.weights()
    finally:
        engine.close()
    for name, value in before.items():
        torch.testing.assert_close(after[name], value * (1 - 0.1 * 0.5), rtol=1e-5, atol=1e-6)


def test_a_fold_in_chunks_is_a_fold(monkeypatch: pytest.MonkeyPatch) -> None:
    data = batches(7)
    losses, weights, _ = train("llama", data)
    monkeypatch.setattr(lsp_engine, "FOLDED", 64 * 7)
    ours, trained, _ = train("llama", data)
    np.testing.assert_allclose(ours, losses, rtol=1e-6)
    assert furthest(trained, weights) < 1e-4


@pytest.mark.parametrize("weights", ["int8", "nf4"])
def test_a_quantised_base_learns_nearly_as_well(weights: str) -> None:
    """One batch again and again: the loss falls nearly as far as over an exact base, through two refreshes."""
    data = batches(1) * 14
    exact, _, _ = train("llama", data, weight_dtype="compute")
    ours, _, _ = train("llama", data, weight_dtype=weights)
    assert exact[0] - exact[-1] > 0.5
    assert ours[0] - ours[-1] > 0.8 * (exact[0] - exact[-1])


def test_bfloat16_follows_float32() -> None:
    data = batches(1) * 6
    exact, _, _ = train("llama", data, check_every=100)
    ours, _, _ = train("llama", data, check_every=100, compute="bfloat16")
    np.testing.assert_allclose(ours, exact, rtol=0.05)


def test_few_bytes_cross_the_bus() -> None:
    """Both ways: s x s numbers a matrix, norms as they are."""

    def crossed(**values: Any) -> int:
        family, sizes = FAMILIES["llama"]
        engine = LspEngine(tiny_model(family, **sizes).family, settings(**values), "cpu")
        for step, (ids, labels) in enumerate(batches(3)):
            engine.step(ids, labels, step, RATE)
            engine.flush()  # so that no answer arrives in the next step, which would count it
        engine.close()
        assert engine.overlap is not None
        return engine.overlap.h2d_bytes + engine.overlap.d2h_bytes

    assert crossed() < 0.35 * crossed(project=False, activations="device")


def test_sliding_weights_come_once_up_and_once_down_but_for_the_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sliding = settings(weight_placement="host", window=2)
    engine = LspEngine(tiny_model("llama", layers=6).family, sliding, "cpu")
    fetched, copy, size = list[str](), engine.device.copy, engine.units.layers[0].numel

    def counted(lane: Any, target: Any, source: Any) -> None:
        if source.numel() == size:
            fetched.append(lane)
        copy(lane, target, source)

    monkeypatch.setattr(engine.device, "copy", counted)
    engine.step(*batches(1)[0], 1, RATE)
    assert fetched == ["h2d"] * (2 * 6 - 2)
    engine.close()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "values",
    [{}, {"schedule": "zero"}, {"weight_placement": "host", "window": 2}, {"project": False}],
    ids=str,
)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_gpu_follows_the_cpu(name: str, values: dict[str, Any]) -> None:
    """Drawn projectors: learned ones amplify a last bit. With graphs from the fourth step on, and without."""
    data, fixed = batches(14, rows=3), {"learned": False, "check_every": 6, **values}
    expected, _, _ = train(name, data, **fixed)
    for graphs in (False, True):
        ours, _, _ = train(name, data, device="cuda", cuda_graphs=graphs, **fixed)
        np.testing.assert_allclose(ours, expected, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_graphs_on_a_gpu_change_little(compute: str) -> None:
    """Through a refresh with learned projectors; kernels may be others in a graph."""
    data, results = batches(14, rows=3), []
    for graphs in (False, True):
        family, sizes = FAMILIES["llama"]
        engine = LspEngine(
            tiny_model(family, **sizes).family,
            settings(compute=compute, check_every=6, cuda_graphs=graphs),
            "cuda",
        )
        try:
            results.append(
                [engine.step(ids, labels, step, RATE) for step, (ids, labels) in enumerate(data)]
            )
            assert bool(engine.graphs.made) == graphs
        finally:
            engine.close()
    np.testing.assert_allclose(
        results[1][:7], results[0][:7], rtol=1e-3 if compute == "float32" else 2e-2
    )
    np.testing.assert_allclose(results[1], results[0], rtol=5e-2)
