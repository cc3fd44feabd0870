"""The adapter in whole numbers: against sums that are written out, and in any order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ondevice.fleet import noise
from ondevice.fleet.charter import Charter
from ondevice.fleet.messages import Group, Outcome, Refresh
from ondevice.fleet.noise import STREAM, gaussians, weighted_sum, whole_gaussians
from ondevice.fleet.numbers import Numbers, pack
from ondevice.fleet.rounds import Rounds
from ondevice.runtime_ops import generator
from tests.fleet.fleets import answer, charter, drawn, fails


@pytest.mark.parametrize("directions", [1, 8, 9, 16, 19])
@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000])
def test_a_sum_of_signs_is_the_generators(size: int, directions: int) -> None:
    draw = np.random.default_rng(size)
    chosen = [
        (int(draw.integers(1 << 42)), place % 4, int(draw.integers(-(2**30), 2**30)))
        for place in range(directions)
    ]
    expected = sum(
        c * generator.rademacher(5, step, STREAM, query + 1, 0, size)[query].astype(np.int64)
        for step, query, c in chosen
    )
    assert np.array_equal(weighted_sum("rademacher", 5, chosen, size), expected)


def test_a_sum_over_several_blocks_of_words_is_the_generators() -> None:
    size = 64 * 8192 + 70
    expected = 3 * generator.rademacher(5, 2, STREAM, 1, 0, size)[0].astype(np.int64)
    assert np.array_equal(weighted_sum("rademacher", 5, [(2, 0, 3)], size), expected)


def test_gaussians_are_the_compiled_kernels_bit_for_bit() -> None:
    torch = pytest.importorskip("torch")
    from ondevice.runtime_ops import native

    if native.library() is None:
        pytest.skip("no compiler")
    seed, step = torch.tensor([5]), torch.tensor([9])
    compiled = native.draw("normal", seed, step, STREAM, 1, 0, 40_000).numpy()[0]
    ours = gaussians(generator.stream_key(5, 9, 0, STREAM), 0, 20_000)
    assert np.array_equal(ours.view(np.int32), compiled.view(np.int32))


@pytest.mark.parametrize("compiled", [True, False])
def test_a_gaussian_sum_rounds_once(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(noise, "_compiled", lambda: None)
    elif noise._compiled() is None:
        pytest.skip("no compiler")
    size, chosen = 33_000, [(4, 1, 12_345), (9, 0, -777)]
    whole = [
        whole_gaussians(generator.stream_key(5, step, query, STREAM), 0, size // 2)
        for step, query, _ in chosen
    ]
    total = sum(c * values for (_, _, c), values in zip(chosen, whole, strict=True))
    expected = np.floor_divide(total + 2**15, 2**16)
    assert np.array_equal(weighted_sum("gaussian", 5, chosen, size), expected)
    floats = generator.normal(5, 4, STREAM, 2, 0, size)[1]
    assert (
        np.abs(weighted_sum("gaussian", 5, [(4, 1, 1 << 20)], size) / 2.0**20 - floats).max() < 2e-5
    )


@pytest.mark.parametrize("kind", ["rademacher", "gaussian"])
def test_an_update_is_what_a_session_in_float32_computes(kind: str) -> None:
    """w - learning rate / q * sum of g z, as `Session.apply_update` has it."""
    fleet = charter(noise=kind, size=1000)
    state, numbers = fleet.state(), drawn(2)
    coefficients = pack([1e-2 / 2 * value for value in numbers], -32, -17)
    state.apply(Outcome(fleet.id, 0, state.hash, bytes(8), (Group(6, coefficients),)), check=False)
    draw = generator.rademacher if kind == "rademacher" else generator.normal
    expected = -(1e-2 / 2) * (np.array(numbers)[:, None] * draw(7, 6, STREAM, 2, 0, 1000)).sum(0)
    assert np.abs(state.flat() - expected).max() < 1e-4 * np.abs(expected).max()


def outcomes(fleet, count: int) -> list[Outcome]:
    """Outcomes that follow one another."""
    state, made = fleet.state(), []
    for number in range(count):
        group = Group(number * 3, pack([value * 1e-3 for value in drawn(6, number)], -32, -17))
        outcome = Outcome(fleet.id, number, state.hash, bytes(8), (group,))
        state.apply(outcome, check=False)
        made.append(replace(outcome, after=state.hash))
    return made


def test_outcomes_in_another_order_give_the_same_adapter() -> None:
    fleet = charter()
    forward, backward = fleet.state(), fleet.state()
    for outcome in outcomes(fleet, 4):
        forward.apply(outcome)
    for outcome in reversed(outcomes(fleet, 4)):
        backward.apply(outcome, check=False)
    assert np.array_equal(forward.vector, backward.vector)


def test_an_outcome_that_does_not_follow_or_is_changed_leaves_the_state() -> None:
    fleet = charter()
    first, second = outcomes(fleet, 2)
    state = fleet.state()
    with fails(f"state {second.before.hex()}"):
        state.apply(second)
    changed = replace(first, groups=(Group(0, Numbers((1,) * 6, -20)),))
    with fails(f"state {first.after.hex()}"):
        state.apply(changed)
    with fails("a multiple of 2 coefficients"):
        state.apply(replace(first, groups=(Group(0, Numbers((1,) * 3, -20)),)))
    assert state.hash == fleet.state().hash
    state.apply(first)
    state.apply(second)


def test_momentum_is_a_velocity_in_whole_numbers() -> None:
    fleet = charter(momentum=0.5)
    state, plain = fleet.state(), charter().state()
    velocity, vector = np.zeros(130, np.int64), np.zeros(130, np.int64)
    for outcome in outcomes(charter(), 3):
        state.apply(outcome, check=False)
        velocity = np.floor_divide(velocity * 128, 256) + plain.change(outcome)
        vector = vector - velocity
    assert np.array_equal(state.vector, vector)
    moved = fleet.state()
    moved.velocity += 1
    assert moved.digest() != fleet.state().digest(), "the velocity is part of the state"


def test_a_refresh_begins_again_and_all_before_it_is_in_the_hash() -> None:
    fleet = charter()
    states = [fleet.state(), fleet.state()]
    for outcome in outcomes(fleet, 1):
        states[0].apply(outcome)
    states[1].round = 1
    for state in states:
        state.apply(Refresh(fleet.id, 1, state.hash, bytes(8), b"\1" * 32), check=False)
        assert not state.vector.any()
        assert (state.round, state.refreshed) == (1, 1)
    assert len({states[0].hash, states[1].hash, fleet.state().hash}) == 3


def test_adam_of_a_fleet_is_adam_of_each_local_steps_estimate() -> None:
    """Against torch.optim.Adam in float64, without whole numbers; moments begin anew in a subspace."""
    torch = pytest.importorskip("torch")
    fleet = charter(local_steps=2, server_rate=0.5, decay_rounds=8).model_copy(
        update={"optimizer": "adam", "subspace": "given"}
    )
    fleet = Charter.from_bytes(fleet.to_bytes())
    state, plain = fleet.state(), fleet.state()
    for start in (0, 2):
        state.apply(Refresh(fleet.id, start, state.hash, bytes(8), b"\1" * 32), check=False)
        weight = torch.zeros(fleet.size, dtype=torch.float64, requires_grad=True)
        adam = torch.optim.Adam([weight], lr=1.0)
        for number in (start, start + 1):
            server = Rounds(fleet, state)
            current = server.begin([3])
            server.receive(answer(current.tasks[3], 3, drawn(4, number)))
            outcome = server.close(number)
            (group,) = outcome.groups
            for step in range(2):
                numbers = group.coefficients
                own = Numbers(numbers.mantissas[2 * step : 2 * step + 2], numbers.exponent)
                part = replace(outcome, groups=(Group(group.first_step + step, own),))
                weight.grad = torch.from_numpy(plain.change(part) * 2.0**-32 / fleet.learning_rate)
                adam.param_groups[0]["lr"] = 0.5 * fleet.learning_rate * (1 - number / 8)
                adam.step()
            assert np.allclose(state.vector * 2.0**-32, weight.detach().numpy(), rtol=0, atol=1e-9)
    assert np.abs(state.vector).max() > 1 << 20
    again = fleet.state()
    again.restore(state.vector.astype("<i8").tobytes(), state.slots())
    again.frozen = state.frozen
    assert again.digest() == state.digest()


def test_the_streams_number_is_the_methods() -> None:
    pytest.importorskip("torch")
    from ondevice.methods.prge.layout import NOISE_TENSOR

    assert STREAM == NOISE_TENSOR
