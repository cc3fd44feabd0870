"""Two processes that train together give what one gives: losses, parameters, checkpoints; and end when one is gone.

With ONDEVICE_RANKS_DEVICE=cuda and two GPUs the same comparisons go through NCCL.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from ondevice.core.errors import ConfigError  # noqa: E402
from ondevice.core.registry import method_config  # noqa: E402
from ondevice.methods.slideformer.torch import SlideformerSession  # noqa: E402
from ondevice.models.tiny import tiny_model  # noqa: E402
from ondevice.offload.ranks import SINGLE, check_rows, join, launched  # noqa: E402
from tests.cli.command import classes, tiny  # noqa: E402
from tests.methods.slideformer.ranked import LIMIT_S, ROWS, RUNS, compute  # noqa: E402
from tests.methods.slideformer.reference import batches  # noqa: E402

DEVICE = os.environ.get("ONDEVICE_RANKS_DEVICE", "cpu")
WORLD = 2
needs_gloo = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
pytestmark = needs_gloo


def environment(**values: object) -> dict[str, str]:
    paths = os.pathsep.join(filter(None, (str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **{k: str(v) for k, v in values.items()}}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def start(case: str, folder: Path) -> list[subprocess.Popen[str]]:
    """Two ranks without `torchrun`, which would end the one when the other dies."""
    port = free_port()
    return [
        subprocess.Popen(
            [sys.executable, "-m", "tests.methods.slideformer.ranked", case, str(folder), DEVICE],
            env=environment(RANK=rank, WORLD_SIZE=WORLD, MASTER_ADDR="127.0.0.1", MASTER_PORT=port),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]


def torchrun(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(WORLD)]
    command += ["--master-port", str(free_port()), "-m", "ondevice", *map(str, arguments)]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of each of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    for process in start("runs", folder):
        _, errors = process.communicate(timeout=150)
        assert process.returncode == 0, errors
    return [torch.load(folder / f"runs-{rank}.pt", weights_only=False) for rank in range(WORLD)]


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_are_one_process(name: str, ranks: list[dict[str, Any]]) -> None:
    """Only the order of additions differs: over the rows of a batch, then over the ranks. In bfloat16 that flips
    roundings, so what differs is held against how far the steps have moved a parameter."""
    exact = RUNS[name][0].get("compute") == "float32"
    expected, (ours, theirs) = compute(name, device=DEVICE), (rank[name] for rank in ranks)
    assert ours["losses"] == theirs["losses"]
    assert ours["losses"] == pytest.approx(expected["losses"], rel=1e-5 if exact else 5e-3)
    masters = {**ours["masters"], **theirs["masters"]}
    assert masters.keys() == expected["masters"].keys() and not ours["masters"].keys() & theirs["masters"].keys()
    _, family, sizes = RUNS[name]
    start = {key: value.detach().float() for key, value in tiny_model(family, **sizes).model.named_parameters()}
    for key, value in expected["masters"].items():
        difference, moved = (masters[key] - value).abs(), (value - start[key]).abs()
        if exact:
            assert difference.max() <= 1e-5 and difference.mean() <= 1e-6, key
        else:
            assert difference.max() <= moved.max() and difference.mean() <= 0.05 * moved.mean(), key


@pytest.mark.parametrize("name", RUNS)
def test_both_ranks_compute_with_the_same_bits(name: str, ranks: list[dict[str, Any]]) -> None:
    ours, theirs = (rank[name] for rank in ranks)
    assert torch.equal(ours["nll"], theirs["nll"])
    assert all(torch.equal(a, b) for a, b in zip(ours["window"], theirs["window"], strict=True))


def test_host_memory_is_divided(ranks: list[dict[str, Any]]) -> None:
    whole = compute("untied")["bytes"]
    shares = [rank["untied"]["bytes"] / whole for rank in ranks]
    assert sum(shares) == pytest.approx(1, abs=0.01) and max(shares) < 0.6


def test_a_resumed_run_has_the_same_bits(ranks: list[dict[str, Any]]) -> None:
    actual = ranks[0]["session"]
    assert actual["resumed"] == actual["straight"] and actual["same"]


def test_one_process_goes_on_from_the_checkpoint_of_two(ranks: list[dict[str, Any]]) -> None:
    actual = ranks[0]["session"]
    config = method_config("slideformer", {"timeout_s": 20.0, "threads": 1})
    single = SlideformerSession(tiny_model("llama", 1, layers=3), config, DEVICE)
    assert single.state().keys() == actual["state"].keys()
    single.written(None)
    single.load_state(actual["state"])
    losses = [single.step(*batch, 3 + step, 1e-3).loss for step, batch in enumerate(batches(6, rows=ROWS)[3:])]
    single.close()
    assert losses == pytest.approx(actual["straight"], rel=5e-3)


def test_what_a_checkpoint_lacks_is_an_error_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["session"]["refused"].startswith("the checkpoint does not fit")


def test_a_rank_that_dies_or_hangs_ends_the_other(tmp_path: Path) -> None:
    cases = {case: start(case, tmp_path) for case in ("dies", "hangs")}
    try:
        for case, (first, _) in cases.items():
            _, errors = first.communicate(timeout=90)
            assert first.returncode == 0, errors
            loaded = torch.load(tmp_path / f"{case}-0.pt", weights_only=False)
            assert (
                "another rank has ended or does not answer" in loaded["message"] or "did not end" in loaded["message"]
            )
            assert loaded["seconds"] < 2 * LIMIT_S
    finally:
        for processes in cases.values():
            for process in processes:
                process.kill()
                process.communicate()


def test_the_command_line_trains_and_resumes_on_two_ranks(tmp_path: Path) -> None:
    data, run = classes(tmp_path / "rows.jsonl"), tmp_path / "run"
    options = tiny("slideformer", "--data", data, "--eval-data", data, "--out", run, "--json", "--lr", "1e-3")
    began = time.time()
    first = torchrun("train", *options, "--steps", 2)
    assert first.returncode == 0, first.stderr
    assert len(first.stdout.splitlines()) == 1 and '"steps": 2' in first.stdout
    assert (run / "model" / "model.safetensors").stat().st_mtime > began
    second = torchrun("train", *options, "--steps", 4, "--resume")
    assert second.returncode == 0, second.stderr
    lines = (run / "events.jsonl").read_text().splitlines()
    assert [line.count('"event":"step"') for line in lines].count(1) == 4
    assert sum('"event":"resume"' in line for line in lines) == 1


def test_what_cannot_be_divided_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ondevice.api.runfile import RunConfig
    from ondevice.planning.devices import place

    assert join("cpu", 1.0) == (SINGLE, "cpu")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert launched() == (1, 4)
    with pytest.raises(ConfigError, match="6 rows cannot be divided among 4 ranks"):
        check_rows(6, 4)
    with pytest.raises(ConfigError, match="lora trains in one process"):
        place(RunConfig.load(None, {"model.source": "tiny:llama", "method.name": "lora", "train.batch_size": 4}))
    with pytest.raises(ConfigError, match="6 rows"):
        place(RunConfig.load(None, {"model.source": "tiny:llama", "method.name": "slideformer", "train.batch_size": 6}))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="several hosts"):
        launched()
