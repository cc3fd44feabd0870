"""A fleet's accuracy on SST-2: 8 devices, rows split evenly and by label, against central training
and FedAvg.

Every fleet is run over its protocol: tasks, answers and outcomes as bytes, the adapter in whole
numbers (`prge`, all of B behind a random A of rank 16 on q and v, loss over the answers, sign
noise, q = 4). Settings, by name:

    central        one device with the rows of all: the same steps, the same rows a step
    iid            8 devices, rows dealt out evenly
    dirichlet      8 devices, split by label with a Dirichlet distribution of 0.1; every device counts alike
    dirichlet-rows        the same; a device counts by the rows that it has, and its step reads rows in proportion
    dirichlet-rows-1step  the same with one local step a round, in as many more rounds
    iid-1step             iid with one local step a round
    fedavg-iid     8 devices, FedAvg over LoRA (A and B), as many forward passes a device as the fleets above
    fedavg-dirichlet
    fedavg-bytes   FedAvg over LoRA of rank 1, as many whole rounds as the fleets' bytes pay for, one at least; all the
                   steps of equal forwards
    mixed          FedAvg over LoRA-FA (only B): 4 strong devices by gradient steps, 4 weak ones send numbers; rounds
                   as fedavg-iid
    strong         the same without the weak devices, nor their rows
    hostile        iid, 2 of 8 devices send their numbers negated and ten times as large; trimmed mean of 0.25
    hostile-mean   the same against a plain mean
    trimmed        iid, nobody lies, trimmed mean of 0.25
    trimmed-10, hostile-10, median-10, hostile-median-10   10 devices, nobody or 2 of them lie, trimmed mean of 0.2 or
                   median
    private-M      iid, vectors of numbers clipped to --clip, Gaussian noise of M times that on each number

The rate of all zeroth-order fleets is the one of --rates that central training likes best, the rate
of FedAvg the one of --fo-rates that fedavg-iid does: mean accuracy of --pilot-seeds seeds on the
last --choose-rows training rows. Accuracy is reported on the validation rows, of the last round.
Runs that --log already has are not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.committed import concise, write
from benchmarks.common import add_arguments, finish, parse_args
from benchmarks.fleet.devices import FirstOrder, Mixed, Setting, ZerothOrder
from benchmarks.prge.race import MAX_TOKENS, read_log, read_sets

NEEDS = ("cuda",)
DEVICES = 8
DEFAULT = (
    "central,iid,iid-1step,dirichlet,dirichlet-rows,dirichlet-rows-1step,fedavg-iid,fedavg-dirichlet,fedavg-bytes,"
    "mixed,strong,trimmed,hostile,hostile-mean,trimmed-10,hostile-10,median-10,hostile-median-10,private-20,private-4,"
    "private-1,private-0.3,private-0.2,private-0.1,private-0.05,private-0"
)
KEY = ("setting", "rate", "seed", "rounds", "local_steps", "rows", "queries", "clip")
COLUMNS = [
    {"key": "setting", "title": "Setting"},
    {"key": "rate", "title": "Rate"},
    {"key": "seeds", "title": "Seeds"},
    {"key": "rounds", "title": "Rounds"},
    {"key": "local_steps", "title": "Local steps"},
    {"key": "rows", "title": "Rows a step"},
    {"key": "row_forwards", "title": "Row forwards a device"},
    {"key": "bytes", "title": "Bytes a device, all rounds"},
    {"key": "epsilon", "title": "Epsilon at delta 1e-5", "digits": 1},
    {"key": "before", "title": "Accuracy before", "digits": 3},
    {"key": "mean", "title": "Accuracy, mean", "digits": 3},
    {"key": "deviation", "title": "Deviation", "digits": 3},
    {"key": "accuracy", "title": "Accuracy, by seed", "digits": 3},
    {"key": "against_central", "title": "Against central, points", "digits": 1},
    {"key": "loss", "title": "Loss", "digits": 3},
    {"key": "seconds", "title": "Seconds a run", "digits": 1},
]


def arguments(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, "--model", "--data", "--eval-rows", "--choose-rows", "--log")
    parser.add_argument("--settings", default=DEFAULT, help="separated by commas; see above")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--pilot-seeds", type=int, default=2, help="seeds of which rates are chosen"
    )
    parser.add_argument("--rates", default="4e-3,8e-3,1.6e-2")
    parser.add_argument("--fo-rates", default="4e-2,1.2e-1")
    parser.add_argument("--rounds", type=int, default=250)
    parser.add_argument("--local-steps", type=int, default=8)
    parser.add_argument(
        "--rows",
        type=int,
        default=1,
        help="of a zeroth-order device's step; central takes 8 times that",
    )
    parser.add_argument("--fo-rows", type=int, default=8, help="of a first-order device's step")
    parser.add_argument("--queries", type=int, default=4)
    parser.add_argument(
        "--clip", type=float, default=4.0, help="of a private device's vector of numbers"
    )
    parser.add_argument("--eval-every", type=int, default=25, help="rounds of --local-steps")
    parser.add_argument("--together", type=int, default=20, help="zeroth-order fleets in one pass")
    parser.add_argument("--fo-together", type=int, default=5, help="first-order fleets in one pass")
    parser.add_argument(
        "--budget-s",
        type=float,
        default=float("inf"),
        help="end after so many seconds, with what is done",
    )
    parser.add_argument("--from-result", type=Path, help="run nothing: write the rows of --log into this result file's "
                        "frame, to benchmarks/results")  # fmt: skip


def setting(name: str, args: argparse.Namespace, weak_rate: float = 0.0) -> Setting:
    """Return the setting of a name; `weak_rate` is the zeroth-order fleets', for the weak devices
    of a mixed one."""
    steps, q = args.local_steps, args.queries
    fleet = Setting(name, DEVICES, args.rows, args.rounds, steps, q)
    first_order = max(1, round(fleet.row_forwards / (3 * args.fo_rows)))  # steps of equal forwards
    dirichlet = 0.1 if name.endswith("dirichlet") else None
    if name == "central":
        return Setting(name, 1, DEVICES * args.rows, args.rounds, steps, q)
    if name in ("iid", "dirichlet"):
        return Setting(name, DEVICES, args.rows, args.rounds, steps, q, dirichlet)
    if name in ("dirichlet-rows", "dirichlet-rows-1step", "iid-1step"):
        rounds, each = (args.rounds * steps, 1) if name.endswith("-1step") else (args.rounds, steps)
        by_rows = name.startswith("dirichlet")
        return Setting(
            name, DEVICES, args.rows, rounds, each, q, 0.1 if by_rows else None, share_rows=by_rows
        )
    if name in ("fedavg-iid", "fedavg-dirichlet"):
        rounds = max(1, round(first_order / steps))
        return Setting(name, DEVICES, args.fo_rows, rounds, steps, q, dirichlet, first_order=True)
    if name in ("mixed", "strong"):
        rate = weak_rate if name == "mixed" else 0.0
        rounds = max(1, round(first_order / steps))
        return Setting(
            name,
            DEVICES,
            args.fo_rows,
            rounds,
            steps,
            q,
            first_order=True,
            weak=DEVICES // 2,
            weak_rate=rate,
        )
    if name == "fedavg-bytes":
        return Setting(name, DEVICES, args.fo_rows, 1, first_order, q, rank=1, first_order=True)
    robust = (("combine", "trimmed_mean"), ("trim", 0.25))
    if name in ("hostile", "hostile-mean", "trimmed"):
        rule = () if name == "hostile-mean" else robust
        lying = 0 if name == "trimmed" else 2
        return Setting(
            name, DEVICES, args.rows, args.rounds, steps, q, hostile=lying, agreement=rule
        )
    if name in ("trimmed-10", "hostile-10", "median-10", "hostile-median-10"):
        rule = (
            (("combine", "median"),)
            if "median" in name
            else (("combine", "trimmed_mean"), ("trim", 0.2))
        )
        lying = 2 if name.startswith("hostile") else 0
        return Setting(name, 10, args.rows, args.rounds, steps, q, hostile=lying, agreement=rule)
    if name.startswith("private-"):
        noise = (
            ("clip_norm", args.clip),
            ("noise_multiplier", float(name.removeprefix("private-"))),
        )
        return Setting(name, DEVICES, args.rows, args.rounds, steps, q, agreement=noise)
    raise SystemExit(f"--settings: {name!r} is no setting; there are {DEFAULT}, and private-M")


class Bench:
    """The runs that are done, and how to do more."""

    def __init__(self, args: argparse.Namespace) -> None:
        from benchmarks.prge.racing_model import AnswerRows, RacingModel
        from ondevice import load_model

        self.args, self.started = args, time.perf_counter()
        self.records = read_log(args.log)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        loaded = load_model(args.model, dtype="float32", device=device)
        self.model = RacingModel(loaded)
        self.train, *others = read_sets(args, "sst2", loaded.tokenizer)
        self.choose, self.judge = (AnswerRows(rows, self.model.device) for rows in others)

    def done(self, member: tuple[Setting, float, int]) -> bool:
        key = self._key(*member)
        return any(all(record.get(name) == key[name] for name in KEY) for record in self.records)

    def _key(self, chosen: Setting, rate: float, seed: int) -> dict[str, Any]:
        clip = dict(chosen.agreement).get("clip_norm")
        return {
            "setting": chosen.name, "rate": rate, "seed": seed, "rounds": chosen.rounds, "rows": chosen.rows,
            "local_steps": chosen.local_steps, "queries": chosen.queries, "clip": clip,
        }  # fmt: skip

    def run(self, members: list[tuple[Setting, float, int]]) -> None:
        """Run what is missing, in passes of one shape."""
        groups: dict[Any, list[tuple[Setting, float, int]]] = {}
        for member in members:
            if not self.done(member):
                groups.setdefault(member[0].group(), []).append(member)
        for shape, group in groups.items():
            size = self.args.fo_together if shape[0] else self.args.together
            parts = -(-len(group) // size)
            for part in range(parts):
                self._pass(group[part * len(group) // parts : (part + 1) * len(group) // parts])

    def _pass(self, members: list[tuple[Setting, float, int]]) -> None:
        args, began = self.args, time.perf_counter()
        shape = members[0][0]
        kind = Mixed if shape.weak else FirstOrder if shape.first_order else ZerothOrder
        fleets = kind(self.model, self.train, members)
        curves: list[list[list[float]]] = [[] for _ in members]
        evaluating = self._evaluate(fleets, curves)
        every = max(1, args.eval_every * args.local_steps // shape.local_steps)
        while fleets.done < shape.rounds:
            if time.perf_counter() - self.started > args.budget_s:
                print(
                    f"left out for want of time: {', '.join(sorted({m[0].name for m in members}))}",
                    flush=True,
                )
                return
            fleets.round()
            if fleets.done % every == 0 or fleets.done == shape.rounds:
                evaluating += self._evaluate(fleets, curves)
        seconds = (time.perf_counter() - began - evaluating) / len(members)
        for place, (member, digest) in enumerate(zip(members, fleets.hashes(), strict=True)):
            record = self._key(*member) | {
                "row_forwards": fleets.row_forwards(place), "bytes": round(float(fleets.bytes[place])), "hash": digest,
                "noise_multiplier": dict(member[0].agreement).get("noise_multiplier"), "seconds": round(seconds, 2),
                "curve": curves[place],
            }  # fmt: skip
            self.records.append(record)
            if args.log:
                with args.log.open("a") as file:
                    file.write(json.dumps(record) + "\n")
            last = curves[place][-1]
            print(f"{member[0].name} @ {member[1]:g} seed {member[2]}: accuracy {last[3]:.3f} from "
                  f"{curves[place][0][3]:.3f}, where chosen {last[1]:.3f}, loss {last[4]:.3f}, "
                  f"{record['bytes']} bytes, {seconds:.1f} s a run", flush=True)  # fmt: skip
        print(f"# {len(members)} fleets in {time.perf_counter() - began:.0f} s; "
              f"{time.perf_counter() - self.started:.0f} s since the start", flush=True)  # fmt: skip

    def _evaluate(self, fleets: Any, curves: list[list[list[float]]]) -> float:
        """Add [round, accuracy and loss where rates are chosen, accuracy and loss where they are
        reported]."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()
        before = time.perf_counter()
        values = [*fleets.evaluate(self.choose), *fleets.evaluate(self.judge)]
        for place, curve in enumerate(curves):
            curve.append([fleets.done, *(round(float(value[place]), 4) for value in values)])
        return time.perf_counter() - before

    def best_rate(self, name: str, rates: list[float]) -> float:
        """Run the pilot and return the rate with the best accuracy, then the least loss, where
        rates are chosen."""
        chosen, seeds = setting(name, self.args), range(min(self.args.pilot_seeds, self.args.seeds))
        if len(rates) == 1:
            return rates[0]
        self.run([(chosen, rate, seed) for rate in rates for seed in seeds])

        def score(rate: float) -> tuple[float, float]:
            last = [self.last(self._key(chosen, rate, seed)) for seed in seeds]
            found = [point for point in last if point]
            if len(found) < len(seeds):
                return (-1.0, 0.0)
            return statistics.mean(point[1] for point in found), -statistics.mean(
                point[2] for point in found
            )

        best = max(rates, key=score)
        print(
            f"# {name}: rate {best:g} of {', '.join(f'{rate:g}: {score(rate)[0]:.3f}' for rate in rates)}",
            flush=True,
        )
        return best

    def last(self, key: dict[str, Any]) -> list[float] | None:
        """Return the last evaluation of a run."""
        found = [
            record for record in self.records if all(record.get(name) == key[name] for name in KEY)
        ]
        return found[0]["curve"][-1] if found else None


def summarize(records: list[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each setting and rate over its seeds; `against_central` is of the seeds that both
    have. A run that two logs have counts once."""
    grouped: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in {tuple(record[name] for name in KEY): record for record in records}.values():
        grouped.setdefault(tuple(record[name] for name in KEY if name != "seed"), []).append(record)
    most = max((len(runs) for runs in grouped.values()), default=0)
    central = {
        record["seed"]: record["curve"][-1][3]
        for runs in grouped.values() if runs[0]["setting"] == "central" and len(runs) == most
        for record in runs
    }  # fmt: skip
    rows = []
    for runs in grouped.values():
        runs.sort(key=lambda record: record["seed"])
        accuracy = [record["curve"][-1][3] for record in runs]
        both = [
            100 * (value - central[run["seed"]])
            for run, value in zip(runs, accuracy)
            if run["seed"] in central
        ]
        row = {name: runs[0][name] for name in (*KEY, "bytes") if name != "seed"}
        row["row_forwards"] = round(statistics.mean(run["row_forwards"] for run in runs))
        rows.append(row | {
            "seeds": len(runs), "accuracy": accuracy, "mean": statistics.mean(accuracy),
            "before": statistics.mean(run["curve"][0][3] for run in runs),
            "deviation": statistics.stdev(accuracy) if len(runs) > 1 else None,
            "against_central": statistics.mean(both) if both else None,
            "loss": statistics.mean(run["curve"][-1][4] for run in runs),
            "seconds": statistics.mean(run["seconds"] for run in runs),
            "epsilon": epsilon_of(runs[0]),
        })  # fmt: skip
    return sorted(
        rows,
        key=lambda row: (
            names.index(row["setting"]) if row["setting"] in names else 99,
            row["rate"],
        ),
    )


EPSILONS = {
    (0.05, 125): 110112.0, (0.1, 125): 27611.8, (0.2, 125): 6986.78, (0.3, 125): 3167.33, (1.0, 125): 354.861,
    (4.0, 125): 40.9705, (20.0, 125): 5.37773, (1.0, 250): 654.861, (4.0, 250): 67.424, (20.0, 250): 8.0794,
    (50.0, 250): 2.8137,
}  # fmt: skip
"""What `ondevice.fleet.privacy.epsilon` says of (multiplier, answers), for machines without its
accountant; a test holds it against the accountant."""


def epsilon_of(record: dict[str, Any]) -> float | None:
    """Epsilon of a device's answers at delta 1e-5; None without noise."""
    from ondevice.core.errors import MissingPackageError
    from ondevice.fleet.privacy import epsilon

    if not record["noise_multiplier"]:
        return None
    try:
        return epsilon(record["noise_multiplier"], record["rounds"])
    except MissingPackageError:
        return EPSILONS.get((record["noise_multiplier"], record["rounds"]))


def main() -> None:
    args = parse_args(__doc__, arguments)
    if args.from_result:
        document = json.loads(args.from_result.read_text())
        rows = summarize(read_log(args.log), DEFAULT.split(","))
        document |= {"rows": rows, "columns": COLUMNS, "notes": [note_of(args)]}
        print(write(concise(document), args.out))
        return
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)  # flash attention is faster on short rows
    bench, names = Bench(args), [name for name in args.settings.split(",") if name]
    chosen = [setting(name, args) for name in names]
    rates = {False: bench.best_rate("central", [float(rate) for rate in args.rates.split(",")])}
    if any(each.first_order for each in chosen):
        rates[True] = bench.best_rate(
            "fedavg-iid", [float(rate) for rate in args.fo_rates.split(",")]
        )
    chosen = [setting(name, args, rates[False]) for name in names]
    for each in chosen:  # one by one, so that little is lost if the time ends
        bench.run([(each, rates[each.first_order], seed) for seed in range(args.seeds)])
    finish("fleet/sst2", summarize(bench.records, names), args, columns=COLUMNS, notes=[note_of(args)],
           title="SST-2, SmolLM2-135M-Instruct, 8 devices")  # fmt: skip


def note_of(args: argparse.Namespace) -> str:
    """Return what the table says of its runs."""
    return (
        f"Trained on all training rows but the last {args.choose_rows}, where rates were chosen; accuracies are of "
        f"the last round on {args.eval_rows} validation rows of at most {MAX_TOKENS} tokens. Forward passes in float32 "
        "with TF32 products on a GPU. A backward pass counts as two forward passes. Every device counts alike, "
        "however many rows it has, but in dirichlet-rows: there it counts by its rows, and reads them in proportion. "
        "Seconds are a fleet's share of a pass that several went through together, without "
        "evaluations."
    )


if __name__ == "__main__":
    main()
