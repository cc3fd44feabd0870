"""A block program that trains and answers, next to a packed program that only answers, both with an
adapter as an input: CPU seconds a token of prefill and decode, and memory.

The block program reads its matrices where the training's weights file is mapped; the packed program
has weights of its own, which XNNPACK packs when it is loaded. Each is a process of its own with the
same number of threads; they are asked in turns, every other round in reverse. Own memory is what a
process has beyond the one that has only imported its libraries, without the pages of mapped files.
Next to other work only CPU seconds and their ratio within a round mean something.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import finish, median, parse_args
from benchmarks.serve.answers import MIB, MODEL, anonymous

NEEDS = ("torch", "executorch")
CONTEXT = 512
RANK = 8
BLOCKS, PACKED = "blocks", "packed"
COLUMNS = [
    {"key": "program", "title": "Program"},
    {"key": "weights", "title": "Weights"},
    {"key": "prefill_s", "title": "Prefill (CPU ms a token)", "scale": 1e3, "digits": 2},
    {"key": "decode_s", "title": "Decode (CPU ms a token)", "scale": 1e3, "digits": 2},
    {"key": "memory_mib", "title": "Own memory (MiB)", "digits": 0},
    {"key": "size_mib", "title": "Files (MiB)", "digits": 0},
]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--quantize", default="8da4w", choices=("none", "q4", "8da4w"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--answer", type=int, default=32, help="tokens")
    parser.add_argument(
        "--programs", type=Path, help="keep the programs here, and take those that are there"
    )


def make(folder: Path, model: str, quantize: str) -> None:
    """Export both programs, unless they are there."""
    if not (folder / BLOCKS / "manifest.json").is_file():
        from ondevice.artifact.manifest import write_manifest
        from ondevice.core.config import ExportConfig, ModelConfig
        from ondevice.core.registry import method_config, target
        from ondevice.exporters.android_cpu.target import AndroidCpu
        from ondevice.exporters.base import ExportJob
        from ondevice.methods.mesp.program import EXECUTORCH
        from ondevice.models import load_model

        method = method_config("mesp", {"rank": RANK})
        fields = {"lengths_tokens": [128], "quantize": quantize, "context_tokens": CONTEXT}
        export = ExportConfig.parse(fields, "benchmark")
        loaded = load_model(model)
        built = EXECUTORCH.build(loaded, method, export, 0)
        job = ExportJob(ModelConfig(source=model), method, export, 0)
        exporter = AndroidCpu(target("android-cpu"))
        place = folder / BLOCKS
        place.mkdir(parents=True, exist_ok=True)
        built, lowered = exporter.lower(job, built, place)
        write_manifest(exporter.write(job, loaded, built, lowered, place), place)
    if not (folder / PACKED / "answers.json").is_file():
        from ondevice.exporters.executorch.answers import FORMS, write_answers
        from ondevice.models import load_model

        loaded = load_model(model, dtype="float32", device="cpu")
        linears = [
            loaded.family.linear_name(layer, name)
            for layer in range(loaded.dims.layers)
            for name in loaded.family.targets(layer)
        ]
        write_answers(folder / PACKED, loaded, FORMS[quantize], CONTEXT, linears, RANK)


def child(words: list[str]) -> None:
    """A program's process: a question a line, an answer a line."""
    kind, path, threads = words
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch

    torch.set_num_threads(int(threads))
    from ondevice.exporters.executorch.packed import PackedModel, load_operators

    load_operators()
    import executorch.extension.pybindings.portable_lib as portable_lib

    portable_lib._unsafe_reset_threadpool(int(threads))
    from ondevice.artifact.manifest import read_manifest
    from ondevice.exporters.executorch.blocks import BlocksSession
    from ondevice.exporters.executorch.blocks_model import BlocksModel

    empty = anonymous()
    place = Path(path)
    model: Any
    if kind == PACKED:
        model = PackedModel(place)
    else:
        model = BlocksModel(BlocksSession(place, read_manifest(place, check_files=False)))
    for line in sys.stdin:
        question = json.loads(line)
        model.rewind(0)
        begin = time.process_time()
        logits = model.feed(question["prompt"])
        middle = time.process_time()
        for _ in range(question["answer"]):
            logits = model.feed([int(logits.argmax())])
        end = time.process_time()
        said = {
            "prefill_s": (middle - begin) / len(question["prompt"]),
            "decode_s": (end - middle) / question["answer"],
            "memory_mib": anonymous() - empty,
        }
        answers.write(json.dumps(said) + "\n")
        answers.flush()


def measure(folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Ask both programs in turns; a row each."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    started = {
        kind: subprocess.Popen(
            [sys.executable, "-m", "benchmarks.serve.blocks", "--child", kind, str(folder / kind), str(args.threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
        )
        for kind in (BLOCKS, PACKED)
    }  # fmt: skip
    question = {"prompt": [40 + 37 * place for place in range(args.prompt)], "answer": args.answer}
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in started}
    try:
        for turn in range(-1, args.repeats):
            for kind in reversed(started) if turn % 2 else started:
                process = started[kind]
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write(json.dumps(question) + "\n")
                process.stdin.flush()
                said = json.loads(process.stdout.readline())
                if turn >= 0:  # the first round warms up
                    found[kind].append(said)
                print(turn, kind, said, flush=True)
    finally:
        for process in started.values():
            process.kill()
            process.wait()
    return [_row(kind, found[kind], folder / kind, args) for kind in started]


def _row(
    kind: str, answers: list[dict[str, Any]], place: Path, args: argparse.Namespace
) -> dict[str, Any]:
    files = [path for path in place.iterdir() if path.suffix in (".pte", ".safetensors")]
    return {
        "program": kind,
        "weights": args.quantize,
        **{key: [answer[key] for answer in answers] for key in ("prefill_s", "decode_s")},
        "memory_mib": max(answer["memory_mib"] for answer in answers),
        "size_mib": sum(path.stat().st_size for path in files) / MIB,
    }


def ratio(rows: list[dict[str, Any]], key: str) -> float:
    """Return the median over rounds of the block program's time by the packed one's."""
    blocks, packed = (row[key] for row in rows)
    return median([one / other for one, other in zip(blocks, packed, strict=True)])


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
        return
    args = parse_args(__doc__, arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.programs or Path(scratch)
        make(folder, args.model, args.quantize)
        before = os.getloadavg()[0]
        rows = measure(folder, args)
    title = f"A program that trains and answers, next to one that only answers: {args.model}, "
    title += f"{args.prompt} tokens of prompt and {args.answer} of answer, {args.threads} thread(s)"
    times = f"Block program by packed, median of rounds: {ratio(rows, 'prefill_s'):.2f} (prefill), "
    times += f"{ratio(rows, 'decode_s'):.2f} (decode). "
    times += f"Load average {before:.1f} before and {os.getloadavg()[0]:.1f} after."
    finish("serve/blocks", rows, args, COLUMNS, title=title, notes=[times])


if __name__ == "__main__":
    main()
