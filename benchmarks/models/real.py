"""Real weights against transformers: the loss of rows of text, MeSP's curve next to LoRA's, memory
next to the plan.

    python -m benchmarks.models.real --record                       Gemma 3 270M, 100 rows, 20 steps
    python -m benchmarks.models.real --device cuda --steps 200 --record
    python -m benchmarks.models.real --parts curve --tokens 8 --steps 200 --batch 1 --record    the curve alone

The loss is the session's own (in tiles of the vocabulary) next to the logits of transformers'
forward pass, row by row. For the curve both methods begin with the same adapter, take the same rows
and update with AdamW. Memory on a CPU is `benchmarks.planning.accuracy`'s: resident memory of a
process of its own; on a GPU it is what PyTorch allocates.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import command_of, finish, parse_args
from benchmarks.models.sst2 import ADAPTER, GEMMA

NEEDS = ("cuda",)
COLUMNS = [
    {"key": "what", "title": "What"},
    {"key": "rows", "title": "Rows"},
    {"key": "tokens", "title": "Tokens, at most"},
    {"key": "steps", "title": "Steps"},
    {"key": "ours", "title": "Here", "digits": 5},
    {"key": "theirs", "title": "Against", "digits": 5},
    {"key": "difference", "title": "Largest difference", "digits": 7},
    {"key": "median", "title": "Median difference", "digits": 7},
    {"key": "ratio", "title": "Planned / measured", "digits": 2},
]
SETTINGS = {key.removeprefix("method."): value for key, value in ADAPTER.items()}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=GEMMA)
    parser.add_argument("--text", type=Path, default=Path("../shared/data/wikitext2/valid.txt"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--parts", default="loss,curve,memory")
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--batch", type=int, default=2, help="rows of a step of the curve, and of the memory"
    )


def main() -> None:
    """Each part in turn."""
    args = parse_args(__doc__, arguments, repeats=1)
    parts, results = args.parts.split(","), []
    if "memory" in parts:  # first: on a CPU it is a process of its own, and wants the machine
        results.append(memory(args))
        print(results[-1], flush=True)
    if "loss" in parts:
        results.append(loss(args, rows_of(args)))
        print(results[-1], flush=True)
    if results:
        end("models/real", results, args, "Gemma 3 270M against transformers, and its plan")
    if "curve" in parts:
        end(
            "models/curve",
            [curve(args, rows_of(args))],
            args,
            "Gemma 3 270M: MeSP's steps and LoRA's",
        )


def end(name: str, results: list[dict[str, Any]], args: Any, title: str) -> None:
    """Print and record rows, under the columns that they have."""
    notes = [f"{args.model}, float32, on {args.device}. Text: wikitext-2's validation paragraphs."]
    finish(
        name, results, args, COLUMNS, title=title, notes=notes, command=command_of("models/real")
    )


def rows_of(args: Any) -> list[list[int]]:
    """Token ids of the first paragraphs that are not headings, each cut to `--tokens`."""
    from ondevice.models.load import load_tokenizer

    tokenizer = load_tokenizer(args.model)
    paragraphs = [line.strip() for line in args.text.read_text(encoding="utf-8").splitlines()]
    chosen = [line for line in paragraphs if len(line) > 60 and not line.startswith("=")][
        : args.rows
    ]
    return [tokenizer(line)["input_ids"][: args.tokens] for line in chosen]


def padded(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Ids and labels of a batch, int64 [rows, longest]."""
    longest = max(map(len, rows))
    ids = np.array([row + [0] * (longest - len(row)) for row in rows])
    return ids, np.array([row + [-100] * (longest - len(row)) for row in rows])


def loss(args: Any, texts: list[list[int]]) -> dict[str, Any]:
    """Mean loss a token here and in transformers."""
    import torch

    from ondevice.core.registry import method_config, open_session
    from ondevice.models import load_model

    loaded = load_model(args.model, device=args.device)
    ours, theirs, counts = [], [], []
    with torch.no_grad():
        for row in texts:
            ids = torch.tensor([row], device=args.device)
            logits = loaded.model(ids, use_cache=False).logits[0, :-1].float()
            theirs.append(
                float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
            )
            counts.append(len(row) - 1)
    session = open_session(
        loaded, method_config("mesp", SETTINGS), 0
    )  # B is zero: the model as it is
    for row in texts:
        ours.append(float(session.evaluate(*padded([row]))[0][0]))
    worst = max(abs(a - b) / count for a, b, count in zip(ours, theirs, counts))
    session.close()
    return {"what": "loss a token: here, transformers", "rows": len(texts), "tokens": args.tokens,
            "ours": sum(ours) / sum(counts), "theirs": sum(theirs) / sum(counts), "difference": worst}  # fmt: skip


def curve(args: Any, texts: list[list[int]]) -> dict[str, Any]:
    """Losses of the same steps by MeSP's backward pass and by autograd."""
    from ondevice.core.registry import method_config, open_session
    from ondevice.models import load_model

    losses, adapter = {}, None
    for name in ("mesp", "lora"):
        session = open_session(
            load_model(args.model, device=args.device), method_config(name, SETTINGS), 0
        )
        if adapter is None:
            adapter = session.adapter()
        else:
            session.load_adapter(adapter)
        losses[name] = []
        for step in range(args.steps):
            chosen = [texts[(step * args.batch + i) % len(texts)] for i in range(args.batch)]
            losses[name].append(session.step(*padded(chosen), step, 3e-4).loss)
            if step % 20 == 19:
                print(
                    f"{name}: {step + 1} steps, loss {losses[name][-1]:.5f}",
                    file=sys.stderr,
                    flush=True,
                )
        session.close()
        del session
        gc.collect()
    differences = [abs(a - b) for a, b in zip(losses["mesp"], losses["lora"])]
    return {"what": "loss after the last step: MeSP, LoRA", "rows": args.batch, "tokens": args.tokens,
            "steps": args.steps, "ours": losses["mesp"][-1], "theirs": losses["lora"][-1],
            "difference": max(differences), "median": statistics.median(differences),
            "mesp_curve": losses["mesp"], "lora_curve": losses["lora"]}  # fmt: skip


def memory(args: Any) -> dict[str, Any]:
    """Bytes of a run of MeSP: planned and measured (MB)."""
    row = {
        "what": "MeSP, memory of a run (MB): planned, measured",
        "rows": args.batch,
        "tokens": args.tokens,
    }
    if args.device == "cpu":
        from benchmarks.planning.accuracy import STEPS, measure

        found = measure(args.model, ("real", "mesp", SETTINGS, args.batch, args.tokens), 1)
        planned, measured = found["run_planned_bytes"], found["run_measured_bytes"][0]
        row["parts"] = found["parts"]
    else:
        planned, measured = on_gpu(args)
        STEPS = 3
    return row | {
        "steps": STEPS,
        "ours": planned / 1e6,
        "theirs": measured / 1e6,
        "ratio": planned / measured,
    }


def on_gpu(args: Any) -> tuple[int, int]:
    """Planned and allocated bytes on the GPU, weights among them."""
    import torch

    from ondevice.core.registry import method_config, open_session
    from ondevice.models import load_model
    from ondevice.planning.estimate import plan

    config = method_config("mesp", SETTINGS)
    planned = plan(
        args.model, config, batch_size=args.batch, length_tokens=args.tokens, device="this-cuda"
    )
    session = open_session(load_model(args.model, device=args.device), config, 0)
    ids = np.random.default_rng(0).integers(0, 256, (args.batch, args.tokens))
    torch.cuda.reset_peak_memory_stats()
    for step in range(3):
        session.step(ids, ids, step, 1e-6)
    measured = torch.cuda.max_memory_allocated()
    session.close()
    return planned.total_bytes - planned.parts.get("runtime", 0) - planned.parts.get(
        "tokenizer", 0
    ), measured


if __name__ == "__main__":
    main()
