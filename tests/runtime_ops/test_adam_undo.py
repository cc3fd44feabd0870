"""A recorded AdamW step is taken back, or let stand, to the bit: all forms of states, gradients of wild range, a full
arena, threads and processors."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ondevice.core.errors import ModelError
from ondevice.runtime_ops import adam_undo, native
from ondevice.runtime_ops import layer_adam as la
from ondevice.runtime_ops.layer_adam import AdamStep, HostState, Moments, UndoRecord

FORMS = [(form, kind) for form in ("plain", "split") for kind in la.KINDS]
pytestmark = pytest.mark.skipif(not la.available(), reason="no C++ compiler")


def bits(x: Tensor) -> Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def make(master: Tensor, form: str, kind: str) -> HostState:
    """A state that holds `master`, with zero moments."""
    moments, high = Moments.empty(master.numel(), kind), master.bfloat16()
    if form == "plain":
        return HostState(master.clone(), high, None, moments, 3)
    low = torch.empty(master.numel(), dtype=torch.uint16)
    la.split_(master, high, low, moments)
    return HostState(None, high, low, moments, 3)


def differing(a: HostState, b: HostState) -> list[str]:
    """Names of arrays that are not equal in every bit."""
    own, other = a.tensors(), b.tensors()
    return [name for name in own if not torch.equal(bits(own[name]), bits(other[name]))]


def wild_masters(count: int) -> Tensor:
    """Any float but NaN, an exact tie every fourth, and both zeros."""
    words = torch.randint(-(2**31), 2**31, (count,)).to(torch.int32)
    words[::4] = (words[::4] & ~0xFFFF) | 0x8000
    words[1::7], words[2::7] = 0, -(2**31)
    masters = words.view(torch.float32)
    usual = torch.rand(count) < 0.5
    masters = torch.where(usual, torch.randn(count) * 0.02, masters)
    return torch.where(masters.isnan(), 1.0, masters)


def tame_gradients(count: int) -> Iterator[Tensor]:
    """What training brings."""
    while True:
        yield torch.randn(count) * 1e-3


def wild_gradients(count: int) -> Iterator[Tensor]:
    """16 decades, zeros, denormals, a jump by 1e4, infinities and NaN."""
    number = 0
    while True:
        number += 1
        grad = torch.randn(count) * 10 ** torch.empty(count).uniform_(-12, 4)
        grad[torch.rand(count) < 0.3] = 0.0
        grad[torch.rand(count) < 0.1] *= 1e-38
        if number == 3:
            grad *= 1e4
        if number == 5 and count > 500:
            grad[5], grad[300] = float("nan"), float("inf")
        yield grad


def mixed_gradients(count: int) -> Iterator[Tensor]:
    """Usual ones, and wild ones in a few tiles."""
    for tame, wild in zip(tame_gradients(count), wild_gradients(count)):
        tame[: count // 40] = wild[: count // 40]
        yield tame


def steps(decay: float, scale: float) -> Iterator[AdamStep]:
    return (
        AdamStep(1e-3, weight_decay=decay, grad_scale=scale, step=number) for number in range(1, 7)
    )


@pytest.mark.parametrize("form,kind", FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("gradients", [tame_gradients, mixed_gradients, wild_gradients])
@pytest.mark.parametrize("count,decay,scale", [(1, 0.1, 1.0), (127, 0.0, 1.0), (70_005, 0.1, 0.5)])
def test_a_recorded_step_is_taken_back_and_let_stand_to_the_bit(
    form, kind, dtype, gradients, count, decay, scale
):
    torch.manual_seed(count)
    state = make(wild_masters(count), form, kind)
    record = UndoRecord.empty(count, kind)
    for grad, step in zip(gradients(count), steps(decay, scale)):
        grad = grad.to(dtype)
        before, ordinary = copy.deepcopy(state), copy.deepcopy(state)
        la.layer_adam(grad, ordinary, step)
        la.layer_adam(grad, state, step, undo=record, threads=2)
        la.undo_adam(grad, state, step, record, threads=3)
        assert differing(state, before) == []
        la.layer_adam(grad, state, step, undo=record, threads=3)
        la.finish_adam(grad, state, step, record, threads=2)
        assert differing(state, ordinary) == [] and differing(state, before) != []


@pytest.mark.parametrize("form,kind", FORMS)
def test_tiles_that_find_no_room_wait_for_the_end_of_the_step(form, kind):
    """A NaN in every tile, and room for one of 32: of the others nothing is changed before."""
    torch.manual_seed(0)
    count = 64 * la.TILE + 5
    state, grad, step = make(torch.randn(count), form, kind), torch.randn(count), AdamStep(1e-3)
    la.layer_adam(grad, state, step)
    grad[:: la.TILE] = float("nan")
    step = replace(step, step=2)
    before, ordinary = copy.deepcopy(state), copy.deepcopy(state)
    record = UndoRecord.empty(count, kind)
    la.layer_adam(grad, ordinary, step)
    la.layer_adam(grad, state, step, undo=record)
    waiting = record.flags == adam_undo.NOT_DONE
    assert len(record.arena) == 3 and int(waiting.sum()) == 65 - 3
    assert sorted(record.flags[~waiting].tolist()) == [0, 1, 2]
    still = waiting.repeat_interleave(la.TILE)[:count]
    for name, tensor in state.tensors().items():
        place = waiting if name.endswith("scale") else still
        assert torch.equal(bits(tensor)[place], bits(before.tensors()[name])[place]), name
    taken_back = copy.deepcopy(state)
    la.undo_adam(grad, taken_back, step, record)
    assert differing(taken_back, before) == []
    la.finish_adam(grad, state, step, record)
    assert differing(state, ordinary) == []


def test_a_record_of_no_step_takes_nothing_back():
    state, grad, step = make(torch.randn(300), "split", "int8"), torch.randn(300), AdamStep(1e-3)
    before, ordinary = copy.deepcopy(state), copy.deepcopy(state)
    record = UndoRecord.empty(300, "int8")
    la.layer_adam(grad, ordinary, step)
    la.undo_adam(grad, state, step, record)
    assert differing(state, before) == []
    la.finish_adam(grad, state, step, record)
    assert differing(state, ordinary) == []


@pytest.mark.parametrize("form,kind", FORMS)
def test_usual_steps_fit_their_codes(form, kind):
    """From the fifth step on, of gradients of one size: hardly a tile needs the arena, and its room is not used up."""
    torch.manual_seed(0)
    count = 1 << 17
    state, record = make(torch.randn(count) * 0.02, form, kind), UndoRecord.empty(count, kind)
    for number, grad in zip(range(1, 13), tame_gradients(count)):
        step = AdamStep(1e-4, weight_decay=0.01, step=number)
        la.layer_adam(grad.bfloat16(), state, step, undo=record)
        if number > 5:
            assert int(record.used) < len(record.arena) // 2 and int((record.flags >= 0).sum()) < 16
        la.finish_adam(grad.bfloat16(), state, step, record)


@pytest.mark.parametrize(
    "beta1,beta2,rate", [(0.0, 0.999, 1e-3), (0.9, 0.0, 1e-3), (0.9, 0.999, 1.0)]
)
def test_what_cannot_be_computed_backwards_is_still_taken_back(beta1, beta2, rate):
    """A beta of 0 forgets the moment, and a decay of 1 the parameter."""
    torch.manual_seed(0)
    state = make(torch.randn(5000), "split", "float32")
    record = UndoRecord.empty(5000, "float32")
    for number in range(1, 5):
        step = AdamStep(rate, beta1, beta2, weight_decay=1.0, step=number)
        before, ordinary, grad = copy.deepcopy(state), copy.deepcopy(state), torch.randn(5000)
        la.layer_adam(grad, ordinary, step)
        for end, expected in ((la.undo_adam, before), (la.finish_adam, ordinary)):
            la.layer_adam(grad, state, step, undo=record)
            end(grad, state, step, record)
            assert differing(state, expected) == []


def test_a_sign_of_a_plain_second_moment_comes_back():
    """No step leaves one there; a file may."""
    state, grad, step = make(torch.randn(300), "plain", "float32"), torch.randn(300), AdamStep(1e-3)
    state.moments.v[7], state.moments.v[200] = -0.0, -1e-3
    before, record = copy.deepcopy(state), UndoRecord.empty(300, "float32")
    la.layer_adam(grad, state, step, undo=record)
    la.undo_adam(grad, state, step, record)
    assert differing(state, before) == []


@pytest.mark.parametrize("form,kind", FORMS)
@pytest.mark.parametrize("gradients", [mixed_gradients, wild_gradients])
def test_every_processor_keeps_the_same_record_and_takes_it_back(
    processors, monkeypatch, form, kind, gradients
):
    """Each also takes back what the one before it recorded."""
    count, records, states = 20_003, [], []
    for number, library in enumerate(processors):
        monkeypatch.setattr(native, "library", lambda library=library: library)
        torch.manual_seed(0)
        state, record = make(wild_masters(count), form, kind), UndoRecord.empty(count, kind)
        for grad, step in zip(gradients(count), steps(0.1, 1.0)):
            grad, before, ordinary = grad.bfloat16(), copy.deepcopy(state), copy.deepcopy(state)
            la.layer_adam(grad, ordinary, step)
            la.layer_adam(grad, state, step, undo=record, threads=1)
            other = processors[number - 1]
            with monkeypatch.context() as patched:
                patched.setattr(native, "library", lambda other=other: other)
                la.undo_adam(grad, state, step, record)
            assert differing(state, before) == []
            state = ordinary
        records.append({name: tensor.clone() for name, tensor in record.tensors().items()})
        states.append(state)
    assert all(differing(states[0], state) == [] for state in states[1:])
    assert all(torch.equal(records[0]["flags"], record["flags"]) for record in records[1:])


@pytest.mark.parametrize("kind", la.KINDS)
@pytest.mark.parametrize("count", [0, 1, 128, 4097])
def test_the_bytes_of_a_record_are_those_of_its_arrays(kind, count):
    record = UndoRecord.empty(count, kind)
    tiles = -(-count // la.TILE)
    assert (
        record.nbytes
        == la.record_bytes(count, kind)
        == sum(t.nbytes for t in record.tensors().values())
    )
    assert len(record.codes) == len(record.flags) == tiles and len(record.arena) == -(-tiles // 32)
    each = {"float32": 4, "bfloat16": 5, "int8": 3 + 16 / la.TILE}[kind]
    assert record.codes.nbytes == tiles * la.TILE * each
    la.layer_adam(
        torch.zeros(count), make(torch.zeros(count), "split", kind), AdamStep(1e-3), undo=record
    )


def test_wrong_records_are_refused():
    state, grad, step = make(torch.zeros(256), "split", "int8"), torch.zeros(256), AdamStep(1e-3)
    good = UndoRecord.empty(256, "int8")
    calls = [
        lambda record: la.layer_adam(grad, state, step, undo=record),
        lambda record: la.undo_adam(grad, state, step, record),
        lambda record: la.finish_adam(grad, state, step, record),
    ]
    wrong = [
        (UndoRecord.empty(256, "float32"), "the record is of other moments"),
        (UndoRecord.empty(400, "int8"), "layer_adam got a wrong record"),
        (replace(good, flags=good.flags[:1]), "layer_adam got a wrong flags"),
        (replace(good, arena=good.arena.double()), "layer_adam got a wrong arena"),
        (replace(good, used=good.flags), "layer_adam got a wrong counter"),
        (
            UndoRecord.empty(256, "int8", torch.empty(9999, dtype=torch.uint8)[8:]),
            "the record's memory is not aligned",
        ),
    ]
    for call in calls:
        for record, message in wrong:
            with pytest.raises(ModelError) as error:
                call(record)
            assert error.value.message == message
    with pytest.raises(ModelError) as error:
        la.layer_adam(grad, state, step, torch.tensor([0]), 128, undo=good)
    assert error.value.expected == "all rows"
    assert adam_undo.SHARE == 32 and float(state.moments.v.sum()) == 0
