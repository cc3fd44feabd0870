"""A P-RGE step on this CPU: sequential, inner-loop and outer-loop forms against each other and
against inference.

    python -m benchmarks.prge.step --programs build/programs --record
    python -m benchmarks.prge.step --lengths 64 --effective 2,8 --skip programs

Effective batch is 2qB: both signs of q queries over B rows. `sequential` runs 2q forwards of B
rows, `inner loop` q of 2B, `outer loop` 2 of qB, `both` one of 2qB. Inference is one forward of the
plain model with the same tiled loss: of the rows of one sign (`inference`), and of both signs
(`doubled`). Every token carries a label. Times are taken in turns in one process; memory is the
growth of anonymous memory in a process for each configuration, plus the weights, which PyTorch maps
from their file. Of a program it is the growth of resident memory from before it is opened; its
sequential form is a call of an `evaluate` program for each forward, without noise or update.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import add_arguments, finish, interleaved, median, parse_args
from benchmarks.prge.forms import Form, Forms, growths
from benchmarks.prge.programs import (
    Q4,
    Program,
    Spec,
    add_programs,
    folder_of,
    program_memory,
    wanted,
)

NEEDS = ("executorch",)

EFFECTIVE = {2: (1, 1), 4: (2, 1), 8: (2, 2), 16: (4, 2)}
"""Effective batch to q and B."""
FORMS = {
    "sequential": (False, False),
    "inner loop": (True, False),
    "outer loop": (False, True),
    "both": (True, True),
}
"""Name to batch_signs and batch_queries."""
PROGRAMS: dict[str, dict[str, Any]] = {"ExecuTorch fp32": {}, "ExecuTorch q4": Q4}
PROGRAM_SHAPES = ((64, 2), (64, 8), (128, 2))
"""Tokens and effective batch of the programs that are lowered."""
COLUMNS = [
    {"key": "runtime", "title": "Runtime"},
    {"key": "length", "title": "Tokens"},
    {"key": "effective", "title": "2qB"},
    {"key": "shape", "title": "q, B"},
    {"key": "form", "title": "Form"},
    {"key": "step_s", "title": "Step (s)", "digits": 3},
    {"key": "speedup", "title": "Against sequential", "digits": 2},
    {"key": "inference_s", "title": "Inference (s)", "digits": 3},
    {"key": "doubled_s", "title": "Doubled (s)", "digits": 3},
    {"key": "peak_bytes", "title": "Peak (MB)", "digits": 1, "scale": 1e-6},
    {"key": "inference_peak_bytes", "title": "Inference peak (MB)", "digits": 1, "scale": 1e-6},
    {"key": "doubled_peak_bytes", "title": "Doubled peak (MB)", "digits": 1, "scale": 1e-6},
    {"key": "ratio", "title": "Peak / (inference + second half)", "digits": 3},
]


def form_of(model: str, length: int, effective: int, name: str) -> Form:
    """The step `name` of this effective batch."""
    queries, batch = EFFECTIVE[effective]
    inner, outer = FORMS[name]
    return Form(
        length,
        batch,
        {"queries": queries, "batch_signs": inner, "batch_queries": outer},
        model=model,
    )


def names_of(effective: int) -> list[str]:
    """With one query the outer loop has nothing to do, so its forms are left out."""
    return list(FORMS) if EFFECTIVE[effective][0] > 1 else ["sequential", "both"]


def inference_of(form: Form, doubled: bool) -> Form:
    """The plain forward of the rows of one sign in one pass of `form`, or of both signs."""
    rows = form.rows * (form.values["queries"] if form.values["batch_queries"] else 1)
    return Form(form.length, rows * (2 if doubled else 1), inference=True, model=form.model)


def plain_of(steps: Iterable[Form]) -> list[Form]:
    """The inference that the steps are held against."""
    return [inference_of(form, doubled) for form in steps for doubled in (False, True)]


def torch_rows(
    steps: dict[str, Form],
    effective: int,
    seconds: dict[Form, list[float]],
    growth: dict[Form, int],
    weights: int,
) -> list[dict[str, Any]]:
    """The forms of one shape in PyTorch; `weights` in bytes."""
    rows = []
    for name, form in steps.items():
        plain, doubled = inference_of(form, False), inference_of(form, True)
        second_half = growth[doubled] - growth[plain] if form.values["batch_signs"] else 0
        row = {
            "runtime": "PyTorch",
            "length": form.length,
            "effective": effective,
            "shape": f"{form.values['queries']}, {form.rows}",
            "form": name,
            "step_s": seconds[form],
            "speedup": median(seconds[steps["sequential"]]) / median(seconds[form]),
            "inference_s": seconds[plain],
            "doubled_s": seconds[doubled],
            "peak_bytes": weights + growth[form],
            "inference_peak_bytes": weights + growth[plain],
            "doubled_peak_bytes": weights + growth[doubled],
            "growth_bytes": growth[form],
            "ratio": (weights + growth[form]) / (weights + growth[plain] + second_half),
            "growth_ratio": growth[form] / (growth[plain] + second_half),
            "bound_ratio": (weights + growth[form])
            / (1.05 * (weights + growth[plain]) + second_half),
        }
        rows.append(row)
    return rows


class Programs:
    """The steps that are lowered, and the plain forwards that they are held against."""

    def __init__(
        self, args: argparse.Namespace, shapes: list[tuple[int, int]], folder: Path
    ) -> None:
        self.steps: dict[tuple[str, int, int], Spec] = {}
        self.plain: dict[tuple[str, int], Spec] = {}
        for runtime, values in PROGRAMS.items():
            base = replace(Spec(), **values, model=args.model)
            for length, effective in shapes:
                queries, batch = EFFECTIVE[effective]
                self.steps[runtime, length, effective] = replace(
                    base, length=length, queries=queries, batch=batch
                )
            for rows in (1, 2) if any(length == 64 for length, _ in shapes) else ():
                self.plain[runtime, rows] = replace(
                    base, generator="op", method="evaluate", batch=rows
                )
        self.steps = {key: spec for key, spec in self.steps.items() if wanted(spec, folder, args)}
        self.plain = {key: spec for key, spec in self.plain.items() if wanted(spec, folder, args)}
        specs = [*self.steps.values(), *self.plain.values()]
        self.memory = {spec: program_memory(spec, folder)["growth_rss_bytes"] for spec in specs}
        self.callables = {spec: Program(spec, folder).call for spec in specs}

    def rows(self, repeats: int) -> list[dict[str, Any]]:
        """Time everything in turns; the sequential form is a plain forward for each copy."""
        seconds: Any = interleaved(self.callables, repeats, warmup=2)  # type: ignore[arg-type]
        measured = []
        for (runtime, length, effective), spec in self.steps.items():
            shape = f"{spec.queries}, {spec.batch}"
            row: dict[str, Any] = {
                "runtime": runtime,
                "length": length,
                "effective": effective,
                "shape": shape,
            }
            one = self.plain.get((runtime, spec.batch)) if length == 64 else None
            two = self.plain.get((runtime, 2)) if length == 64 and effective == 2 else None
            step = row | {"form": "both", "step_s": seconds[spec], "peak_bytes": self.memory[spec]}
            if one:
                sequential = [2 * spec.queries * value for value in seconds[one]]
                step["speedup"] = median(sequential) / median(seconds[spec])
                measured.append(row | {"form": "sequential", "step_s": sequential, "speedup": 1.0})
                measured[-1]["peak_bytes"] = self.memory[one]
            if one and two:
                step |= {"inference_s": seconds[one], "inference_peak_bytes": self.memory[one]}
                step |= {"doubled_s": seconds[two], "doubled_peak_bytes": self.memory[two]}
                step["ratio"] = self.memory[spec] / self.memory[two]
                bound = 1.05 * self.memory[one] + self.memory[two] - self.memory[one]
                step["bound_ratio"] = self.memory[spec] / bound
            measured.append(step)
        return measured


def notes_of(rows: list[dict[str, Any]]) -> list[str]:
    """The goal of memory with its measurement, and what batching brings."""
    notes = []
    for runtime in dict.fromkeys(row["runtime"] for row in rows):
        both = [row for row in rows if row["runtime"] == runtime and row["form"] == "both"]
        held = [row["bound_ratio"] for row in both if "bound_ratio" in row]
        gains = [row["speedup"] for row in both if "speedup" in row]
        if held:
            goal = f"{runtime}: goal, the peak of `both` is at most 1.05 × inference plus the second half's activations"
            words = f"{min(held):.3f} to {max(held):.3f} of it, {'met' if max(held) <= 1 else 'not met'}"
            notes.append(f"{goal}: {words}.")
        if own := [row["growth_ratio"] for row in both if "growth_ratio" in row]:
            notes[-1] += (
                f" Without weights: {min(own):.2f} to {max(own):.2f} of the doubled forward's own memory."
            )
        if gains:
            notes.append(
                f"{runtime}: `both` is {min(gains):.2f} to {max(gains):.2f} times as fast as sequential forwards."
            )
    return notes


def arguments(parser: argparse.ArgumentParser) -> None:
    add_programs(parser)
    parser.add_argument("--lengths", default="64,128")
    parser.add_argument("--effective", default="2,4,8,16")
    parser.add_argument("--skip", default="", help="parts to leave out: programs, forms")
    add_arguments(parser, "--note")


def main() -> None:
    args = parse_args(__doc__, arguments)
    skip = args.skip.split(",")
    lengths, batches = (
        [int(value) for value in words.split(",")] for words in (args.lengths, args.effective)
    )
    cases = [
        (length, effective, name)
        for length in lengths
        for effective in batches
        for name in names_of(effective)
    ]
    steps = {case: form_of(args.model, *case) for case in cases if "forms" not in skip}
    unique = list(dict.fromkeys([*steps.values(), *plain_of(steps.values())]))
    with folder_of(args) as folder:
        growth = growths(unique, folder)
        shapes = [shape for shape in PROGRAM_SHAPES if shape[0] in lengths and shape[1] in batches]
        programs = None if "programs" in skip else Programs(args, shapes, folder)
        forms = Forms(args.model)
        load = os.getloadavg()[0]
        rows: list[dict[str, Any]] = []
        for shape in sorted({case[:2] for case in steps}):
            mine = {case[2]: form for case, form in steps.items() if case[:2] == shape}
            seconds = forms.seconds([*mine.values(), *plain_of(mine.values())], args.repeats)
            rows += torch_rows(mine, shape[1], seconds, growth, forms.weight_bytes)
            print(
                *(f"{row['form']} {median(row['step_s']):.3f} s" for row in rows[-len(mine) :]),
                file=sys.stderr,
            )
        rows += programs.rows(args.repeats) if programs else []
    for row in rows:
        row["load_before"] = load
    title = f"A P-RGE step of {args.model.split(':')[-1]} (LoRA-FA r = 16 on q and v)"
    command = (
        f"python -m benchmarks.prge.step --lengths {args.lengths} --effective {args.effective}"
    )
    command += f" --skip {args.skip}" * bool(args.skip) + f" --repeats {args.repeats}"
    shown = {"show_versions": ["torch", "executorch"], "command": command}
    finish(
        "prge/step", rows, args, COLUMNS, title=title, notes=[*notes_of(rows), *args.note], **shown
    )


if __name__ == "__main__":
    main()
