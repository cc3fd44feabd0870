"""Properties that LoRA, LoRA-FA and full fine-tuning share: AdamW, resume, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ondevice.core.errors import CheckpointError, ConfigError
from ondevice.core.registry import method_config, open_session
from ondevice.core.session import Replaying
from ondevice.models.load import tiny_model
from tests.methods.reference import batch, open_tiny

BETAS, EPSILON = (0.9, 0.999), 1e-8


def adamw(value: np.ndarray, gradients: list[np.ndarray], rate: float, decay: float) -> np.ndarray:
    """Loshchilov and Hutter's update, float64."""
    value, m, v = value.astype(np.float64), 0.0, 0.0
    for t, g in enumerate(gradients, 1):
        m, v = BETAS[0] * m + (1 - BETAS[0]) * g, BETAS[1] * v + (1 - BETAS[1]) * g**2
        value = value * (1 - rate * decay)
        value = value - rate * (m / (1 - BETAS[0] ** t)) / (
            np.sqrt(v / (1 - BETAS[1] ** t)) + EPSILON
        )
    return value


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_optimizer_is_adamw_at_the_loop_s_learning_rate(decay) -> None:
    target = open_tiny("lora", weight_decay=decay, learning_rate=123.0)
    key = "model.layers.0.self_attn.q_proj.lora_B.weight"
    start, gradients, m = target.state()[key], [], 0.0
    for step in range(3):
        target.step(*batch(2, seed=step), step, 1e-2)
        moment = target.state()[f"exp_avg/{key}"].astype(np.float64)
        gradients.append((moment - BETAS[0] * m) / (1 - BETAS[0]))
        m = moment
    np.testing.assert_allclose(target.state()[key], adamw(start, gradients, 1e-2, decay), atol=2e-5)


@pytest.mark.parametrize("name", ["lora", "lora-fa", "full"])
def test_resumed_it_has_the_same_bits(name) -> None:
    straight, first = open_tiny(name), open_tiny(name)
    batches = [batch(2, seed=step) for step in range(5)]
    results = [straight.step(*batches[step], step, 1e-3) for step in range(5)]
    for step in range(2):
        first.step(*batches[step], step, 1e-3)
    second = open_tiny(name, sizes={"seed": 0})
    second.load_state({key: value.copy() for key, value in first.state().items()})
    for step in range(2, 5):
        assert second.step(*batches[step], step, 1e-3) == results[step]
    ours, theirs = straight.state(), second.state()
    assert ours.keys() == theirs.keys() and all(
        ours[key].tobytes() == theirs[key].tobytes() for key in ours
    )


def test_what_is_not_for_it_is_refused() -> None:
    target = open_tiny("full")
    assert not isinstance(target, Replaying)
    with pytest.raises(ConfigError, match="takes no adapter"):
        target.load_adapter(open_tiny("lora").adapter())
    other = open_tiny("lora")
    other.step(*batch(2), 0, 1e-3)
    state = other.state()
    with pytest.raises(CheckpointError, match="exp_avg"):
        open_tiny("lora").load_state(
            {k: v for k, v in state.items() if not k.startswith("exp_avg/")}
        )


def first_moments(state: dict[str, np.ndarray]) -> np.ndarray:
    """All first moments of AdamW, one after the other: after one step a tenth of the gradient."""
    return np.concatenate(
        [state[key].ravel() for key in sorted(state) if key.startswith("exp_avg/")]
    )


@pytest.mark.parametrize("name", ["lora", "lora-fa", "full", "mesp"])
def test_micro_batches_give_the_gradient_of_the_batch_and_the_norm_is_clipped(name) -> None:
    data, moments = batch(3), {}
    for limit in (None, 1e9, 0.05):
        for rows in (None, 2):
            opened = open_tiny(name, max_grad_norm=limit, micro_batch_size=rows)
            loss = opened.step(*data, 0, 1e-3).loss
            moments[limit, rows] = first_moments(opened.state())
            assert loss == pytest.approx(open_tiny(name).step(*data, 0, 1e-3).loss, rel=1e-6)
    whole = moments[None, None]
    norm = 10 * float(np.linalg.norm(whole))
    assert norm > 0.06 and moments[1e9, None].tobytes() == whole.tobytes()
    for rows in (None, 2):
        np.testing.assert_allclose(moments[None, rows], whole, rtol=1e-3, atol=1e-7)
        np.testing.assert_allclose(moments[0.05, rows], whole * 0.05 / norm, rtol=1e-3, atol=1e-8)


def bfloat16_session(name: str = "full", **values):
    """A session whose model is in bfloat16."""
    loaded = tiny_model("llama")
    loaded.model.to(torch.bfloat16)
    return open_session(loaded, method_config(name, values), 3)


def movement(session, steps: int = 12, rate: float = 1e-5) -> np.ndarray:
    before = {name: value for name, value in session.state().items() if value.size > 1}
    for step in range(steps):
        session.step(*batch(2, seed=step), step, rate)
    after = session.state()
    return np.concatenate([(after[name] - value).ravel() for name, value in before.items()])


def test_bfloat16_parameters_move_as_float32_ones_do_at_the_default_rate() -> None:
    narrow, wide = bfloat16_session(), open_tiny("full")
    ours = movement(narrow)
    wide.load_state(
        {name: value for name, value in bfloat16_session().state().items() if "/" not in name}
    )
    theirs = movement(wide)
    assert (ours != 0).mean() > 0.99
    assert np.linalg.norm(ours) == pytest.approx(np.linalg.norm(theirs), rel=0.01)
    assert ours @ theirs / (theirs @ theirs) > 0.99


def test_torch_s_own_step_in_bfloat16_loses_most_of_it(monkeypatch) -> None:
    """Why there are masters: without them this is what the same steps do."""
    from ondevice.methods.adamw import TorchAdamW

    monkeypatch.setattr("ondevice.methods.adamw.open_adamw", lambda *given: [TorchAdamW(*given)])
    assert (movement(bfloat16_session()) != 0).mean() < 0.3


def test_the_model_computes_with_the_masters_rounded_to_the_nearest() -> None:
    session = bfloat16_session()
    movement(session, steps=3)
    for name, parameter in session.parameters.items():
        master = torch.from_numpy(session.state()[name])
        assert parameter.dtype == torch.bfloat16
        difference = (parameter.detach().float() - master).abs()
        assert bool((difference <= master.abs() * 2**-8).all())


@pytest.mark.parametrize("kernel", [True, False], ids=["compiled", "torch"])
@pytest.mark.parametrize("name", ["full", "lora"])
def test_in_bfloat16_a_resumed_run_has_the_same_bits(name, kernel, monkeypatch) -> None:
    if not kernel:
        monkeypatch.setattr("ondevice.methods.adamw.has_kernel", lambda tensor: False)
    straight, first = bfloat16_session(name), bfloat16_session(name)
    for step in range(5):
        straight.step(*batch(2, seed=step), step, 1e-4)
    for step in range(2):
        first.step(*batch(2, seed=step), step, 1e-4)
    second = bfloat16_session(name)
    second.load_state({key: value.copy() for key, value in first.state().items()})
    for step in range(2, 5):
        second.step(*batch(2, seed=step), step, 1e-4)
    ours, theirs = straight.state(), second.state()
    assert ours.keys() == theirs.keys() and all(
        ours[key].tobytes() == theirs[key].tobytes() for key in ours
    )


def test_without_a_compiler_the_masters_are_the_same_up_to_rounding(monkeypatch) -> None:
    compiled = bfloat16_session()
    movement(compiled)
    monkeypatch.setattr("ondevice.methods.adamw.has_kernel", lambda tensor: False)
    plain = bfloat16_session()
    movement(plain)
    for name, value in plain.state().items():
        np.testing.assert_allclose(compiled.state()[name], value, atol=3e-6)


def test_the_plan_counts_the_masters() -> None:
    from ondevice.methods.full import memory

    session = bfloat16_session()
    movement(session, steps=1)
    states = [state for optimizer in session.optimizers for state in optimizer.states.values()]
    held = sum(t.nbytes for state in states for t in (state.low, state.moments.m, state.moments.v))
    dims = session.loaded.dims
    planned = memory(dims, session.config, 2, 12, activation_bytes=2)
    assert planned["optimizer"] == held == 10 * dims.parameters
    assert (
        memory(dims, session.config, 2, 12, activation_bytes=4)["optimizer"] == 8 * dims.parameters
    )


def test_float16_weights_are_refused_and_adapters_beside_them_are_not() -> None:
    for name in ("full", "lora"):
        loaded = tiny_model("llama")
        loaded.model.to(torch.float16)
        if name == "lora":
            open_session(loaded, method_config(name), 3)
            continue
        with pytest.raises(ConfigError, match="float16"):
            open_session(loaded, method_config(name), 3)
