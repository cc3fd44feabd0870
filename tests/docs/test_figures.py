"""Sentences with figures of the offload engines agree with the result files they are about.

Each sentence is built here from the file, so a page cannot keep a figure of an older run.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

BATCHES = (4, 8, 16, 32)
PEERS = (
    "torchao-fp32",
    "torchao",
    "fsdp2",
    "deepspeed-2",
    "deepspeed-3",
    "roundpipe",
    "roundpipe-late",
)


def rows_of(root: Path, name: str) -> list[dict[str, Any]]:
    """The rows of a committed result."""
    path = root / "benchmarks" / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))["rows"]


class Defaults:
    """`slideformer/auto`: medians by shape, batch and variant."""

    def __init__(self, root: Path) -> None:
        rows = rows_of(root, "slideformer/auto/nvidia-h200")
        self.rows = {(row["shape"], row["batch"], row["variant"]): row for row in rows}

    def seconds(self, batch: int, variant: str, shape: str = "Llama-1.5B") -> float:
        return median(self.rows[shape, batch, variant]["step_s"])

    def times(self, batch: int, variant: str) -> float:
        """How much longer a peer's step takes."""
        return self.seconds(batch, variant) / self.seconds(batch, "auto")

    def share(self, shape: str, batch: int) -> str:
        return f"{self.rows[shape, batch, 'auto']['of_resident']:.2f}"

    def gigabytes(self, batch: int, variant: str) -> str:
        return f"{self.rows['Llama-1.5B', batch, variant]['gpu_peak_bytes'] / 1e9:.1f}"


def listed(values: list[str]) -> str:
    return f"{', '.join(values[:-1])} and {values[-1]}"


def sentences_of_slideformer(root: Path) -> list[str]:
    runs = Defaults(root)
    share = runs.share
    found = [
        f"7B at batch 8 keeps the tables and 9 of 28 layers on the GPU and runs at {share('Qwen2.5-7B', 8)} "
        f"of no offload (the goal was 0.90). At batch 4 it runs at {share('Qwen2.5-7B', 4)}, "
        "bound by the update on the host.",
    ]
    for shape, kernels in (("Qwen2.5-1.5B", "PyTorch's kernels"), ("Llama-1.5B", "liger-kernel's")):
        shares = listed([share(shape, batch) for batch in BATCHES])
        found.append(f"{shape} with {kernels} runs at {shares} of it at batch 4, 8, 16 and 32.")
    for batch in BATCHES:
        cells = [f"{runs.seconds(batch, name):.3f}" for name in ("resident", "auto", *PEERS)]
        cells[1] = f"**{cells[1]}**"
        found.append(f"| {batch} | {' | '.join(cells)} |")
    for peer in ("torchao-fp32", "fsdp2"):
        times = listed([f"{runs.times(batch, peer):.1f}" for batch in BATCHES])
        found.append(f"today's defaults, 1.5B of Llama's shape, {times} at batch 4, 8, 16 and 32")
    nearest = [min(runs.times(batch, peer) for peer in PEERS) for batch in (4, 32)]
    found += [
        f"at 4 by {nearest[0]:.1f} times, at 32 by {100 * (nearest[1] - 1):.0f}%",
        f"{runs.gigabytes(4, 'auto')} GB at batch 4, while torchao in float32 takes "
        f"{runs.gigabytes(4, 'torchao-fp32')} and FSDP2 {runs.gigabytes(4, 'fsdp2')}.",
    ]
    return found


def sentences_of_lsp(root: Path) -> list[str]:
    rows = rows_of(root, "lsp/ranks/2x-nvidia-h100-80gb-hbm3")
    two = {row["rows"]: row for row in rows if row["variant"] == "lsp" and row["gpus"] == 2}
    weak = listed([f"{two[count]['weak']:.2f}" for count in (2, 8, 32)])
    return [
        f"two GPUs with 1, 4 and 16 rows each do {weak} times one GPU's tokens.",
        f"The same 16 rows over both do {two[16]['strong']:.2f} times, "
        f"the same 4 rows {two[4]['strong']:.2f} times.",
    ]


def test_the_sentences_on_slideformer_have_the_figures_of_its_runs(root: Path) -> None:
    page = (root / "docs/results/slideformer.md").read_text(encoding="utf-8")
    assert [one for one in sentences_of_slideformer(root) if one not in page] == []


def test_the_sentences_on_lsp_have_the_figures_of_its_runs(root: Path) -> None:
    page = (root / "docs/results/lsp.md").read_text(encoding="utf-8")
    assert [one for one in sentences_of_lsp(root) if one not in page] == []


def test_goals_are_met_where_the_figures_say_so(root: Path) -> None:
    """The last column of the goals that name a peer."""
    page = (root / "docs/results/slideformer.md").read_text(encoding="utf-8")
    runs = Defaults(root)
    for goal, least, peer in (
        ("| 1.8 times torchao", 1.8, "torchao-fp32"),
        ("| 3 times FSDP2", 3.0, "fsdp2"),
    ):
        [line] = [line for line in page.splitlines() if line.startswith(goal)]
        missed = [batch for batch in BATCHES if runs.times(batch, peer) < least]
        assert line.endswith(f"missed from {missed[0]} on |"), line


def test_a_page_that_times_several_gpus_does_not_deny_it(root: Path) -> None:
    page = (root / "docs/results/lsp.md").read_text(encoding="utf-8")
    most = max(row["gpus"] for row in rows_of(root, "lsp/ranks/2x-nvidia-h100-80gb-hbm3"))
    assert most == 2 and "More than two GPUs were not timed." in page
    assert "Several GPUs were not timed" not in page
