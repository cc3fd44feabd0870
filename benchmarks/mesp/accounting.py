"""MeSP's memory in MLX at the shapes of the paper's Tables 1, 2 and 4, as `ondevice plan` counts it:
no model of 1.5B or 3B is run.

    python -m benchmarks.mesp.accounting        Qwen2.5-0.5B, 1.5B and 3B; seconds

Weights in 4 bits, float32, SGD, LoRA on all seven projections. `benchmarks.mesp.memory` measures the
first shape, which says how near the count is.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, finish, parse_args
from ondevice.core.registry import method_config
from ondevice.planning.estimate import plan

NEEDS = ()
SHAPES = {
    "Qwen2.5-0.5B": (896, 4864, 24, 14),
    "Qwen2.5-1.5B": (1536, 8960, 28, 12),
    "Qwen2.5-3B": (2048, 11008, 36, 16),
}
"""Hidden size, inner size of the MLP, layers, heads; two heads of keys each."""
RUNS = [(length, 8) for length in (128, 256, 512, 1024)] + [(256, rank) for rank in (4, 16, 32)]
"""Tokens and rank."""
MIB = 2**-20
COLUMNS = [
    {"key": "model", "title": "Shape"},
    {"key": "tokens", "title": "Tokens"},
    {"key": "rank", "title": "Rank"},
    {"key": "weights_bytes", "title": "Weights (MiB)", "digits": 1, "scale": MIB},
    {"key": "streamed_bytes", "title": "streamed", "digits": 1, "scale": MIB},
    {"key": "adapter_bytes", "title": "Adapter (MiB)", "digits": 1, "scale": MIB},
    {"key": "inputs_bytes", "title": "Block inputs (MiB)", "digits": 1, "scale": MIB},
    {"key": "stage_bytes", "title": "Largest stage (MiB)", "digits": 1, "scale": MIB},
    {"key": "step_bytes", "title": "Step (MiB)", "digits": 1, "scale": MIB},
    {"key": "measured_bytes", "title": "measured", "digits": 1, "scale": MIB},
]


def write_config(folder: Path, shape: tuple[int, int, int, int]) -> str:
    """Write the `config.json` of a shape, and return its folder."""
    hidden, inner, layers, heads = shape
    folder.mkdir()
    config = {
        "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 32_768, "rope_theta": 1e6,
        "torch_dtype": "float32", "hidden_act": "silu",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def parts(source: str, tokens: int, rank: int, **more: Any) -> dict[str, int]:
    """Return the plan's bytes by part."""
    values = {"rank": rank, "alpha": 16.0, "bits": 4, "optimizer": "sgd", **more}
    return plan(
        source,
        method_config("mesp", values),
        batch_size=1,
        length_tokens=tokens,
        runtime="mlx",
        evaluates=False,
    ).parts


def measured() -> dict[tuple[int, int], int]:
    """Return the step's bytes of the first shape by tokens and rank, as they were measured."""
    found = {}
    for name, key in (("sequence", "length"), ("rank", "rank")):
        (path,) = (ROOT / f"benchmarks/results/mesp/memory_{name}").glob("*.json")
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            if row["method"] == "MeSP":
                at = (row[key], 8) if key == "length" else (256, row[key])
                found[at] = row["step_bytes"]
    return found


def main() -> None:
    """Count every shape."""
    args = parse_args(__doc__, repeats=1)
    real, rows = measured(), []
    with tempfile.TemporaryDirectory() as scratch:
        for name, shape in SHAPES.items():
            source = write_config(Path(scratch) / name, shape)
            for tokens, rank in RUNS:
                own = parts(source, tokens, rank)
                streamed = parts(source, tokens, rank, weight_placement="streamed")
                rows.append(
                    {
                        "model": name,
                        "tokens": tokens,
                        "rank": rank,
                        "weights_bytes": own["weights"],
                        "streamed_bytes": streamed["weights"],
                        "adapter_bytes": own["adapter"],
                        "inputs_bytes": own["block inputs"],
                        "stage_bytes": own["activations"],
                        "step_bytes": own["block inputs"] + own["activations"],
                        "measured_bytes": real.get((tokens, rank))
                        if name == "Qwen2.5-0.5B"
                        else None,
                    }
                )
    notes = [
        "Counted by `ondevice plan`, not run. Measured: the step's bytes of the first shape, from "
        "`python -m benchmarks.mesp.memory`."
    ]
    finish("mesp/accounting", rows, args, COLUMNS, title="MeSP's memory by accounting", notes=notes)


if __name__ == "__main__":
    main()
