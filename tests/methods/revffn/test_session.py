"""Sessions of RevFFN: every way through a step gives the same update, stages, router, resume,
evaluation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ondevice.core.errors import CheckpointError, ConfigError
from ondevice.core.registry import method_config, open_session
from ondevice.core.session import Replaying
from ondevice.methods.revffn.streams import StreamOverflow
from ondevice.methods.revffn.torch import RevffnSession
from ondevice.models.load import tiny_model
from tests.methods.reference import batch

RATE = 1e-3
MODELS = [("llama", {}), ("qwen2", {"tied": False, "layers": 3}), ("qwen2_moe", {})]


def opened(
    family: str = "llama",
    sizes: dict[str, Any] | None = None,
    dtype: str = "float32",
    **settings: Any,
) -> Any:
    loaded = tiny_model(family, **(sizes or {}))
    for parameter in loaded.model.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    return open_session(loaded, method_config("revffn", {"skip_stage1": True, **settings}), 3)


def after(
    session: RevffnSession, steps: int = 3, rows: int = 4, first: int = 0
) -> tuple[list[float], dict[str, Any]]:
    """Losses of some steps on the same rows, and the state after them."""
    losses = [session.step(*batch(rows), step, RATE).loss for step in range(first, first + steps)]
    return losses, session.state()


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.tobytes() == right[name].tobytes(), name


def near(left: dict[str, np.ndarray], right: dict[str, np.ndarray], tolerance: float) -> None:
    for name, value in left.items():
        np.testing.assert_allclose(value, right[name], atol=tolerance, err_msg=name)


@pytest.mark.parametrize("coupling", ["full", "exact"])
@pytest.mark.parametrize(("family", "sizes"), MODELS)
def test_a_fused_update_is_that_of_all_gradients_at_once(family, sizes, coupling) -> None:
    fused = after(opened(family, sizes, coupling=coupling))
    at_once = after(opened(family, sizes, coupling=coupling, fused_update=False))
    stored = after(opened(family, sizes, coupling=coupling, fused_update=False, recompute="stored"))
    assert fused[0] == at_once[0] == stored[0] and fused[0][-1] < fused[0][0]
    same(fused[1], at_once[1])
    same(fused[1], stored[1])


@pytest.mark.parametrize(("family", "sizes"), MODELS)
@pytest.mark.parametrize("recompute", ["reversible", "stored"])
def test_a_batch_in_parts_has_the_gradients_of_the_whole(family, sizes, recompute) -> None:
    """Three parts, the last of another size, rows with different numbers of labelled tokens."""
    ids, labels = batch(5)
    whole, parts = (
        opened(family, sizes, recompute=recompute, micro_batch_size=size).gradients(ids, labels)
        for size in (None, 2)
    )
    assert parts[0] == pytest.approx(whole[0], rel=1e-6)
    assert parts[1].keys() == whole[1].keys()
    for name, gradient in whole[1].items():
        torch.testing.assert_close(
            parts[1][name], gradient, rtol=0, atol=2e-5 * float(gradient.abs().max() + 1e-3)
        )


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "adafactor", "sgd"])
def test_every_optimizer_in_parts_and_fused(optimizer) -> None:
    settings = {"optimizer": optimizer, "coupling": "exact", "micro_batch_size": 2}
    fused, at_once = after(opened(**settings)), after(opened(**settings, fused_update=False))
    assert fused[0][-1] < fused[0][0]
    same(fused[1], at_once[1])


def test_global_clipping_is_torchs_clip_grad_norm() -> None:
    limit = 0.3
    model = opened(optimizer="sgd", max_grad_norm=limit, clip="global")
    loss, gradients = opened().gradients(*batch(4, seed=0))
    start = {name: value.detach().clone() for name, value in model.parameters.items()}
    leaves = [torch.nn.Parameter(start[name]) for name in gradients]
    for leaf, gradient in zip(leaves, gradients.values(), strict=True):
        leaf.grad = gradient.clone()
    assert float(torch.nn.utils.clip_grad_norm_(leaves, limit)) > limit
    assert model.step(*batch(4, seed=0), 0, RATE).loss == pytest.approx(loss, rel=1e-6)
    for name, leaf in zip(gradients, leaves, strict=True):
        torch.testing.assert_close(
            model.parameters[name], start[name] - RATE * leaf.grad, rtol=1e-5, atol=1e-7
        )


@pytest.mark.parametrize("parts", [None, 2])
def test_two_passes_clip_as_one_that_keeps_everything(parts) -> None:
    settings = {"max_grad_norm": 0.3, "clip": "global", "micro_batch_size": parts}
    same(after(opened(**settings))[1], after(opened(**settings, fused_update=False))[1])


def test_a_block_is_clipped_alone() -> None:
    model, limit = opened(optimizer="sgd", max_grad_norm=0.05), 0.05
    _, gradients = opened().gradients(*batch(4, seed=0))
    before = {name: value.detach().clone() for name, value in model.parameters.items()}
    model.step(*batch(4, seed=0), 0, RATE)
    for block in model.passes.blocks:
        norm = float(torch.stack([gradients[name].square().sum() for name in block]).sum().sqrt())
        changes = [model.parameters[name].detach() - before[name] for name in block]
        moved = float(torch.stack([change.square().sum() for change in changes]).sum().sqrt())
        assert norm > limit and moved == pytest.approx(RATE * limit, rel=1e-3)


@pytest.mark.parametrize(
    ("family", "router"), [("qwen2_moe", ".mlp.gate."), ("granitemoe", ".router.")]
)
def test_stage_1_trains_adapters_then_everything_but_the_router(family: str, router: str) -> None:
    session = opened(family, coupling="exact", skip_stage1=False, stage1_steps=2, stage1_learning_rate=1e-3,
                     learning_rate=RATE)  # fmt: skip
    values = {**dict(session.loaded.model.named_parameters()), **session.adapters}
    before = {name: value.detach().clone() for name, value in values.items()}
    after(session, steps=2)
    assert {name for name, value in values.items() if not torch.equal(value, before[name])} == set(
        session.adapters
    )
    after(session, steps=1, first=2)
    still = {name for name, value in values.items() if torch.equal(value, before[name])}
    assert still == {name for name in values if router in name} and len(still) == 2


def test_the_first_step_of_stage_2_is_adamws_first() -> None:
    """Its moments begin there: the step's size is the learning rate, as AdamW's first always is."""
    session = opened(
        "qwen2_moe", coupling="exact", skip_stage1=False, stage1_steps=3, learning_rate=RATE
    )
    after(session, steps=3)
    name = "model.layers.1.mlp.shared_expert.up_proj.weight"
    before = session.parameters[name].detach().clone()
    after(session, steps=1, first=3)
    moved = (session.parameters[name].detach() - before).abs()
    assert float(moved.median()) == pytest.approx(RATE, rel=1e-2)


def test_ablations_train_what_they_say() -> None:
    only = opened("qwen2", coupling="exact", skip_stage1=False, stage1_only=True)
    losses, state = after(only, steps=4)
    assert losses[-1] < losses[0] and all(
        "revffn" in name for name in state if name != "fraction_bits"
    )
    both = opened("qwen2_moe", coupling="exact", train_router=True)
    router = next(name for name in both.parameters if ".mlp.gate." in name)
    before = both.parameters[router].detach().clone()
    after(both, steps=1)
    assert not torch.equal(before, both.parameters[router])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"coupling": "full", "stage1_only": True}, "coupling: full has none"),
        ({"coupling": "full", "stage1_steps": 3}, "coupling: full has none"),
        ({"coupling": "exact", "stage1_only": True, "skip_stage1": True}, "nothing to train"),
        ({"optimiser": "sgd"}, "did you mean 'optimizer'"),
    ],
)
def test_settings_that_contradict_are_refused(settings, message) -> None:
    with pytest.raises(ConfigError) as caught:
        method_config("revffn", settings)
    assert message in str(caught.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "adafactor", "sgd"])
def test_a_resumed_run_has_the_same_bits(optimizer, dtype) -> None:
    settings = {
        "coupling": "exact",
        "skip_stage1": False,
        "stage1_steps": 2,
        "optimizer": optimizer,
        "dtype": dtype,
    }
    straight = opened("qwen2_moe", **settings)
    _, first = after(straight, steps=3)
    losses, expected = after(straight, steps=2, first=3)
    resumed = opened("qwen2_moe", **settings)
    resumed.load_state(first)
    again, actual = after(resumed, steps=2, first=3)
    assert again == losses
    same(actual, expected)


def test_a_foreign_checkpoint_is_refused() -> None:
    state = after(opened(coupling="exact"), steps=1)[1]
    with pytest.raises(CheckpointError, check=lambda error: "float32 [" in error.expected):
        opened("qwen2", coupling="exact").load_state(state)
    with pytest.raises(CheckpointError):
        opened(coupling="exact", optimizer="adafactor").load_state(
            {name.replace("exp_avg_sq/", "row_var/"): value for name, value in state.items()}
        )


def test_a_scale_is_kept_over_a_resume() -> None:
    state = after(opened(fraction_bits=14), steps=1)[1]
    session = opened()
    assert session.network.fraction_bits != 14
    session.load_state(state)
    assert session.network.fraction_bits == 14


@pytest.mark.parametrize(
    "settings", [{}, {"micro_batch_size": 1}, {"recompute": "stored"}], ids=str
)
def test_a_step_that_overflows_begins_again_with_a_coarser_scale(settings) -> None:
    session, other = opened(coupling="exact", **settings), opened(coupling="exact", **settings)
    with torch.no_grad():
        for one in (session, other):
            one.family.embedding.weight.mul_(2.0**8)
    session.network.fraction_bits = 26
    ids, labels = batch(3)
    session.evaluate(ids, labels)
    assert session.network.fraction_bits == 26  # training's own, whatever is evaluated in between
    loss = session.step(ids, labels, 0, RATE).loss
    assert session.network.fraction_bits < 26
    other.network.fraction_bits = session.network.fraction_bits
    assert other.step(ids, labels, 0, RATE).loss == loss
    same(session.state(), other.state())


def test_a_scale_that_was_set_is_not_changed() -> None:
    session = opened(coupling="exact", fraction_bits=26)
    with torch.no_grad():
        session.family.embedding.weight.mul_(2.0**8)
    before = session.state()
    with pytest.raises(StreamOverflow):
        session.step(*batch(3), 0, RATE)
    same(session.state(), before)


def test_evaluation_is_the_training_loss() -> None:
    session = opened("qwen2_moe", coupling="exact")
    ids, labels = batch(3)
    nll, count = session.evaluate(ids, labels)
    assert count.tolist() == [6, 5, 4]
    assert nll.sum() / count.sum() == pytest.approx(session.gradients(ids, labels)[0], rel=1e-6)


def test_full_is_near_the_ordinary_model_and_converts_back() -> None:
    session = opened("qwen2_moe")
    ids, labels = batch(3)
    ours, ordinary = (
        part.evaluate(ids, labels)[0].sum() for part in (session, session.ordinary_session)
    )
    assert ours == pytest.approx(
        ordinary, rel=0.2
    )  # random weights; real ones are held to 1% elsewhere
    assert opened(coupling="exact").ordinary_session is None


def test_there_is_no_adapter_and_nothing_to_replay() -> None:
    session = opened()
    assert session.adapter() is None
    with pytest.raises(ConfigError):
        session.load_adapter(None)
    assert not isinstance(session, Replaying)


@pytest.mark.parametrize("recompute", ["reversible", "stored"])
def test_bfloat16_gradients_of_micro_batches_are_added_in_float32(recompute: str) -> None:
    """Eight rows of as many labels: each row's gradient by itself is eight times its share."""
    ids = np.random.default_rng(5).integers(0, 256, (8, 9))
    labels = ids.copy()
    labels[:, 0] = -100
    parts = {"recompute": recompute, "micro_batch_size": 1}
    _, sums = opened("llama", {"tied": False}, "bfloat16", **parts).gradients(ids, labels)
    alone = opened("llama", {"tied": False}, "bfloat16", recompute=recompute)
    each = [alone.gradients(ids[[row]], labels[[row]])[1] for row in range(8)]
    for name, total in sums.items():
        assert total.dtype == torch.float32
        expected = torch.zeros_like(total)
        for gradients in each:
            assert gradients[name].dtype == torch.bfloat16
            expected += gradients[name].float() / 8
        assert torch.equal(total, expected), name
