"""No step wakes torch's own threads: they spin for milliseconds after a call, on cores that the
runtime's threads need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ondevice.api import export as artifacts
from ondevice.api.runfile import RunConfig
from ondevice.artifact.manifest import ANSWERS
from ondevice.models.tiny import save_tiny
from tests.shared import cached

pytest.importorskip("executorch.exir")
if sys.platform != "linux":
    pytest.skip("threads are counted in Linux's /proc", allow_module_level=True)

SHARED = 32_768
"""Elements above which torch shares a copy between its threads."""
SIZES = {"layers": 1, "hidden": 128, "heads": 2, "kv_heads": 1}
VOCAB = {"blocks": SHARED + 8, "prge": 264}
TOKENS = 264
RUNS = {
    "blocks": {
        "method.name": "mesp",
        "method.loss_tiles": 8,
        "export.lengths_tokens": [TOKENS],
        "export.context_tokens": 24,
        "export.answers": "packed",
    },
    "prge": {
        "method.name": "prge",
        "method.queries": 1,
        "method.rank": 128,
        "method.target_modules": ["q_proj", "o_proj", "down_proj"],
        "export.loss": "plain",
        "export.lengths_tokens": [16],
    },
}
COMMON = {"export.batch_size": 1, "export.eval_batch_size": 1, "export.check_steps": 1}

# Torch first, as in a notebook; its pool has one more thread, which is asleep before and after.
WOKEN = """
import sys, time
from pathlib import Path
import torch
torch.set_num_threads(2)
tasks = Path("/proc/self/task")
before = set(tasks.iterdir())
torch.ones({shared} * 4) + 1.0
pool = set(tasks.iterdir()) - before
assert len(pool) == 1, pool

def switches():
    counts = []
    for task in sorted(pool):
        until = time.monotonic() + 60
        while True:
            fields = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
            if fields["State"].split()[0] == "S":
                break
            assert time.monotonic() < until, "torch's thread does not go to sleep"
            time.sleep(0.001)
        counts.append([int(fields[kind + "_ctxt_switches"]) for kind in ("voluntary", "nonvoluntary")])
    return counts

def woken(run):
    before = switches()
    run()
    return switches() != before

import numpy as np
{setup}
run()  # loads what a first call loads
assert not woken(run), "the step woke torch's threads"
large = torch.zeros({shared} * 4)
assert woken(lambda: large + 1.0), "nothing can be seen"
"""
STEP = """
from ondevice.api.open import open_artifact
session = open_artifact(sys.argv[1])
ids = np.arange(session.lengths_tokens[0])[None] % 200
def run():
    session.step(ids, ids, 0, 1e-3)
wide = [int(np.prod(port.shape)) for one in session.spec.methods.values() for port in one.outputs]
assert max(wide) > {least}, wide
"""
# A token of the answer: what reads a prompt is ExecuTorch's attention, which multiplies with the
# library that torch has, in that library's threads.
ANSWER = """
from ondevice.exporters.executorch.packed import PackedModel
model = PackedModel(Path(sys.argv[1]))
model.feed([1, 2, 3])
def run():
    assert model.feed([4]).size > {least}
"""


def program(name: str) -> Path:
    """A program whose outputs torch would copy with its threads: hidden states, logits, an
    adapter."""

    def export(place: Path) -> Path:
        source = save_tiny(place / "model", "llama", vocab=VOCAB[name], **SIZES)
        settings = {"model.source": str(source), **COMMON, **RUNS[name]}
        return artifacts.export(RunConfig.load(None, settings), place / "program").path

    return cached(f"threads, {name}", json.dumps([SIZES, VOCAB, COMMON, RUNS[name]]), export)


@pytest.mark.parametrize(
    ("name", "inside", "setup"),
    [("blocks", "", STEP), ("prge", "", STEP), ("blocks", ANSWERS, ANSWER)],
    ids=["block program", "program of P-RGE", "packed answer"],
)
def test_a_step_wakes_none_of_torchs_threads(name: str, inside: str, setup: str) -> None:
    free = {key: value for key, value in os.environ.items() if not key.startswith("OMP_")}
    code = WOKEN.format(shared=SHARED, setup=setup.format(least=SHARED))
    done = subprocess.run(
        [sys.executable, "-c", code, str(program(name) / inside)],
        env=free,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
