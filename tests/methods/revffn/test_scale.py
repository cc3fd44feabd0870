"""The scale of int32 streams: chosen for a model, the same every time, and checked in every forward
pass."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ondevice.core.errors import TrainingError
from ondevice.methods.revffn.streams import (
    MOST_BITS,
    ROOM,
    SPARE_BITS,
    StreamOverflow,
    check_overflow,
    choose_bits,
)
from tests.methods.revffn.networks import network, random_ids, rebuilt, same_bits, stored


@given(st.floats(1e-6, 1e8))
def test_a_scale_leaves_the_spare_room_and_no_more(peak: float) -> None:
    bits = choose_bits(peak)
    assert 1 <= bits <= MOST_BITS
    assert peak * 2.0 ** (bits + SPARE_BITS) <= ROOM
    assert bits == MOST_BITS or peak * 2.0 ** (bits + SPARE_BITS + 1) > ROOM


def test_numbers_that_are_none_have_no_scale() -> None:
    with pytest.raises(TrainingError):
        choose_bits(float("nan"))


def test_a_peak_is_refused_from_the_room_on() -> None:
    below, above = torch.tensor([0.0, ROOM - 64.0]), torch.tensor([float(ROOM), 1.0])
    check_overflow([], [], 8)
    check_overflow([below, below], ["first", "second"], 8)
    with pytest.raises(StreamOverflow) as caught:
        check_overflow([below, above, above], ["first", "second", "third"], 8)
    assert "second" in caught.value.message
    assert caught.value.bits == choose_bits(2.0**22) and caught.value.received == "4.194e+06"
    assert caught.value.expected == "magnitudes of at most 4.1943e+06 with fraction_bits: 8"
    for number in (float("inf"), float("nan")):
        with pytest.raises(TrainingError, check=lambda error: "second" in error.message):
            check_overflow([below, torch.tensor([number, 0.0])], ["first", "second"], 8)


def test_the_scale_is_the_models_and_the_same_every_time() -> None:
    first = network(coupling="full").fraction_bits
    assert first == network(coupling="full").fraction_bits
    reversible = network(coupling="full")
    with torch.no_grad():
        reversible.family.embedding.weight.mul_(2.0**14)
    larger = network(reversible.family, coupling="full").fraction_bits
    assert first is not None and larger is not None and larger < first
    assert network(coupling="full", fraction_bits=9).fraction_bits == 9
    assert network(coupling="exact", streams="float32").fraction_bits is None


@pytest.mark.parametrize("coupling", ["exact", "full"])
def test_an_overflow_names_the_layer_and_a_scale_that_does(coupling: str) -> None:
    reversible = network(sizes={"layers": 5}, coupling=coupling)
    with torch.no_grad():
        reversible.family.linear(3, "down_proj").weight.mul_(2.0**18)  # type: ignore[operator]
    ids = random_ids(reversible)
    with pytest.raises(StreamOverflow) as caught:
        reversible.forward(ids)
    assert "layer 3" in caught.value.message
    assert f"fraction_bits: {reversible.fraction_bits}" in caught.value.expected
    named = re.search(r"fraction_bits: (\d+)", caught.value.hint or "")
    assert named is not None
    again = network(reversible.family, coupling=coupling, fraction_bits=int(named[1]))
    assert same_bits(rebuilt(again, ids)[1], stored(again, ids)[1])


@given(st.floats(1e-6, 1e12), st.integers(1, MOST_BITS))
def test_the_advice_never_repeats_the_scale_that_failed(peak: float, bits: int) -> None:
    hint = StreamOverflow("layer 0", bits, peak).hint or ""
    named = re.search(r"fraction_bits: (\d+)", hint)
    if peak * 2.0**bits >= ROOM:
        assert (int(named[1]) < bits) if named else "streams: bfloat16" in hint


def test_a_scale_that_is_too_fine_is_refused() -> None:
    reversible = network(coupling="exact", fraction_bits=30)
    with torch.no_grad():
        reversible.family.embedding.weight.mul_(100)
    with pytest.raises(StreamOverflow):
        reversible.forward(random_ids(reversible))


def test_a_layer_without_numbers_is_named() -> None:
    reversible = network(sizes={"layers": 4}, coupling="exact")
    with torch.no_grad():
        reversible.family.linear(2, "v_proj").weight.fill_(float("nan"))  # type: ignore[operator]
    with pytest.raises(TrainingError) as caught:
        reversible.forward(random_ids(reversible))
    assert caught.value.message.startswith("the attention of layer 2 ")


def test_a_resumed_run_sets_the_scale() -> None:
    reversible, other = network(coupling="full"), network(coupling="full", fraction_bits=10)
    bits = reversible.fraction_bits
    assert bits is not None and bits != 10
    ids = random_ids(reversible)
    other.fraction_bits = bits
    assert same_bits(rebuilt(other, ids)[1], rebuilt(reversible, ids)[1])
