"""`clip: global` with layers that are updated before the norm is known: the bits of a run that waits for it."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ondevice.core.errors import TrainingError  # noqa: E402
from ondevice.methods.slideformer.config import SlideformerConfig  # noqa: E402
from ondevice.methods.slideformer.torch import SlideformerSession  # noqa: E402
from ondevice.models.load import tiny_model  # noqa: E402
from ondevice.models.save import as_numpy  # noqa: E402
from ondevice.offload.config import RECORD_BYTES  # noqa: E402
from ondevice.offload.presumed import Presumed  # noqa: E402
from ondevice.offload.units import unit_key  # noqa: E402
from ondevice.offload.updater import Updater  # noqa: E402
from ondevice.runtime_ops import layer_adam  # noqa: E402
from tests.methods.slideformer.reference import InMemory, batches, differing, open_engine  # noqa: E402

RATE = 1e-2
STEPS = 6
LAYERS = 5
needs_compiler = pytest.mark.skipif(not layer_adam.available(), reason="no C++ compiler")


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many updates were presumed, and how many of these taken back; a backward pass ends when all that came is
    looked at."""
    counted = {"presumed": 0, "dropped": 0}
    end, begin, take, update = (
        Updater.end_backward,
        Presumed.begin,
        Presumed.take,
        Updater._update,
    )

    def late(self: Any) -> None:
        self.worker.submit("a pause", lambda: None, 1 << 30).wait()
        end(self)

    def counting(self: Any, *rest: Any) -> Any:
        records = begin(self, *rest)
        counted["presumed"] += records is not None
        return records

    def taking(self: Any, unit: Any) -> Any:
        self.taken = take(self, unit)
        return self.taken

    def updating(self: Any, unit: Any, *rest: Any) -> None:
        taken = getattr(self.presumed, "taken", None)
        counted["dropped"] += taken is not None
        self.presumed.taken = None
        update(self, unit, *rest)

    monkeypatch.setattr(Updater, "end_backward", late)
    monkeypatch.setattr(Updater, "_update", updating)
    monkeypatch.setattr(Presumed, "begin", counting)
    monkeypatch.setattr(Presumed, "take", taking)
    return counted


def data() -> list[Any]:
    """Batches whose gradients are short and long in turn."""
    return [
        batches(1, rows=2 if step % 2 else 8, length=5 if step % 2 else 9, seed=step)[0]
        for step in range(STEPS)
    ]


def train(config: dict[str, Any], family: str = "llama", tied: bool = False, **sizes: Any) -> Any:
    """Losses, states, and the norms of all steps."""
    engine = open_engine(config, family, layers=LAYERS, tied=tied, **sizes)
    try:
        losses, norms = [], []
        for step, batch in enumerate(data()):
            losses.append(engine.step(*batch, step, RATE))
            engine.flush()
            norms.append(engine.updater.clipping.now.norm)
        return losses, {n: x.clone() for n, x in engine.store.arrays().items()}, norms
    finally:
        engine.close()


def limit_of(config: dict[str, Any], tied: bool) -> float:
    """A limit that about every second step exceeds, though each layer's own norm is below it."""
    norms = sorted(train({**config, "max_grad_norm": 1e6, "clip": "global"}, tied=tied)[2])
    return math.sqrt(norms[STEPS // 2 - 1] * norms[STEPS // 2])


CONFIGS: list[dict[str, Any]] = [
    {},
    {"compute": "float32", "micro_batch_size": 2, "loss_tiles": 3},
    {"moments": "bfloat16", "weight_decay": 0.1, "decayed": "matrices"},
    {"moments": "int8", "weight_decay": 0.1, "decayed": "matrices"},
    {"optimizer": "torch"},
    {"optimizer": "torch", "compute": "float32"},
    {"disk_fraction": 0.5},
]


@needs_compiler
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_presumed_layers_change_no_bit(
    config: dict[str, Any], tied: bool, counts: dict[str, int]
) -> None:
    clipped = {**config, "max_grad_norm": limit_of(config, tied), "clip": "global"}
    waits = train(clipped, tied=tied)
    assert counts["presumed"] == 0
    presumes = train({**clipped, "presumed_layers": 3}, tied=tied)
    assert presumes[0] == waits[0] and presumes[2] == waits[2]
    assert differing(presumes[1], waits[1]) == []
    if config.get("optimizer") == "torch":  # its update keeps no record
        assert counts["presumed"] == 0
    else:
        assert 0 < counts["dropped"] < counts["presumed"]


def clipped_in_memory(limit: float, config: dict[str, Any]) -> tuple[Any, list[float], list[float]]:
    """AdamW in memory with torch's `clip_grad_norm_`: the reference, its losses and scales."""
    reference = InMemory(config, layers=LAYERS, tied=False)
    losses, scales = [], []
    for batch in data():
        loss, gradients = reference.gradients(*batch)
        for name, gradient in gradients.items():
            reference.masters[name].grad.copy_(gradient)
        norm = float(torch.nn.utils.clip_grad_norm_(reference.flat, limit))
        wide = {name: reference.masters[name].grad.clone() for name in gradients}
        reference.update(wide, RATE)
        losses.append(loss)
        scales.append(min(1.0, limit / norm))
    return reference, losses, scales


@needs_compiler
def test_presumed_layers_match_clipping_in_memory(counts: dict[str, int]) -> None:
    """An epsilon as large as the gradients, so that a wrong scale shows in the parameters."""
    config = {"compute": "float32", "eps": 0.05, "optimizer": "native"}
    limit = limit_of(config, False)
    reference, losses, scales = clipped_in_memory(limit, config)
    assert min(scales) < 0.9 and scales.count(1.0) >= 2
    start = InMemory(config, layers=LAYERS, tied=False).masters
    engine = open_engine(
        {**config, "max_grad_norm": limit, "clip": "global", "presumed_layers": 5},
        layers=LAYERS,
        tied=False,
    )
    try:
        ours = [engine.step(*batch, step, RATE) for step, batch in enumerate(data())]
        engine.flush()
        masters = engine.store.masters()
    finally:
        engine.close()
    assert 0 < counts["dropped"] < counts["presumed"]
    assert ours == pytest.approx(losses, rel=2e-6)
    for name, value in masters.items():
        moved, wanted = value - start[name], reference.masters[name] - start[name]
        # as test_clip.py: the norm's sum is rounded otherwise
        assert float((moved - wanted).norm()) <= 1e-4 * float(wanted.norm()) + 1e-7, name


def test_nothing_more_is_presumed_once_the_norm_exceeds_the_limit(counts: dict[str, int]) -> None:
    """The head's gradient comes first, and its norm says already that the step is clipped."""
    train({"max_grad_norm": 1e-3, "clip": "global", "presumed_layers": 5})
    assert counts["presumed"] == 0


@needs_compiler
def test_a_checkpoint_beside_presumed_steps_is_of_its_step(
    counts: dict[str, int], tmp_path: Any
) -> None:
    """States that are being written are not updated before that; the run goes on from them."""
    settings = {"max_grad_norm": 1e6, "clip": "global", "presumed_layers": 2, "timeout_s": 60.0}

    def opened(**values: Any) -> SlideformerSession:
        config = SlideformerConfig(**{**settings, **values}, threads=1)
        return SlideformerSession(tiny_model("llama", layers=LAYERS), config, "cpu")

    first, second = opened(), opened(presumed_layers=5)
    batch = data()
    for step in range(3):
        first.step(*batch[step], step, RATE)
    state = first.state()
    expected = {name: value.copy() for name, value in state.items()}
    presumed = counts["presumed"]
    first.hold()
    first.step(*batch[3], 3, RATE)
    assert counts["presumed"] == presumed >= 2
    for name, value in state.items():
        assert (value == expected[name]).all(), name
        first.written(name)
    first.written(None)
    second.load_state(expected)
    second.step(*batch[3], 3, RATE)
    for step in (4, 5):
        for each in (first, second):
            each.step(*batch[step], step, RATE)
    weights = [each.weights() for each in (first, second)]
    assert differing(*weights) == []
    for each in (first, second):
        each.close()


@needs_compiler
@pytest.mark.parametrize("moments", sorted(RECORD_BYTES))
def test_memory_for_records_is_counted_and_bounded(moments: str) -> None:
    sizes: dict[str, Any] = {"layers": LAYERS}
    config = {"max_grad_norm": 1.0, "clip": "global", "optimizer": "native", "moments": moments}
    engines = [open_engine({**config, "presumed_layers": n}, **sizes) for n in (0, 2, 99)]
    numel = engines[0].updater.store.owned[0].numel
    layer = layer_adam.record_bytes(numel, moments)
    bytes_of = [engine.host_bytes - engines[0].host_bytes for engine in engines]
    assert bytes_of == [0, 2 * layer, LAYERS * layer]
    # The plan's: but for a counter, and what fills up the last tile and the arena's share.
    whole = 32 * layer_adam.TILE
    assert layer_adam.record_bytes(whole, moments) - 4 == whole * RECORD_BYTES[moments]
    assert layer >= numel * RECORD_BYTES[moments]
    others = [
        open_engine({"presumed_layers": 3, "max_grad_norm": 1.0, "clip": "layer"}, **sizes),
        open_engine(
            {**config, "presumed_layers": 3, "optimizer": "torch", "moments": "float32"}, **sizes
        ),
    ]
    assert all(not one.updater.presumed.free for one in others)
    for engine in (*engines, *others):
        engine.close()


@needs_compiler
@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
def test_no_state_of_an_interrupted_step_is_given_away(
    compute: str, counts: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers whose gradients came are updated in place: neither a checkpoint nor a model is made of them, and what was
    read of the step before is what it was."""
    settings: dict[str, Any] = {
        "max_grad_norm": 1e6, "clip": "global", "presumed_layers": 5, "timeout_s": 60.0, "compute": compute,
    }  # fmt: skip
    config = SlideformerConfig(**settings, threads=1)
    session = SlideformerSession(tiny_model("llama", layers=LAYERS), config, "cpu")
    batch = data()
    session.step(*batch[0], 0, RATE)
    before = {name: value.copy() for name, value in session.state().items()}
    session.hold()
    last = session.engine.units.layers[-1].key
    for name in before:
        if unit_key(name) == last:
            session.written(name)  # only this layer may be updated
    family, calls, presumed = session.engine.passes.family, [], counts["presumed"]
    block = family.block

    def interrupted(i: int, *rest: Any, **options: Any) -> Any:
        calls.append(i)
        if calls.count(1) == 2:  # on the way back
            for worker in (session.engine.transfers, session.engine.updates):
                worker.submit("a pause", lambda: None, 1 << 30).wait()
            raise KeyboardInterrupt
        return block(i, *rest, **options)

    monkeypatch.setattr(family, "block", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.step(*batch[1], 1, RATE)
    assert counts["presumed"] == presumed + 1
    for give in (session.state, session.weights, lambda: session.step(*batch[1], 1, RATE)):
        with pytest.raises(TrainingError):
            give()
    arrays = {name: as_numpy(tensor) for name, tensor in session.engine.store.arrays().items()}
    changed = {unit_key(name) for name, value in arrays.items() if (value != before[name]).any()}
    assert changed == {last}
    session.close()
