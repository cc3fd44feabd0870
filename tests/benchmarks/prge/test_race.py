"""The race's batched runs are the model's own losses and gradients, and its script resumes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from benchmarks.prge import race  # noqa: E402
from benchmarks.prge.calibrating import gradients_of, refresh, top_subspace  # noqa: E402
from benchmarks.prge.racing import Group  # noqa: E402
from benchmarks.prge.racing_model import AnswerRows, RacingModel  # noqa: E402
from benchmarks.prge.variants import Variant  # noqa: E402
from ondevice import read_dataset  # noqa: E402
from ondevice.models import tiny_model  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rows = [{"sentence": "x" * (3 + 5 * i % 23) + f" film {i}", "label": i % 2} for i in range(16)]
    (folder / "sst2").mkdir()
    for name in ("train", "valid"):
        (folder / "sst2" / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    return folder


def group(data: Path, *texts: str, seeds: int = 1) -> tuple[Any, Any, Group]:
    loaded = tiny_model()
    rows = read_dataset(
        data / "sst2" / "train.jsonl", loaded.tokenizer, task="sst2", max_length_tokens=72
    )
    members = [(Variant.parse(text, 4, 4), 1e-2, seed) for text in texts for seed in range(seeds)]
    return loaded, rows, Group(RacingModel(loaded), rows, members)


def plain_losses(loaded: Any, table: AnswerRows) -> torch.Tensor:
    """Loss over the answers of each row, by transformers' forward pass of one row."""
    losses = []
    for row, length in enumerate(table.lengths):
        logits = loaded.model(input_ids=table.ids[row : row + 1, :length]).logits[
            0, -1, table.answers
        ]
        losses.append(
            torch.nn.functional.cross_entropy(logits[None].float(), table.gold[row : row + 1])
        )
    return torch.stack(losses)


@pytest.mark.parametrize("space", ["xs", "diag"])
def test_a_new_subspace_keeps_the_learned_change(data: Path, space: str) -> None:
    _, _, runs = group(data, f"{space} q2 r3 refresh2 cal5", seeds=2)
    runs.run(2)
    before = runs.evaluate(runs.table)[1]
    untouched = runs.state.abs().sum(1)
    refresh(runs, [0], 2)
    after = runs.evaluate(runs.table)[1]
    assert runs.state[0].abs().sum() == 0 < untouched[0]
    assert runs.state[1].abs().sum() == untouched[1]
    np.testing.assert_allclose(after, before, rtol=2e-6)


def test_the_exact_gradient_matches_the_plain_model(data: Path) -> None:
    loaded, rows, runs = group(data, "xs q2 r3")
    every = np.arange(len(rows.items))[None]
    found = gradients_of(runs, [0], every, [0])[0]
    weight = loaded.family.linear(1, "v_proj").weight.requires_grad_(True)
    losses = plain_losses(loaded, runs.table)
    losses.sum().backward()
    np.testing.assert_allclose(
        found[1]["v_proj"].T.numpy(), weight.grad.numpy(), rtol=2e-4, atol=1e-6
    )
    np.testing.assert_allclose(runs.evaluate(runs.table)[1][0], losses.mean().item(), rtol=1e-5)


@pytest.mark.parametrize("space", ["xs", "diag"])
def test_an_estimate_is_the_slope_along_its_noise(data: Path, space: str) -> None:
    """With many queries the projected gradients of a small R are those of the exact gradient, C and
    A."""
    _, _, runs = group(data, f"{space} q8 r2 b8 eps1e-3")
    refresh(runs, [0], 0)
    gradient = gradients_of(runs, [0], runs.jobs[0][:1], [0])[0]
    parts = []
    for layer, target, _, _ in runs.layout:
        exact = gradient[layer][target] / 8  # a sum over the batch's rows
        square = runs.a[layer][target][0].T @ exact @ runs.c[layer][target][0].T
        parts.append(square.diagonal() if space == "diag" else square.flatten())
    expected = torch.cat(parts)
    noise = torch.randn(8, runs.state.shape[1], generator=torch.Generator().manual_seed(1000))
    packed, rows_SB = runs.table.pack(runs.jobs[0])
    estimate = runs._estimate(packed, rows_SB, 0)
    slope = ((noise @ expected) @ noise / 8).numpy()
    np.testing.assert_allclose(
        estimate[0].numpy(), slope, rtol=0.02, atol=1e-3 * np.abs(slope).max()
    )
    _, _, fo = group(data, f"fo {space} r2 b8 sgd")
    refresh(fo, [0], 0)
    fo._step(0)
    moved = -fo.state[0] / 1e-2
    np.testing.assert_allclose(moved.numpy(), expected.numpy(), rtol=2e-3, atol=1e-5)
    _, _, exact = group(data, f"{space} q8 r2 cal16 exact5 refresh2")
    refresh(exact, [0], 2)  # half of the steps are done, and so is half of the rate
    slope = exact.state[0].double()
    np.testing.assert_allclose(slope.square().mean().sqrt(), 5 * 1e-2 / 2, rtol=1e-5)
    before = exact.evaluate(exact.table)[1]
    exact.state *= -1
    assert exact.evaluate(exact.table)[1] > before


def test_directions_from_cones_pools_gradients_and_growing_queries(data: Path) -> None:
    """A cone around earlier estimates, one direction out of a pool, exact gradients at the top,
    queries that grow."""
    _, _, runs = group(data, "diag q2 r2 b8 cone0.25")
    none = torch.zeros(1, 3, runs.state.shape[1])
    assert not runs._in_cone(none).any()  # nothing was estimated yet
    runs.run(1)
    axis = runs._in_cone(none)[0, 2]
    assert axis.square().sum().item() == pytest.approx(0.25 * len(axis), rel=1e-5)
    torch.testing.assert_close(axis / axis.norm(), runs.mean[0] / runs.mean[0].norm())

    _, _, pooled = group(data, "diag pool8 r2 b8 eps1e-3")
    refresh(pooled, [0], 0)
    packed, rows_SB = pooled.table.pack(pooled.jobs[0])
    exact = pooled._backpropagated(packed, rows_SB)[0]
    with torch.no_grad():
        guided = pooled._guided(packed, rows_SB)[0, 0]
    pool = torch.randn(8, len(exact), generator=torch.Generator().manual_seed(1000))
    order = (pool @ exact).argsort()
    expected = pool[order[:4]].mean(0) - pool[order[4:]].mean(0)
    torch.testing.assert_close(guided, expected)

    _, _, mixed = group(data, "diag q2 r2 b8 top1")
    refresh(mixed, [0], 0)
    mixed._step(0)
    moved, half = -mixed.state[0] / 1e-2, len(exact) // 2  # of two layers
    torch.testing.assert_close(moved[half:], exact[half:], rtol=2e-3, atol=1e-5)
    assert moved[:half].abs().max() > 0 and not torch.allclose(moved[:half], exact[:half], rtol=0.1)

    grown = Variant.parse("rand q4 b4 grow500", 1000, 0)
    assert (grown.queries_at(499), grown.queries_at(500), grown.row_forwards(30)) == (1, 4, 20)
    assert Variant.parse("rand pool6", 1000, 0).row_forwards(30) == 4 * 8
    assert Variant.parse("rand q4 b4 top15", 1000, 0).row_forwards(30) == 4 * (8 + 2)
    for wrong in ("diag pool1", "diag pool4 onesided", "diag cone1"):
        with pytest.raises(ValueError) as refused:
            Variant.parse(wrong, 4, 4)
        assert wrong.split()[1] in str(refused.value) or "pool" in str(refused.value)


def test_the_top_subspace_matches_the_svd() -> None:
    generator = torch.Generator().manual_seed(3)
    scale = 0.6 ** torch.arange(20)
    matrix = (
        torch.randn(2, 33, 20, generator=generator)
        * scale
        @ torch.randn(20, 29, generator=generator)
    )
    u, s, v = top_subspace(matrix, 5)
    _, exact, _ = torch.linalg.svd(matrix.double())
    np.testing.assert_allclose(s.numpy(), exact[:, :5].numpy(), rtol=1e-6)
    np.testing.assert_allclose(
        (u.mT @ matrix.double() @ v).numpy(), torch.diag_embed(s).numpy(), atol=1e-6
    )


@pytest.mark.nightly
def test_the_script_resumes_and_chooses_the_rate_on_separate_rows(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(variants: str) -> dict[str, Any]:
        words = f"race --model tiny:llama --data {data} --choose-rows 4 --eval-rows 4 --seeds 2 --steps 3 --fo-steps 2"
        more = [
            "--eval-every",
            "2",
            "--log",
            str(tmp_path / "log.jsonl"),
            "--json",
            "--variants",
            variants,
        ]
        monkeypatch.setattr(sys, "argv", [*words.split(), *more])
        race.main()
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    run("xs q2 r2 adam refresh2@1e-3,1e-2;fo full r2 sgd@1e-3")
    lines = (tmp_path / "log.jsonl").read_text().splitlines()
    assert len(lines) == 6
    (tmp_path / "log.jsonl").write_text("\n".join([*lines, '{"task": "ss']) + "\n")
    document = run(
        "xs q2 r2 adam refresh2@1e-3,1e-2;fo full r2 sgd@1e-3;full q2 r2 norm onesided@1e-3"
    )
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 9
    jsonschema.validate(document, json.loads((ROOT / "benchmarks/results/schema.json").read_text()))
    assert {row["variant"] for row in document["rows"]} == {
        "xs q2 r2 adam refresh2", "fo full r2 sgd", "full q2 r2 norm onesided",
    }  # fmt: skip
    records = [
        {"task": "t", "variant": "v", "rate": rate, "seed": 0, "steps": 1, "seconds": 1.0, "numbers": 1,
         "row_forwards": 1, "curve": [[1, chosen, 0.5, judged, 0.5, 0, 0]]}
        for rate, chosen, judged in ((1.0, 0.7, 0.6), (2.0, 0.6, 0.9))
    ]  # fmt: skip
    assert {row["rate"]: row["chosen"] for row in race.summarize(records)} == {
        1.0: True,
        2.0: False,
    }
