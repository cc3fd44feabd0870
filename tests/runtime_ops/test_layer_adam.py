"""The fused AdamW step: against torch, split storage to the bit, rounding, rows, threads, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ondevice.core.errors import DataError, MissingPackageError, ModelError
from ondevice.runtime_ops import layer_adam as la
from ondevice.runtime_ops import native
from ondevice.runtime_ops.layer_adam import AdamStep, HostState, Moments

FORMS = [(form, kind) for form in ("plain", "split") for kind in la.KINDS]
STEP = AdamStep(1e-3, weight_decay=0.1, grad_scale=0.5)
needs_compiler = pytest.mark.skipif(not la.available(), reason="no C++ compiler")


def bits(x: Tensor) -> Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def make(master: Tensor, form: str, kind: str, seed: int = 3) -> HostState:
    """A state that holds `master`, with zero moments."""
    moments, high = (
        Moments.empty(master.numel(), kind),
        torch.empty(master.numel(), dtype=torch.bfloat16),
    )
    if form == "plain":
        return HostState(master.clone(), high, None, moments, seed)
    low = torch.empty(master.numel(), dtype=torch.uint16)
    la.split_(master, high, low, moments)
    return HostState(None, high, low, moments, seed)


def master_of(state: HostState) -> Tensor:
    if state.master is not None:
        return state.master
    assert state.high is not None and state.low is not None
    return la.merge(state.high, state.low, state.moments)


def tensors(state: HostState) -> dict[str, Tensor]:
    arrays = {
        "master": state.master,
        "high": state.high,
        "low": state.low,
        **state.moments.tensors(),
    }
    return {name: tensor for name, tensor in arrays.items() if tensor is not None}


def same_bits(a: HostState, b: HostState) -> bool:
    return all(
        torch.equal(bits(x), bits(y))
        for x, y in zip(tensors(a).values(), tensors(b).values(), strict=True)
    )


def hard_masters(count: int = 50_000) -> Tensor:
    """Random bits without NaN: normals, denormals, infinities, both signs, and an exact tie every
    fourth."""
    words = torch.randint(-(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(0)).to(
        torch.int32
    )
    words[::4] = (words[::4] & ~0xFFFF) | 0x8000
    words[:8] = torch.tensor(
        [0, -(2**31), 1, 0x8000, 0x18000, 0x7F800000, -0x800000, 0x7F7F8000], dtype=torch.int32
    )
    return torch.where(words.view(torch.float32).isnan(), 1.0, words.view(torch.float32))


@pytest.fixture(params=["native", "plain"])
def form_of_code(request, monkeypatch) -> str:
    if request.param == "plain":
        monkeypatch.setattr(native, "library", lambda: None)
    elif not la.available():
        pytest.skip("no C++ compiler")
    return request.param


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_split_and_merge_keep_every_bit(form_of_code, kind):
    master = hard_masters()
    state = make(master, "split", kind)
    assert state.high is not None
    assert torch.equal(bits(state.high), bits(master.bfloat16()))
    assert torch.equal(bits(master_of(state)), bits(master))
    assert bool(state.moments.v.signbit().any()), "no tie was met: the test would prove nothing"
    state.moments.v.abs_()
    assert not torch.equal(bits(master_of(state)), bits(master))


def test_with_int8_moments_ties_round_away_from_zero_and_every_bit_is_kept(form_of_code):
    master = hard_masters()
    state = make(master, "split", "int8")
    assert torch.equal(bits(master_of(state)), bits(master))
    assert state.high is not None
    off = bits(state.high).int() - bits(master.bfloat16()).int()
    even_tie = ((bits(master) & 0x1FFFF) == 0x8000).int()
    assert torch.equal(off, even_tie) and int(even_tie.sum()) > 1000


def test_nan_stays_a_nan_in_both_halves(form_of_code):
    words = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -0x7FFFFF], dtype=torch.int32)
    state = make(words.view(torch.float32), "split", "float32")
    assert (
        state.high is not None
        and bool(state.high.isnan().all())
        and bool(master_of(state).isnan().all())
    )


@needs_compiler
def test_both_forms_of_code_split_alike(monkeypatch):
    master = hard_masters()
    states = [make(master, "split", kind) for kind in la.KINDS]
    monkeypatch.setattr(native, "library", lambda: None)
    assert all(same_bits(state, make(master, "split", state.moments.kind)) for state in states)


@needs_compiler
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_split_is_plain_to_the_bit_over_200_steps(kind):
    torch.manual_seed(0)
    count, ties = 20_011, 2000
    master = torch.randn(count)
    bits(master)[:ties] = (bits(master)[:ties] & ~0xFFFF) | 0x8000
    plain, split = make(master, "plain", kind), make(master, "split", kind)
    seen = 0
    for number in range(1, 201):
        grad = torch.randn(count).mul_(1e-2).bfloat16()
        grad[:ties] = (
            0  # without weight decay these stay ties, with v = -0.0 where they were rounded up
        )
        step = AdamStep(1e-3, step=number, weight_decay=0.01 if number > 100 else 0.0)
        la.layer_adam(grad, plain, step)
        la.layer_adam(grad, split, step)
        assert plain.high is not None and split.high is not None
        assert torch.equal(bits(plain.high), bits(split.high))
        assert torch.equal(bits(master_of(plain)), bits(master_of(split)))
        assert torch.equal(bits(plain.moments.v), bits(split.moments.v.abs()))
        seen += int(split.moments.v[ties:].signbit().sum())
        assert number > 100 or int(split.moments.v[:ties].signbit().sum()) > ties // 4
    assert seen > 0, "no tie came about by itself"


def reference(master: Tensor, grads: list[Tensor], step: AdamStep, fused: bool) -> Tensor:
    """torch.optim.AdamW over scaled gradients."""
    parameter = torch.nn.Parameter(master.clone())
    betas = (step.beta1, step.beta2)
    optimizer = torch.optim.AdamW(
        [parameter],
        step.learning_rate,
        betas,
        step.eps,
        weight_decay=step.weight_decay,
        fused=fused,
    )
    for grad in grads:
        parameter.grad = grad.to(master.dtype) * step.grad_scale
        optimizer.step()
    return parameter.detach()


@needs_compiler
@pytest.mark.parametrize(
    "form,dtype", [("plain", torch.bfloat16), ("plain", torch.float32), ("split", torch.bfloat16)]
)
@pytest.mark.parametrize("count", [1, 7, 63, 65, 128, 100_003])
def test_updates_match_torch_adamw(form, dtype, count):
    torch.manual_seed(count)
    master, grads = torch.randn(count), [torch.randn(count).to(dtype) for _ in range(10)]
    state = make(master, form, "float32")
    for number, grad in enumerate(grads, 1):
        la.layer_adam(grad, state, replace(STEP, step=number))
    for expected in (
        reference(master.double(), grads, STEP, False),
        reference(master, grads, STEP, True),
    ):
        error = (master_of(state).double() - expected.double()).norm() / expected.double().norm()
        assert error < 1e-6
        torch.testing.assert_close(
            master_of(state).double(), expected.double(), rtol=1e-6, atol=1e-6
        )
    assert state.high is not None and torch.equal(state.high, master_of(state).bfloat16())
    unscaled = reference(master.double(), grads, replace(STEP, weight_decay=0.0), False)
    assert (master_of(state).double() - unscaled).norm() / unscaled.norm() > 1e-5


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_torch_adam_is_the_fused_optimizer(scale):
    torch.manual_seed(0)
    master, grads = torch.randn(5003), [torch.randn(5003).bfloat16() for _ in range(5)]
    state, step = (
        make(master, "plain", "float32"),
        AdamStep(1e-3, weight_decay=0.1, grad_scale=scale),
    )
    for number, grad in enumerate(grads, 1):
        la.torch_adam(grad, state, replace(step, step=number), torch.empty(5003))
    assert state.high is not None
    assert torch.equal(master_of(state), reference(master, grads, step, True))
    assert torch.equal(state.high, master_of(state).bfloat16())


@needs_compiler
@pytest.mark.parametrize("form,kind", FORMS)
def test_the_number_of_threads_does_not_change_bits(form, kind):
    torch.manual_seed(0)
    master, grad = torch.randn(300_007), torch.randn(300_007)
    states = [make(master, form, kind) for _ in range(4)]
    for number in (1, 2):
        for threads, state in zip((1, 2, 3, 7), states):
            la.layer_adam(grad, state, replace(STEP, step=number), threads=threads)
    assert all(same_bits(states[0], state) for state in states[1:])
    assert not torch.equal(master_of(states[0]), master)


@pytest.mark.parametrize("form,kind", FORMS)
def test_every_processor_gives_the_same_bits(processors, monkeypatch, form, kind):
    """Gradients over 16 decades with zeros, a NaN and an infinity; several tiles and a part of one."""
    states = []
    for library in processors:
        monkeypatch.setattr(native, "library", lambda library=library: library)
        torch.manual_seed(0)
        state = make(torch.randn(20_003), form, kind)
        for number in range(1, 13):
            grad = torch.randn(20_003) * 10 ** torch.empty(20_003).uniform_(-12, 4)
            grad[torch.rand(20_003) < 0.3] = 0
            if number == 9:
                grad[5], grad[500] = float("nan"), float("inf")
            la.layer_adam(grad.bfloat16(), state, replace(STEP, step=number))
        states.append(state)
    assert all(same_bits(states[0], state) for state in states[1:])
    assert int(master_of(states[0]).isnan().sum()) >= 2


@needs_compiler
@pytest.mark.parametrize("form,kind", FORMS)
@pytest.mark.parametrize("width", [256, 48, 1])
def test_rows_and_their_complement_are_the_whole(form, kind, width):
    torch.manual_seed(0)
    table = torch.randn(500, width)
    if kind == "int8" and width % la.TILE:
        with pytest.raises(ModelError) as error:
            la.layer_adam(table, make(table.view(-1), form, kind), STEP, torch.tensor([0]), width)
        assert "a multiple of 128" in error.value.expected
        return
    chosen = torch.rand(500) < 0.4
    chosen[100:200] = True
    rows, rest = chosen.nonzero().view(-1), (~chosen).nonzero().view(-1)
    whole, parts, first = (make(table.view(-1), form, kind) for _ in range(3))
    for number in (1, 2, 3):
        grad = torch.randn(500, width).bfloat16()
        step = replace(STEP, step=number)
        la.layer_adam(grad, whole, step)
        la.layer_adam(grad, parts, step, rows, width, threads=2)
        if number == 1:
            la.layer_adam(grad, first, step, rows, width)
            moved = bits(master_of(first).view(500, width)) != bits(
                master_of(make(table.view(-1), form, kind))
            ).view(500, width)
            assert torch.equal(moved.any(1), chosen)
        assert not same_bits(whole, parts)
        la.layer_adam(grad, parts, step, rest, width)
        assert same_bits(whole, parts)
    la.layer_adam(grad, parts, replace(STEP, step=4), torch.empty(0, dtype=torch.int64), width)
    assert same_bits(whole, parts)


@needs_compiler
@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_stochastic_rounding_is_unbiased_and_follows_the_seed_and_step(kind):
    count = 1 << 20
    value_m, value_v = torch.tensor(0.7).bfloat16(), torch.tensor(0.3).bfloat16()

    def after(seed: int, number: int) -> tuple[Tensor, Tensor]:
        state = HostState(torch.zeros(count), None, None, Moments.empty(count, kind), seed)
        if kind == "bfloat16":
            state.moments.m.fill_(value_m)
            state.moments.v.fill_(value_v)
            la.layer_adam(torch.zeros(count), state, AdamStep(0.0, step=number))
            return state.moments.m.float(), state.moments.v.float()
        grad = torch.full(
            (count,), 0.7
        )  # m = 0.07, v = 0.00049; the first of each tile sets the scales
        grad[:: la.TILE] = 1.0
        la.layer_adam(grad, state, AdamStep(0.0, step=number))
        return decoded(state.moments)

    wanted = (
        (0.9 * float(value_m), 0.999 * float(value_v)) if kind == "bfloat16" else (0.07, 0.00049)
    )
    keep = torch.arange(count) % la.TILE != 0
    actual = after(1, 5)
    for got, exact in zip(actual, wanted):
        got = got[keep].double()
        gap = float(got.max() - got.min())
        assert gap > 0 and len(got.unique()) == 2
        assert abs(float(got.mean()) - exact) < 5 * gap / 2 / got.numel() ** 0.5 + 1e-4 * gap
    for other in (after(2, 5), after(1, 6)):
        assert (other[0] != actual[0])[keep].double().mean() > 0.1
    assert torch.equal(after(1, 5)[1], actual[1])
    if kind == "bfloat16":
        assert float((value_v.float() * 0.999).bfloat16()) == float(value_v), (
            "nearest rounding does not move"
        )


@needs_compiler
def test_every_array_and_step_rounds_by_random_bits_of_its_own():
    """Bits that come again would push the same elements up again: a bias."""
    roundings = set()
    for seed in range(8):
        for number in range(1, 33):
            state = HostState(torch.zeros(256), None, None, Moments.empty(256, "bfloat16"), seed)
            state.moments.m.fill_(0.7)
            la.layer_adam(torch.zeros(256), state, AdamStep(0.0, step=number))
            roundings.add(bits(state.moments.m).numpy().tobytes())
    assert len(roundings) == 8 * 32


def decoded(moments: Moments) -> tuple[Tensor, Tensor]:
    """Both moments of 8-bit codes, by what Moments says of them: in float64."""
    assert moments.m_scale is not None and moments.v_scale is not None

    def value(code: Tensor, exponents: int, scale: Tensor) -> Tensor:
        least, most = 2.0 ** (1 - 2**exponents), 2 - 2.0**-4
        size = (1 + (code % 16) / 16) * 2.0 ** (code // 16) * least - least
        return size / (most - least) * scale.double().repeat_interleave(la.TILE)[: len(code)]

    m, v = moments.m.long(), moments.v.long()
    sign = 1 - 2 * (m // 128)
    return sign * value(m % 128, 3, moments.m_scale), value(v, 4, moments.v_scale)


@needs_compiler
@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_the_second_moment_follows_the_gradient_and_nearest_rounding_does_not(kind):
    count = 8192
    state = HostState(torch.zeros(count), None, None, Moments.empty(count, kind))
    exact, nearest = 0.0, torch.zeros(1).bfloat16()
    scale = torch.linspace(0.5, 1, count)  # of the gradient: other values in one tile
    for number in range(1, 3001):
        size = 1.0 if number <= 1500 else 0.25
        la.layer_adam(scale * size, state, AdamStep(0.0, step=number))
        exact = 0.999 * exact + 0.001 * size**2
        nearest = (nearest.float() * 0.999 + 0.001 * size**2).bfloat16()
        if number in (1500, 3000):
            v = decoded(state.moments)[1] if kind == "int8" else state.moments.v.float()
            assert abs(float((v / scale**2).mean()) / exact - 1) < 0.02
            assert abs(float(nearest) / exact - 1) > 0.1


@needs_compiler
def test_int8_updates_never_explode():
    """A step of AdamW moves a parameter by at most 3.2 lr; with 8-bit moments by less than 16 lr,
    whatever comes."""
    torch.manual_seed(0)
    count = 1 << 16
    state, seen = make(torch.zeros(count), "plain", "int8"), 0.0
    for number in range(1, 301):
        grad = torch.randn(count) * 10 ** torch.empty(count).uniform_(-12, 4)
        if number % 50 == 0:
            grad *= 1e4
        if number % 3 == 0:
            grad[torch.rand(count) < 0.5] = 0
        assert state.master is not None
        before = state.master.clone()
        la.layer_adam(grad, state, AdamStep(1.0, step=number))
        state.master.sub_(before)
        seen = max(seen, float(state.master.abs().max()))
        state.master.zero_()
    assert 1 < seen < 16


@needs_compiler
@pytest.mark.parametrize("form,kind", FORMS)
def test_infinities_and_nan_do_not_crash_and_are_seen(form, kind):
    state = make(torch.ones(1000), form, kind)
    grad = torch.zeros(1000)
    grad[3], grad[500], grad[900] = float("nan"), float("inf"), 3e38
    for number in (1, 2):
        la.layer_adam(grad, state, AdamStep(1e-3, step=number))
    assert bool(master_of(state)[torch.tensor([3, 500])].isnan().all())
    clean = master_of(state)[128:384]
    assert bool((clean == 1).all())


def train(kind: str, form: str) -> float:
    """The final loss of a small regression whose parameters live in one state."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 8, generator=generator)
    y = torch.sin(x @ torch.randn(8, 4, generator=generator))
    sizes = [(8, 64), (64,), (64, 4), (4,)]
    counts = [torch.Size(size).numel() for size in sizes]
    start = torch.cat(
        [torch.randn(n, generator=generator) * (0.3 if n > 64 else 0.0) for n in counts]
    )
    state, loss = make(start, form, kind), torch.tensor(0.0)
    for number in range(1, 301):
        flat = master_of(state).clone().requires_grad_()
        w1, b1, w2, b2 = (part.view(size) for part, size in zip(flat.split(counts), sizes))
        loss = (torch.tanh(x @ w1 + b1) @ w2 + b2 - y).square().mean()
        loss.backward()
        assert flat.grad is not None
        la.layer_adam(flat.grad, state, AdamStep(1e-2, step=number))
    return float(loss.detach())


@needs_compiler
def test_small_moments_train_nearly_as_well():
    exact = train("float32", "plain")
    assert train("float32", "split") == exact
    assert exact < 0.2
    for kind, margin in (("bfloat16", 0.03), ("int8", 0.10)):
        assert abs(train(kind, "split") / exact - 1) < margin, kind


@pytest.mark.parametrize("form,kind", FORMS)
def test_the_table_of_bytes(form, kind):
    state = make(torch.zeros(128 * 100), form, kind)
    stored = sum(tensor.nbytes for tensor in tensors(state).values()) / 12_800
    assert la.BYTES[form, kind].stored == stored
    read = stored - 2 if form == "plain" else stored  # the copy is only written
    assert la.BYTES[form, kind].moved == 2 + read + stored
    assert state.moments.nbytes == sum(t.nbytes for t in state.moments.tensors().values())


def test_wrong_arguments_are_refused(monkeypatch):
    good, grad = make(torch.zeros(256), "plain", "float32"), torch.zeros(256)
    for bad in (
        torch.zeros(255),
        torch.zeros(257),
        torch.zeros(256).double(),
        torch.zeros(512)[::2],
    ):
        with pytest.raises(ModelError) as error:
            la.layer_adam(bad, good, STEP)
        assert "256 contiguous elements" in error.value.expected
    no_scale = replace(Moments.empty(256, "int8"), m_scale=None)
    for state, name in (
        (replace(good, high=torch.zeros(256)), "high"),
        (replace(good, moments=Moments("bfloat16", grad, grad)), "m"),
        (replace(good, moments=no_scale), "m_scale"),
    ):
        with pytest.raises(ModelError) as error:
            la.layer_adam(grad, state, STEP)
        assert error.value.message.split()[-1] == name
    with pytest.raises(ModelError) as error:
        la.layer_adam(grad, replace(good, low=torch.zeros(256, dtype=torch.uint16)), STEP)
    assert error.value.received == "master and high and low"
    with pytest.raises(ModelError) as error:
        Moments.empty(4, "float16")
    assert error.value.received == "float16"
    with pytest.raises(ModelError) as error:
        la.layer_adam(grad, good, STEP, torch.tensor([0]), 100)
    assert error.value.expected == "a positive divisor of 256"
    for rows in ([-1, 0], [0, 4]):
        with pytest.raises(DataError) as error:
            la.layer_adam(grad, good, STEP, torch.tensor(rows), 64)
        assert error.value.received in rows and error.value.expected == "0 to 3"
    for rows in ([1, 0], [1, 1]):
        with pytest.raises(DataError) as error:
            la.layer_adam(grad, good, STEP, torch.tensor(rows), 64)
        assert error.value.hint == "rows.unique()"
    with pytest.raises(ModelError) as error:
        la.torch_adam(grad, make(torch.zeros(256), "split", "float32"), STEP, grad)
    assert error.value.received == "split with float32 moments"
    monkeypatch.setattr(native, "library", lambda: None)
    assert not la.available()
    with pytest.raises(MissingPackageError):
        la.layer_adam(grad, good, STEP)
    assert float(good.moments.v.abs().sum()) == 0
