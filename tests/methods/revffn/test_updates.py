"""Updates of one tensor at a time against torch's and bitsandbytes' optimizers on the same
gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice.core.errors import CheckpointError
from ondevice.core.registry import method_config
from ondevice.methods.revffn import updates
from ondevice.methods.revffn.updates import Updates, clip_scale, squared_norm
from tests.sampling import part_of

RATE, STEPS, SEED = 1e-2, 4, 7
SHAPES = [(40, 24), (24, 40), (3, 20, 12), (33,), (96, 64)]
PEERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=RATE),
    "adamw": lambda p: torch.optim.AdamW(p, lr=RATE, weight_decay=0.1, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=RATE, weight_decay=0.1),
}


def opened(optimizer: str, parameters: dict[str, torch.Tensor], **settings: Any) -> Updates:
    return Updates(method_config("revffn", {"optimizer": optimizer, **settings}), parameters, SEED)


def tensors(
    shapes: list[tuple[int, ...]], dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return {
        f"w{i}": torch.randn(shape, generator=random).to(dtype) for i, shape in enumerate(shapes)
    }


def gradients(of: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(100 + step)
    return {
        name: torch.randn(value.shape, generator=random).to(value.dtype)
        for name, value in of.items()
    }


def peer_steps(
    make: Any, start: dict[str, torch.Tensor], steps: int = STEPS
) -> dict[str, torch.Tensor]:
    leaves = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
    optimizer = make(list(leaves.values()))
    for step in range(steps):
        for name, gradient in gradients(start, step).items():
            leaves[name].grad = gradient
        optimizer.step()
    return {name: leaf.detach() for name, leaf in leaves.items()}


@pytest.mark.parametrize("chunk", [updates.CHUNK, 256])
@pytest.mark.parametrize("name", list(PEERS))
def test_float32_updates_are_those_of_torch(
    name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updates, "CHUNK", chunk)
    start = tensors(SHAPES)
    expected = peer_steps(PEERS[name], start)
    ours = {key: value.clone() for key, value in start.items()}
    run = opened(name, ours, weight_decay=0.0 if name == "sgd" else 0.1)
    for step in range(STEPS):
        for key, gradient in gradients(start, step).items():
            before = gradient.clone()
            run.apply(key, gradient, step + 1, RATE)
            assert torch.equal(gradient, before)
    for key, value in ours.items():
        assert not torch.equal(value, start[key])
        if name == "adafactor":  # sums are taken in chunks
            torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6)
        elif chunk == 256 or name == "sgd":  # vector instructions end where a chunk does
            torch.testing.assert_close(value, expected[key], rtol=1e-6, atol=1e-7)
        else:
            assert torch.equal(value, expected[key]), key


@pytest.mark.parametrize("chunk", [updates.CHUNK, 512])
def test_8_bit_updates_are_those_of_bitsandbytes(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import bitsandbytes

    monkeypatch.setattr(updates, "CHUNK", chunk)
    start = tensors([*SHAPES, (70, 100), (3, 1451)])  # the last is 17 blocks of 256 and one element
    expected = peer_steps(
        lambda p: bitsandbytes.optim.AdamW8bit(p, lr=RATE, weight_decay=0.1), start
    )
    ours = {key: value.clone() for key, value in start.items()}
    run = opened("adamw8bit", ours, weight_decay=0.1)
    for step in range(STEPS):
        for key, gradient in gradients(start, step).items():
            run.apply(key, gradient, step + 1, RATE)
    assert run.states["w6"]["absmax1"].numel() == run.states["w6"]["absmax2"].numel() == 18
    assert {"state1", "absmax1"} <= set(run.states["w4"]) and "exp_avg" in run.states["w0"]
    for key, value in ours.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-6)
    kept = sum(value.numel() * value.element_size() for value in run.states["w4"].values())
    assert kept <= 2.1 * 96 * 64


@settings(max_examples=part_of(25), deadline=None)
@given(
    st.sampled_from(["sgd", "adamw", "adamw8bit", "adafactor"]),
    st.lists(st.integers(1, 70), min_size=1, max_size=3),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_resumed_update_has_the_same_bits(
    name: str, shape: list[int], dtype: torch.dtype
) -> None:
    whole = tensors([tuple(shape)], dtype)
    run = opened(name, whole)
    parts: dict[str, torch.Tensor] = {}
    other = run
    for step in range(STEPS):
        if step == 2:
            parts = {key: value.clone() for key, value in whole.items()}
            other = opened(name, parts)
            other.load({key: value.clone() for key, value in run.arrays().items()})
        for key, gradient in gradients(whole, step).items():
            run.apply(key, gradient, step + 1, RATE)
            if step >= 2:
                other.apply(key, gradient, step + 1, RATE)
    assert torch.equal(whole["w0"], parts["w0"])
    for key, value in run.arrays().items():
        assert torch.equal(value, other.arrays()[key])


def test_stochastic_rounding_keeps_small_steps_on_average() -> None:
    """A sixteenth of a unit of the last place: to the nearest it is lost, by chance every sixteenth
    weight moves."""
    for rounding, expected in (("nearest", 0.0), ("stochastic", 32 * 2.0**-11)):
        weight = {"w": torch.ones(64, 64, dtype=torch.bfloat16)}
        run = opened("sgd", weight, rounding=rounding)
        for step in range(32):
            run.apply(
                "w", torch.full((64, 64), -1.0), step + 1, 2.0**-11
            )  # ulp of [1, 2) is 2^-7: a sixteenth
        moved = float((weight["w"].float() - 1).mean())
        assert moved == pytest.approx(expected, rel=0.05), rounding


def test_rounding_is_a_function_of_seed_step_and_tensor() -> None:
    def moved(seed: int, count: int, name: str) -> torch.Tensor:
        weights = {key: torch.ones(256, dtype=torch.bfloat16) for key in ("a", "b")}
        config = method_config("revffn", {"optimizer": "sgd"})
        Updates(config, weights, seed).apply(name, torch.ones(256), count, 2.0**-10)
        return weights[name]

    first = moved(0, 1, "a")
    assert torch.equal(first, moved(0, 1, "a"))
    assert not any(
        torch.equal(first, moved(*other)) for other in ((1, 1, "a"), (0, 2, "a"), (0, 1, "b"))
    )


@pytest.mark.parametrize("chunk", [1, 7, 64, 256, 1000])
def test_chunks_of_a_stack_cover_it_once_and_are_small(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(updates, "CHUNK", chunk)
    for shape in [
        (1, 1, 33),
        (3, 20, 12),
        (5, 8, 4),
        (1, 100, 3),
        (40, 1, 1),
        (2, 16, 16),
        (4, 6, 9),
    ]:
        covered = torch.zeros(shape, dtype=torch.int64)
        for part in updates._chunks(covered.shape):
            covered[part] += 1
            assert covered[part].numel() <= max(chunk, shape[2]), "a row is the smallest part"
        assert bool((covered == 1).all())


def test_a_gradient_below_the_limit_is_not_scaled() -> None:
    square = torch.tensor(0.09)
    assert [float(clip_scale(square, limit)) for limit in (0.31, 0.6, 100.0)] == [1.0, 1.0, 1.0]
    assert float(clip_scale(square, 0.15)) == pytest.approx(0.5, rel=1e-5)
    assert float(clip_scale(torch.zeros(()), 0.15)) == 1.0


def test_small_gradients_keep_the_variance_that_torch_gives_them() -> None:
    """Squares of 1e-10 are far below float32's epsilon and far above the square of it."""
    start, shrink = tensors([(40, 24)]), 1e-5
    gradient = gradients(start, 0)["w0"] * shrink
    leaf = torch.nn.Parameter(start["w0"].clone())
    leaf.grad = gradient.clone()
    PEERS["adafactor"]([leaf]).step()
    ours = {"w0": start["w0"].clone()}
    opened("adafactor", ours, weight_decay=0.1).apply("w0", gradient, 1, RATE)
    change, expected = (value - start["w0"] for value in (ours["w0"], leaf.detach()))
    assert float((change - expected).norm() / expected.norm()) < 1e-3


@pytest.mark.parametrize("name", ["sgd", "adamw", "adafactor"])
def test_clipping_is_torchs(name: str) -> None:
    start, limit = tensors([(8, 8), (5,)]), 0.5
    leaves = {key: torch.nn.Parameter(value.clone()) for key, value in start.items()}
    optimizer = PEERS[name](list(leaves.values()))
    actual = gradients(start, 0)
    for key, leaf in leaves.items():
        leaf.grad = actual[key].clone()
    torch.nn.utils.clip_grad_norm_(leaves.values(), limit)
    optimizer.step()
    run = opened(name, start, weight_decay=0.0 if name == "sgd" else 0.1)
    scale = clip_scale(squared_norm(actual.values()), limit)
    assert float(scale) < 0.2
    for key, gradient in actual.items():
        run.apply(key, gradient, 1, RATE, scale)
        torch.testing.assert_close(start[key], leaves[key].detach(), rtol=1e-5, atol=1e-6)


def test_a_foreign_state_is_refused() -> None:
    weight = tensors([(8, 8)])
    run = opened("adamw", weight)
    run.apply("w0", weight["w0"].clone(), 1, RATE)
    arrays = run.arrays()
    with pytest.raises(CheckpointError, check=lambda error: "exp_avg_sq" in error.message):
        opened("adamw", weight).load({"exp_avg/w0": arrays["exp_avg/w0"]})
    with pytest.raises(CheckpointError, check=lambda error: error.received is not None):
        opened("adamw", weight).load({key: value[:5] for key, value in arrays.items()})
