"""`lsp.quality` on a tiny model: every method learns, and the files hold."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest

torch = pytest.importorskip("torch")

from benchmarks.committed import concise  # noqa: E402
from benchmarks.lsp import quality  # noqa: E402
from benchmarks.lsp.methods import (  # noqa: E402
    LENGTHS,
    METHODS,
    Lsp,
    Trained,
    gradient_bytes,
    nbytes,
    open_method,
)
from benchmarks.lsp.report import BASE, mark, merged  # noqa: E402
from ondevice.data import Batches  # noqa: E402
from ondevice.methods.lsp.config import ProjectorConfig  # noqa: E402
from ondevice.models import tiny_model  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
SCHEMA = json.loads((ROOT / "benchmarks/results/schema.json").read_text())
CPU = torch.device("cpu")
PROJECTORS = ProjectorConfig(subspace=32, nonzeros=4, check_every=4, learn_rounds=2, learn_steps=3)
RATES = {"lora": 1e-2}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small products are far faster on one thread if cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    sst2 = [{"sentence": "x" * (3 + 5 * i % 23) + f" film {i}", "label": i % 2} for i in range(12)]
    cola = [
        {"task": "cola", "prompt_fields": {"sentence": f"Sentence {i}."}, "label": str(i % 2)}
        for i in range(6)
    ]
    alpaca = [{"instruction": f"Say {i}.", "input": "", "output": f"It is {i}."} for i in range(6)]
    for name, rows in (("sst2", sst2), ("cola", cola), ("alpaca", alpaca)):
        (folder / name).mkdir()
        for part in ("train", "valid"):
            (folder / name / f"{part}.jsonl").write_text(
                "".join(json.dumps(row) + "\n" for row in rows)
            )
    return folder


def opened(data: Path, method: str, half: bool = False) -> tuple[Any, Any, Any]:
    loaded = tiny_model()
    task = quality.Task("sst2", data, loaded.tokenizer, 12)
    run = Trained(loaded, CPU, half)
    optimizer = open_method(method, run, 0, PROJECTORS, 4, 4)
    return run, optimizer, Batches(task.train, 4, LENGTHS, 0, 256).at(0)


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_lowers_the_training_loss(data: Path, method: str, half: bool) -> None:
    if method == "lora":
        pytest.importorskip("peft")
    run, optimizer, batch = opened(data, method, half)
    losses = []
    for _ in range(6):
        loss = run.loss(batch)
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step(RATES.get(method, 1e-3))
    assert losses[-1] < losses[0] - 0.2
    assert all(later < earlier for earlier, later in pairwise(losses))


def test_the_projected_methods_need_less_memory(data: Path) -> None:
    needed = {}
    for method in ("full", "lsp", "galore", "lora"):
        run, optimizer, batch = opened(data, method)
        run.loss(batch).backward()
        gradients = gradient_bytes(run, optimizer)
        optimizer.step(1e-3)
        needed[method] = (nbytes(optimizer.tensors()), gradients)
    parameters = sum(p.numel() for p in tiny_model().model.parameters())
    assert needed["full"] == (8 * parameters, 4 * parameters)
    assert needed["galore"][1] == 4 * parameters  # the gradients are whole, as autograd makes them
    assert needed["lora"] < needed["galore"] < needed["full"]
    assert needed["lsp"][1] < needed["full"][1]


def test_the_loss_counts_only_label_tokens(data: Path) -> None:
    run, _, batch = opened(data, "full")
    labels = torch.from_numpy(batch.labels)
    logits = run.model(torch.from_numpy(batch.ids)).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    )
    torch.testing.assert_close(run.loss(batch), expected)
    nll, counts = run.evaluate(batch.ids, batch.labels)
    assert nll.sum() / counts.sum() == pytest.approx(float(expected.detach()), rel=1e-5)


def test_a_layer_in_half_precision_passes_on_the_same_gradient(data: Path) -> None:
    collected = []
    for half in (False, True):
        run, optimizer, batch = opened(data, "lsp", half)
        for _, matrix in optimizer.matrices:
            matrix.watch = None
        run.loss(batch).backward()
        collected.append([matrix.gradient for _, matrix in optimizer.matrices])
    for whole, half in zip(*collected, strict=True):
        assert float((whole - half).norm()) <= 0.05 * float(whole.norm())


def test_measuring_held_out_bias_changes_nothing(data: Path) -> None:
    run, optimizer, batch = opened(data, "lsp")
    assert isinstance(optimizer, Lsp)
    run.loss(batch).backward()
    assert optimizer.finish_look()
    plain = [p for p, matrix, _, _ in optimizer.optimizer.entries if matrix is None]
    before = [p.grad.clone() for p in plain if p.grad is not None]
    sums = [
        matrix.gradient.clone() for _, matrix in optimizer.matrices if matrix.gradient is not None
    ]
    optimizer.held_out(lambda: run.loss(batch).backward())
    (look,) = optimizer.looks
    assert look["after"] < look["before"] and look["renewed"] > 0 and look["step"] == 0
    assert look["held_out"] == pytest.approx(look["after"], rel=1e-3)  # the same batch
    assert len(before) == len(plain) and len(sums) == len(optimizer.matrices)
    assert all(torch.equal(p.grad, old) for p, old in zip(plain, before, strict=True))
    assert all(
        torch.equal(m.gradient, old) for (_, m), old in zip(optimizer.matrices, sums, strict=True)
    )


def test_a_run_with_bias_checks_matches_lsp_adamw(data: Path) -> None:
    """A measurement between a backward pass and a step leaves the run as it is."""
    weights = []
    for measured in (True, False):
        run, optimizer, batch = opened(data, "lsp")
        for _ in range(5):
            run.loss(batch).backward()
            if measured and optimizer.finish_look():
                optimizer.held_out(lambda run=run, batch=batch: run.loss(batch).backward())
            optimizer.step(1e-3)
        weights.append(run.model.state_dict())
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def script(monkeypatch: pytest.MonkeyPatch, words: str, *more: str) -> None:
    monkeypatch.setattr(sys, "argv", ["quality", *words.split(), *more])
    quality.main()


def test_the_script_writes_rows_and_draws_them(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("matplotlib")
    common = f"--model tiny:llama --data {data} --eval-every 2 --steps 3 --batch-size 2 --rank 4 --subspace 96"
    words = f"{common} --nonzeros 4 --check-every 2 --out {tmp_path / 'a.json'}"
    script(
        monkeypatch,
        f"{words} --tasks cola --methods lsp,lora --seeds 2",
        "--rates",
        "lsp=1e-4,1e-3;lora=1e-2",
    )
    document = json.loads((tmp_path / "a.json").read_text())
    jsonschema.validate(document, SCHEMA)
    rows = document["rows"]
    runs = [("lsp", 1e-4), ("lsp", 1e-3), ("lora", 1e-2)]
    assert [(row["method"], row["learning_rate"]) for row in rows] == [(BASE, None), *runs]
    assert [
        sum(bool(row["best_rate"]) for row in rows if row["method"] == name)
        for name in ("lsp", "lora")
    ] == [1, 1]
    for row in rows:
        if row["method"] == BASE:
            continue
        assert row["evaluated_at"] == [0, 2, 3] and row["seeds"] == [0, 1]
        assert [len(curve) for curve in row["loss_curves"]] == [3, 3]
        assert [len(row[key]) for key in ("best_loss", "last_loss", "step_s", "accuracy")] == [
            2,
            2,
            2,
            2,
        ]
        assert row["mean_best_loss"] <= row["mean_last_loss"] and row["deviation"] is not None
    lsp = rows[1]
    assert [look["step"] for look in lsp["looks"][0]] == [0, 2] and len(lsp["held_out_bias"]) == 2
    assert lsp["memory_bytes"] == lsp["state_bytes"] + lsp["gradient_bytes"]
    words = f"{common} --tasks alpaca --methods full --rates full=1e-5 --seeds 1"
    script(monkeypatch, f"{words} --out {tmp_path / 'b.json'}")
    files = f"{tmp_path / 'a.json'} {tmp_path / 'b.json'}"
    script(
        monkeypatch,
        f"--from-results {files} --out {tmp_path / 'c.json'} --plot {tmp_path / 'c.png'}",
    )
    document = json.loads((tmp_path / "c.json").read_text())
    jsonschema.validate(document, SCHEMA)
    assert {row["task"] for row in document["rows"]} == {"cola", "alpaca"}
    assert document["rows"][-1]["accuracy_curves"] is None
    assert (tmp_path / "c.png").stat().st_size > 10_000


@pytest.mark.nightly
def test_runs_side_by_side_match_single_runs_except_for_seconds(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first seed chooses the rate of the others; merged with timed runs, seconds are theirs."""
    words = f"--model tiny:llama --data {data} --tasks cola --methods full --eval-every 2 --steps 4 --batch-size 2"
    rates = ("--rates", "full=1e-3,1e-30")
    script(
        monkeypatch,
        f"{words} --seeds 3 --best-rates --workers 2 --out {tmp_path / 'a.json'}",
        *rates,
    )
    script(monkeypatch, f"{words} --seeds 1 --out {tmp_path / 'b.json'}", *rates)
    beside, alone = (
        json.loads((tmp_path / name).read_text())["rows"] for name in ("a.json", "b.json")
    )
    assert [row["seeds"] for row in beside] == [[None], [0, 1, 2], [0]] and beside[1]["best_rate"]
    for one, other in zip(beside[1:], alone[1:], strict=True):
        assert one["loss_curves"][0] == pytest.approx(other["loss_curves"][0], rel=1e-4)
        assert one["step_s"] is None and not one["seconds_curves"] and other["seconds_curves"]
    for order in ("ab", "ba"):
        rows = merged([tmp_path / f"{name}.json" for name in order])["rows"]
        for row, one, other in zip(rows[1:], beside[1:], alone[1:], strict=True):
            assert row["seeds"] == one["seeds"] and row["seconds_curves"] == other["seconds_curves"]
    committed = tmp_path / "committed.json"
    committed.write_text(json.dumps(concise(json.loads((tmp_path / "a.json").read_text()))))
    rows = merged([committed, tmp_path / "b.json"])["rows"]
    assert [row["seeds"] for row in rows] == [row["seeds"] for row in beside]
    assert [row["step_s"] for row in rows] == [row["step_s"] for row in alone]
    with pytest.raises(SystemExit) as refused:
        script(monkeypatch, f"--from-results {committed} --plot {tmp_path / 'a.png'}")
    assert "committed" in str(refused.value)
    script(monkeypatch, f"--from-results {tmp_path / 'a.json'} --plot {tmp_path / 'a.png'}")
    assert (tmp_path / "a.png").stat().st_size > 10_000


def test_a_diverging_run_ends_and_skipped_runs_are_named(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = f"--model tiny:llama --data {data} --tasks sst2 --methods full --eval-every 1 --steps 3 --batch-size 2"
    script(
        monkeypatch, f"{words} --seeds 1 --out {tmp_path / 'a.json'}", "--rates", "full=1e30,1e-3"
    )
    rows = json.loads((tmp_path / "a.json").read_text())["rows"]
    assert (
        rows[1]["diverged_at"][0] in (1, 2)
        and rows[1]["mean_last_loss"] is None
        and not rows[1]["best_rate"]
    )
    assert rows[2]["best_rate"] and rows[2]["diverged_at"] == [None]
    later = merged([tmp_path / "a.json", tmp_path / "a.json"])
    assert len(later["rows"]) == 3 and later["rows"][2]["best_rate"]
    script(monkeypatch, f"{words} --seeds 1 --time-budget-s 0 --out {tmp_path / 'b.json'}")
    document = json.loads((tmp_path / "b.json").read_text())
    assert [row["method"] for row in document["rows"]] == [BASE]
    assert "Not run for lack of time: sst2 full 1e-05 seed 0" in document["notes"][-1]


def test_rates_and_ranks_of_the_table_are_read() -> None:
    assert quality.parse_rates("lsp=1e-4,3e-4", ["full", "lsp"]) == {
        "full": [1e-5, 3e-5],
        "lsp": [1e-4, 3e-4],
    }
    with pytest.raises(ValueError) as refused:
        quality.parse_rates("sgd=1", ["full"])
    assert "full" in str(refused.value) and "sgd" in str(refused.value)
    figures = [(None, None), (2.0, None), (0.5, 7), (1.0, None), (1.0, None)]
    assert best([(loss, [0], at) for loss, at in figures]) == [False, False, False, True, False]


def best(figures: list[tuple[Any, list[int], Any]]) -> list[Any]:
    """`best_rate` of rows with these losses, seeds and steps of divergence."""
    rows = [
        {"task": "a", "method": "full", "mean_best_loss": loss, "seeds": seeds, "diverged_at": [at]}
        for loss, seeds, at in figures
    ]
    return [row["best_rate"] for row in mark(rows)]


def test_a_rate_of_one_seed_is_not_compared_with_one_of_more() -> None:
    assert best([(0.3, [0], None), (0.5, [0, 1], None), (0.4, [0, 1], None)]) == [
        False,
        False,
        True,
    ]
