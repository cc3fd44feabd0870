"""Loss against steps and seconds: LSP-Offload's subspaces, full AdamW, GaLore and LoRA
(LSP-Offload, section 6).

Every run starts from the same model and sees the same rows in the same order for a seed. Losses are
of answer tokens: Alpaca's answers, or the word that stands for the class (the templates of
`ondevice.data`), which also gives accuracy.

    python -m benchmarks.lsp.quality --tasks alpaca --rates 'full=1e-5,3e-5;lsp=1e-4' --out a.json
    python -m benchmarks.lsp.quality --from-results a.json b.json --out both.json --plot both.png
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from benchmarks.committed import write
from benchmarks.common import add_arguments, finish, parse_args, write_result
from benchmarks.lsp.report import COLUMNS, merged, plot, ranking, rows_of
from benchmarks.lsp.runs import Job, Runner, load
from benchmarks.tasks import MAX_TOKENS, Task

NEEDS = ("cuda",)
NAME = "lsp/quality"
RATES = "full=1e-5,3e-5;lsp=3e-5,1e-4;lsp-random=3e-5,1e-4;galore=1e-4,3e-4;"
RATES += "galore-4=1e-5,3e-5;lora=3e-4,1e-3"


def arguments(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, "--model", "--data", "--eval-rows")
    parser.add_argument("--tasks", default="alpaca,sst2,rte,mrpc,cola,qnli")
    parser.add_argument(
        "--methods",
        default="full,lsp,lsp-random,galore,lora",
        help="also galore-4 (alpha 4, not 0.25), and lsp or lsp-random with other looks: lsp-random@20, lsp@never",
    )
    parser.add_argument("--rates", default="", help=f"instead of the default ones: {RATES}")
    parser.add_argument("--steps", default="1000", help="one number, or one for each task")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--eval-every", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--best-rates", action="store_true", help="the first seed chooses the others' rates"
    )
    parser.add_argument(
        "--workers", type=int, default=1, help="runs at a time, without seconds if more than one"
    )
    parser.add_argument("--subspace", type=int, default=256)
    parser.add_argument("--nonzeros", type=int, default=8)
    parser.add_argument(
        "--check-every", type=int, default=200, help="steps between looks at the projectors' bias"
    )
    parser.add_argument("--threshold", type=float, default=0.3)
    parser.add_argument("--rank", type=int, default=16, help="of GaLore and LoRA")
    parser.add_argument(
        "--refresh", type=int, default=200, help="steps between GaLore's decompositions"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", choices=("auto", "float32", "bfloat16"), default="auto",
                        help="of the passes; auto is bfloat16 on CUDA; weights are float32")  # fmt: skip
    parser.add_argument(
        "--time-budget-s",
        type=float,
        default=float("inf"),
        help="starts no run after so many seconds",
    )
    parser.add_argument("--plot", type=Path, help="draw to this PNG file")
    parser.add_argument(
        "--from-results",
        type=Path,
        nargs="+",
        help="run nothing: merge and draw these result files",
    )


def parse_rates(text: str, methods: list[str]) -> dict[str, list[float]]:
    """'full=1e-5,3e-5;lsp=1e-4' to rates by method; a method that is not named has its default
    ones, and one with other looks (`lsp@20`) those of the method.

    Raises:
        ValueError: an unknown method, or no number.
    """
    parts = [part.partition("=")[::2] for part in f"{RATES};{text}".split(";") if part]
    rates = {name.strip(): [float(rate) for rate in values.split(",")] for name, values in parts}
    known = [part.partition("=")[0] for part in RATES.split(";")]
    if unknown := [name for name in [*rates, *methods] if name.partition("@")[0] not in known]:
        raise ValueError(
            f"unknown method: expected some of {', '.join(known)}, received {unknown[0]}"
        )
    return {name: rates.get(name) or rates[name.partition("@")[0]] for name in methods}


def settings(args: Any, tasks: dict[str, Task], half: bool) -> str:
    """Describe what the table's figures depend on, as one paragraph."""
    left = [
        f"{t.name} {len(t.train.problems)} + {len(t.valid.problems)}"
        for t in tasks.values()
        if t.train.problems
    ]
    passes = "bfloat16" if half else "float32"
    text = f"{args.model}, float32 weights, {passes} passes, batches of {args.batch_size} rows of at most "
    text += f"{MAX_TOKENS} tokens, constant rates. LSP: s = {args.subspace}, d = {args.nonzeros}, a look every "
    text += f"{args.check_every} steps, threshold {args.threshold}; "
    text += "bias is the mean over all matrices, one value a look. "
    text += f"GaLore: rank {args.rank}, anew every {args.refresh} steps, alpha 0.25 (galore-4: 4), embedding and norms "
    text += f"by AdamW. LoRA: rank {args.rank} on the blocks' linear layers. Seconds a step are without evaluations, "
    text += "with looks and decompositions; LSP is the reference in memory, not the engine."
    if args.best_rates:
        text += " If a rate has one seed, another was better with it."
    return text + (
        f" Rows left out as too long (training + validation): {', '.join(left)}." if left else ""
    )


def main() -> None:
    args = parse_args(__doc__, arguments)
    if args.from_results:
        _from_results(args)
        return
    rates = parse_rates(args.rates, args.methods.split(","))
    here = load(args)
    tasks, before, runs = here["tasks"], here["before"], list[dict[str, Any]]()
    order = [(method, rate) for method in rates for rate in rates[method]]
    extra: dict[str, Any] = {
        "columns": COLUMNS,
        "title": "Loss of full, projected and low-rank fine-tuning",
    }
    with Runner(args, here) as runner:
        for seeds in ([0], range(1, args.seeds)) if args.best_rates else (range(args.seeds),):
            rows = rows_of(runs)
            chosen = {
                (row["task"], row["method"], row["learning_rate"])
                for row in rows
                if row["best_rate"]
            }
            jobs = [Job(name, method, rate, seed) for name in tasks for seed in seeds for method in rates
                    for rate in rates[method]
                    if seed == 0 or not args.best_rates or (name, method, rate) in chosen]  # fmt: skip
            for run in runner.run(jobs):
                runs.append(run)
                runs.sort(
                    key=lambda run: (
                        run["seed"],
                        order.index((run["method"], run["learning_rate"])),
                    )
                )
                said = {
                    key: run[key]
                    for key in ("task", "method", "learning_rate", "seed", "step_s", "losses")
                }
                print(f"{time.perf_counter() - runner.started:.0f} s: {said}", flush=True)
                extra["notes"] = [settings(args, tasks, here["half"]), *ranking(rows_of(runs))]
                if args.out:
                    write_result(NAME, rows_of([*before.values(), *runs]), args.out, **extra)
        if runner.missing:
            missing = f"Not run for lack of time: {'; '.join(map(str, runner.missing))}."
            extra["notes"] = [*extra.get("notes", []), missing]
    rows = rows_of([*before.values(), *runs])
    finish(NAME, rows, args, **extra)
    if args.plot:
        plot({"rows": rows}, args.plot)


def _from_results(args: Any) -> None:
    """Merge result files, write them to --out or for --record, and draw them to --plot."""
    document = merged(args.from_results)
    if args.out:
        write(document, args.out)
    if args.record:
        write(document)
    if args.plot:
        plot(document, args.plot)


if __name__ == "__main__":
    main()
