"""LoRA's passes as graphs: what surrounds a CUDA graph, and every kernel of the passes done again on the memory that it
had (`tests.offload.recording`), on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ondevice.core.registry import method_config, open_session
from ondevice.methods.lora.graphed import HiddenGraphs
from ondevice.models import load_model
from ondevice.models.load import tiny_model
from ondevice.offload.rehearsal import NotForGraphs, reason_against, rehearse
from ondevice.offload.shapes import padded
from tests.methods.mesp.reference import errors, rows
from tests.methods.reference import LORA
from tests.models.test_any_decoder import save
from tests.offload.recording import record

SHAPES = [(3, 40), (3, 40), (3, 37), (1, 40), (3, 64), (3, 33), (3, 40), (1, 40)]
"""Rows and tokens of steps; all lengths share a bucket, and two numbers of rows come twice."""
RATE = 1e-3


def again(run: Any) -> Any:
    """A recorder of graphs that does the work again."""
    return run


def opened(
    name: str = "lora",
    family: str = "llama",
    recorder: Any = None,
    graphs: bool = True,
    **values: Any,
) -> Any:
    """A session with B that is not zero; `graphs` is what a GPU has, with a `recorder` in its place."""
    loaded = tiny_model(family, 1)
    session: Any = open_session(loaded, method_config(name, {**LORA, **values}), 3)
    assert session.graphs is None
    adapter, random = session.adapter(), np.random.default_rng(5)
    for key, value in adapter.tensors.items():
        if ".lora_B." in key:
            value[:] = 0.1 * random.standard_normal(value.shape)
    session.load_adapter(adapter)
    if graphs:
        session.graphs = HiddenGraphs(recorder, session.family, session.parameters)
    return session


def steps(session: Any, shapes: list[tuple[int, int]] = SHAPES) -> list[float]:
    """Losses of steps; all labels are answers if the loss is over answers."""
    losses = []
    for number, shape in enumerate(shapes):
        ids, labels = rows(*shape, number)
        if session.answers:
            answers = np.array(session.answers)
            labels = np.where(labels >= 0, answers[labels % len(answers)], labels)
        losses.append(session.step(ids, labels, number, RATE).loss)
    return losses


def same_bits(ours: Any, theirs: Any) -> None:
    state, other = ours.state(), theirs.state()
    assert state.keys() == other.keys()
    for name, value in state.items():
        assert value.tobytes() == other[name].tobytes(), name


@pytest.mark.parametrize(
    ("name", "family", "values"),
    [
        ("lora", "llama", {}),
        ("lora-fa", "qwen3", {"max_grad_norm": 0.05}),
        ("lora", "gemma3_text", {"micro_batch_size": 2, "max_grad_norm": 0.05}),
        ("lora", "lfm2", {"target_modules": ("q_proj", "in_proj")}),
        ("lora", "qwen2", {"answers": (5, 9, 70), "micro_batch_size": 2}),
    ],
)
@pytest.mark.parametrize("recorder", [again, record])
def test_steps_as_graphs_change_no_bit(name, family, values, recorder) -> None:
    """Of steps with the same padding: lengths that share a bucket, another number of rows, parts of a batch."""
    plain, graphed = (opened(name, family, one, **values) for one in (None, recorder))
    assert steps(plain) == steps(graphed)
    assert not plain.graphs.made and len(graphed.graphs.made) == 2
    same_bits(graphed, plain)


@pytest.mark.parametrize("name", ["lora", "lora-fa"])
@pytest.mark.parametrize("values", [{}, {"micro_batch_size": 2, "max_grad_norm": 0.05}])
def test_they_learn_what_steps_without_padding_learn(name, values) -> None:
    """Up to the order of float32 sums."""
    plain, graphed = opened(name, graphs=False, **values), opened(name, recorder=record, **values)
    losses = steps(plain)
    assert steps(graphed) == pytest.approx(losses, rel=1e-5) and len(graphed.graphs.made) == 2
    ours, theirs = graphed.state(), plain.state()
    assert ours.keys() == theirs.keys()
    assert max(errors(ours, theirs).values()) <= 1e-4


def test_a_recorder_that_fails_leaves_the_steps_as_they_are_and_is_logged_once(caplog) -> None:
    def broken(run: Any) -> Any:
        run()
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    plain, graphed = opened(), opened(recorder=broken)
    assert steps(plain) == steps(graphed) and not graphed.graphs.made
    same_bits(graphed, plain)
    said = [one.message for one in caplog.records if "steps run without" in one.message]
    assert len(said) == 1 and "operation not permitted when stream is capturing)" in said[0]


def test_memory_that_is_short_for_graphs_ends_them_and_is_logged(caplog) -> None:
    def short(run: Any) -> Any:
        raise torch.OutOfMemoryError("none left")

    graphed = opened(recorder=short)
    steps(graphed)
    assert "no memory for CUDA graphs of 3 x 64 tokens: steps run without" in caplog.text
    assert not graphed.graphs.made


@pytest.mark.parametrize("part", [1, 2])
def test_a_step_that_lacks_memory_next_to_graphs_is_taken_without_them(
    part, monkeypatch, caplog
) -> None:
    """Its first part's gradients are not counted twice."""
    shapes = [(2, 40), (2, 40), (4, 100), (2, 40)]
    plain, graphed = (opened(recorder=one, micro_batch_size=2) for one in (None, again))
    graphed.graphs.tokens = 200
    hidden, calls = graphed.family.hidden, []

    def scarce(ids: Any, **more: Any) -> Any:
        calls.append(ids.shape)
        if graphed.graphs.made and calls.count((2, 128)) == part:
            raise torch.OutOfMemoryError("none left")
        return hidden(ids, **more)

    monkeypatch.setattr(graphed.family, "hidden", scarce)
    assert steps(plain, shapes) == steps(graphed, shapes)
    same_bits(graphed, plain)
    assert "no memory for CUDA graphs and what runs next to them" in caplog.text
    assert not graphed.graphs.made
    with pytest.raises(torch.OutOfMemoryError):  # without graphs there is nothing to give back
        graphed.graphs.with_room(lambda: scarce_always())


def scarce_always() -> None:
    raise torch.OutOfMemoryError("none left")


def test_an_evaluation_between_steps_is_that_of_the_weights_as_they_are(monkeypatch) -> None:
    plain, graphed = opened(graphs=False), opened(recorder=record)
    for number, shape in enumerate(SHAPES[:4]):
        for session in (plain, graphed):
            session.step(*rows(*shape, number), number, RATE)
        found, expected = (one.evaluate(*rows(2, 50, 9))[0] for one in (graphed, plain))
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    hidden = graphed.family.hidden

    def scarce(*arguments: Any, **more: Any) -> Any:
        return scarce_always() if graphed.graphs.made else hidden(*arguments, **more)

    monkeypatch.setattr(graphed.family, "hidden", scarce)
    assert graphed.graphs.made
    assert graphed.evaluate(*rows(2, 50, 9))[0].tobytes() == found.tobytes()
    assert not graphed.graphs.made


def test_weights_that_others_load_or_move_are_those_of_the_next_step() -> None:
    plain, graphed = opened(recorder=None), opened(recorder=record)
    first = plain.state()
    for session in (plain, graphed):
        steps(session, [(2, 40)] * 3)
        session.load_state({**session.state(), **first})  # in place: graphs go on
    assert len(graphed.graphs.made) == 1
    assert steps(plain, [(2, 40)] * 2) == steps(graphed, [(2, 40)] * 2)
    for session in (plain, graphed):
        embedding = session.family.embedding.weight
        embedding.data = embedding.data * 1.5
    old = graphed.graphs.made[torch.Size((2, 64))]
    assert steps(plain, [(2, 40)] * 3) == steps(graphed, [(2, 40)] * 3)
    assert graphed.graphs.made[torch.Size((2, 64))] is not old  # it has another address
    with graphed.writing() as loaded:
        assert loaded is graphed.loaded and not graphed.graphs.made
    assert steps(plain, [(2, 40)] * 3) == steps(graphed, [(2, 40)] * 3)
    assert len(graphed.graphs.made) == 1
    same_bits(graphed, plain)


def test_packed_and_weighed_rows_run_without_graphs_and_it_is_logged_once(caplog) -> None:
    caplog.set_level("INFO")
    plain, graphed = opened(graphs=False), opened(recorder=record)
    ids, labels = rows(2, 24, 1)
    places = np.tile(np.r_[0:10, 0:14], (2, 1))
    labels[:, [0, 10]] = -100
    for number in range(3):
        for session in (plain, graphed):
            session.packed_step(ids, labels, places, number, RATE)
            session.weighted_step(ids, labels, lambda nll: (1.0, np.full(2, 0.1)), number, RATE)
    same_bits(graphed, plain)
    assert not graphed.graphs.made
    for reason in ("rows of one sequence are kept apart", "rows are weighed"):
        assert caplog.text.count(f"without CUDA graphs: {reason}") == 1


def test_a_model_that_reads_values_on_the_host_is_found_before_a_graph_is_made(
    tmp_path, caplog
) -> None:
    """Of one without a family transformers looks whether the positions are those of one row."""

    def never(run: Any) -> Any:
        raise AssertionError("a graph was made")

    folder = str(save(tmp_path / "model", "gpt_neox"))
    config = method_config("lora", {"rank": 2, "target_modules": ("query_key_value",)})
    sessions: list[Any] = [open_session(load_model(folder), config, 3) for _ in range(2)]
    for session, recorder in zip(sessions, (None, never), strict=True):
        session.graphs = HiddenGraphs(recorder, session.family, session.parameters)
    plain, graphed = sessions
    assert steps(graphed) == steps(plain)
    same_bits(graphed, plain)
    assert caplog.text.count("_local_scalar_dense.default waits for values on the host") == 1


def test_a_rehearsal_takes_numbers_of_rows_and_refuses_masks() -> None:
    x = torch.arange(6.0).reshape(3, 2)
    assert rehearse(lambda: x[torch.tensor([2, 0])]).tolist() == [[4.0, 5.0], [0.0, 1.0]]
    for reads in (
        lambda: x[x[:, 0] > 1],
        lambda: x.nonzero(),
        lambda: x * x.sum().item(),
        lambda: torch.zeros(2).index_put_((torch.tensor([True, False]),), torch.tensor(1.0)),
    ):
        with pytest.raises(NotForGraphs) as refused:
            rehearse(reads)
        assert "waits for values on the host" in str(refused.value)


def test_mixtures_have_no_graphs_and_the_reason_is_known() -> None:
    assert reason_against(tiny_model("llama", 1)) == ""
    assert "experts are chosen" in reason_against(tiny_model("qwen3_moe", 1))
    training = tiny_model("llama", 1)
    training.model.train()
    assert "training mode" in reason_against(training)


def test_rows_are_not_padded_beyond_the_positions_that_a_model_has() -> None:
    ids, labels = rows(2, 40, 1)
    assert padded(ids, labels, None, 64)[0].shape == (2, 64)
    assert padded(ids, labels, None, 63)[0].shape == (2, 40)
    wide, marks = padded(ids, labels, 1, 64)
    assert (wide[:, :40] == ids).all() and (marks[:, 40:] == -100).all()
