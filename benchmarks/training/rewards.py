"""Does a model learn a format from rewards alone? SmolLM2-135M, a number between tags, by `grpo`.

    python -m benchmarks.training.rewards --device cuda --seeds 0 1 2 3 4 --processes 5 --record
    python -m benchmarks.training.rewards --rows gsm8k --answer-tokens 192 --device cuda
    OMP_NUM_THREADS=1 python -m benchmarks.training.rewards --steps 2 --prompts 2 --held-out 8

Prompts are sums in words, of which none is in both parts. The reward is that of
`examples/reward_tags.py`: 1 for `<n>42</n>` and nothing else, a fifth for each part of it. It does
not ask whether the number is right. The share is that of held-out prompts whose likeliest answer
has a reward of 1, before and after training. With `--rows gsm8k` the reward is 1 for the right
number after `####`, and a tenth for any number there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.common import add_arguments, finish, parse_args

NEEDS = ("cuda",)
REWARDS = {
    "sums": "examples.reward_tags:number_in_tags",
    "gsm8k": "benchmarks.training.rewards:right_number",
}
MARKED = re.compile(r"####\s*(-?[\d,]*\d)")
THINGS = ("apples", "coins", "birds", "letters", "stones", "books", "boats", "cups")
ASK = "{first} {thing} and {second} {thing}: how many? Write only the number in tags, such as <n>7</n>."
"""It shows the form: asked to write "between <n> and </n>", no answer of SmolLM2 ever had a digit behind
`<n>`, so that nothing was learned beyond `<n>`."""
TRAINED = 400
COLUMNS = [
    {"key": "rows", "title": "Prompts"},
    {"key": "method", "title": "Method"},
    {"key": "seed", "title": "Seed"},
    {"key": "steps", "title": "Steps"},
    {"key": "before", "title": "Whole reward before", "digits": 3},
    {"key": "share", "title": "after", "digits": 3},
    {"key": "reward_before", "title": "Reward before", "digits": 3},
    {"key": "reward", "title": "after", "digits": 3},
    {"key": "kl", "title": "KL", "digits": 3},
    {"key": "write_s", "title": "Writing a step's answers (s)", "digits": 3},
    {"key": "step_s", "title": "Step (s)", "digits": 3},
    {"key": "peak_bytes", "title": "Peak on the GPU (MB)", "scale": 1e-6, "digits": 0},
]


def arguments(parser: argparse.ArgumentParser) -> None:
    add_arguments(parser, "--model", "--data", "--processes")
    parser.add_argument("--rows", choices=sorted(REWARDS), default="sums")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--method", default="mesp")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=8, help="of a step")
    parser.add_argument("--answers", type=int, default=4, help="to each prompt")
    parser.add_argument("--answer-tokens", type=int, default=24)
    parser.add_argument("--held-out", type=int, default=100)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--beta", type=float, default=0.02)
    parser.add_argument("--every", type=int, default=25, help="steps between two evaluations")


def prompts() -> list[dict[str, Any]]:
    """Return all prompts in an order of their own, as conversations with the right answer."""
    made = []
    for first, second, thing in itertools.product(range(2, 21), range(2, 21), THINGS):
        ask = ASK.format(first=first, second=second, thing=thing)
        turns = [("user", ask), ("assistant", f"<n>{first + second}</n>")]
        made.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    random.Random(0).shuffle(made)
    return made


def right_number(prompt: str, answer: str, row: dict[str, Any]) -> float:
    """Return 1 for the number that the row's answer has after `####`, 0.1 for another one there."""
    found = MARKED.search(answer)
    if found is None:
        return 0.0
    right = MARKED.search(row["answers"][0])
    return 1.0 if right and right[1].replace(",", "") == found[1].replace(",", "") else 0.1


def parts(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows to train on and the held-out ones."""
    if args.rows == "sums":
        rows = prompts()
        return rows[:TRAINED], rows[TRAINED : TRAINED + args.held_out]
    made = []
    for name in ("train", "valid"):
        text = (args.data / f"gsm8k/{name}.jsonl").read_text(encoding="utf-8")
        made.append([conversation(json.loads(line)) for line in text.strip().split("\n")])
    return made[0], made[1][: args.held_out]


def conversation(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of GSM8K as a conversation that says which form the answer has."""
    ask = f"{row['prompt_fields']['question']}\nThink in steps. End with #### and the number."
    turns = [("user", ask), ("assistant", row["label"])]
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def timed_policy(*parts: Any) -> Any:
    """Return a policy that notes how long each writing of answers took."""
    from ondevice.training.policy import Policy

    class Timed(Policy):
        def __init__(self) -> None:
            super().__init__(*parts)
            self.write_s: list[float] = []

        def write(self, *args: Any) -> Any:
            began = time.perf_counter()
            written = super().write(*args)
            self.write_s.append(time.perf_counter() - began)
            return written

    return Timed()


def measure(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Train with one seed; return what came out."""
    import torch

    if args.device == "cuda":  # with several GPUs, seeds take them in turns
        torch.cuda.set_device(seed % torch.cuda.device_count())
    from ondevice import method_config, open_session
    from ondevice.core.config import TrainConfig
    from ondevice.data import Batches
    from ondevice.models import load_model
    from ondevice.training.policy import PromptBatches

    loaded = load_model(args.model, device=args.device)
    session: Any = open_session(loaded, method_config(args.method), seed)
    settings = TrainConfig(
        objective="grpo", reward=REWARDS[args.rows], seed=seed, beta=args.beta, batch_size=args.prompts,
        group_size=args.answers, answer_tokens=args.answer_tokens,
    )  # fmt: skip
    train, held_out = (encoded(rows, loaded.tokenizer) for rows in parts(args))
    policy = timed_policy(settings, train, held_out, 0)
    policy.begin(session, Path())
    batches = PromptBatches(policy, Batches(train, args.prompts, None, seed, 0))
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    row: dict[str, Any] = {
        "rows": args.rows,
        "method": args.method,
        "seed": seed,
        "steps": args.steps,
    }
    row["before"], row["reward_before"], wrote = share(policy, session)
    print(json.dumps({**row, "wrote": wrote}), flush=True)
    seconds: list[float] = []
    curve = []
    figures: dict[str, float] = {}
    policy.write_s.clear()
    for step in range(args.steps):
        began = time.perf_counter()
        _, figures = policy.step(session, batches.at(step), step, args.rate)
        seconds.append(time.perf_counter() - began)
        if (step + 1) % args.every == 0 and step + 1 < args.steps:
            taken = len(policy.write_s)
            found, reward, _ = share(policy, session)
            del policy.write_s[taken:]
            curve.append([step + 1, found, reward])
            line = {"step": step + 1, "share": found, "reward": reward, "s": sum(seconds)}
            print(json.dumps(line | figures), flush=True)
    row |= {"write_s": policy.write_s[: args.steps], "step_s": seconds, "kl": figures.get("kl")}
    row["share"], row["reward"], wrote = share(policy, session)
    print(json.dumps({"share": row["share"], "wrote": wrote}), flush=True)
    if args.device == "cuda":
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
    return row | {"curve": curve}


def share(policy: Any, session: Any) -> tuple[float, float, list[str]]:
    """Return the share of held-out prompts with the whole reward, the mean, and some answers."""
    found = policy.evaluate(session, None, lambda: False)
    rewards = [one.scores[0] for one in found.predictions]
    whole = sum(reward == 1.0 for reward in rewards) / len(rewards)
    return whole, found.metric_value, [one.text for one in found.predictions[:5]]


def encoded(rows: list[dict[str, Any]], tokenizer: Any) -> Any:
    """Return rows as token ids."""
    from ondevice.data import encode, read_rows

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return encode(read_rows(path), tokenizer, max_length_tokens=768)


def main() -> None:
    """Measure; print the table."""
    args = parse_args(__doc__, arguments, repeats=1)
    with ProcessPoolExecutor(args.processes, get_context("spawn")) as pool:
        rows = list(pool.map(partial(measure, args), args.seeds))
    notes = [
        f"{args.model}, {args.method}, {args.prompts} prompts a step with {args.answers} answers "
        f"of at most {args.answer_tokens} tokens at temperature 1, learning rate {args.rate:g}, "
        f"beta {args.beta:g}, {args.held_out} held-out prompts. "
        f"{args.processes} runs at a time, which share the device."
    ]
    title = "Rewards: a number between tags, or GSM8K's answer; SmolLM2-135M"
    finish("training/rewards", rows, args, COLUMNS, title=title, notes=notes)


if __name__ == "__main__":
    main()
