"""Processes that train together give what one gives: losses, parameters, checkpoints; and end when one is gone.

With ONDEVICE_RANKS_DEVICE=cuda and two GPUs the same comparisons go through NCCL.
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

import ondevice  # noqa: E402
from ondevice.cli.app import app  # noqa: E402
from ondevice.core.errors import ConfigError, Need  # noqa: E402
from ondevice.methods.slideformer.torch import SlideformerSession  # noqa: E402
from ondevice.models.load import tiny_model  # noqa: E402
from ondevice.offload.config import check_rows, launched  # noqa: E402
from ondevice.offload.session import join  # noqa: E402
from ondevice.offload.units import SINGLE, Joined  # noqa: E402
from ondevice.training.checkpoint import read_state  # noqa: E402
from ondevice.training.events import read_log  # noqa: E402
from tests.cli.command import classes, tiny  # noqa: E402
from tests.methods.slideformer.rank_processes import (  # noqa: E402
    DEVICE,
    WORLD,
    environment,
    last_word,
    needs_gloo,
    results,
    start,
    torchrun,
    torchrun_on_two_hosts,
)
from tests.methods.slideformer.ranked import (  # noqa: E402
    LIMIT_S,
    ROWS,
    RUNS,
    THREE,
    compute,
    learned_pairs,
    opened,
    orthogonal,
    save_again,
)
from tests.methods.slideformer.reference import batches  # noqa: E402
from tests.offload import pairs  # noqa: E402
from tests.ports import free_port  # noqa: E402
from tests.warm import Warm  # noqa: E402

pytestmark = needs_gloo


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder: Path, warm: Warm) -> list[dict[str, Any]]:
    """Return the results of each of two ranks."""
    return results(warm, "runs", folder, 2)


@pytest.fixture(scope="module")
def single(folder: Path, ranks: list[dict[str, Any]]) -> SlideformerSession:
    """One process that has loaded the checkpoint of two ranks, and has written it again."""
    one = opened(SlideformerSession, 3, SINGLE, DEVICE, seed=1)
    save_again(one, folder / "two", folder / "one")
    return one


@pytest.fixture(scope="module")
def three(folder: Path, single: SlideformerSession, warm: Warm) -> list[dict[str, Any]]:
    """Return the results of each of three ranks, which also load and write what one process has written."""
    needs_three()
    return results(warm, "three", folder, 3)


def needs_three() -> None:
    if DEVICE != "cpu" and torch.cuda.device_count() < 3:
        pytest.skip("fewer than three GPUs")


def compare(name: str, ranks: list[dict[str, Any]]) -> None:
    """Only the order of additions differs: over the rows of a batch, then over the ranks. In bfloat16 that flips
    roundings, so what differs is held against how far the steps have moved a parameter."""
    exact, parts = RUNS[name][0].get("compute") == "float32", [rank[name] for rank in ranks]
    expected, first = compute(name, len(ranks), device=DEVICE), parts[0]
    for other in parts[1:]:  # all compute with the same bits
        assert other["losses"] == first["losses"] and torch.equal(other["nll"], first["nll"])
        assert all(torch.equal(a, b) for a, b in zip(other["window"], first["window"], strict=True))
    assert first["losses"] == pytest.approx(expected["losses"], rel=1e-5 if exact else 5e-3)
    torch.testing.assert_close(
        first["nll"], expected["nll"], rtol=1e-5 if exact else 2e-2, atol=1e-5
    )
    masters: dict[str, list[Any]] = {}
    for (key, _), value in sorted(
        (item for part in parts for item in part["masters"].items()), key=lambda i: i[0]
    ):
        masters.setdefault(key, []).append(value)
    _, family, sizes = RUNS[name]
    start = {
        key: value.detach().float()
        for key, value in tiny_model(family, **sizes).model.named_parameters()
    }
    assert masters.keys() == {key for key, _ in expected["masters"]}
    for (key, _), value in expected["masters"].items():
        difference, moved = (
            (torch.cat(masters[key]) - value).abs(),
            (value - start[key].reshape(-1)).abs(),
        )
        if exact:
            assert difference.max() <= 1e-5 and difference.mean() <= 1e-6, key
        else:
            # Where a gradient is nothing but rounding, two runs may walk apart, each as far as any parameter moves: on
            # two H100 1.06 times as far.
            most = moved.max() * (1 if DEVICE == "cpu" else 2)
            assert difference.max() <= most and difference.mean() <= 0.1 * moved.mean(), key


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_match_one_process(name: str, ranks: list[dict[str, Any]]) -> None:
    compare(name, ranks)


@pytest.mark.parametrize("name", THREE)
def test_three_ranks_match_one_process(name: str, three: list[dict[str, Any]]) -> None:
    compare(name, three)


def test_two_ranks_have_muons_bits_of_one_process(ranks: list[dict[str, Any]]) -> None:
    """A momentum is in shards, and a matrix is cut by them; the update is of the whole matrix."""
    first, second = (rank["muon"] for rank in ranks)
    alone = orthogonal(SINGLE, DEVICE)
    assert first["losses"] == second["losses"] == alone["losses"]
    shards = {**first["arrays"], **second["arrays"]}
    assert len(shards) == len(first["arrays"]) + len(second["arrays"])
    whole = Joined({name: tensor.numpy() for name, tensor in shards.items()})
    assert whole.whole.keys() == alone["arrays"].keys()
    for name, expected in alone["arrays"].items():
        value = whole.get(name)
        value = value[0 : value.shape[0]]
        assert np.array_equal(value, expected.numpy()), name


def test_ranks_learn_from_preference_pairs_what_one_process_learns(
    ranks: list[dict[str, Any]], three: list[dict[str, Any]]
) -> None:
    alone = learned_pairs(SINGLE, DEVICE)
    for found in (*ranks, *three):
        pairs.compare(found["pairs"], alone)


def test_ranks_agree_on_what_auto_chose(ranks: list[dict[str, Any]]) -> None:
    settled = {"window": 3, "resident_layers": 1, "gradient_buffers": 4, "resident_tables": False}
    assert [one["settled"] for one in ranks] == [settled] * 2


def test_host_memory_is_divided(ranks: list[dict[str, Any]]) -> None:
    whole = compute("untied", 2)["bytes"]
    assert [rank["untied"]["bytes"] / whole for rank in ranks] == pytest.approx(
        [0.5, 0.5], abs=0.01
    )


def test_a_resumed_run_has_the_same_bits(ranks: list[dict[str, Any]], folder: Path) -> None:
    actual = ranks[0]["session"]
    assert actual["resumed"] == actual["straight"]
    models = [
        (folder / name / "model.safetensors").read_bytes() for name in ("straight", "resumed")
    ]
    assert models[0] == models[1]
    assert AutoModelForCausalLM.from_pretrained(
        folder / "two" / "checkpoint-00000003" / "model"
    ).num_parameters()


def test_a_checkpoint_is_the_same_for_any_number_of_ranks(
    single: Any, three: Any, folder: Path
) -> None:
    """Two ranks wrote it, one process took it and wrote it, three ranks took that and wrote it: the same bits."""
    paths = [
        folder / "two/checkpoint-00000003",
        *(folder / f"{name}/checkpoint-00000004" for name in ("one", "three")),
    ]
    assert [len(list(path.glob("state*.safetensors"))) for path in paths] == [2, 1, 3]
    states = [Joined(read_state(path)) for path in paths]
    assert states[0].whole.keys() == states[1].whole.keys() == states[2].whole.keys()
    for name, expected in states[1].whole.items():
        for state in (states[0], states[2]):
            assert np.array_equal(state.get(name)[0 : len(expected)], expected), name
    models = [(path / "model" / "model.safetensors").read_bytes() for path in (paths[0], paths[2])]
    assert models[0] == models[1]


def test_one_process_goes_on_from_the_checkpoint_of_two(
    ranks: list[dict[str, Any]], single: Any
) -> None:
    losses = [
        single.step(*batch, 3 + step, 1e-3).loss
        for step, batch in enumerate(batches(6, rows=ROWS[2])[3:])
    ]
    single.close()
    assert losses == pytest.approx(ranks[0]["session"]["straight"], rel=5e-3)


def test_a_missing_array_is_an_error_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["session"]["refused"].startswith("the checkpoint does not fit")


def test_a_rank_that_dies_or_hangs_ends_the_others(tmp_path: Path, warm: Warm) -> None:
    """Each of the others says which layer waits for it; and what rank 0 leaves without a word ends, too. A checkpoint
    that a rank has not written does not get its name."""
    world = 3 if DEVICE == "cpu" else 2
    at_once = ("dies", "hangs") if DEVICE == "cpu" else ("dies", "hangs", "silent", "killed")
    cases = {
        case: start(warm, case, tmp_path, world if case in ("dies", "hangs") else 2)
        for case in at_once
    }
    survivors = {
        "dies": (0, 2)[: world - 1],
        "hangs": (0, 2)[: world - 1],
        "silent": (1,),
        "killed": (0,),
    }
    loaded: dict[str, list[dict[str, Any]]] = {}
    try:
        for case, ranks in survivors.items():
            if case not in cases:
                cases[case] = start(warm, case, tmp_path, 2)
            for rank in ranks:
                loaded.setdefault(case, []).append(
                    last_word(cases[case][rank], tmp_path / f"{case}-{rank}.pt")
                )
    finally:
        for processes in cases.values():
            for process in processes:
                process.kill()
                process.communicate()
    for one in (*loaded["dies"], *loaded["hangs"]):
        assert "transfer of " in one["message"] and one["seconds"] < 10 * LIMIT_S
    for one in (*loaded["dies"], *loaded["hangs"], *loaded["silent"]):
        assert "checkpoint is intact" in one["message"]
    assert LIMIT_S / 2 < loaded["silent"][0]["seconds"] < 10 * LIMIT_S
    (killed,) = loaded["killed"]
    assert killed == {
        "message": "another rank has ended or does not respond",
        "newest": 0,
        "left": 1,
    }


def test_the_command_line_trains_and_resumes_on_two_ranks_and_two_hosts(
    tmp_path: Path, warm: Warm
) -> None:
    data, run = classes(tmp_path / "rows.jsonl"), tmp_path / "run"
    options = tiny(
        "slideformer", "--data", data, "--eval-data", data, "--out", run, "--json", "--lr", "1e-3"
    )
    began = time.time()
    first = torchrun(warm, "train", *options, "--steps", 2)
    assert first.returncode == 0, first.stderr
    assert len(first.stdout.splitlines()) == 1 and '"steps": 2' in first.stdout
    assert (run / "model" / "model.safetensors").stat().st_mtime > began
    if DEVICE == "cpu":
        apart = [tmp_path / "apart" if word == run else word for word in options]
        torchrun_on_two_hosts(warm, "train", *apart, "--steps", 2)
        for name in ("model/model.safetensors", "checkpoint-00000002/state-00001.safetensors"):
            assert (tmp_path / "apart" / name).read_bytes() == (run / name).read_bytes()
    second = torchrun(warm, "train", *options, "--steps", 4, "--resume")
    assert second.returncode == 0, second.stderr
    lines = (run / "events.jsonl").read_text().splitlines()
    assert [line.count('"event":"step"') for line in lines].count(1) == 4
    assert sum('"event":"resume"' in line for line in lines) == 1


def test_the_command_line_learns_from_rated_answers_on_two_ranks(
    tmp_path: Path, warm: Warm
) -> None:
    rows = [
        {"prompt": f"{n}?", "completion": "abcdefg"[n % 5 :], "label": n % 2 == 0} for n in range(8)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    exact = ("--set", "method.compute=float32", "--lr", "1e-3", "--batch-size", 4, "--steps", 3)
    command = tiny("slideformer", "--data", data, "--eval-data", data, *exact, "--out", "{}")
    runs = [tmp_path / name for name in ("ranks", "alone")]
    done = torchrun(warm, "train", *(runs[0] if word == "{}" else word for word in command))
    assert done.returncode == 0, done.stderr
    words = [str(runs[1] if word == "{}" else word) for word in command]
    assert CliRunner().invoke(app, ["train", *words]).exit_code == 0
    steps, alone = (
        [
            entry.event.preferences | {"loss": entry.event.loss}
            for entry in read_log(run / "events.jsonl").entries
            if entry.event.kind == "step"
        ]
        for run in runs
    )
    # The order of additions changes 1e-5 of a row's likelihood, some 100 nats; beta is 0.1.
    assert len(steps) == 3 and steps == [pytest.approx(step, abs=2e-4) for step in alone]


def test_ranks_that_measure_other_things_compute_alike(tmp_path: Path, warm: Warm) -> None:
    """Rank 0 decides for all, at the first start; nobody is asked again when the run is resumed.

    One process does so with any method: tests/api/test_decisions.py.
    """
    method = "slideformer"
    data, run = classes(tmp_path / "rows.jsonl"), tmp_path / "run"
    command = [
        str(warm.python),
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(WORLD),
        "--no-python",
        "--master-port",
    ]
    for steps, resumed in ((2, 0), (4, 1)):
        words = [
            str(free_port()),
            str(warm.python),
            "-m",
            "tests.api.flipped",
            method,
            str(data),
            str(run),
            str(steps),
            str(resumed),
        ]
        done = subprocess.run(
            [*command, *words], env=environment(), capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr
    events = [entry.event for entry in read_log(run / "events.jsonl").entries]
    assert [event.step for event in events if event.kind == "step"] == [0, 1, 2, 3]
    alone = tmp_path / "alone"
    settings = {
        "model.source": "tiny:llama",
        "model.device": "cpu",
        "data.path": str(data),
        "train.out": str(alone),
    }
    settings |= {"method.name": method, "train.steps": 4, "train.batch_size": 2}
    ondevice.train(settings | {"method.compute": events[0].decided["method.compute"]})
    straight = [
        entry.event.loss
        for entry in read_log(alone / "events.jsonl").entries
        if entry.event.kind == "step"
    ]
    assert [event.loss for event in events if event.kind == "step"] == pytest.approx(
        straight, rel=2e-3
    )


def test_indivisible_rows_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ondevice.api.runfile import RunConfig
    from ondevice.training.choices import place

    assert join("cpu", 1.0) == (SINGLE, "cpu")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert launched() == (1, 4)
    with pytest.raises(ConfigError, check=lambda error: error.received == 6):
        check_rows(6, 4)
    with pytest.raises(ConfigError, check=lambda error: error.needs is Need.RANKS):
        config = RunConfig.load(
            None, {"model.source": "tiny:llama", "method.name": "lora", "train.batch_size": 4}
        )
        place(config.method, config.train, "cpu")
    with pytest.raises(ConfigError, check=lambda error: error.received == 6):
        config = RunConfig.load(
            None,
            {"model.source": "tiny:llama", "method.name": "slideformer", "train.batch_size": 6},
        )
        place(config.method, config.train, "cpu")
