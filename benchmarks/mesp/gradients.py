"""How near the gradients of block programs are, by the form of their weights: what an export
checks, on SmolLM2-135M.

    python -m benchmarks.mesp.gradients                     all layers, 8 rows of 32 tokens, every form; minutes
    python -m benchmarks.mesp.gradients --layers 2          its first layers
    python -m benchmarks.mesp.gradients --forms int8,8da8w  some of: none, int8, q4, q4dq, 8da8w, 8da4w

`--out` is written after each form: a run that is ended keeps what it measured.

Each program runs in the ExecuTorch runtime, at an adapter that is not zero. Its gradients are held
against automatic differentiation in eager PyTorch, over the same rounded weights and over
float32's.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.committed import write
from benchmarks.common import finish, parse_args, result
from benchmarks.mesp.blocks import ALPHA, FORMS, MODEL, RANK, SEED

NEEDS = ("executorch",)
COLUMNS = [
    {"key": "form", "title": "Form"},
    {"key": "layers", "title": "Layers"},
    {
        "key": "max_rel_gradient_error",
        "title": "Same weights: largest relative error of a tensor",
        "digits": 6,
    },
    {"key": "gradient_cosine", "title": "cosine", "digits": 4},
    {"key": "median_gradient_cosine", "title": "median tensor's", "digits": 4},
    {"key": "min_gradient_cosine", "title": "least", "digits": 4},
    {"key": "gradient_cosine_float32", "title": "Float32's weights: cosine", "digits": 4},
    {"key": "median_gradient_cosine_float32", "title": "median tensor's", "digits": 4},
    {"key": "min_gradient_cosine_float32", "title": "least", "digits": 4},
]


def measure(form: str, model: str, rows: int, tokens: int, folder: Path) -> dict[str, Any]:
    """What the export of one form measures."""
    from ondevice.api.export import export
    from ondevice.api.runfile import RunConfig

    values = {
        "model.source": model,
        "method.name": "mesp",
        "method.rank": RANK,
        "method.alpha": ALPHA,
        "export.target": "android-cpu",
        "export.quantize": form,
        "export.lengths_tokens": [tokens],
        "export.batch_size": rows,
        "export.eval_batch_size": rows,
        "export.check_steps": 1,
        "train.seed": SEED,
    }
    report = export(RunConfig.load(None, values), folder / form)
    found = {column["key"]: report.check.get(column["key"]) for column in COLUMNS[2:]}
    return {"form": FORMS[form], **found}


def main() -> None:
    """Export every form in turn."""

    def more(parser: Any) -> None:
        parser.add_argument("--layers", type=int, default=0, help="of the model; 0 is all")
        parser.add_argument("--tokens", type=int, default=32)
        parser.add_argument("--rows", type=int, default=8)
        parser.add_argument("--forms", default=",".join(FORMS))

    args = parse_args(__doc__, more, repeats=1)
    told: dict[str, Any] = {
        "columns": COLUMNS,
        "title": "Gradients of block programs by the form of their weights",
        "notes": [
            f"SmolLM2-135M, {args.rows} rows of {args.tokens} tokens of text, rank {RANK} on all seven linear layers; "
            "each A and each B is a tensor."
        ],
        "show_versions": ("torch", "executorch"),
    }
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder, model = Path(scratch), MODEL
        if args.layers:
            model = str(shortened(args.layers, folder / "model"))
        for form in args.forms.split(","):
            rows.append(
                {
                    **measure(form, model, args.rows, args.tokens, folder),
                    "layers": args.layers or 30,
                }
            )
            print(rows[-1], flush=True)
            if args.out:
                write(result("mesp/gradients", rows, **told), args.out)
    finish("mesp/gradients", rows, args, **told)


def shortened(layers: int, folder: Path) -> Path:
    """A model of SmolLM2's first layers, in a folder."""
    from benchmarks.mesp.joint_graph import load

    loaded = load(layers)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
