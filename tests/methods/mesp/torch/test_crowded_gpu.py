"""A card that is not empty: another process has most of its memory, or its free memory lies in
pieces."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ondevice.core.errors import DoesNotFitError
from ondevice.core.registry import method_config, open_session
from ondevice.methods.mesp.check import needed_bytes
from ondevice.models import save_tiny
from ondevice.models.load import tiny_model
from ondevice.planning.devices import FREE_FRACTION, find_device
from ondevice.planning.estimate import plan

pytestmark = pytest.mark.gpu
SIZES = {"layers": 8, "hidden": 1024, "intermediate": 4096, "heads": 16, "kv_heads": 8}
ROWS, LENGTH = 4, 2048
GIB = 1 << 30
HOLD = """
import sys, torch
size = int(sys.argv[1])
held = torch.empty(torch.cuda.mem_get_info()[0] - size, dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def a_process_that_leaves(free_bytes: int) -> Iterator[None]:
    """Another process, which holds all of the card but so many bytes."""
    torch.cuda.empty_cache()
    command = [sys.executable, "-c", HOLD, str(free_bytes)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        try:
            yield
        finally:
            other.communicate()


def trained(folder: Path, out: Path) -> tuple[int, str]:
    """Run two steps by the command; return its exit code and what it said."""
    row = json.dumps({"text": "a word or two " * 2000})
    (folder / "rows.jsonl").write_text(f"{row}\n" * ROWS)
    words = ["train", "--method", "mesp", "--model", folder / "model"]
    words += ["--data", folder / "rows.jsonl"]
    words += ["--steps", 2, "--batch-size", ROWS, "--max-length", LENGTH, "--out", out]
    words += ["--dtype", "bfloat16", "--set", "model.device=cuda"]
    done = subprocess.run(
        [sys.executable, "-m", "ondevice", *map(str, words)], capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("crowded")
    save_tiny(made / "model", "llama", 1, **SIZES, max_positions=4096)
    return made


def test_a_run_keeps_what_a_second_process_leaves_room_for(folder: Path) -> None:
    code, said = trained(folder, folder / "empty card")
    assert code == 0 and "method.recompute: none" in said, said
    decided, size = on_card(tiny_model("llama", 1, **SIZES, max_positions=4096).dims, GIB)
    assert decided.recompute not in ("all", "none")
    with a_process_that_leaves(size):
        code, said = trained(folder, folder / "crowded card")
    assert code == 0, said
    assert "method.recompute keeps" in said, said


def test_a_run_that_does_not_fit_next_to_a_second_process_says_so_before_it_begins(
    folder: Path,
) -> None:
    out = folder / "no room"
    with a_process_that_leaves(GIB):
        code, said = trained(folder, out)
    assert code != 0 and "Traceback" not in said, said
    assert "does not fit this-cuda" in said and "that are free now" in said, said
    assert "rows of 1024 tokens" in said, said
    assert not list(out.glob("**/adapter_model.safetensors"))


@contextmanager
def a_card_of(size_bytes: int) -> Iterator[None]:
    """PyTorch's allocator takes no more than so many bytes."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(size_bytes / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        gc.collect()
        torch.cuda.empty_cache()


def on_card(dims: Any, room_bytes: int) -> tuple[Any, int]:
    """What a plan decides for a card that has so many bytes more than the step needs, and the
    card's size."""
    config = method_config("mesp", {})
    shape = {"batch_size": ROWS, "length_tokens": LENGTH, "dtype": "bfloat16"}
    device = find_device("h100")
    request = plan(dims, config, device=device, **shape).request
    needed = needed_bytes(request, config.model_copy(update={"recompute": "all"}))
    size = int((needed + GIB + room_bytes) / 0.85 / FREE_FRACTION)
    decided = plan(dims, config, device=device.within(size), **shape).request.method
    return decided, size


def opened(decided: Any) -> Any:
    loaded = tiny_model("llama", 1, **SIZES, max_positions=4096)
    for parameter in loaded.model.parameters():
        parameter.data = parameter.data.bfloat16()
    model: Any = loaded.model
    model.cuda()
    return open_session(loaded, decided, 3, "cuda")


def batch(rows: int, length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(seed).integers(0, 256, (rows, length))
    return ids, ids.copy()


def test_batches_of_every_shape_fit_the_memory_that_was_planned() -> None:
    """In any order: what one shape leaves in pieces is no obstacle to the next."""
    decided, size = on_card(tiny_model("llama", 1, **SIZES, max_positions=4096).dims, GIB)
    assert decided.recompute not in ("all", "none")
    random = np.random.default_rng(0)
    with a_card_of(size):
        session = opened(decided)
        for step in range(40):
            shape = int(random.integers(1, ROWS + 1)), int(random.integers(16, LENGTH + 1))
            if step % 10 == 9:
                shape = ROWS, LENGTH
            assert np.isfinite(session.step(*batch(*shape, step), step, 1e-4).loss)
        del session


def test_memory_in_pieces_ends_a_step_with_what_to_change_and_a_run_goes_on() -> None:
    with a_card_of(3 * GIB):
        session = opened(method_config("mesp", {"recompute": "none", "cuda_graphs": False}))
        before = session.state()
        pieces = []
        try:
            while True:
                pieces.append(torch.empty(8 << 20, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            pass
        del pieces[::2]  # half of the card is free, and no piece is larger than 8 MiB
        with pytest.raises(DoesNotFitError) as refused:
            session.step(*batch(ROWS, LENGTH, 0), 0, 1e-4)
        assert "method.recompute" in str(refused.value.hint)
        pieces.clear()
        session.load_state(before)
        assert np.isfinite(session.step(*batch(ROWS, LENGTH, 0), 0, 1e-4).loss)
        del session
