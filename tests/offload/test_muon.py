"""Muon in the slide: the bits of the algorithm in memory, torch's own within a rounding, resume, and refusals."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import ondevice  # noqa: E402
from ondevice.core.errors import ConfigError  # noqa: E402
from ondevice.core.registry import method_config  # noqa: E402
from ondevice.methods.slideformer.config import SlideformerConfig  # noqa: E402
from ondevice.methods.slideformer.memory import host_memory  # noqa: E402
from ondevice.methods.slideformer.torch import SlideformerSession  # noqa: E402
from ondevice.models.load import tiny_model  # noqa: E402
from ondevice.offload import engine as offload_engine  # noqa: E402
from ondevice.offload import momentum, muon  # noqa: E402
from ondevice.offload.device import Device  # noqa: E402
from ondevice.offload.store import TieredStore  # noqa: E402
from ondevice.offload.units import SINGLE, Joined, Ranks, cut  # noqa: E402
from ondevice.runtime_ops import layer_adam, native  # noqa: E402
from ondevice.runtime_ops.layer_adam import AdamStep, HostState, Moments  # noqa: E402
from tests.methods.slideformer import test_happens_before  # noqa: E402
from tests.methods.slideformer.reference import (  # noqa: E402
    LEARNING_RATE,
    InMemory,
    batches,
    differing,
    open_engine,
    run,
)
from tests.offload.faults import LateDevice  # noqa: E402

STEPS = 6
MUON: dict[str, Any] = {"optimizer": "muon", "weight_decay": 0.1}


def newton_schulz(direction: Any) -> Any:
    """Keller Jordan's `zeropower_via_newtonschulz5`."""
    x = direction.bfloat16()
    if direction.shape[0] > direction.shape[1]:
        x = x.T
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        a = x @ x.T
        b = torch.addmm(a, a, a, beta=-4.7750, alpha=2.0315)
        x = torch.addmm(x, b, x, beta=3.4445)
    return x.T if direction.shape[0] > direction.shape[1] else x


class InMemoryMuon(InMemory):
    """The reference: Muon for matrices of layers, torch's AdamW for the rest."""

    def __init__(self, config: dict[str, Any], **more: Any) -> None:
        super().__init__(config, **more)
        self.hidden = [
            name for name, p in self.parameters.items() if p.ndim == 2 and ".layers." in name
        ]
        self.momenta = {name: torch.zeros(self.parameters[name].shape) for name in self.hidden}

    def update(self, gradients: dict[str, Any], learning_rate: float) -> None:
        for name in self.hidden:
            self.muon(name, gradients.pop(name), learning_rate)
        kept = {name: self.masters[name].clone() for name in self.hidden}
        super().update(gradients, learning_rate)
        for name, value in kept.items():  # its gradient is zero there, but it decays
            self.masters[name].copy_(value)

    def muon(self, name: str, gradient: Any, learning_rate: float) -> None:
        c = self.config
        kind = {"float32": torch.float32, "bfloat16": torch.bfloat16}[c.moments]
        momentum = self.momenta[name].to(kind).float()
        momentum.lerp_(gradient, 0.05)
        self.momenta[name] = momentum
        update = newton_schulz(gradient.lerp(momentum, 0.95)).float()
        if c.compute == "bfloat16":
            update = update.bfloat16().float()
        rows, columns = gradient.shape
        factor = 0.2 * math.sqrt(max(rows, columns))
        if c.muon_rate == "original":
            factor = math.sqrt(max(1, rows / columns))
        self.masters[name].mul_(1 - learning_rate * c.weight_decay)
        self.masters[name].sub_(update * (learning_rate * factor))


def trained(config: dict[str, Any], data: Any, **sizes: Any) -> tuple[list[float], dict[str, Any]]:
    engine = open_engine(config, **sizes)
    try:
        return run(engine, data), engine.store.masters()
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({}, {"layers": 3}),
        ({"compute": "float32", "micro_batch_size": 2}, {"layers": 2, "tied": False}),
        ({"moments": "bfloat16", "window": 2}, {"layers": 4, "tied": False}),
        ({"muon_rate": "original", "compute": "float32"}, {"layers": 1}),
    ],
    ids=str,
)
def test_steps_have_the_bits_of_the_algorithm_in_memory(
    config: dict[str, Any], sizes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """AdamW is torch's, whose bits the reference has."""
    monkeypatch.setattr(layer_adam, "available", lambda: False)
    if config.get("moments"):
        monkeypatch.undo()  # torch's has no small moments
    config = {**MUON, **config}
    data = batches(STEPS)
    losses, masters = trained(config, data, **sizes)
    reference = InMemoryMuon(config, **sizes)
    expected = [
        reference.step(*batch, step, LEARNING_RATE / (1 + step / 10))
        for step, batch in enumerate(data)
    ]
    if config.get("moments") == "bfloat16":  # AdamW's are rounded by chance, in the engine only
        np.testing.assert_allclose(losses, expected, rtol=1e-2)
        return
    assert losses == expected
    assert differing(masters, reference.masters) == []


def state_of(start: Any, split: bool) -> HostState:
    """A state without moments that holds `start`."""
    if not split:
        return HostState(start.clone(), None, None, Moments.empty(0))
    high, low = (torch.zeros(start.numel(), dtype=kind) for kind in (torch.bfloat16, torch.uint16))
    layer_adam.split_(start, high, low, None)
    return HostState(None, high, low, Moments.empty(0))


def master_of(state: HostState) -> Any:
    if state.master is not None:
        return state.master
    assert state.high is not None and state.low is not None
    return layer_adam.merge(state.high, state.low, None)


@pytest.mark.parametrize("compiled", [True, False], ids=["C++", "torch"])
@pytest.mark.parametrize("split", [True, False], ids=["split", "plain"])
def test_a_unit_s_matrices_have_each_their_rate_and_decay(
    split: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of random updates of odd sizes; one matrix is frozen, one does not decay, and what is not
    a matrix stays."""
    if not compiled:
        monkeypatch.setattr(native, "library", lambda: None)
    model = tiny_model("llama", layers=1, intermediate=77)
    names = [name for name, p in model.family.model.named_parameters() if p.ndim == 2]
    frozen, undecayed = (next(n for n in names if part in n) for part in ("k_proj", "o_proj"))
    model.family.frozen, model.family.undecayed = frozenset({frozen}), frozenset({undecayed})
    unit = cut(model.family, suits=muon.suits).layers[0]
    random = torch.Generator().manual_seed(0)
    start = torch.randn(unit.numel, generator=random)
    state = state_of(start, split)
    expected = start.clone()
    for number in range(5):
        update = torch.randn(unit.numel, generator=random).bfloat16()
        adam = AdamStep(1e-2, weight_decay=0.1, step=number + 1)
        muon.step(unit, update, state, adam, "adamw", 2)
        for piece in unit.pieces:
            if len(piece.shape) < 2 or piece.name == frozen:
                continue
            part = slice(piece.offset, piece.offset + piece.numel)
            rate = 1e-2 * 0.2 * math.sqrt(max(piece.shape))
            kept = 1.0 if piece.name == undecayed else 1 - 1e-2 * 0.1
            expected[part] = expected[part] * kept - update[part].float() * rate
    assert torch.equal(master_of(state), expected)
    moved = {
        p.name for p in unit.pieces
        if not torch.equal(expected[p.offset :][: p.numel], start[p.offset :][: p.numel])
    }  # fmt: skip
    assert moved == {p.name for p in unit.pieces if len(p.shape) == 2} - {frozen}


def test_neighbours_that_are_treated_alike_are_one_pass() -> None:
    """Of a Llama layer whose matrices fill their memory: q, k, v, o, and the three of the MLP."""
    model = tiny_model("llama", layers=1, hidden=64, intermediate=128, heads=4, kv_heads=4)
    unit = cut(model.family, suits=muon.suits).layers[0]
    runs = muon._runs(unit, AdamStep(1e-2, weight_decay=0.1), "adamw")
    assert [span for span, _, _ in runs] == [slice(0, 4 * 64**2), slice(4 * 64**2, unit.matrices)]


@pytest.mark.parametrize(("rule", "name"), [("adamw", "match_rms_adamw"), ("original", "original")])
def test_torch_s_own_muon_ends_within_a_rounding(
    rule: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_adam, "available", lambda: False)
    config = {**MUON, "compute": "float32", "muon_rate": rule}
    data = batches(STEPS)
    reference = InMemoryMuon(config, layers=2)
    hidden = [reference.masters[key] for key in reference.hidden]
    peer = torch.optim.Muon(hidden, weight_decay=0.1, adjust_lr_fn=name)
    for key in reference.hidden:
        reference.masters[key].grad = torch.zeros_like(reference.masters[key])

    def step(key: str, gradient: Any, learning_rate: float) -> None:
        reference.masters[key].grad.copy_(gradient)
        if key == reference.hidden[-1]:
            peer.param_groups[0]["lr"] = learning_rate
            peer.step()

    reference.muon = step  # type: ignore[method-assign]
    expected = [reference.step(*data[0], 0, LEARNING_RATE)]
    _, masters = trained(config, data[:1], layers=2)
    for key, value in masters.items():
        torch.testing.assert_close(value, reference.masters[key], rtol=1e-6, atol=1e-6)
    for at, batch in enumerate(data[1:], 1):
        expected.append(reference.step(*batch, at, LEARNING_RATE / (1 + at / 10)))
    losses, _ = trained(config, data, layers=2)
    np.testing.assert_allclose(losses, expected, rtol=1e-4)  # bfloat16 grows a last bit


def test_late_copies_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {**MUON, "window": 2, "gradient_buffers": 2}
    data = batches(4, rows=3)
    losses, masters = trained(config, data, layers=5)
    device = LateDevice()
    monkeypatch.setattr(offload_engine, "open_device", lambda _: device)
    ours, late = trained(config, data, layers=5)
    assert device.late > 4 * 5
    assert ours == losses and differing(late, masters) == []


@pytest.mark.parametrize("more", [{}, {"window": 2, "micro_batch_size": 1}], ids=str)
def test_nothing_touches_memory_too_early(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert test_happens_before.races({**MUON, **more}, False, False, monkeypatch) == []


def test_a_momentum_that_is_not_waited_for_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checker sees memory that is read before the copy of the step before has written it."""
    monkeypatch.setattr(momentum.MuonWindow, "arrive", lambda self, slot: slot, raising=False)
    with pytest.raises(BaseException):  # noqa: B017  a race, or the engine fails
        assert test_happens_before.races({**MUON}, False, False, monkeypatch) == []


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_a_resume_has_the_same_bits(moments: str, compute: str) -> None:
    """Also where the checkpoint is written during the next step."""
    settings = {**MUON, "moments": moments, "compute": compute, "threads": 1}
    data = batches(7)

    def opened(seed: int) -> SlideformerSession:
        loaded = tiny_model("llama", seed, layers=3)
        return SlideformerSession(loaded, method_config("slideformer", settings).fixed(), "cpu")

    straight, resumed = opened(0), opened(1)
    try:
        for step, batch in enumerate(data[:3]):
            straight.step(*batch, step, LEARNING_RATE)
        state = {name: np.array(value) for name, value in straight.state().items()}
        straight.written(None)
        assert state["momentum/layer.0"].any() and "momentum/rest" not in state
        resumed.load_state(state)
        for step, batch in enumerate(data[3:], 3):
            ours = straight.step(*batch, step, LEARNING_RATE).loss
            assert resumed.step(*batch, step, LEARNING_RATE).loss == ours
        first, second = straight.state(), resumed.state()
        assert [n for n in first if first[n].tobytes() != second[n].tobytes()] == []
    finally:
        straight.close()
        resumed.close()


def test_a_layer_is_not_written_over_before_its_checkpoint_is_there() -> None:
    settings = {**MUON, "threads": 1}
    loaded = tiny_model("llama", layers=3)
    session = SlideformerSession(loaded, method_config("slideformer", settings).fixed(), "cpu")
    data = batches(2)
    try:
        session.step(*data[0], 0, LEARNING_RATE)
        state = session.state()
        before = {name: value.tobytes() for name, value in state.items()}
        session.hold()
        thread = threading.Thread(target=session.step, args=(*data[1], 1, LEARNING_RATE))
        thread.start()
        thread.join(0.5)
        assert {name: value.tobytes() for name, value in state.items()} == before
        session.written(None)
        thread.join(120)
        session.engine.flush()
        assert state["momentum/layer.0"].tobytes() != before["momentum/layer.0"]
    finally:
        session.written(None)
        session.close()


@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_planned_host_bytes_are_those_of_the_engine(moments: str) -> None:
    """Six or eight bytes a parameter of the layers' matrices."""
    sizes = {"layers": 6, "hidden": 128, "intermediate": 384, "vocab": 512}
    loaded = tiny_model("llama", **sizes)
    config = SlideformerConfig(**MUON, moments=moments, threads=1)
    dims = loaded.dims
    engine = offload_engine.OffloadEngine(loaded.family, config, "cpu")
    try:
        if not engine.store.split:
            pytest.skip("without the fused update masters are not split")
        run(engine, batches(2, 4, 16))
        planned = host_memory(dims, config, 4, 16)
        assert sum(planned.values()) == pytest.approx(engine.host_bytes, rel=0.1), planned
        layer = engine.store.states[0]
        assert layer.momentum is not None and layer.high is not None and layer.low is not None
        each = layer.momentum.element_size() + 4
        assert each == {"float32": 8, "bfloat16": 6}[moments]
        assert layer.momentum.numel() >= dims.matrices_of_block
    finally:
        engine.close()


def test_any_loop_trains_with_muon() -> None:
    """`ondevice.offload(model, optimizer="muon")` against torch's two optimizers."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        vocab_size=64, num_hidden_layers=2, num_key_value_heads=2, **sizes
    )
    model = transformers.LlamaForCausalLM(config)
    peer = transformers.LlamaForCausalLM(config)
    peer.load_state_dict(model.state_dict())
    hidden = [p for n, p in peer.named_parameters() if p.ndim == 2 and ".layers." in n]
    rest = [p for n, p in peer.named_parameters() if p.ndim != 2 or ".layers." not in n]
    optimizers = (
        torch.optim.Muon(hidden, lr=1e-2, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=1e-2, weight_decay=0.0),
    )
    engine = ondevice.offload(model, optimizer="muon", lr=1e-2, device="cpu")
    try:
        for step in range(4):
            ids = torch.randint(0, 64, (3, 9), generator=torch.Generator().manual_seed(step))
            expected = peer(input_ids=ids, labels=ids).loss
            expected.backward()
            loss = engine({"input_ids": ids, "labels": ids})
            engine.backward(loss)
            engine.step()
            for one in optimizers:
                one.step()
                one.zero_grad()
            assert float(loss) == pytest.approx(float(expected), rel=1e-5)
        loss = engine({"input_ids": ids, "labels": ids})
        with pytest.raises(ConfigError) as caught:
            engine.backward(loss, update=False)
        assert "Muon" in caught.value.message
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"moments": "int8"}, "float32 or bfloat16"),
        ({"max_grad_norm": 1.0}, "no max_grad_norm"),
        ({"resident_layers": 1}, "resident_layers: 0"),
        ({"disk_fraction": 0.5}, "disk_fraction: 0"),
    ],
    ids=str,
)
def test_settings_that_muon_does_not_go_with_are_refused_by_name(
    settings: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        open_engine({**MUON, **settings}, layers=2)
    assert expected in str(caught.value.expected)


def test_subspaces_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        method_config("lsp", {"optimizer": "muon"})
    assert "muon is slideformer's" in str(caught.value)


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
def test_shards_take_and_give_the_states_of_whole_layers(world: int, moments: str) -> None:
    """With five ranks some have no matrix' momentum of a layer, and some nothing but momenta."""
    config = SlideformerConfig(optimizer="muon", moments=moments, timeout_s=30.0).fixed()

    def store(ranks: Ranks, seed: int) -> TieredStore:
        family = tiny_model("llama", seed, layers=2, tied=False).family
        return TieredStore(cut(family, "all", muon.suits), config, Device(), None, ranks)

    whole = plain(store(SINGLE, 0))
    random = np.random.default_rng(0)
    whole = {name: random.integers(0, 99, a.shape).astype(a.dtype) for name, a in whole.items()}
    shards: dict[str, Any] = {}
    for rank in range(world):
        one = store(Ranks(rank, world), 1)
        one.load(Joined(whole))
        shards |= plain(one)
    joined = Joined(shards)
    assert joined.whole.keys() == whole.keys()
    for name, expected in whole.items():
        found = joined.get(name)
        assert found.shape == expected.shape, name
        assert np.array_equal(found[0 : len(expected)], expected), name


def plain(store: TieredStore) -> dict[str, Any]:
    """A store's arrays as a checkpoint has them."""
    arrays = store.arrays().items()
    return {
        name: (a.view(torch.uint16) if a.dtype == torch.bfloat16 else a).numpy().copy()
        for name, a in arrays
    }


@pytest.mark.parametrize("shape", [(12, 30), (30, 12), (3, 16, 8), (3, 8, 16)], ids=str)
def test_a_stack_of_matrices_is_made_orthogonal_one_by_one(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    ours = muon.orthogonal(x).float()
    each = x[None] if x.ndim == 2 else x
    for found, one in zip(ours[None] if x.ndim == 2 else ours, each, strict=True):
        torch.testing.assert_close(found, newton_schulz(one).float(), rtol=0.02, atol=0.01)
        values = torch.linalg.svdvals(found)
        assert float(values.min()) > 0.4 and float(values.max()) < 1.4


def test_filters_of_single_channels_are_not_matrices() -> None:
    assert muon.suits((64, 32)) and muon.suits((8, 64, 32))
    assert not muon.suits((64,)) and not muon.suits((64, 1, 3))
