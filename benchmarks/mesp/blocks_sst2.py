"""The cost of rounding in accuracy: SST-2 with each form of block programs, several seeds side by
side.

python -m benchmarks.mesp.blocks_sst2                                  300 steps of 8 rows, five seeds, every form
python -m benchmarks.mesp.blocks_sst2 --forms none,8da8w --processes 4

A form is exported once, with its check; a run takes its adapter and its order of rows from its
seed. Processes share the cores: each has cores / processes threads.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common import add_arguments, finish, parse_args
from benchmarks.mesp.blocks import FORMS, MODEL

NEEDS = ("executorch",)
TEMPLATE = 8
"""Tokens that the template puts around a sentence, at most."""
COLUMNS = [
    {"key": "form", "title": "Form"},
    {"key": "gradient_cosine_float32", "title": "Gradient cosine with float32", "digits": 3},
    {"key": "accuracy_before", "title": "Accuracy before", "digits": 3},
    {"key": "mean_accuracy", "title": "Accuracy, mean", "digits": 3},
    {"key": "against_float32", "title": "less float32's", "digits": 3},
    {"key": "accuracy", "title": "Accuracy, by seed", "digits": 3},
    {"key": "loss", "title": "Loss on validation rows", "digits": 3},
    {"key": "step_s", "title": "Step (s), processes side by side", "digits": 2},
]


def main() -> None:
    """Export every form, train every seed of it, and write the table."""

    def more(parser: Any) -> None:
        add_protocol(parser, valid_rows=400, processes=5)
        parser.add_argument("--lengths", default="32,64", help="tokens; longer rows are left out")
        parser.add_argument(
            "--programs", type=Path, help="keep the programs here, and take those that are there"
        )

    args = parse_args(__doc__, more)
    lengths = tuple(map(int, args.lengths.split(",")))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        data = protocol_rows(args, Path(scratch), max(lengths))
        pool = ProcessPoolExecutor(args.processes, multiprocessing.get_context("spawn"))
        for form in args.forms.split(","):
            folder = (args.programs or Path(scratch)) / form
            check = exported(form, folder, args.model, lengths, args.batch)
            threads = max(1, len(os.sched_getaffinity(0)) // args.processes)
            common = (folder, data["train"], data["valid"], args.rate, threads)
            before = pool.submit(run, *common, 0, 0)
            runs = [pool.submit(run, *common, args.steps, seed) for seed in range(args.seeds)]
            results = [future.result() for future in runs]
            more_of_row = {
                "gradient_cosine_float32": check.get("gradient_cosine_float32", 1.0),
                "step_s": [result["step_s"] for result in results],
            }
            add_row(rows, form, args, before.result(), results, **more_of_row)
        pool.shutdown()
    notes = [
        f"{args.steps} steps of {args.batch} rows, AdamW, rate {args.rate:g} falling to 0, rank 8."
    ]
    finish(
        "mesp/blocks_sst2",
        rows,
        args,
        columns=COLUMNS,
        title="SST-2 by form of block programs",
        notes=notes,
    )


def add_protocol(parser: Any, valid_rows: int, processes: int) -> None:
    """Add the flags of the runs, which are the same in the runtime and in eager PyTorch."""
    parser.add_argument("--model", default=MODEL)
    add_arguments(parser, "--data")
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--train-rows", type=int, default=1000)
    parser.add_argument("--valid-rows", type=int, default=valid_rows)
    parser.add_argument("--processes", type=int, default=processes)


def protocol_rows(args: Any, folder: Path, tokens: int) -> dict[str, Path]:
    """Write the rows of `train` and `valid` that have at most `tokens` tokens into `folder`."""
    data = {part: folder / f"{part}.jsonl" for part in ("train", "valid")}
    for part, count in (("train", args.train_rows), ("valid", args.valid_rows)):
        first_rows(args.data / "sst2" / f"{part}.jsonl", data[part], count, args.model, tokens)
    return data


def add_row(
    rows: list[dict[str, Any]],
    form: str,
    args: Any,
    before: dict[str, Any],
    results: list[dict[str, Any]],
    **more: Any,
) -> None:
    """Append a form's row, from what its untrained model and its seeds came to; the first row is
    float32's."""
    row = {
        "form": FORMS[form],
        "steps": args.steps,
        "seeds": [*range(args.seeds)],
        "accuracy_before": before["accuracy"],
        "mean_accuracy": statistics.mean(result["accuracy"] for result in results),
        **{key: [result[key] for result in results] for key in ("accuracy", "loss")},
        **more,
    }
    rows.append(row)
    row["against_float32"] = row["mean_accuracy"] - rows[0]["mean_accuracy"]
    print(row, flush=True)


def exported(
    form: str, folder: Path, model: str, lengths: tuple[int, ...], batch: int
) -> dict[str, Any]:
    """The manifest's check of a form's artifact, which is made unless it is there."""
    from ondevice.api import export as artifacts
    from ondevice.api.runfile import RunConfig
    from ondevice.artifact.manifest import MANIFEST_NAME, read_manifest

    if not (folder / MANIFEST_NAME).is_file():
        settings = {
            "model.source": model,
            "method.name": "mesp",
            "data.task": "sst2",
            "export.quantize": form,
            "export.lengths_tokens": list(lengths),
            "export.batch_size": batch,
            "export.eval_batch_size": batch,
        }
        artifacts.export(RunConfig.load(None, settings), folder)
    return read_manifest(folder).check


def run(
    folder: Path, train: Path, valid: Path, rate: float, threads: int, steps: int, seed: int
) -> dict[str, Any]:
    """Train an artifact from a seed; accuracy and loss on the validation rows, and seconds of the
    median step."""
    from executorch.extension.pybindings import portable_lib

    from ondevice.api.open import open_artifact
    from ondevice.artifact.manifest import read_manifest
    from ondevice.core.dims import ModelDims
    from ondevice.data import Batches, pad_id_of, read_dataset
    from ondevice.methods.mesp.lora import FlatLayout, initial_tensors, lora_parameters
    from ondevice.models.load import artifact_tokenizer
    from ondevice.models.registry import family_classes
    from ondevice.training.evaluate import evaluate_dataset

    portable_lib._unsafe_reset_threadpool(threads)
    manifest, session, tokenizer = (
        read_manifest(folder),
        open_artifact(folder),
        artifact_tokenizer(folder),
    )
    dims, longest = ModelDims.from_manifest(manifest.model.dims), max(manifest.lengths_tokens)
    parameters = lora_parameters(dims, family_classes()[dims.family], session.config)
    adapter = FlatLayout.build(parameters, dims.layers).to_flat(initial_tensors(parameters, seed))
    session.load_state(session.state() | {"adapter": adapter})
    rows, held = (
        read_dataset(path, tokenizer, task="sst2", max_length_tokens=longest)
        for path in (train, valid)
    )
    batches = Batches(rows, session.batch_size, session.lengths_tokens, seed, pad_id_of(tokenizer))
    seconds = [0.0]
    for step in range(steps):
        batch, started = batches.at(step), time.perf_counter()
        session.step(batch.ids, batch.labels, step, rate * (1 - step / steps))
        seconds.append(time.perf_counter() - started)
    result = evaluate_dataset(session, held, pad_id_of(tokenizer))
    assert result is not None
    return {
        "accuracy": result.accuracy,
        "loss": result.loss,
        "step_s": statistics.median(seconds[1:] or [0.0]),
    }


def first_rows(source: Path, target: Path, count: int, model: str, longest: int) -> None:
    """Copy the first rows that are short enough, with the template around them."""
    from ondevice.models.load import load_tokenizer

    tokenizer, lines = load_tokenizer(model), source.read_text(encoding="utf-8").splitlines()
    sentences = [json.loads(line)["prompt_fields"]["sentence"] for line in lines]
    short = [
        line
        for line, text in zip(lines, sentences)
        if len(tokenizer(text)["input_ids"]) <= longest - TEMPLATE
    ]
    target.write_text("\n".join(short[:count]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
