"""The program with fused CUDA kernels, run by Triton's interpreter on the CPU, against the plain
program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.interpreter import needs_interpreter

CASES = (
    {},
    {"estimator": "one_sided"},
    {"noise": "rademacher", "top_layers": 1, "rank": 3},
    {"noise": "rademacher", "estimator": "one_sided"},
)


@needs_interpreter
def test_the_fused_kernels_make_the_same_step(root: Path) -> None:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
    }  # read when a kernel is decorated
    done = subprocess.run(
        [sys.executable, "-m", "tests.methods.prge.test_cuda"],
        capture_output=True,
        text=True,
        cwd=root,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["same"] * len(CASES)


def main() -> None:
    """Three steps of each case by both programs; the adapter is compared and handed on."""
    import torch

    from ondevice.methods.prge.config import PrgeConfig
    from ondevice.methods.prge.cuda import CudaPrgeProgram
    from ondevice.methods.prge.layout import AdapterLayout
    from ondevice.methods.prge.step import PrgeProgram
    from ondevice.models.load import tiny_model
    from ondevice.runtime_ops import torch_ops
    from tests.methods.reference import batch

    for values in CASES:
        config, programs = PrgeConfig(**{"queries": 3, "rank": 4, **values}), []
        for kind in (PrgeProgram, CudaPrgeProgram):
            loaded = tiny_model("llama")
            layout = AdapterLayout.build(loaded.dims, config, 4)
            programs.append(kind(loaded.family, layout, config, torch_ops.noise(config.noise)))
        adapter = torch.zeros(layout.size)
        for step in range(3):
            ids, labels = (torch.from_numpy(values) for values in batch(2, seed=step))
            scalars = torch.tensor([4]), torch.tensor([step]), torch.tensor([0.05])
            with torch.no_grad():
                plain, fused = (
                    p.train_step(ids, labels, adapter.clone(), *scalars) for p in programs
                )
            for ours, theirs in zip(fused, plain, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-4)
            adapter = plain[2]
        print("same" if float(adapter.abs().max()) > 0 else "did not move")


if __name__ == "__main__":
    main()
