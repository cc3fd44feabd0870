"""Messages: bytes that every implementation gives, and refusals of everything else."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice.core.errors import FleetError
from ondevice.fleet.messages import Group, Outcome, Refresh, Task, TaskReply, read_event
from ondevice.fleet.numbers import LIMIT, Numbers, pack
from tests.fleet.fleets import fails

HASH, LATER = bytes(range(8)), bytes(range(8, 16))
VECTORS = (
    (
        Task(0x01020304, 5, HASH, 40, 8, 2.0**-10),
        "d701010403020105000000000102030405060728000000000000000800" + "0000803a",
    ),
    (
        TaskReply(0x01020304, 5, HASH, 3, 16, 0.5, Numbers((1, -2, 32767), -9)),
        "d70102040302010500000000010203040506070300000000000000" + "100000000000003f" + "f70300" + "0100feffff7f",
    ),
    (
        Outcome(0x01020304, 5, HASH, LATER, (Group(40, Numbers((-5, 7), -30)),)),
        "d7010304030201050000000001020304050607" + "08090a0b0c0d0e0f" + "01002800000000000000" + "e20200fbff0700",
    ),
    (
        Refresh(0x01020304, 6, HASH, LATER, bytes([170] * 32)),
        "d7010404030201060000000001020304050607" + "08090a0b0c0d0e0f" + "aa" * 32,
    ),
)  # fmt: skip
"""Also in develop/fleet-protocol.md."""


@pytest.mark.parametrize(("message", "expected"), VECTORS, ids=lambda value: type(value).__name__)
def test_bytes_are_those_of_the_reference_page(message, expected: str, root) -> None:
    assert message.to_bytes().hex() == expected
    assert type(message).from_bytes(bytes.fromhex(expected)) == message
    assert expected in (root / "develop/fleet-protocol.md").read_text(encoding="utf-8")


def test_a_round_of_four_queries_and_eight_steps_is_below_256_bytes() -> None:
    numbers = Numbers((1,) * 32, -20)
    task = Task(1, 1, HASH, 1, 8, 1e-3)
    answer = TaskReply(1, 1, HASH, 1, 1, 0.0, numbers)
    outcome = Outcome(1, 1, HASH, LATER, (Group(8, numbers),))
    sizes = [len(message.to_bytes()) for message in (task, answer, outcome)]
    assert sizes == [33, 102, 104]
    assert sum(sizes) <= 256


@given(st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=40))
def test_packed_numbers_are_within_half_a_unit_of_the_largest(values: list[float]) -> None:
    packed = pack(values)
    largest = max(map(abs, values))
    for value, back in zip(values, packed.values(), strict=True):
        assert abs(value - back) <= max(largest * 2.0**-15, 2.0**-127)
    assert max(map(abs, packed.mantissas)) <= LIMIT
    assert pack(packed.values()).values() == packed.values()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_refused(value: float) -> None:
    with fails("finite numbers"):
        pack([1.0, value])


@settings(max_examples=300)
@given(st.sampled_from(VECTORS), st.data())
def test_a_damaged_message_is_read_or_refused_with_a_reason(vector, data) -> None:
    """Bytes that are changed, cut off or added: nothing but a FleetError, and no message that means nothing."""
    whole = bytearray(vector[0].to_bytes())
    kind = data.draw(st.sampled_from(["change", "cut", "add", "noise"]))
    if kind == "change":
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    elif kind == "cut":
        del whole[data.draw(st.integers(0, len(whole) - 1)) :]
    elif kind == "add":
        whole += data.draw(st.binary(min_size=1, max_size=9))
    else:
        whole = bytearray(data.draw(st.binary(max_size=200)))
    for read in (
        Task.from_bytes,
        TaskReply.from_bytes,
        Outcome.from_bytes,
        Refresh.from_bytes,
        read_event,
    ):
        try:
            message = read(bytes(whole))
        except FleetError as error:
            assert error.message
        else:
            assert kind == "change" or kind == "noise"
            assert message.to_bytes() == bytes(whole)
