"""One of several ranks of test_ranks.py: `... -m tests.methods.slideformer.ranked CASE FOLDER [DEVICE]`.

One group of processes does all that a case asks for, so that torch is imported once a rank. Rank r leaves what it
found in FOLDER/CASE-r.pt.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ondevice.core.errors import CheckpointError, OndeviceError
from ondevice.core.registry import method_config
from ondevice.methods import ranked_session
from ondevice.methods.slideformer.config import SlideformerConfig
from ondevice.methods.slideformer.torch import (
    Follower,
    Leader,
    SlideformerSession,
    agreed,
)
from ondevice.models.load import tiny_model
from ondevice.offload.engine import OffloadEngine
from ondevice.offload.session import join
from ondevice.offload.units import SINGLE, Ranks
from ondevice.training.checkpoint import CheckpointStore
from tests.methods.slideformer.reference import batches, run
from tests.offload import pairs
from tests.offload.trees import evaluated_trees

STEPS = 10
ROWS = {1: 12, 2: 4, 3: 6}
"""Of a batch, by the number of ranks."""
EXACT = {"compute": "float32", "optimizer": "torch", "eps": 1e-4}
"""Where a gradient is nothing but rounding (the bias of keys), a smaller epsilon would make steps of it."""
SMALL = {"max_grad_norm": 0.05}
LIMIT_S = 6.0 if os.environ.get("ONDEVICE_RANKS_DEVICE", "cpu") == "cpu" else 15.0
"""Longest wait for a rank that dies or hangs; on a GPU the first step loads its kernels."""
RUNS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "tied": (EXACT, "llama", {"layers": 3}),
    "untied": (EXACT, "llama", {"layers": 4, "tied": False}),
    "gpt2": ({**EXACT, "micro_batch_size": 1}, "gpt2", {"layers": 2}),
    "previous": ({**EXACT, **SMALL, "clip": "previous"}, "llama", {"layers": 3, "tied": False}),
    "layer": ({**EXACT, **SMALL, "clip": "layer"}, "llama", {"layers": 2}),
    "global": ({**EXACT, **SMALL, "clip": "global"}, "llama", {"layers": 3}),
    "presumed": (
        {**EXACT, "max_grad_norm": 1.0, "clip": "global", "presumed_layers": 2},
        "llama",
        {"layers": 3},
    ),
    "global untied": ({**EXACT, **SMALL, "clip": "global"}, "gpt2", {"layers": 1, "tied": False}),
    "parts": ({**EXACT, "loss_tiles": 3, "window": 2}, "qwen2", {"layers": 4, "tied": False}),
    "disk": ({**EXACT, "disk_fraction": 0.5, "activations": "disk"}, "llama", {"layers": 4}),
    "masters on disk": (
        {**EXACT, "disk_fraction": 1, "disk_masters": True, "resident_layers": 1},
        "llama",
        {"layers": 3},
    ),
    "resident": ({**EXACT, "resident_layers": 2}, "llama", {"layers": 4}),
    "resident clipped": (
        {**EXACT, **SMALL, "resident_layers": 1},
        "llama",
        {"layers": 3, "tied": False},
    ),
    "resident tables": (
        {**EXACT, **SMALL, "resident_layers": 1, "resident_tables": True},
        "llama",
        {"layers": 3},
    ),
    "resident untied tables": (
        {**EXACT, **SMALL, "resident_tables": True, "loss_tiles": 3, "micro_batch_size": 1},
        "qwen2",
        {"layers": 2, "tied": False},
    ),
    "bfloat16": ({}, "llama", {"layers": 4, "tied": False}),
    "small moments": ({"moments": "int8"}, "llama", {"layers": 3}),
}
"""Settings, family and sizes of each comparison with one process."""
THREE = (
    "untied", "parts", "previous", "resident clipped", "resident tables", "resident untied tables", "small moments",
)  # fmt: skip
"""Those that three ranks make, too: no size of a unit is a multiple of three."""


def parts(engine: OffloadEngine) -> dict[tuple[str, int], torch.Tensor]:
    """Masters that this rank keeps, flat, by parameter and the first element that is here."""
    masters = engine.store.masters()
    pieces = [
        p for unit in (*engine.store.owned, *engine.store.resident.shards) for p in unit.pieces
    ]
    return {(piece.name, piece.start): masters[piece.name].reshape(-1) for piece in pieces}


def settled(ranks: Ranks) -> dict[str, Any]:
    """What ranks agree on that have decided by memory of different sizes, and what each would have chosen."""
    sizes = {"window": 3 + ranks.rank, "resident_layers": 2 - ranks.rank, "gradient_buffers": 4}
    sizes |= {"resident_tables": ranks.rank == 0}
    return agreed(SlideformerConfig(**sizes), ranks).model_dump(include=set(sizes))


def compute(name: str, world: int, ranks: Ranks = SINGLE, device: str = "cpu") -> dict[str, Any]:
    """Losses, this rank's masters, an evaluation, what the accelerator holds, and host bytes; of the batches that
    `world` ranks have."""
    settings, family, sizes = RUNS[name]
    config = SlideformerConfig(timeout_s=30.0, threads=1, **settings)
    engine = OffloadEngine(tiny_model(family, **sizes).family, config, device, ranks)
    losses = run(engine, batches(STEPS, rows=ROWS[world]), 1e-3)
    ids, labels = batches(1, rows=5, seed=7)[0]
    nll, _ = engine.evaluate(ids, labels)
    by_name = {
        "losses": losses,
        "masters": parts(engine),
        "nll": torch.cat([torch.from_numpy(nll), evaluated_trees(engine)]),
        "window": [
            slot.memory.cpu().clone() for slot in (*engine.window.layers, *engine.window.head)
        ],
        "bytes": engine.store.bytes,
        "segments": engine.device.segments(),
    }
    engine.close()
    return by_name


SESSION = {
    "timeout_s": 30.0,
    "threads": 1,
    "resident_layers": 1,
    "moments": "int8",
    "max_grad_norm": 0.5,
}
SESSION |= {"resident_tables": True}


def opened(kind: Any, layers: int, ranks: Ranks, device: str, seed: int = 0) -> Any:
    return kind(
        tiny_model("llama", seed, layers=layers),
        method_config("slideformer", SESSION),
        device,
        ranks,
    )


def checkpoints(folder: Path) -> CheckpointStore:
    return CheckpointStore(folder, {}, seed=0, backend="torch-cpu")


def session(ranks: Ranks, device: str, folder: Path) -> dict[str, Any]:
    """A checkpoint after three steps, written by all ranks beside the next three; another session goes on from it with
    the same bits; errors on every rank."""
    kind = Follower if ranks.rank else Leader
    first, second = (opened(kind, 3, ranks, device, seed) for seed in (0, 1))
    if ranks.rank:
        assert [first.follow(), second.follow()] == ["first", "second"]
        return {"refused": _refused(opened(kind, 2, ranks, device).follow)}
    store, data = checkpoints(folder / "two"), batches(6, rows=ROWS[2])
    for step, batch in enumerate(data[:3]):
        first.step(*batch, step, 1e-3)
    state = first.state()
    first.hold()
    save = partial(store.save, written=first.written, beside=first.save_beside)
    thread = threading.Thread(target=save, args=(3, state))
    thread.start()
    straight = [first.step(*batch, 3 + step, 1e-3).loss for step, batch in enumerate(data[3:])]
    thread.join()
    first.written(None)
    first.save_model(folder / "straight")
    first.finish("first")
    loaded = store.newest(lambda _: None)
    assert loaded is not None
    second.load_state(loaded.state)
    resumed = [second.step(*batch, 3 + step, 1e-3).loss for step, batch in enumerate(data[3:])]
    second.save_model(folder / "resumed")
    second.finish("second")
    third = opened(kind, 2, ranks, device)
    missing = {name: value for name, value in loaded.state.items() if "layer.1" not in name}
    refused = _refused(lambda: third.load_state(missing))
    return {"straight": straight, "resumed": resumed, "refused": refused}


def orthogonal(ranks: Ranks, device: str) -> dict[str, Any]:
    """Muon's steps on batches in which every rank has the same rows: gradients are sums of equal halves, so that two
    ranks have the bits of one process on one of the halves."""
    config = SlideformerConfig(
        timeout_s=30.0, threads=1, compute="float32", optimizer="muon", weight_decay=0.1
    )
    family = tiny_model("llama", layers=3, tied=False).family
    engine = OffloadEngine(family, config, device, ranks)
    data = [tuple(np.repeat(part, ranks.world, 0) for part in batch) for batch in batches(6)]
    losses = [engine.step(*batch, step, 1e-3) for step, batch in enumerate(data)]
    engine.flush()
    arrays = {name: tensor.clone() for name, tensor in engine.store.arrays().items()}
    window = [slot.memory.cpu().clone() for slot in engine.window.layers]
    engine.close()
    return {"losses": losses, "arrays": arrays, "window": window}


def learned_pairs(ranks: Ranks, device: str) -> dict[str, Any]:
    """Steps on preference pairs, whose two rows are computed by different ranks."""
    kind = SlideformerSession
    if not ranks.single:
        kind = Follower if ranks.rank else Leader
    config = method_config("slideformer", {**EXACT, "timeout_s": 30.0, "threads": 1})
    one = kind(tiny_model("llama", layers=2), config, device, ranks)
    return pairs.learned(one, batches(6, rows=12))


def save_again(one: SlideformerSession, source: Path, target: Path) -> None:
    """Load a checkpoint, whoever wrote it, and write another one."""
    loaded = checkpoints(source).newest(lambda _: None)
    assert loaded is not None
    one.load_state(loaded.state)
    checkpoints(target).save(4, one.state(), written=one.written, beside=one.save_beside)
    one.written(None)


def _refused(call: Any) -> str:
    try:
        call()
    except CheckpointError as error:
        return error.message
    return "not refused"


def left_alone(ranks: Ranks, device: str, how: int) -> dict[str, Any]:
    """Rank 1 is killed or stopped between two steps."""
    engine = OffloadEngine(
        tiny_model("llama").family, SlideformerConfig(timeout_s=LIMIT_S, threads=1), device, ranks
    )
    began = 0.0
    try:
        for step, batch in enumerate(batches(3, rows=ROWS[ranks.world])):
            if step == 1 and ranks.rank == 1:
                os.kill(os.getpid(), how)
            began = time.monotonic()
            engine.step(*batch, step, 1e-3)
    except OndeviceError as error:
        seconds = time.monotonic() - began
        engine.close()
        return {"message": str(error), "seconds": seconds}
    return {"message": "no error", "seconds": 0.0}


def silent(ranks: Ranks, device: str) -> dict[str, Any]:
    """Rank 0 is stopped while the others wait for its next word."""
    began = 0.0
    try:
        one = opened(Follower if ranks.rank else Leader, 2, ranks, device)
        began = time.monotonic()
        if ranks.rank:
            one.follow()
        one.step(*batches(1, rows=ROWS[ranks.world])[0], 0, 1e-3)
        os.kill(os.getpid(), signal.SIGSTOP)
    except OndeviceError as error:
        return {"message": str(error), "seconds": time.monotonic() - began}
    return {"message": "no error", "seconds": 0.0}


def killed_in_a_checkpoint(ranks: Ranks, device: str, folder: Path) -> dict[str, Any]:
    """Rank 1 is killed in the midst of the second checkpoint."""
    one, store = (
        opened(Follower if ranks.rank else Leader, 2, ranks, device),
        checkpoints(folder / "killed"),
    )
    if isinstance(one, Follower):
        write = ranked_session.write_tensors
        calls: list[Path] = []

        def dies(path: Path, *rest: Any, **options: Any) -> str:
            calls.append(path)
            if len(calls) == 2:
                path.write_bytes(b"half")
                os.kill(os.getpid(), signal.SIGKILL)
            return write(path, *rest, **options)

        ranked_session.write_tensors = dies
        return one.follow()
    message = "no error"
    for step, batch in enumerate(batches(2, rows=ROWS[ranks.world])):
        one.step(*batch, step, 1e-3)
        try:
            store.save(step, one.state(), written=one.written, beside=one.save_beside)
        except OndeviceError as error:
            message = error.message
        one.written(None)
    newest = store.newest(lambda _: None)
    return {
        "message": message,
        "newest": newest and newest.meta.step,
        "left": len(list(store.folder.iterdir())),
    }


def main(case: str, folder: Path, device: str) -> None:
    torch.set_num_threads(1)
    ranks, device = join(device, 30.0 if case in ("runs", "three") else LIMIT_S)
    by_name: Any
    if case == "runs":
        by_name = {name: compute(name, 2, ranks, device) for name in RUNS}
        by_name["session"] = session(ranks, device, folder)
        by_name["settled"] = settled(ranks)
        by_name["muon"] = orthogonal(ranks, device)
        by_name["pairs"] = learned_pairs(ranks, device)
    elif case == "three":
        by_name = {name: compute(name, 3, ranks, device) for name in THREE}
        by_name["pairs"] = learned_pairs(ranks, device)
        one = opened(Follower if ranks.rank else Leader, 3, ranks, device)
        if isinstance(one, Leader):
            save_again(one, folder / "one", folder / "three")
            one.finish(None)
        else:
            one.follow()
    elif case == "silent":
        by_name = silent(ranks, device)
    elif case == "killed":
        by_name = killed_in_a_checkpoint(ranks, device, folder)
    else:
        by_name = left_alone(ranks, device, signal.SIGKILL if case == "dies" else signal.SIGSTOP)
    torch.save(by_name, folder / f"{case}-{ranks.rank}.pt")


if __name__ == "__main__":
    np.seterr(all="raise")
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "cpu")
