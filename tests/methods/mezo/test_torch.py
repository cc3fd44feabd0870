"""MeZO over all parameters against its algorithm, written down in float64 with the noise kept in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ondevice.core.errors import CheckpointError, ConfigError
from ondevice.methods.mezo import torch as mezo_torch
from ondevice.methods.mezo.config import MezoConfig
from ondevice.methods.mezo.torch import MezoSession
from ondevice.models.load import tiny_model
from ondevice.runtime_ops import generator
from tests.methods.reference import batch, in_double, plain_loss

SEED = 5
MODELS = [("llama", {}), ("qwen2", {"tied": False, "layers": 1, "vocab": 263}), ("gpt2", {})]


def session(config: MezoConfig, family: str = "llama", **sizes: Any) -> MezoSession:
    return MezoSession(tiny_model(family, **sizes), config, SEED)


def directions(target: MezoSession, step: int, query: int) -> dict[str, np.ndarray]:
    """z of one query by parameter, float64; query i of step s is step s q + i of each parameter's stream."""
    draw = generator.normal if target.config.noise == "gaussian" else generator.rademacher
    number = step * target.config.queries + query
    return {
        name: draw(SEED, number, tensor, 1, 0, value.numel())[0]
        .reshape(value.shape)
        .astype(np.float64)
        for tensor, (name, value) in enumerate(target.parameters.items())
    }


def parameters(target: MezoSession) -> dict[str, np.ndarray]:
    return {name: value.numpy().copy() for name, value in target.parameters.items()}


def reference_loss(
    family: str, sizes: dict, values: dict, ids: np.ndarray, labels: np.ndarray
) -> float:
    model = in_double(tiny_model(family, **sizes).model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(values[name]))
        logits = model(torch.from_numpy(ids), use_cache=False).logits
        return float(plain_loss(logits, torch.from_numpy(labels)))


@pytest.mark.parametrize(("family", "sizes"), MODELS)
@pytest.mark.parametrize("noise", ["gaussian", "rademacher"])
def test_a_step_follows_algorithm_2(family, sizes, noise) -> None:
    config = MezoConfig(
        queries=3, perturbation_scale=1e-2, noise=noise
    )  # no power of two: ranges of steps overlap
    target = session(config, family, **sizes)
    before = parameters(target)
    ids, labels = batch(3)
    result = target.step(ids, labels, 7, 1e-3)
    zs = [directions(target, 7, query) for query in range(3)]
    expected = [
        reference_loss(
            family, sizes, {n: before[n] + sign * 1e-2 * z[n] for n in before}, ids, labels
        )
        for sign in (1, -1)
        for z in zs
    ]
    np.testing.assert_allclose(result.losses, expected, rtol=3e-6)
    plus, minus = np.array(expected[:3]), np.array(expected[3:])
    np.testing.assert_allclose(result.projected_gradients, (plus - minus) / 2e-2, atol=2e-3)
    for name, value in parameters(target).items():
        moved = sum(g * z[name] for g, z in zip(result.projected_gradients, zs))
        np.testing.assert_allclose(value, before[name] - 1e-3 / 3 * moved, atol=2e-6, err_msg=name)


@pytest.mark.parametrize(("family", "sizes"), MODELS)
def test_a_step_at_learning_rate_zero_restores_every_parameter(family, sizes) -> None:
    target = session(MezoConfig(queries=3, perturbation_scale=1e-3), family, **sizes)
    before = parameters(target)
    target.step(*batch(2), 0, 0.0)
    after = parameters(target)
    assert max(float(np.abs(after[name] - before[name]).max()) for name in before) < 2e-6
    assert before.keys() == dict(target.loaded.model.named_parameters()).keys()
    assert ("lm_head.weight" in before) == (sizes.get("tied") is False)


def test_half_precision_parameters_do_not_drift() -> None:
    """At rate 0 every bit stays, and each loss is that of the parameters moved along the noise and rounded once."""
    loaded = tiny_model()
    loaded.model.to(torch.bfloat16)
    target = MezoSession(loaded, MezoConfig(queries=2), SEED)
    before = {name: value.clone() for name, value in target.parameters.items()}
    for step in range(3):
        result = target.step(*batch(3), step, 0.0)
    assert all(torch.equal(value, before[name]) for name, value in target.parameters.items())
    for sign, loss in zip((1, -1), result.losses[1::2], strict=True):
        for name, z in directions(target, 2, 1).items():
            moved = before[name].double() + sign * 1e-3 * torch.from_numpy(z)
            target.parameters[name].data.copy_(moved.to(torch.bfloat16))
        assert loss == pytest.approx(target._loss(*map(torch.from_numpy, batch(3))), rel=1e-3)


def test_a_projected_gradient_is_the_derivative_along_its_direction() -> None:
    target = session(MezoConfig(queries=4, perturbation_scale=1e-3))
    model = in_double(tiny_model("llama").model).requires_grad_(True)
    ids, labels = batch(2)
    plain_loss(
        model(torch.from_numpy(ids), use_cache=False).logits, torch.from_numpy(labels)
    ).backward()
    gradient = {name: value.grad.numpy() for name, value in model.named_parameters()}
    exact = [
        sum((z[name] * gradient[name]).sum() for name in z)
        for z in (directions(target, 0, i) for i in range(4))
    ]
    received = target.step(ids, labels, 0, 0.0).projected_gradients
    np.testing.assert_allclose(received, exact, atol=0.02 * np.abs(exact).max())


def test_each_query_has_a_batch_of_its_own() -> None:
    """Algorithm 2, line 5: its numbers are those of one query after the other, each on its share of the rows."""
    config = MezoConfig(queries=2, fresh_batches=True)
    ids, labels = batch(4)
    numbers = session(config).step(ids, labels, 3, 0.0).projected_gradients
    for query in range(2):
        rows = slice(2 * query, 2 * query + 2)
        alone = session(config.model_copy(update={"fresh_batches": False})).step(
            ids[rows], labels[rows], 3, 0.0
        )
        assert alone.projected_gradients[query] == pytest.approx(numbers[query], abs=2e-3)
    with pytest.raises(ConfigError) as refused:
        session(config).step(ids[:1], labels[:1], 0, 0.0)
    assert refused.value.received == 1


def test_noise_is_the_same_in_chunks(monkeypatch) -> None:
    one, many = session(MezoConfig()), session(MezoConfig())
    ids, labels = batch(2)
    one.step(ids, labels, 3, 1e-3)
    monkeypatch.setitem(mezo_torch.CHUNK, "cpu", 1 << 9)
    many.step(ids, labels, 3, 1e-3)
    assert all(
        a.tobytes() == b.tobytes()
        for a, b in zip(parameters(one).values(), parameters(many).values())
    )


def test_a_resumed_run_has_the_same_bits_and_a_replay_the_same_parameters() -> None:
    config = MezoConfig(queries=2)
    straight, first, replayed = session(config), session(config), session(config)
    batches = [batch(2, seed=step) for step in range(4)]
    results = [straight.step(*batches[step], step, 1e-3) for step in range(4)]
    for step in range(2):
        first.step(*batches[step], step, 1e-3)
    second = session(config, seed=99)  # other weights: the state must replace them all
    second.load_state(first.state())
    for step in range(2, 4):
        assert second.step(*batches[step], step, 1e-3) == results[step]
    for name, value in parameters(straight).items():
        assert parameters(second)[name].tobytes() == value.tobytes(), name
    for step, result in enumerate(results):
        replayed.apply_update(result.projected_gradients, step, 1e-3)
    for name, value in parameters(straight).items():
        np.testing.assert_allclose(parameters(replayed)[name], value, atol=5e-6, err_msg=name)


def test_adapters_and_incomplete_states_are_refused() -> None:
    target = session(MezoConfig())
    assert target.adapter() is None
    with pytest.raises(ConfigError):
        target.load_adapter(None)  # type: ignore[arg-type]
    state = target.state()
    del state["model.norm.weight"]
    with pytest.raises(CheckpointError) as error:
        target.load_state(state)
    assert "model.norm.weight" in str(error.value)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_an_update_below_the_last_bit_is_kept_on_average(half: torch.dtype) -> None:
    rate = torch.finfo(half).eps / 800  # a step is some 1/30 of a typical weight's last bit

    def moved(dtype: torch.dtype) -> np.ndarray:
        loaded = tiny_model("llama")
        for parameter in loaded.model.parameters():
            parameter.data = parameter.data.to(half).to(dtype)
        target = MezoSession(loaded, MezoConfig(), 3)
        before = {name: value.copy() for name, value in target.state().items()}
        for step in range(40):
            target.apply_update((1.0,), step, rate)
        after = target.state()
        return np.concatenate(
            [(after[name] - before[name]).ravel() for name in before if name != "seed"]
        )

    wide, narrow = moved(torch.float32), moved(half)
    assert narrow @ wide / (wide @ wide) == pytest.approx(1.0, abs=0.1)
    np.testing.assert_array_equal(narrow, moved(half))  # a function of seed, step and element
