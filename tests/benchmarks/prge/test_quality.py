"""The batched runs of `prge.quality` are the sessions of the SDK, and the script ends with a valid
result."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from benchmarks.prge import quality  # noqa: E402
from benchmarks.prge.batched import BatchedRuns  # noqa: E402
from ondevice import read_dataset  # noqa: E402
from ondevice.artifact.adapter import Adapter  # noqa: E402
from ondevice.data import Batches  # noqa: E402
from ondevice.methods.lora_fa.config import LoraFaConfig  # noqa: E402
from ondevice.methods.prge.config import PrgeConfig  # noqa: E402
from ondevice.methods.prge.torch import PrgeSession  # noqa: E402
from ondevice.models import tiny_model  # noqa: E402
from ondevice.training.evaluate import evaluate_dataset  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
STEPS = 3


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rows = [{"sentence": "x" * (3 + 5 * i % 23) + f" film {i}", "label": i % 2} for i in range(12)]
    (folder / "sst2").mkdir()
    for name in ("train", "valid"):
        (folder / "sst2" / f"{name}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    return folder


def open_data(folder: Path, loaded: Any) -> Any:
    return read_dataset(
        folder / "sst2" / "train.jsonl", loaded.tokenizer, task="sst2", max_length_tokens=72
    )


def batched(
    data: Path, config: Any, seeds: list[int], rate: float, batch: int = 2
) -> tuple[BatchedRuns, list[Any]]:
    loaded = tiny_model()
    rows = open_data(data, loaded)
    batches = [Batches(rows, batch, None, seed, 256) for seed in seeds]
    rates = np.full((STEPS, len(seeds)), rate, dtype=np.float32)
    return BatchedRuns(loaded, config, rows, rows, seeds, batches, rates), batches


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"estimator": "one_sided", "queries": 3},
        {"top_layers": 1, "noise": "rademacher", "rank": 4, "target_modules": ("v_proj",)},
    ],
    ids=["central", "one-sided", "v of the top layer"],
)
def test_a_batched_run_computes_what_a_session_computes(
    data: Path, options: dict[str, Any]
) -> None:
    config = PrgeConfig(
        **{"queries": 2, "perturbation_scale": 1e-1, "learning_rate": 1e-1, **options}
    )
    runs, batches = batched(data, config, [3, 5], config.learning_rate)
    runs.run(0, STEPS)
    accuracy, loss = runs.evaluate()
    for i, seed in enumerate((3, 5)):
        session = PrgeSession(tiny_model(), config, seed)
        for step in range(STEPS):
            batch = batches[i].at(step)
            session.step(batch.ids, batch.labels, step, config.learning_rate)
        change = np.abs(session.flat()).max()
        assert change > 1e-3
        assert np.abs(runs.adapters[i].numpy() - session.flat()).max() < 1e-3 * change
        expected = evaluate_dataset(session, open_data(data, session.loaded), 256)
        assert loss[i] == pytest.approx(expected.loss, rel=1e-4)
        assert accuracy[i] == expected.accuracy


def test_batched_adamw_matches_a_session(data: Path) -> None:
    from ondevice.methods.lora.torch import LoraSession
    from ondevice.methods.prge.layout import AdapterLayout

    config = LoraFaConfig(learning_rate=1e-3)
    runs, batches = batched(data, config, [3, 5], config.learning_rate)
    runs.run(0, STEPS)
    loaded = tiny_model()
    layout = AdapterLayout.build(loaded.dims, PrgeConfig(), 5)
    names = {
        (e.layer, e.target): loaded.family.linear_name(e.layer, e.target) for e in layout.entries
    }
    session = LoraSession(loaded, config, 5)
    tensors = layout.to_tensors(np.zeros(layout.size, np.float32), names)
    session.load_adapter(Adapter(tensors, config.rank, config.alpha, config.target_modules, ""))
    for step in range(STEPS):
        batch = batches[1].at(step)
        session.step(batch.ids, batch.labels, step, config.learning_rate)
    expected = layout.from_adapter(session.adapter(), names, config.alpha)
    assert np.abs(expected).max() > 1e-3
    assert np.abs(runs.adapters[1].detach().numpy() - expected).max() < 2e-5


def test_the_script_ends_with_a_valid_result(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "result.json"
    variants = "zo q=1;zo q=4@1e-3,1e-2:linear;fo lora-fa"
    words = f"--model tiny:llama --tasks sst2 --steps 4 --fo-steps 2 --seeds 2 --eval-every 2 --data {data} --out {out}"
    monkeypatch.setattr(sys, "argv", ["quality", *words.split(), "--variants", variants])
    quality.main()
    document = json.loads(out.read_text())
    jsonschema.validate(document, json.loads((ROOT / "benchmarks/results/schema.json").read_text()))
    methods = [
        (row["method"], row["learning_rate"], row["schedule"], row["steps"])
        for row in document["rows"]
    ]
    assert methods == [
        ("zero-shot", None, None, 0),
        ("zo q=1", 3e-3, "constant", 4),
        ("zo q=4", 1e-3, "constant", 4),
        ("zo q=4", 1e-2, "linear", 4),
        ("fo lora-fa", 3e-4, "constant", 2),
    ]
    assert all(len(row["accuracy"]) == 2 for row in document["rows"][1:])
    assert any("q=4" in note and "by seed" in note for note in document["notes"])
