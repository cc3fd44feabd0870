"""P-RGE over packed weights: how often a matrix is dequantised; the session of fixed shapes against
the plain one."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from ondevice.artifact.adapter import load_adapter, save_adapter
from ondevice.core.registry import method_config
from ondevice.data.batching import Batch
from ondevice.methods.prge.graphed import GraphedPrgeSession
from ondevice.methods.prge.torch import PrgeSession
from ondevice.models.load import tiny_model
from ondevice.nn.packed import Int8Matrix, pack_model
from tests.methods.reference import batch

SEED, RATE = 4, 0.05


def config(**values):
    return method_config("prge", {"queries": 3, "rank": 4, **values})


@pytest.mark.parametrize(
    ("settings", "passes"),
    [({}, 1), ({"batch_signs": False}, 2), ({"batch_queries": False}, 3),
     ({"batch_signs": False, "batch_queries": False}, 6), ({"estimator": "one_sided"}, 1),
     ({"noise": "rademacher", "queries": 8}, 1)],
)  # fmt: skip
def test_a_matrix_is_dequantised_once_for_both_signs_and_all_queries(
    settings, passes, monkeypatch
) -> None:
    counts: Counter[int] = Counter()
    dense = Int8Matrix.dense
    monkeypatch.setattr(Int8Matrix, "dense", lambda self: counts.update([id(self)]) or dense(self))
    loaded = tiny_model("llama")
    pack_model(loaded.family, "int8")
    session = PrgeSession(loaded, config(**settings), SEED)
    session.step(*batch(2), 0, RATE)
    assert len(counts) == loaded.dims.layers * len(loaded.family.linear_targets)
    assert set(counts.values()) == {passes}


@pytest.mark.parametrize(
    "settings", [{}, {"batch_signs": False}, {"estimator": "one_sided"}, {"top_layers": 1}]
)
def test_fixed_shapes_give_the_same_steps(settings) -> None:
    """Without a GPU the graph is the function itself; the loss of fixed shape rounds in another
    order."""
    plain, fixed = (
        kind(tiny_model("llama"), config(**settings), SEED)
        for kind in (PrgeSession, GraphedPrgeSession)
    )
    for step in range(4):
        given = batch(2, 12 if step % 2 else 16, seed=step)
        fixed.load_state(plain.state())
        ours, theirs = fixed.step(*given, step, RATE), plain.step(*given, step, RATE)
        np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-5)
        np.testing.assert_allclose(fixed.flat(), plain.flat(), atol=1e-3)
        for received, expected in zip(fixed.evaluate(*given), plain.evaluate(*given), strict=True):
            np.testing.assert_allclose(received, expected, rtol=1e-4)
    assert len(fixed.graphs) == 2 and np.abs(fixed.flat()).max() > 0


def test_fixed_shapes_go_on_in_a_new_subspace(tmp_path) -> None:
    """What a graph has captured of the old one is captured again; the state stays at its place."""
    values = {
        "subspace": "gradient",
        "optimizer": "adam",
        "calibration_rows": 3,
        "refresh_every": 2,
    }
    plain, fixed = (
        kind(tiny_model("llama"), config(**values), SEED)
        for kind in (PrgeSession, GraphedPrgeSession)
    )
    place = fixed._adapter.data_ptr()
    for step in range(4):
        plain.before_step(step, lambda number: Batch(*batch(2, seed=number)), tmp_path)
        fixed.before_replay(step, tmp_path)
        assert bool(fixed.graphs) == (step % 2 == 1) and fixed._adapter.data_ptr() == place
        given = batch(2, 12, seed=step)
        ours, theirs = fixed.step(*given, step, RATE), plain.step(*given, step, RATE)
        np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-4)
    for received, expected in zip(fixed.evaluate(*given), plain.evaluate(*given), strict=True):
        np.testing.assert_allclose(received, expected, rtol=1e-4)
    assert np.abs(fixed.flat()).max() > 0


def test_the_adapter_stays_where_the_graphs_look_for_it(tmp_path) -> None:
    session, other = (GraphedPrgeSession(tiny_model("llama"), config(), SEED) for _ in range(2))
    place = session._adapter.data_ptr()
    for step in range(2):
        session.step(*batch(2, seed=step), step, RATE)
    save_adapter(session.adapter(), tmp_path / "adapter")
    other.step(*batch(2, seed=9), 0, RATE)
    other.load_adapter(load_adapter(tmp_path / "adapter"))
    result, again = (side.step(*batch(2, seed=2), 2, RATE) for side in (session, other))
    assert result == again
    session.apply_update((0.5, -0.5, 1.0), 3, RATE)
    other.apply_update((0.5, -0.5, 1.0), 3, RATE)
    assert session.flat().tobytes() == other.flat().tobytes()
    another = GraphedPrgeSession(tiny_model("llama"), config(), SEED)
    another.step(*batch(2, seed=7), 0, RATE)
    state = session.state()
    state["seed"] = np.array([SEED + 1])
    another.load_state(state)
    assert session._adapter.data_ptr() == place and all(
        int(graph.seed) == SEED + 1 for graph in another.graphs.values()
    )
    assert another.step(*batch(2, seed=3), 4, RATE) != session.step(
        *batch(2, seed=3), 4, RATE
    )  # other noise


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, {"batch_signs": False}, {"noise": "rademacher"}])
def test_graphs_over_nf4_give_the_steps_of_eager_on_a_gpu(settings) -> None:
    pytest.importorskip("bitsandbytes")
    sessions = []
    for kind in (PrgeSession, GraphedPrgeSession):
        loaded = tiny_model("llama")
        loaded.model.cuda()
        pack_model(loaded.family, "nf4")
        sessions.append(kind(loaded, config(**settings), SEED))
    plain, fixed = sessions
    for step in range(6):
        given = batch(2, 12 if step % 2 else 16, seed=step)
        fixed.load_state(plain.state())
        ours, theirs = fixed.step(*given, step, RATE), plain.step(*given, step, RATE)
        np.testing.assert_allclose(ours.losses, theirs.losses, rtol=1e-4)
        np.testing.assert_allclose(fixed.flat(), plain.flat(), atol=1e-2)
    assert len(fixed.graphs) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_gpu_makes_the_same_dense_matrix_as_a_cpu(kind) -> None:
    pytest.importorskip("bitsandbytes")
    from ondevice.nn.packed import KINDS

    weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    packed = KINDS[kind].pack(weight)
    moved = {name: tensor.cuda() for name, tensor in packed.tensors().items()}
    received = KINDS[kind].from_tensors(moved, torch.bfloat16).dense().cpu()
    torch.testing.assert_close(received.float(), packed.dense().float(), rtol=2**-7, atol=1e-6)
