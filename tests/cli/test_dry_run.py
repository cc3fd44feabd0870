"""`--dry-run` refuses whatever the command refuses, with the same words, and writes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from ondevice.training import loggers
from tests.cli.refused import make

ROWS = "--data rows.jsonl --steps 2"
LLAMA = f"tiny:llama {ROWS}"
REFUSED = {
    "a classification head on a decoder": f"{LLAMA} --classes 2",
    "an encoder without classes": f"roberta {ROWS}",
    "a head of other classes than the rows": f"roberta {ROWS} --classes 3",
    "a head with a method for adapters": f"roberta {ROWS} --classes 2 --method mesp",
    "unknown blocks in MLX": f"stablelm {ROWS} --backend mlx",
    "unknown blocks with MeSP in MLX": f"stablelm {ROWS} --backend mlx --method mesp",
    "a model without files in MLX": f"{LLAMA} --backend mlx --method mesp",
    "unknown blocks with a method of known ones": f"mamba {ROWS} --method revffn",
    "a setting of known blocks": f"stablelm {ROWS} --method mesp --set method.activations=disk",
    "layer norms": f"tiny:gpt2 {ROWS} --method mesp",
    "reversible blocks of layer norms": f"tiny:gpt2 {ROWS} --method revffn",
    "adapters of experts' tensors": f"tiny:qwen3_moe {ROWS} --method lora --target-modules gate_proj",
    "a layer that is not there": f"{LLAMA} --target-modules q_proj,nothing",
    "packed rows": f"{LLAMA} --packing --method revffn",
    "4 bits without a GPU": f"{LLAMA} --set method.bits=4",
    "streamed weights of a model in memory": f"{LLAMA} --set method.weight_placement=streamed",
    "float16": f"{LLAMA} --method full --dtype float16",
    "factors of a program": f"{LLAMA} --method prge --set method.factors=factors.safetensors",
    "fewer rows than queries": f"{LLAMA} --method mezo --queries 8 --set method.fresh_batches=true",
    "masters on the disk without moments": f"{LLAMA} --method slideformer --set method.disk_masters=true",
    "resident layers with a global norm": f"{LLAMA} --method slideformer --set method.resident_layers=1 "
    "--max-grad-norm 1 --set method.clip=global",
    "a score of rows without candidates": "tiny:llama --data chat.jsonl --steps 2 --method prge "
    "--set train.objective=accuracy",
    "a score with a gradient": f"{LLAMA} --set train.objective=accuracy",
    "a loss over answers": "tiny:llama --data chat.jsonl --steps 2 --method prge --set method.loss=answers",
    "patience without evaluations": f"{LLAMA} --patience 2",
    "a tracker that is not installed": f"{LLAMA} --report-to mlflow",
    "an adapter that is not there": f"{LLAMA} --adapter nowhere",
    "an adapter of another base": f"tiny:gpt2 {ROWS} --adapter run",
    "an adapter of another rank": f"{LLAMA} --rank 4 --adapter run",
    "an adapter for all parameters": f"{LLAMA} --method full --adapter run",
    "a folder with a run": f"{LLAMA} --out run",
    "a resume with another rank": f"{LLAMA} --rank 4 --out run --resume",
    "a resume with other rows": "tiny:llama --data other.jsonl --steps 2 --out run --resume",
    "a resume with fewer steps": "tiny:llama --data rows.jsonl --steps 1 --out run --resume",
    "a file in the run's place": f"{LLAMA} --out rows.jsonl",
    "a file above the run's place": f"{LLAMA} --out rows.jsonl/run",
    "a memory limit": f"{LLAMA} --memory-limit 1MiB",
    "an empty file": "tiny:llama --data empty.jsonl",
    "rows of no format": "tiny:llama --data odd.jsonl",
    "columns that nothing reads": "tiny:llama --data foreign.csv --column text=Nachricht --strict-columns",
    "a task of other columns": f"{LLAMA} --task rte",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    import ondevice

    place = make(tmp_path_factory.mktemp("refused"))
    rows = str(place / "rows.jsonl")
    ondevice.train("tiny:llama", rows, steps=2, out=str(place / "run"))
    (place / "other.jsonl").write_text(Path(rows).read_text().replace("yes", "yes!"))
    return place


def listing(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("case", REFUSED)
def test_a_dry_run_refuses_what_the_run_refuses(case, ondevice, folder, monkeypatch) -> None:
    monkeypatch.chdir(folder)
    if case == "a tracker that is not installed":
        monkeypatch.setitem(loggers.TRACKERS, "mlflow", (loggers.MLflow, "not_installed"))
    words = REFUSED[case].split()
    if "--out" not in words:
        words += ["--out", f"new, {case}"]
    before = listing(folder)
    dry = ondevice("train", *words, "--dry-run", "--json")
    assert listing(folder).keys() == before.keys()
    real = ondevice("train", *words, "--json")
    assert real.code not in (0, 1), real.err
    assert dry.code == real.code, f"{dry.err}{real.err}"
    if case != "a memory limit":  # its plan is printed
        assert dry.out == real.out
    assert not (folder / f"new, {case}").exists()


@pytest.mark.parametrize(
    "words",
    [LLAMA, f"stablelm {ROWS}", f"roberta {ROWS} --classes 2", f"{LLAMA} --out run --resume"],
)
def test_a_dry_run_of_what_runs_prints_the_plan_and_writes_nothing(
    words, ondevice, folder, monkeypatch
) -> None:
    monkeypatch.chdir(folder)
    before = listing(folder)
    done = ondevice("train", *words.split(), "--dry-run", "--json")
    assert done.code == 0 and done.json["plan"]["total_bytes"], done.err
    assert listing(folder).keys() == before.keys()
