"""One of several ranks of test_ranks.py: `... -m tests.methods.lsp.ranked FOLDER [DEVICE]`; rank r leaves what it found
in FOLDER/r.pt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ondevice.core.registry import method_config
from ondevice.core.session import Leading
from ondevice.methods.lsp.config import LspConfig
from ondevice.methods.lsp.engine import LspEngine
from ondevice.methods.lsp.torch import Follower, Leader, LspSession
from ondevice.models.load import tiny_model
from ondevice.offload.session import join
from ondevice.offload.units import SINGLE, Ranks
from ondevice.training.checkpoint import CheckpointStore
from tests.methods.slideformer.reference import batches
from tests.offload import pairs
from tests.offload.trees import evaluated_trees

STEPS, ROWS = 7, 4
PROJECTORS: dict[str, Any] = {
    "subspace": 24,
    "nonzeros": 4,
    "check_every": 3,
    "threshold": 0.0,
    "timeout_s": 30.0,
}
EXACT: dict[str, Any] = {
    "compute": "float32",
    "eps": 1e-4,
    "weight_decay": 0.1,
    "threads": 1,
    **PROJECTORS,
}
RUNS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "drawn": (EXACT, "llama", {"layers": 3, "tied": False}),
    "learned": ({**EXACT, "learned": True, "learn_steps": 2}, "llama", {"layers": 2}),
    "followed": ({**EXACT, "projector_values": "followed"}, "llama", {"layers": 2}),
    "codes": ({**EXACT, "gradient_dtype": "int4", "learned": False}, "llama", {"layers": 2}),
    "gpt2": (
        {**EXACT, "micro_batch_size": 1, "learned": False, "max_grad_norm": 0.05},
        "gpt2",
        {"layers": 2},
    ),
    "zero": (
        {**EXACT, "schedule": "zero", "project": False, "max_grad_norm": 0.05, "clip": "global"},
        "llama",
        {},
    ),
    "sliding": ({**EXACT, "weight_placement": "host", "window": 2}, "llama", {"layers": 4}),
    "bfloat16": ({"threads": 1, "eps": 1e-4, **PROJECTORS}, "qwen2", {"layers": 2, "tied": False}),
}
"""Settings, family and sizes of each comparison with one process; all but the last differ in rounding alone."""
SESSION = {**PROJECTORS, "threads": 1, "max_grad_norm": 0.5, "learned": True, "learn_steps": 2}


def data(steps: int = STEPS) -> list[Any]:
    return batches(steps, rows=ROWS)


def compute(name: str, ranks: Ranks = SINGLE, device: str = "cpu") -> dict[str, Any]:
    """Losses, weights, an evaluation, and host bytes of the moments."""
    settings, family, sizes = RUNS[name]
    if (
        ranks.single and "micro_batch_size" in settings
    ):  # a check looks at the first micro-batch of all ranks
        settings = {**settings, "micro_batch_size": 2 * settings["micro_batch_size"]}
    engine = LspEngine(tiny_model(family, **sizes).family, LspConfig(**settings), device, 3, ranks)
    losses = [engine.step(ids, labels, step, 1e-3) for step, (ids, labels) in enumerate(data())]
    engine.flush()
    nll, _ = engine.evaluate(*batches(1, rows=5, seed=7)[0])
    found = {
        "losses": losses,
        "weights": {
            (name, first): flat for name, first, flat in engine.weight_parts(engine.store.flats())
        },
        "nll": torch.cat([torch.from_numpy(nll), evaluated_trees(engine)]),
    }
    found["bytes"] = engine.store.bytes
    found["checks"] = {
        name: (check.before, check.after) for name, check in engine.bias_checks.items()
    }
    engine.close()
    return found


def opened(kind: Any, ranks: Ranks = SINGLE, device: str = "cpu", seed: int = 0) -> Any:
    loaded = tiny_model("llama", seed, layers=2, tied=False)
    return kind(loaded, method_config("lsp", SESSION), device, 3, ranks)


def checkpoints(folder: Path) -> CheckpointStore:
    return CheckpointStore(folder, {}, seed=0, backend="torch-cpu")


def session(ranks: Ranks, device: str, folder: Path) -> Any:
    """A checkpoint after five steps and two checks, from which another session goes on with the same bits; and one that
    a single process has written."""
    kind = Follower if ranks.rank else Leader
    sessions = [opened(kind, ranks, device, seed) for seed in (0, 1, 2)]
    if ranks.rank:
        return [one.follow() for one in sessions]
    first, second, third = sessions
    for step, batch in enumerate(data(5)):
        first.step(*batch, step, 1e-3)
    checkpoints(folder / "two").save(5, first.state(), beside=first.save_beside)
    straight = go_on(first, folder / "straight")
    losses = {"straight": straight}
    for name, one, source in (("resumed", second, "two"), ("from one", third, "one")):
        loaded = checkpoints(folder / source).newest(lambda _: None)
        assert loaded is not None
        one.load_state(loaded.state)
        losses[name] = go_on(one, folder / name)
    return losses


def learned_pairs(ranks: Ranks, device: str) -> dict[str, Any]:
    """Steps on preference pairs, whose two rows are computed by different ranks."""
    kind = LspSession
    if not ranks.single:
        kind = Follower if ranks.rank else Leader
    loaded = tiny_model("llama", layers=2, tied=False)
    return pairs.learned(kind(loaded, method_config("lsp", EXACT), device, 3, ranks), data())


def go_on(one: LspSession, folder: Path) -> list[float]:
    losses = [
        one.step(ids, labels, 5 + step, 1e-3).loss for step, (ids, labels) in enumerate(data(8)[5:])
    ]
    one.save_model(folder)
    if isinstance(one, Leading):
        one.finish("done")
    return losses


def main(folder: Path, device: str) -> None:
    torch.set_num_threads(1)
    ranks, device = join(device, 30.0)
    found: dict[str, Any] = {name: compute(name, ranks, device) for name in RUNS}
    found["session"] = session(ranks, device, folder)
    found["pairs"] = learned_pairs(ranks, device)
    torch.save(found, folder / f"{ranks.rank}.pt")


if __name__ == "__main__":
    np.seterr(all="raise")
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "cpu")
