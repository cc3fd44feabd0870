"""The three rules of clipping, each against AdamW in memory with the scale that the rule says.

AdamW divides a gradient's scale out again; with an epsilon as large as the gradients it does not, so that a wrong
scale shows in the parameters.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ondevice.methods.slideformer.config import SlideformerConfig  # noqa: E402
from ondevice.models.load import tiny_model  # noqa: E402
from ondevice.offload.gradients import Clipping  # noqa: E402
from ondevice.offload.units import SINGLE, cut  # noqa: E402
from ondevice.offload.updater import Updater  # noqa: E402
from ondevice.runtime_ops import layer_adam  # noqa: E402
from tests.methods.slideformer.reference import InMemory, batches, differing, open_engine, outcome  # noqa: E402

LIMIT = 0.5
STEPS = 3
RATE = 0.1
OPTIONS: list[dict[str, Any]] = [
    {"compute": "float32"},
    {"compute": "float32", "micro_batch_size": 2, "loss_tiles": 3, "optimizer": "torch"},
    {"compute": "float32", "disk_fraction": 1.0, "weight_decay": 0.1},
    {"compute": "bfloat16", "optimizer": "torch"},
]


class Clipped:
    """The reference, with the gradients of each unit scaled by its rule."""

    def __init__(self, config: dict[str, Any], rule: str, tied: bool) -> None:
        self.reference = InMemory(config, layers=3, tied=tied)
        self.units = [
            [piece.name for piece in unit.pieces] for unit in cut(self.reference.family).all
        ]
        self.start = {name: value.clone() for name, value in self.reference.masters.items()}
        self.rule, self.last = rule, 0.0

    def scales(self, gradients: dict[str, torch.Tensor]) -> list[float]:
        """By unit, as the docstring of `SlideformerConfig.clip` says."""
        own = [
            math.sqrt(sum(float(gradients[name].double().square().sum()) for name in unit))
            for unit in self.units
        ]
        whole = math.sqrt(sum(norm**2 for norm in own))
        if self.rule == "layer":
            norms = own
        elif self.rule == "global":
            norms = [whole] * len(own)
        elif self.last == 0:
            norms = [norm * math.sqrt(len(own)) for norm in own]
        else:
            norms = [max(norm, self.last) for norm in own]
        self.last = whole
        return [min(1.0, LIMIT / norm) for norm in norms]

    def step(self, ids: Any, labels: Any) -> float:
        loss, gradients = self.reference.gradients(ids, labels)
        wide = {name: gradient.float() for name, gradient in gradients.items()}
        for unit, scale in zip(self.units, self.scales(wide), strict=True):
            for name in unit:
                wide[name] = wide[name] * scale
        self.reference.update(wide, RATE)
        return loss


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rule", ["previous", "layer", "global"])
def test_each_clipping_rule_matches_its_definition(
    rule: str, tied: bool, options: dict[str, Any]
) -> None:
    config = {"eps": 0.05, **options}
    data, plain = batches(STEPS), Clipped(config, rule, tied)
    expected = [plain.step(*batch) for batch in data]
    changed = {**config, "max_grad_norm": LIMIT, "clip": rule}
    losses, masters = run_at(changed, tied, data)
    coarse = options["compute"] == "bfloat16"
    assert losses == pytest.approx(expected, rel=1e-3 if coarse else 2e-6)
    for name, value in masters.items():
        moved, wanted = value - plain.start[name], plain.reference.masters[name] - plain.start[name]
        assert (
            float((moved - wanted).norm())
            <= (0.02 if coarse else 1e-4) * float(wanted.norm()) + 1e-7
        ), name


def run_at(config: dict[str, Any], tied: bool, data: list[Any]) -> Any:
    """As `outcome`, with one learning rate."""
    engine = open_engine(config, layers=3, tied=tied)
    try:
        losses = [engine.step(*batch, step, RATE) for step, batch in enumerate(data)]
        engine.flush()
        return losses, engine.store.masters()
    finally:
        engine.close()


def opened(rule: str) -> Clipping:
    config = SlideformerConfig(max_grad_norm=LIMIT, clip=rule)
    return Clipping(config, cut(tiny_model("llama", layers=3).family), SINGLE)


@pytest.mark.parametrize("rule", ["previous", "layer"])
def test_the_scale_on_the_accelerator_matches_the_hosts(rule: str) -> None:
    clipping = opened(rule)
    for step in range(3):
        clipping.begin(step, RATE)
        for unit, square in zip(
            clipping.units.all, (1e-4, 0.09, 0.36, 4.0, 0.01 * step), strict=True
        ):
            clipping.now.squares[unit.index] = square
            host = clipping.apply(clipping.now, unit)
            assert float(clipping.scale(torch.tensor(square))) == pytest.approx(
                host.grad_scale, rel=1e-6
            )
            assert host.step == step + 1 and host.learning_rate == RATE


@pytest.mark.parametrize("rule", ["previous", "layer", "global"])
def test_a_checkpoint_keeps_the_norms_that_the_next_step_reads(rule: str) -> None:
    clipping, other = opened(rule), opened(rule)
    clipping.begin(0, RATE)
    clipping.now.squares.update({unit.index: 0.5 + unit.index for unit in clipping.units.all})
    kept = clipping.norms()
    assert len(kept) == (len(clipping.units.all) if rule == "previous" else 0)
    other.restore({name: value.numpy() for name, value in kept.items()})
    for each in (clipping, other):
        each.begin(1, RATE)
    assert other.now.before == (clipping.now.before if rule == "previous" else {})
    clipping.restore({})
    assert clipping.now.squares == {}


@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
@pytest.mark.parametrize("tied", [True, False])
def test_global_clipping_matches_pytorch(
    tied: bool, compute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One scale for all units, that of `clip_grad_norm_` on the gradients in memory: its sums round otherwise."""
    reference, scales = InMemory({"compute": compute}, layers=3, tied=tied), []
    clipped = Clipping.apply

    def seen(self: Any, now: Any, unit: Any) -> Any:
        adam = clipped(self, now, unit)
        scales.append(adam.grad_scale)
        return adam

    monkeypatch.setattr(Clipping, "apply", seen)
    (batch,) = batches(1)
    _, gradients = reference.gradients(*batch)
    for name, gradient in gradients.items():
        reference.masters[name].grad.copy_(gradient)
    norm = torch.nn.utils.clip_grad_norm_(reference.flat, LIMIT)
    assert norm > 2 * LIMIT
    outcome(
        {"compute": compute, "max_grad_norm": LIMIT, "clip": "global"},
        "llama",
        {"layers": 3, "tied": tied},
        [batch],
    )
    assert len(scales) == 5 + (not tied)
    assert scales == pytest.approx([LIMIT / (float(norm) + 1e-6)] * len(scales), rel=1e-6)


@pytest.mark.parametrize("rule", ["previous", "layer", "global"])
def test_a_limit_that_is_never_reached_changes_no_bit(rule: str) -> None:
    sizes, data = {"layers": 3, "tied": rule == "layer"}, batches(4)
    expected = outcome({}, "llama", sizes, data)
    losses, masters = outcome({"max_grad_norm": 1e6, "clip": rule}, "llama", sizes, data)
    assert losses == expected[0]
    assert differing(masters, expected[1]) == []


@pytest.mark.parametrize("rule", ["previous", "layer", "global"])
def test_no_unit_exceeds_the_limit(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the last step's norm was: a gradient that is suddenly large is clipped by its own."""
    applied = []
    update = Updater._update

    def seen(self: Any, unit: Any, gradient: Any, adam: Any, *rest: Any) -> None:
        applied.append(float(gradient.float().norm()) * adam.grad_scale)
        update(self, unit, gradient, adam, *rest)

    monkeypatch.setattr(Updater, "_update", seen)
    small, large = batches(2, rows=8), batches(2, rows=1, length=5)
    outcome(
        {"max_grad_norm": LIMIT, "clip": rule},
        "llama",
        {"layers": 3},
        [small[0], large[0], small[1], large[1]],
    )
    assert len(applied) >= 4 * 5
    assert max(applied) <= LIMIT * 1.001


@pytest.mark.skipif(not layer_adam.available(), reason="no C++ compiler")
@pytest.mark.parametrize("rule", ["previous", "layer", "global"])
def test_the_placement_of_states_changes_no_bit_of_a_clipped_step(rule: str) -> None:
    sizes, data = {"layers": 5, "tied": False}, batches(4)
    config = {"max_grad_norm": LIMIT, "clip": rule}
    expected = outcome(config, "gpt2", sizes, data)
    for change in (
        {"disk_fraction": 1.0},
        {"window": 2, "gradient_buffers": 2},
        {"activations": "device"},
    ):
        losses, masters = outcome({**config, **change}, "gpt2", sizes, data)
        assert losses == expected[0]
        assert differing(masters, expected[1]) == []
