"""P-RGE's program against the formulas of the paper in float64, and its forms against each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ondevice.core.errors import ArtifactError
from ondevice.methods.prge import step as prge_step
from ondevice.methods.prge.config import PrgeConfig
from ondevice.methods.prge.torch import PrgeSession
from ondevice.models.load import tiny_model
from tests.methods.prge.algorithm1 import CopiesState
from tests.methods.prge.reference import Reference, noise
from tests.methods.reference import batch

SEED = 11


def session(
    config: PrgeConfig, family: str = "llama", seed: int = SEED, **sizes: Any
) -> PrgeSession:
    return PrgeSession(tiny_model(family, **sizes), config, seed)


def start_from(target: PrgeSession, reference: Reference, scale: float = 0.05) -> np.ndarray:
    """Give the session an adapter that is not zero; returns it in float64."""
    random = np.random.default_rng(3)
    flat = np.zeros(reference.layout.size, np.float32)
    for entry in reference.layout.entries:
        flat[entry.offset : entry.offset + entry.count] = scale * random.standard_normal(
            entry.count
        )
    target.load_state({**target.state(), "adapter": flat})
    return flat.astype(np.float64)


def used(reference: Reference) -> np.ndarray:
    """Elements that are part of some B; the padding between them moves too and means nothing."""
    mask = np.zeros(reference.layout.size, bool)
    for entry in reference.layout.entries:
        mask[entry.offset : entry.offset + entry.count] = True
    return mask


CASES = {
    "paper": ({}, "llama", {}, 2),
    "bias": (
        {"target_modules": ("q_proj", "k_proj", "v_proj", "o_proj")},
        "qwen2",
        {"tied": False},
        2,
    ),
    "every linear": (
        {"target_modules": ("down_proj", "up_proj", "gate_proj", "o_proj")},
        "llama",
        {"layers": 1},
        1,
    ),
    "odd sizes": (
        {"rank": 3, "alpha": 7.0, "queries": 3},
        "llama",
        {"layers": 3, "vocab": 263, "heads": 2},
        3,
    ),
    "one row": ({"queries": 1}, "qwen2", {}, 1),
    "four rows": ({"queries": 2}, "llama", {}, 4),
    "five rows": ({"queries": 5, "rank": 1}, "qwen2", {"layers": 1}, 5),
    "rademacher": ({"noise": "rademacher", "rank": 5}, "llama", {}, 2),
    "top layer": ({"top_layers": 1}, "llama", {"layers": 3}, 2),
    "more than all layers": ({"top_layers": 9}, "llama", {}, 2),
    "one tile": ({"loss_tiles": 1}, "llama", {}, 2),
    "fzoo": ({"estimator": "one_sided", "queries": 6, "noise": "rademacher"}, "llama", {}, 2),
    "fzoo in sequence": (
        {"estimator": "one_sided", "queries": 3, "batch_queries": False},
        "llama",
        {},
        2,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_equation_1(case) -> None:
    values, family, sizes, rows = CASES[case]
    config = PrgeConfig(**{"queries": 4, "rank": 4, **values})
    target, reference = session(config, family, **sizes), Reference(config, SEED, family, **sizes)
    flat, mask = start_from(target, reference), used(reference)
    # a one-sided gradient divides by the losses' deviation, so the rounding of a loss weighs more
    gradient_error = (
        2e-3 if config.estimator == "one_sided" else 3e-7 / config.perturbation_scale * 10
    )
    for step in range(2):
        ids, labels = batch(rows, seed=step)
        losses, gradients, flat = reference.step(flat, ids, labels, step, 0.1)
        result = target.step(ids, labels, step, 0.1)
        np.testing.assert_allclose(result.losses, losses, rtol=2e-6)
        np.testing.assert_allclose(
            result.projected_gradients, gradients, atol=gradient_error, rtol=1e-3
        )
        assert result.loss == pytest.approx(losses.mean(), rel=2e-6)
        np.testing.assert_allclose(target.flat()[mask], flat[mask], atol=0.1 * gradient_error)
        target.load_state({**target.state(), "adapter": flat.astype(np.float32)})
        flat = flat.astype(np.float32).astype(np.float64)


def test_a_projected_gradient_is_the_derivative_along_its_direction() -> None:
    ids, labels = batch(3)
    coarse = PrgeConfig(queries=6, rank=4)
    target, reference = session(coarse), Reference(coarse, SEED)
    flat = start_from(target, reference)
    z = noise(coarse, SEED, 0, reference.layout.size)
    exact = reference.directional(flat, z, ids, labels)
    errors = []
    for epsilon in (1e-2, 1e-3, 1e-4):
        reference.config = PrgeConfig(queries=6, rank=4, perturbation_scale=epsilon)
        _, estimated, _ = reference.step(flat, ids, labels, 0, 0.1)
        errors.append(float(np.abs(estimated - exact).max() / np.abs(exact).max()))
    assert errors[2] < 1e-6 and errors[1] < 1e-4  # second order in epsilon, float64
    assert errors[0] / errors[1] == pytest.approx(100, rel=0.2)
    received = np.array(target.step(ids, labels, 0, 0.0).projected_gradients)
    assert np.abs(received - exact).max() < (errors[0] + 1e-3) * np.abs(exact).max()
    assert np.corrcoef(received, exact)[0, 1] > 0.999


@pytest.mark.parametrize("noise_kind", ["gaussian", "rademacher"])
def test_algorithm_1_with_stored_copies_is_the_master_form(noise_kind) -> None:
    """Ten steps of the same scalars: losses to 2e-6, adapter to 1e-6; free-running, rounding grows
    to 1e-4."""
    config = PrgeConfig(queries=3, rank=4, noise=noise_kind)
    master, program = session(config), session(config).program
    copies, free = (CopiesState(torch.zeros(program.layout.size), config.queries) for _ in range(2))
    for step in range(10):
        ids, labels = batch(2, seed=step)
        given = (
            program,
            torch.from_numpy(ids),
            torch.from_numpy(labels),
            torch.tensor([SEED]),
            torch.tensor([step]),
        )
        ours = master.step(ids, labels, step, 0.05)
        with torch.no_grad():
            losses, gradients = copies.step(*given, torch.tensor([0.05]))
            free_losses, _ = free.step(*given, torch.tensor([0.05]))
        np.testing.assert_allclose(losses, ours.losses, rtol=2e-6)
        np.testing.assert_allclose(free_losses, ours.losses, rtol=1e-4)
        np.testing.assert_allclose(gradients, ours.projected_gradients, atol=3e-4)
        copies.pending = torch.tensor(ours.projected_gradients)
        np.testing.assert_allclose(
            copies.master(config.perturbation_scale), master.flat(), atol=1e-6
        )
    assert np.abs(master.flat()).max() > 1e-2 and copies.copies.shape == (6, master.flat().size)


@pytest.mark.parametrize(("signs", "queries"), [(False, True), (True, False), (False, False)])
@pytest.mark.parametrize("rows", [1, 3])
def test_sequential_is_parallel(signs, queries, rows) -> None:
    parallel = session(PrgeConfig(queries=3, rank=4))
    sequential = session(PrgeConfig(queries=3, rank=4, batch_signs=signs, batch_queries=queries))
    for step in range(3):
        ids, labels = batch(rows, seed=step)
        ours, theirs = (s.step(ids, labels, step, 0.05) for s in (parallel, sequential))
        np.testing.assert_allclose(theirs.losses, ours.losses, rtol=2e-6)
        np.testing.assert_allclose(sequential.flat(), parallel.flat(), atol=2e-5)


def test_the_shared_prefix_changes_nothing() -> None:
    """top_layers=1 gives what a run of all layers gives whose other adapters stay zero and are not
    moved."""
    top, whole = PrgeConfig(queries=3, rank=4, top_layers=1), PrgeConfig(queries=3, rank=4)
    limited, full = session(top, layers=3), session(whole, layers=3)
    ids, labels = batch(2)
    seed, step = torch.tensor([SEED]), torch.tensor([0])
    copies_of = limited.program.perturbed(torch.zeros(limited.program.layout.size), seed, step)
    wide = torch.zeros(6, full.program.layout.size)
    # the frozen A is drawn by position in the layout, so give both sides the same
    for entry in limited.program.layout.entries:
        there = next(
            e
            for e in full.program.layout.entries
            if (e.layer, e.target) == (entry.layer, entry.target)
        )
        wide[:, there.offset : there.offset + there.count] = copies_of(entry.offset, entry.count)
        full.program.linears[there].lora_a.copy_(limited.program.linears[entry].lora_a)
    tokens = torch.from_numpy(ids), torch.from_numpy(labels)
    expected = full.program.losses(*tokens, lambda start, count: wide[:, start : start + count])
    torch.testing.assert_close(
        limited.program.losses(*tokens, copies_of), expected, rtol=1e-6, atol=1e-6
    )
    assert {entry.layer for entry in limited.program.layout.entries} == {2}
    assert sorted(limited.adapter().tensors)[0].startswith("model.layers.2.")


def test_an_evaluation_is_the_adapted_model_s_loss() -> None:
    """Of every row, as a sum over its labelled tokens; with ranges that share bits with their
    beginnings."""
    config = PrgeConfig(queries=2, rank=3, target_modules=("q_proj", "v_proj", "down_proj"))
    target, reference = session(config, layers=3), Reference(config, SEED, layers=3)
    flat = torch.from_numpy(start_from(target, reference, 0.2))
    base, count = reference.layout.layer_range(1)
    assert base & count
    ids, labels = batch(3)
    sums, counts = target.evaluate(ids, labels)
    wanted = [float(reference.loss(flat, ids[i : i + 1], labels[i : i + 1])) for i in range(3)]
    np.testing.assert_allclose(sums / counts, wanted, rtol=2e-6)
    assert counts.tolist() == (labels[:, 1:] >= 0).sum(1).tolist()


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_explicit_masks_change_nothing(family) -> None:
    target = session(PrgeConfig(queries=2, rank=4, top_layers=1), family, layers=2)
    start_from(target, Reference(target.config, SEED, family, layers=2))
    program, (ids, labels) = target.program, map(torch.from_numpy, batch(3))
    flat = torch.from_numpy(target.flat())

    def losses() -> torch.Tensor:
        return program.losses(
            ids, labels, program.perturbed(flat, torch.tensor([SEED]), torch.tensor([0]))
        )

    implicit = losses()
    program.use_explicit_masks((ids.shape[1], 8))
    assert program.causal_mask_8[0, 0].tolist() == [
        [-1e9 if k > q else 0.0 for k in range(8)] for q in range(8)
    ]
    torch.testing.assert_close(losses(), implicit, rtol=1e-6, atol=1e-6)
    getattr(program, f"causal_mask_{ids.shape[1]}").zero_()
    assert (losses() - implicit).abs().max() > 1e-4  # the mask is what the blocks see


def test_noise_is_the_same_in_chunks(monkeypatch) -> None:
    config = PrgeConfig(queries=2, rank=4)
    one, many = session(config), session(config)
    ids, labels = batch(2)
    one.step(ids, labels, 4, 0.05)
    monkeypatch.setattr(prge_step, "UPDATE_CHUNK", 192)
    many.step(ids, labels, 4, 0.05)
    assert many.flat().tobytes() == one.flat().tobytes()


def test_a_seed_a_step_and_a_query_have_noise_of_their_own() -> None:
    ids, labels = batch(2)
    config = PrgeConfig(queries=2, rank=4)
    same, other = (
        session(config).step(ids, labels, 0, 0.1),
        session(config, seed=12).step(ids, labels, 0, 0.1),
    )
    later = session(config).step(ids, labels, 1, 0.1)
    assert same == session(config).step(ids, labels, 0, 0.1)
    assert len({same.losses, other.losses, later.losses}) == 3 and len(set(same.losses)) == 4


def test_training_lowers_the_loss() -> None:
    target = session(
        PrgeConfig(queries=8, rank=8, target_modules=("q_proj", "v_proj", "up_proj", "down_proj"))
    )
    ids, labels = batch(4)
    losses = [target.step(ids, labels, step, 0.02).loss for step in range(60)]
    assert np.mean(losses[-10:]) < 0.9 * np.mean(losses[:10])


def test_an_adapter_whose_frozen_a_another_machine_drew_is_taken_and_another_seed_s_is_not() -> (
    None
):
    """The last bits of A depend on a machine's logarithm and sine; a phone's adapter must load
    here."""
    trained, fresh = session(PrgeConfig(queries=2, rank=4)), session(PrgeConfig(queries=2, rank=4))
    trained.step(*batch(2), 0, 0.05)
    adapter = trained.adapter()
    name = next(name for name in adapter.tensors if name.endswith("lora_A.weight"))
    value = adapter.tensors[name].copy()
    adapter.tensors[name] = np.nextafter(value, np.float32(1))
    fresh.load_adapter(adapter)
    assert fresh.flat().tobytes() == trained.flat().tobytes()
    adapter.tensors[name] = value + np.float32(1e-4)
    with pytest.raises(ArtifactError) as error:
        fresh.load_adapter(adapter)
    assert name.removesuffix(".lora_A.weight") in error.value.message
    adapter.tensors[name] = value[:, :-1]
    with pytest.raises(ArtifactError):
        fresh.load_adapter(adapter)
