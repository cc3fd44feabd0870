"""Where things are kept, and how many of them at once, changes no bit; what does change bits changes the last ones."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ondevice.models.save import as_numpy  # noqa: E402
from ondevice.offload.updater import Updater  # noqa: E402
from ondevice.runtime_ops import layer_adam  # noqa: E402
from tests.methods.slideformer.reference import (  # noqa: E402
    LEARNING_RATE,
    InMemory,
    batches,
    differing,
    open_engine,
    outcome,
    run,
)

SIZES = {"layers": 7, "intermediate": 77}
STEPS = 6
TWO = {"micro_batch_size": 2}
EXACT: dict[str, dict[str, Any]] = {
    "activations on the device": {"activations": "device"},
    "activations on disk": {"activations": "disk"},
    "activations on disk, micro-batches": {"activations": "disk", **TWO},
    "activations on the device, micro-batches": {"activations": "device", **TWO},
    "half of the moments on disk": {"disk_fraction": 0.5},
    "all moments on disk": {"disk_fraction": 1.0},
    "everything on disk": {"disk_fraction": 1.0, "activations": "disk"},
    "a window of 2": {"window": 2},
    "a window of 5": {"window": 5},
    "a window larger than the model": {"window": 20},
    "2 gradient buffers": {"gradient_buffers": 2},
    "2 gradient buffers and all moments on disk": {"gradient_buffers": 2, "disk_fraction": 1.0},
    "a gradient buffer for each layer": {"gradient_buffers": 20},
    "two threads": {"threads": 2},
    "no weight decay": {"weight_decay": 0.0},
}
needs_compiler = pytest.mark.skipif(not layer_adam.available(), reason="no C++ compiler")


@cache
def base(family: str, tied: bool, micro_batch_size: int | None, weight_decay: float) -> Any:
    config = {"micro_batch_size": micro_batch_size, "weight_decay": weight_decay}
    return outcome(config, family, {"tied": tied, **SIZES}, batches(STEPS))


@pytest.mark.parametrize("change", EXACT)
def test_placements_and_counts_change_no_bit(change: str) -> None:
    """The update is the fused one where there is a compiler; moments on disk update the whole embedding at once."""
    family, tied = ("llama", True) if len(change) % 2 else ("gpt2", False)
    config = {"weight_decay": 0.1, **EXACT[change]}
    losses, masters = outcome(config, family, {"tied": tied, **SIZES}, batches(STEPS))
    expected = base(family, tied, config.get("micro_batch_size"), config["weight_decay"])
    assert losses == expected[0]
    assert differing(masters, expected[1]) == []


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
@needs_compiler
def test_updating_rows_first_matches_updating_the_complete_embedding(
    tied: bool, moments: str, monkeypatch: pytest.MonkeyPatch, engine: Any
) -> None:
    """`flush` after each step updates the embedding as a whole, else the rows that the next batch reads come first."""
    rows: list[int | None] = []
    update = Updater._update

    def counted(
        self: Any, unit: Any, gradient: Any, adam: Any, only: Any = None, width: int = 0
    ) -> None:
        if unit.kind == "embedding":
            rows.append(None if only is None else len(only))
        update(self, unit, gradient, adam, only, width)

    monkeypatch.setattr(Updater, "_update", counted)
    data, sizes = batches(STEPS), {"layers": 2, "tied": tied, "vocab": 261, "hidden": 128}
    config = {"moments": moments, "weight_decay": 0.1}
    one, other = engine(config, **sizes), engine(config, **sizes)
    losses = run(one, data)
    assert (
        rows.count(None) == 1 and len(rows) == 2 * STEPS - 1
    )  # the last step's by `flush`, all others in two parts
    assert all(
        first + second == 261 for first, second in zip(rows[:-1:2], rows[1:-1:2], strict=True)
    )
    again = []
    for step, batch in enumerate(data):
        again.append(other.step(*batch, step, LEARNING_RATE / (1 + step / 10)))
        other.flush()
    assert again == losses
    assert differing(one.store.masters(), other.store.masters()) == []


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "int8"])
@needs_compiler
def test_skipping_unread_rows_changes_no_bit(
    moments: str, monkeypatch: pytest.MonkeyPatch, engine: Any
) -> None:
    """Through a checkpoint, too: which rows have moments is seen in them."""
    seen, update = list[int](), Updater._update

    def counted(
        self: Any, unit: Any, gradient: Any, adam: Any, only: Any = None, width: int = 0
    ) -> None:
        if unit.kind == "embedding" and only is not None:
            seen.append(len(only))
        update(self, unit, gradient, adam, only, width)

    monkeypatch.setattr(Updater, "_update", counted)
    data, sizes = (
        batches(STEPS, vocab=40),
        {"layers": 2, "tied": False, "vocab": 261, "hidden": 128},
    )
    one, whole, resumed = (engine({"moments": moments}, **sizes) for _ in range(3))
    losses = run(one, data)
    assert max(seen) <= 41 and len(seen) == 2 * STEPS - 1
    whole.updater.by_rows = False  # all rows in every step
    whole.updater.read.fill_(True)
    assert run(whole, data) == losses
    assert differing(one.store.masters(), whole.store.masters()) == []
    resumed.load({name: as_numpy(tensor) for name, tensor in whole.store.arrays().items()})
    assert (
        torch.equal(resumed.updater.read, one.updater.read)
        and 0 < int(resumed.updater.read.sum()) <= 41
    )
    assert not bool(engine({"weight_decay": 0.1}, **sizes).updater.read.logical_not().any())


def test_evaluation_is_cross_entropy_and_changes_nothing(engine: Any) -> None:
    data = batches(4)
    reference, looked, plain = InMemory({}, layers=3), engine(layers=3), engine(layers=3)
    for step, batch in enumerate(data):
        nll, count = looked.evaluate(*data[0])
        assert looked.step(*batch, step, LEARNING_RATE) == plain.step(*batch, step, LEARNING_RATE)
    nll, count = looked.evaluate(*data[0])
    assert np.array_equal(nll, looked.evaluate(*data[0])[0])
    looked.flush(), plain.flush()
    assert differing(looked.store.masters(), plain.store.masters()) == []
    model = reference.family.model.float()
    for name, value in looked.store.masters().items():
        reference.parameters[name].data = value.bfloat16().float()
    ids, labels = data[0]
    logits = model(input_ids=torch.from_numpy(ids), use_cache=False).logits[:, :-1]
    targets = torch.from_numpy(labels[:, 1:].copy())
    expected = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), targets, reduction="none"
    ).sum(1)
    assert nll == pytest.approx(expected.detach().numpy(), rel=0.02)
    assert (count == (labels[:, 1:] != -100).sum(1)).all()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "change",
    [{"loss_tiles": 3}, {"loss_tiles": 400}, {"loss_chunk_tokens": 7}, {"micro_batch_size": 1}],
    ids=str,
)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("compute", "tolerance"), [("float32", 2e-5), ("bfloat16", 4e-3)])
def test_other_orders_of_addition_change_last_bits(
    change: dict[str, Any], tied: bool, compute: str, tolerance: float
) -> None:
    data, sizes = batches(3), {"layers": 2, "tied": tied, "vocab": 261}
    expected = outcome({"compute": compute}, "llama", sizes, data)
    losses, masters = outcome({"compute": compute, **change}, "llama", sizes, data)
    assert losses == pytest.approx(expected[0], rel=tolerance)
    moved = sum(float((masters[name] - value).abs().sum()) for name, value in expected[1].items())
    total = sum(value.numel() for value in masters.values())
    assert moved / total < tolerance * 200 * LEARNING_RATE  # of 3 steps of a learning rate each


@pytest.mark.parametrize("fraction", [0.01, 0.1])
def test_a_small_disk_fraction_is_at_least_one_unit(fraction: float, engine: Any) -> None:
    opened = engine({"disk_fraction": fraction}, layers=1)
    assert len(opened.disk.states.records) == 1
    assert run(opened, batches(2)) == outcome({}, "llama", {"layers": 1}, batches(2))[0]


def test_training_lowers_the_loss(engine: Any) -> None:
    """One batch again and again is learned by heart: bits of a wrong direction would be bits too."""
    opened, (batch,) = engine(layers=2), batches(1)
    losses = run(opened, [batch] * 20)
    assert losses[-1] < 0.5 < 4 < losses[0]


def test_two_engines_do_not_interfere() -> None:
    data = batches(3)
    one, other = open_engine({}, layers=2), open_engine({}, layers=2)
    for step, batch in enumerate(data):
        assert one.step(*batch, step, LEARNING_RATE) == other.step(*batch, step, LEARNING_RATE)
    one.close(), other.close()
