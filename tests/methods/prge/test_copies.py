"""The pass of all copies as graphs: what surrounds a CUDA graph, and every kernel of the pass done again on the
memory that it had (`tests.offload.recording`), on a CPU; on a GPU as CUDA graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ondevice.core.registry import method_config
from ondevice.data.batching import Batch
from ondevice.methods.prge.copies import CopiesGraphs, graphs_for
from ondevice.methods.prge.torch import PrgeSession
from ondevice.models.load import tiny_model
from tests.methods.mesp.reference import rows
from tests.offload.recording import record

SHAPES = [(2, 40), (2, 40), (2, 37), (1, 40), (2, 64), (2, 33), (2, 40), (1, 40)]
"""Rows and tokens of steps; all lengths share a bucket, and two numbers of rows come twice."""
RATE = 5e-3
DEFAULT = {
    "subspace": "gradient",
    "optimizer": "adam",
    "calibration_rows": 3,
    "refresh_every": 5,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", DEFAULT),
    ("qwen2", {**DEFAULT, "answers": (5, 9, 70)}),
    ("gemma3_text", {}),
    ("lfm2", {**DEFAULT, "target_modules": ("q_proj", "in_proj")}),
    ("qwen3", {"estimator": "one_sided", "noise": "rademacher"}),
    ("llama", {"top_layers": 1}),
]


def again(run: Any) -> Any:
    """A recorder of graphs that does the work again."""
    return run


def opened(family: str, recorder: Any, **values: Any) -> PrgeSession:
    """A session of what a GPU has, with a `recorder` in the place of its own."""
    config: Any = method_config("prge", {"queries": 2, "rank": 2, **values})
    session = PrgeSession(tiny_model(family, 1), config, 3)
    session.run_as(CopiesGraphs(recorder, session.program, 8192))
    return session


def given(session: PrgeSession, shape: tuple[int, int], number: int) -> Any:
    """Ids and labels; all labels are answers if the loss is over answers."""
    ids, labels = rows(*shape, number)
    if session.config.answers:
        answers = np.array(session.config.answers)
        labels = np.where(labels >= 0, answers[labels % len(answers)], labels)
    return ids, labels


def steps(session: PrgeSession, folder: Path) -> list[tuple[float, ...]]:
    """Losses of the copies, by step."""
    found = []
    for number, shape in enumerate(SHAPES):
        session.before_step(number, lambda n: Batch(*given(session, (2, 20), n)), folder)
        found.append(session.step(*given(session, shape, number), number, RATE).losses)
    return found


def made(session: PrgeSession) -> int:
    graphs = session.copies_graphs
    assert graphs is not None
    return len(graphs.made)


@pytest.mark.parametrize(("family", "values"), CASES)
@pytest.mark.parametrize("recorder", [again, record])
def test_steps_as_graphs_change_no_bit(family, values, recorder, tmp_path) -> None:
    """Of steps with the same padding; a new subspace comes in between."""
    plain, graphed = (opened(family, one, **values) for one in (None, recorder))
    assert steps(plain, tmp_path) == steps(graphed, tmp_path)
    assert made(plain) == 0 and made(graphed) == 2  # of both shapes, made again after the subspace
    assert graphed.flat().tobytes() == plain.flat().tobytes() and np.abs(plain.flat()).max() > 0


def test_they_learn_what_steps_without_padding_learn(tmp_path) -> None:
    """Up to the order of float32 sums."""
    plain, graphed = (opened("llama", record, **DEFAULT) for _ in range(2))
    plain.run_as(None)
    for ours, theirs in zip(steps(graphed, tmp_path), steps(plain, tmp_path), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4)


def test_a_new_subspace_is_recorded_again(tmp_path) -> None:
    """Whatever lies at the old one's place."""
    session = opened("llama", record, **DEFAULT)
    steps(session, tmp_path)
    graphs = session.copies_graphs
    assert graphs is not None
    before = dict(graphs.made)
    for linear in session.program.linears.values():
        assert linear.c_RO is not None
        linear.c_RO = linear.c_RO * 2.0
    ids, _labels = (torch.from_numpy(x) for x in rows(2, 64, 1))
    copies = torch.randn(4, session.program.layout.size)
    with torch.inference_mode():
        for _ in range(2):
            found = graphs.hidden(ids, copies)
    torch.testing.assert_close(found, session.program.copies_hidden(ids, copies), rtol=0, atol=0)
    assert graphs.made and not set(map(id, before.values())) & set(map(id, graphs.made.values()))


def test_a_step_that_lacks_memory_next_to_graphs_is_taken_without_them(
    tmp_path, monkeypatch, caplog
) -> None:
    plain, graphed = (opened("llama", one) for one in (None, again))
    hidden = graphed.program.copies_hidden
    calls = []

    def scarce(ids: Any, copies: Any) -> Any:
        calls.append(ids.shape)
        if graphed.copies_graphs.made and ids.shape[0] == 1:
            raise torch.OutOfMemoryError("none left")
        return hidden(ids, copies)

    monkeypatch.setattr(graphed.program, "copies_hidden", scarce)
    assert steps(plain, tmp_path) == steps(graphed, tmp_path)
    assert "no memory for CUDA graphs and what runs next to them" in caplog.text
    assert graphed.flat().tobytes() == plain.flat().tobytes() and made(graphed) == 0


def test_copies_one_after_the_other_run_without() -> None:
    config: Any = method_config("prge", {"batch_signs": False})
    session = PrgeSession(tiny_model("llama", 1), config, 3)
    assert session.copies_graphs is None
    assert graphs_for(session.loaded, session.program) is None


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "values"), CASES)
def test_steps_as_cuda_graphs_learn_what_other_steps_learn(family, values, tmp_path) -> None:
    sessions = []
    for graphs in (False, True):
        loaded = tiny_model(family, 1)
        model: Any = loaded.model
        model.cuda()
        chosen = {"queries": 2, "rank": 2, "cuda_graphs": graphs, **values}
        config: Any = method_config("prge", chosen)
        sessions.append(PrgeSession(loaded, config, 3))
    plain, graphed = sessions
    assert plain.copies_graphs is None
    for ours, theirs in zip(steps(graphed, tmp_path), steps(plain, tmp_path), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4)
    assert made(graphed) == 2
