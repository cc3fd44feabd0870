"""Work as graphs gives the bits of the work itself, and is recorded anew where what it depends on has changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ondevice.methods.lsp import engine as lsp_engine  # noqa: E402
from ondevice.methods.lsp.engine import LspEngine  # noqa: E402
from ondevice.methods.lsp.fit import fit  # noqa: E402
from ondevice.methods.lsp.matrix import Plane  # noqa: E402
from ondevice.models.load import tiny_model  # noqa: E402
from ondevice.offload.graphs import SHAPES, WARM, Graphs  # noqa: E402
from tests.methods.lsp.dense import low_rank, pair  # noqa: E402
from tests.methods.lsp.test_engine import FAMILIES, RATE, furthest, settings  # noqa: E402
from tests.methods.slideformer.reference import batches  # noqa: E402
from tests.offload.recording import record  # noqa: E402


def train(
    name: str, data: list[Any], **values: Any
) -> tuple[list[float], dict[str, Any], list[int]]:
    """Losses, weights, and how many graphs there were after each step."""
    family, sizes = FAMILIES[name]
    engine = LspEngine(tiny_model(family, **sizes).family, settings(**values), "cpu")
    try:
        losses, collected = [], []
        for step, (ids, labels) in enumerate(data):
            losses.append(engine.step(ids, labels, step, RATE))
            collected.append(engine.graphs.made)
        engine.flush()
        return losses, engine.weights(), collected
    finally:
        engine.close()


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["llama", "tied", "gpt2"])
@pytest.mark.parametrize(
    "values",
    [{}, {"weight_decay": 0.0}, {"weight_decay": 0.0, "weight_dtype": "float32", "window": 2}, {"weight_dtype": "nf4"},
     {"weight_placement": "host"}, {"project": False}, {"micro_batch_size": 2}, {"activations": "host"}],
    ids=str,
)  # fmt: skip
def test_an_engine_with_graphs_has_the_bits_of_one_without(
    name: str, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through two refreshes, with batches of two lengths."""
    long, short = batches(14, rows=3), batches(14, rows=3, length=7)
    data = [(long if step % 5 else short)[step] for step in range(14)]
    chosen = {"check_every": 6, **values}
    monkeypatch.setattr(lsp_engine, "recorder", lambda _: record)
    losses, weights, none = train(name, data, **chosen, cuda_graphs=False)
    ours, trained, built = train(name, data, **chosen)
    assert ours == losses and furthest(trained, weights) == 0
    assert not any(none) and built[1] == 0 < built[4]
    assert built[6] == built[5] and built[12] == built[11], (
        "a step that looks at the bias is done as it stands"
    )


@pytest.mark.parametrize("weight_dtype", ["compute", "nf4"])
def test_weight_decay_costs_no_graph(weight_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The factor of the base is another in each step, and the same memory."""
    monkeypatch.setattr(lsp_engine, "recorder", lambda _: record)
    made = [
        train("llama", batches(6), weight_decay=decay, weight_dtype=weight_dtype)[2]
        for decay in (0.0, 0.1)
    ]
    assert made[0] == made[1] and made[0][-1] >= 3 * 2


def test_steady_work_is_recorded_once_and_other_state_again() -> None:
    graphs, factor = Graphs(record), 2.0
    x = torch.arange(3.0)

    def compute(x: Any) -> tuple[Any, ...]:
        return (x * factor,)

    for turn in range(1, WARM + 4):
        assert torch.equal(graphs.run(("a",), (factor,), (x + turn,), compute)[0], (x + turn) * 2)
        assert graphs.made == (turn > WARM)
    factor = 3.0
    for turn in range(1, WARM + 4):
        assert torch.equal(graphs.run(("a",), (factor,), (x + turn,), compute)[0], (x + turn) * 3)
        assert graphs.made == 1 + (turn > WARM)


def test_outputs_of_a_graph_belong_to_the_caller() -> None:
    graphs = Graphs(record)
    collected = [
        graphs.run(("a",), (), (torch.full((2,), float(i)),), lambda x: (x + 1,))[0]
        for i in range(8)
    ]
    assert [float(x[0]) for x in collected] == [i + 1.0 for i in range(8)]


def test_further_shapes_run_without_graphs() -> None:
    """A layer's two passes, one with a gradient more, are of one shape; work without inputs has none."""
    graphs = Graphs(record)
    for length in range(1, SHAPES + 4):
        for _ in range(WARM + 2):
            graphs.run(("forward",), (), (torch.ones(length),), lambda x: (x * 2,))
            graphs.run(
                ("backward",), (), (torch.ones(length), torch.ones(length)), lambda x, g: (x * g,)
            )
    assert graphs.made == 2 * SHAPES
    for _ in range(WARM + 2):
        graphs.run(("make",), (), (), lambda: ())
    assert graphs.made == 2 * SHAPES + 1


@pytest.mark.parametrize("rows", [31, 9])
def test_learning_with_graphs_has_the_same_bits(rows: int) -> None:
    """Of several matrices, one of them with an exact side, in memory that they share."""
    plane = Plane(record)
    for seed in range(5):
        gradient, drawn = low_rank(rows, 23, 3, seed), pair(rows, 23, 9, 4)
        expected, fitted = fit(*drawn, gradient), fit(*drawn, gradient, descents=plane.descents)
        assert fitted.losses == expected.losses and fitted.bias == expected.bias
        for a, b in ((fitted.left, expected.left), (fitted.right, expected.right)):
            assert a.exact == b.exact
            assert a.exact or np.array_equal(a.values.numpy(), b.values.numpy())  # pyright: ignore
    assert plane.descents.graphs.made == 1 + (rows > 9)
