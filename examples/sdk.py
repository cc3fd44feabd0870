"""The Python API from end to end on a tiny random model: no download, about a minute, most of it
the export.

python examples/sdk.py [FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

import ondevice
from ondevice.data import pad_examples
from ondevice.training.events import Step

ROWS = Path(__file__).resolve().parent / "data"
MODEL = "tiny:llama"
TASK = "sst2"


def main(out: Path) -> None:
    """Train, export, step the program, evaluate, fuse; everything is written below `out`."""
    # A run file as Python values; `RunConfig.load(Path("run.yaml"), {...})` puts values over a
    # file.
    config = ondevice.RunConfig.load(
        None,
        {
            "model.source": MODEL,
            "data.path": ROWS / "reviews_train.jsonl",
            "data.task": TASK,
            "method.name": "prge",
            "method.queries": 2,
            "method.rank": 4,
            "method.subspace": "random",  # what a program trains; alone, PyTorch takes the subspace of a gradient
            "train.steps": 4,
            "train.batch_size": 2,
            "train.out": out / "run",
            "export.lengths_tokens": [128],
            "export.generator": "op",  # this project's kernels: a smaller program, and a quicker export
            "export.loss": "op",
        },
    )

    # Train in eager PyTorch. Sinks are called with every event of the run.
    losses: list[float] = []

    def collect(event: object) -> None:
        if isinstance(event, Step):
            losses.append(event.loss)

    run = ondevice.train(config, overwrite=True, sinks=[collect])
    print(
        f"eager: {run.result.steps} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}, adapter in {run.adapter}"
    )

    # Export the same training step as a program. It is checked against eager PyTorch before it is
    # written.
    report = ondevice.export(config, out / "artifact", overwrite=True)
    print(
        f"program: {report.program_bytes} bytes, loss error {report.check['max_rel_loss_error_replayed']:.1e}"
    )

    # Open the program in the ExecuTorch runtime and step it by hand.
    session = ondevice.open_artifact(out / "artifact")
    loaded = ondevice.load_model(MODEL)
    rows = ondevice.read_dataset(
        ROWS / "reviews_train.jsonl", loaded.tokenizer, task=TASK, max_length_tokens=128
    )
    for step, item in enumerate(rows.items[:2]):
        batch = pad_examples([item.example], 128, loaded.tokenizer.pad_token_id)
        result = session.step(batch.ids, batch.labels, step, learning_rate=1e-3)
        print(
            f"program: step {step}, loss {result.loss:.3f}, projected gradients {result.projected_gradients}"
        )
    ondevice.save_adapter(session.adapter(), out / "stepped")
    session.close()

    # The same model, before and after, in either runtime.
    valid = ROWS / "reviews_valid.jsonl"
    before = ondevice.evaluate(out / "artifact", valid, most_rows=8)
    after = ondevice.evaluate(out / "artifact", valid, most_rows=8, adapter=run.adapter)
    eager = ondevice.evaluate(MODEL, valid, task=TASK, most_rows=8, adapter=run.adapter)
    print(
        f"evaluation: loss {before.loss:.4f} -> {after.loss:.4f} in ExecuTorch, {eager.loss:.4f} in PyTorch"
    )

    # Merge the adapter into the weights; the result is checked to be base plus adapter.
    fused = ondevice.fuse(MODEL, run.adapter, out / "fused")
    print(f"fused: differs from the base by {fused.max_abs_difference_from_base:.1e}")
    print(f"       and from base plus adapter by {fused.max_abs_difference_from_adapter:.1e}")

    # A zeroth-order run is its seed and its scalars: the log rebuilds the adapter.
    rebuilt = ondevice.replay(out / "run")
    saved = ondevice.load_adapter(run.adapter)
    same = all((rebuilt.tensors[name] == value).all() for name, value in saved.tensors.items())
    print(f"replayed from the log: {'the same bits' if same else 'other bits'}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/sdk"))
