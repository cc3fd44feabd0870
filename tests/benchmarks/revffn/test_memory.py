"""The benchmarks of RevFFN on tiny models: the memory's bars, every way on the same weights, the
quality run."""

from __future__ import annotations

import argparse
import json
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.committed import concise
from benchmarks.common import peak_bytes
from benchmarks.revffn import memory, quality, speed
from benchmarks.revffn.peers import ORDINARY, make, open_way
from tests.cli.command import write_rows

IDS = np.random.default_rng(0).integers(0, 512, (2, 16))


def arguments(**values: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    memory.arguments(parser)
    return argparse.Namespace(**{**vars(parser.parse_args([])), "repeats": 1, **values})


def test_the_allocators_record_is_the_peak() -> None:
    def three() -> None:
        a = torch.empty(1 << 18)
        b = a + 1
        del a
        c = b + 1
        del c
        b + 1 + 1

    assert peak_bytes(three) == pytest.approx(3 << 20, abs=4096)


def test_memory_is_reported_by_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closed-form streams: not a byte more for more layers; a checkpoint a block: an input for
    each."""
    monkeypatch.setattr(memory, "LAYERS", (2, 4, 8))
    chosen = ("RevFFN, exact", "RevFFN, full", "Checkpoint a block, updates in hooks")
    monkeypatch.setattr(memory, "DEPTH", {name: memory.DEPTH[name] for name in chosen})
    rows, _, _ = memory.depth(arguments(rows=2, length=64))
    growth = {name: [row["growth"] for row in rows if row["method"] == name] for name in chosen}
    assert max(growth[chosen[0]]) <= 0.02
    assert growth[chosen[0]][-1] < growth[chosen[1]][-1] < 0.5 * growth[chosen[2]][-1]


@pytest.mark.parametrize("name", ["revffn", *ORDINARY])
def test_every_way_learns_and_leaves_the_model_as_it_was(name: str) -> None:
    loaded = make("tiny-moe")
    names = [name for name, _ in loaded.model.named_parameters()]
    way = open_way(loaded, name, **({} if name in ("revffn", "ia3") else {"rank": 4}))
    losses = [way.step(IDS, IDS, step, 3e-3) for step in range(4)]
    assert losses[-1] < losses[0] and losses == sorted(losses, reverse=True)
    way.close()
    assert [name for name, _ in loaded.model.named_parameters()] == names
    assert not any(p.requires_grad or p.grad is not None for p in loaded.model.parameters())


def test_updates_in_hooks_match_updates_after_the_backward_pass() -> None:
    after = {}
    for name in ("sft", "sft-fused"):
        loaded = make("tiny-moe")
        way = open_way(loaded, name)
        first, _ = (way.step(IDS, IDS, step, 1e-3) for step in range(2))
        after[name] = (
            first,
            {name: p.detach().clone() for name, p in loaded.model.named_parameters()},
        )
    assert after["sft"][0] == after["sft-fused"][0]
    for name, value in after["sft"][1].items():
        assert torch.equal(value, after["sft-fused"][1][name]), name


@pytest.mark.nightly
def test_the_gpu_part_also_runs_on_a_cpu() -> None:
    args = arguments(
        cuda=True, device="cpu", shape="tiny-moe", length=16, limit_gb=0.02, target_gb=0.012, max_rows=32,
        methods="revffn-full,revffn-parts,sft,lora",
    )  # fmt: skip
    rows, columns, notes = memory.table(args)
    assert [row["method"] for row in rows] == args.methods.split(",")
    assert all(
        row["tokens_per_s"] and 0 < row["peak_bytes"] < 2e7 and row["rows"] <= 32 for row in rows
    )
    assert rows[2]["ratio"] == 1 and rows[2]["paper_gb"] == 65.4
    assert {column["key"] for column in columns} >= {"peak_bytes", "ratio"} and any(
        "below" in note for note in notes
    )
    nothing = memory.table(
        argparse.Namespace(**{**vars(args), "target_gb": 1e-6, "methods": "revffn-full"})
    )[0]
    assert nothing[0]["rows"] is None and nothing[0]["peak_bytes"] is None


@pytest.mark.nightly
def test_the_quality_run_and_its_parts(tmp_path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """A way that diverges is counted and not averaged; files of two seeds are the table of both."""
    rows = [
        {"instruction": f"Say {word}.", "input": "", "output": word}
        for word in ("yes", "no", "good", "bad")
    ]
    for part in ("train", "valid"):
        (tmp_path / "alpaca").mkdir(exist_ok=True)
        write_rows(tmp_path / "alpaca" / f"{part}.jsonl", rows)
    monkeypatch.setitem(quality.WAYS, "RevFFN full", ("revffn", 1e-3, {"skip_stage1": True}))
    monkeypatch.setitem(
        quality.WAYS, "full fine-tuning", ("sft-fused", 1e-3, {"optimizer": "adamw"})
    )
    monkeypatch.setitem(quality.WAYS, "diverges", ("sft-fused", 1e30, {"optimizer": "sgd"}))
    files = [tmp_path / f"{seed}.json" for seed in (0, 1)]
    options = ["--model", "tiny:qwen2_moe", "--data", tmp_path, "--device", "cpu", "--steps", 4, "--batch-size", 2,
               "--methods", "full fine-tuning,RevFFN full,diverges"]  # fmt: skip
    for seed, file in enumerate(files):
        monkeypatch.setattr(
            "sys.argv", ["quality", *map(str, [*options, "--seeds", seed, "--out", file])]
        )
        quality.main()
    actual, notes = quality.merged(files)
    by = {row["method"]: row for row in actual}
    assert (
        by["RevFFN full"]["seeds"] == [0, 1]
        and len(by["RevFFN full"]["loss"]) == 2
        and len(notes) == 1
    )
    assert all(loss < by["RevFFN full"]["before"] for loss in by["RevFFN full"]["loss"])
    assert by["full fine-tuning"]["ratio"] == 1 and 0.8 < by["RevFFN full"]["ratio"] < 1.2
    assert by["diverges"]["failed"] == 2 and by["diverges"]["loss"] is None
    for file in files:  # what is committed can be merged as well
        file.write_text(json.dumps(concise(json.loads(file.read_text()))))
    assert [row["seeds"] for row in quality.merged(files)[0]] == [row["seeds"] for row in actual]
    monkeypatch.setattr("sys.argv", ["quality", "--from-results", *map(str, files)])
    capsys.readouterr()
    quality.main()
    assert "| tiny:qwen2_moe | RevFFN full |" in capsys.readouterr().out


def test_kernels_of_a_profile_are_named_by_their_part() -> None:
    assert speed.part_of("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT") == "products"
    assert speed.part_of("pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel") == "attention"
    assert speed.part_of("Memcpy DtoH (Device -> Pinned)") == "copies between host and GPU"
    assert speed.part_of("at::native::vectorized_elementwise_kernel") == "element by element"


@pytest.mark.nightly
def test_the_speed_table_has_every_way_at_equal_rows_and_at_its_most() -> None:
    parser = argparse.ArgumentParser()
    speed.arguments(parser)
    words = "--device cpu --shape tiny-moe --dtype float32 --equal-rows 2 --length 16 --max-rows 8"
    args = parser.parse_args([*words.split(), "--limit-gb", "0.02"])
    rows, notes = speed.table(argparse.Namespace(**{**vars(args), "repeats": 1}))
    equal = [row["method"] for row in rows if row["batch"] == "equal"]
    assert equal == list(speed.WAYS) and all(row["tokens_per_s"] for row in rows)
    assert {row["ratio"] for row in rows if row["method"] == "sft"} == {1.0}
    assert {row["rows"] for row in rows if row["batch"] == "largest"} == {8}
    assert "Adafactor" in notes[0]
