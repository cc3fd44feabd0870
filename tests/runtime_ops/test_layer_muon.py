"""The host's part of a Muon step: C++ and torch to the bit, every form and processor, odd sizes, refusals."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from ondevice.core.errors import ModelError
from ondevice.runtime_ops import layer_adam as la
from ondevice.runtime_ops import layer_muon as lm
from ondevice.runtime_ops import native
from ondevice.runtime_ops.adam_state import HostState, Moments
from tests.runtime_ops.test_layer_adam import bits, hard_masters, needs_compiler

FORMS = ("plain", "copied", "split")
DTYPES = (torch.bfloat16, torch.float32)
DECAY, RATE = 0.99937, 0.0123


def make(master: Tensor, form: str) -> HostState:
    """A state without moments that holds `master`; `copied` is a plain one with bfloat16 values."""
    high = torch.zeros(master.numel(), dtype=torch.bfloat16)
    if form == "split":
        low = torch.zeros(master.numel(), dtype=torch.uint16)
        la.split_(master, high, low, None)
        return HostState(None, high, low, Moments.empty(0))
    return HostState(master.clone(), high if form == "copied" else None, None, Moments.empty(0))


def master_of(state: HostState) -> Tensor:
    if state.master is not None:
        return state.master
    assert state.high is not None and state.low is not None
    return la.merge(state.high, state.low, None)


def tensors(state: HostState) -> list[Tensor]:
    return [bits(t) for t in (state.master, state.high, state.low) if t is not None]


def same(a: HostState, b: HostState) -> bool:
    return all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))


def update_of(count: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_compiler), False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("count", [1, 127, 70_001])
def test_a_step_is_the_formula_to_the_bit(
    count: int, form: str, dtype: torch.dtype, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each operation rounds to float32, and the bfloat16 values are the master's nearest."""
    if not compiled:
        monkeypatch.setattr(native, "library", lambda: None)
    start = torch.randn(count, generator=torch.Generator().manual_seed(0))
    state, expected = make(start, form), start.clone()
    for number in range(3):
        update = update_of(count, dtype, number)
        lm.layer_muon(update, state, slice(0, count), DECAY, RATE, 2)
        kept, change = expected * torch.tensor(DECAY), update.float() * torch.tensor(RATE)
        expected = kept - change
    assert torch.equal(bits(master_of(state)), bits(expected))
    if state.high is not None:
        ties = bits(expected) & 0xFFFF == 0x8000
        assert torch.equal(state.high[~ties], expected.bfloat16()[~ties])


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("numbers", [(DECAY, RATE), (1.0, 0.0)], ids=["moves", "stays"])
def test_hard_masters_have_the_bits_of_torch_s_operations(
    form: str, dtype: torch.dtype, numbers: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Denormals, infinities, NaN and ties; masters that stay keep their ties."""
    start = hard_masters(50_003)
    start[1] = 1.0  # -0.0 less -0.0 is 0.0
    if form != "copied":  # torch writes a NaN's sign to bfloat16 as it likes
        start[9::1000] = float("nan")
    ours, theirs = make(start, form), make(start, form)
    update = update_of(len(start), dtype)
    if form == "split" and dtype == torch.float32:
        bits(update)[9::1000] = 0x7FFFFFFF  # as a master, rounding would make it -0.0
        start[9::2000] = 1.0
        ours, theirs = make(start, form), make(start, form)
    lm.layer_muon(update, ours, slice(0, len(start)), *numbers, threads=3)
    monkeypatch.setattr(lm, "CHUNK", 1000)
    lm.torch_muon(update, theirs, *numbers)
    assert same(ours, theirs)
    assert torch.equal(master_of(ours).isnan(), start.isnan() | update.isnan())
    stays = numbers == (1.0, 0.0) and form != "copied" and not update.isnan().any()
    assert same(ours, make(start, form)) == stays


@needs_compiler
def test_bits_depend_on_neither_threads_nor_cuts_and_nothing_else_is_written() -> None:
    count = 3 * (1 << 16) + 77
    start, update = hard_masters(count), update_of(count, torch.bfloat16)
    whole, cut = make(start, "split"), make(start, "split")
    lm.layer_muon(update, whole, slice(5, count - 3), DECAY, RATE, 1)
    for low, high in ((5, 6), (6, 70_001), (70_001, count - 3)):
        lm.layer_muon(update, cut, slice(low, high), DECAY, RATE, 4)
    assert same(whole, cut)
    before = make(start, "split")
    for now, then in zip(tensors(whole), tensors(before), strict=True):
        assert torch.equal(now[:5], then[:5]) and torch.equal(now[-3:], then[-3:])
        assert not torch.equal(now, then)
    lm.layer_muon(update, cut, slice(9, 9), DECAY, RATE)
    assert same(whole, cut)


def test_every_processor_gives_the_same_bits(
    processors: list[ctypes.CDLL], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = hard_masters(10_007)
    for form in FORMS:
        for dtype in DTYPES:
            states = [make(start, form) for _ in processors]
            for library, state in zip(processors, states, strict=True):
                monkeypatch.setattr(native, "library", lambda library=library: library)
                update = update_of(len(start), dtype)
                lm.layer_muon(update, state, slice(0, len(start)), DECAY, RATE, 2)
            assert all(same(states[0], other) for other in states[1:])


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"update": torch.zeros(8, dtype=torch.float16)}, "update"),
        ({"update": torch.zeros(16)[::2]}, "update"),
        ({"high": torch.zeros(7, dtype=torch.bfloat16)}, "high"),
        ({"low": torch.zeros(8, dtype=torch.int32)}, "low"),
        ({"low": None}, "neither plain nor split"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensors_that_do_not_fit_are_refused(change: dict[str, Any], name: str) -> None:
    parts: dict[str, Any] = {
        "update": torch.zeros(8),
        "high": torch.zeros(8, dtype=torch.bfloat16),
        "low": torch.zeros(8, dtype=torch.uint16),
        **change,
    }
    state = HostState(None, parts["high"], parts["low"], Moments.empty(0))
    with pytest.raises(ModelError) as caught:
        lm.layer_muon(parts["update"], state, slice(0, 8), DECAY, RATE)
    assert name in caught.value.message
