"""P-RGE's options beyond the paper: what each should cost, what it costs, and when it helps.

python -m benchmarks.prge.options --programs build/programs --record      kept memory figures are reused
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.common import add_arguments, finish, median, parse_args
from benchmarks.prge.forms import Form, Forms, growths
from benchmarks.prge.programs import add_programs, folder_of

NEEDS = ("torch",)

LENGTH, BATCH = 64, 2
TOP = 10
COLUMNS = [
    {"key": "option", "title": "Option"},
    {"key": "base", "title": "Against"},
    {"key": "option_s", "title": "Step (s)", "digits": 3},
    {"key": "base_s", "title": "Base's step (s)", "digits": 3},
    {"key": "predicted_ratio", "title": "Predicted", "digits": 2},
    {"key": "predicted_with_head_ratio", "title": "With the head", "digits": 2},
    {"key": "measured_ratio", "title": "Measured", "digits": 2},
    {"key": "growth_bytes", "title": "Memory (MB)", "digits": 1, "scale": 1e-6},
    {"key": "base_growth_bytes", "title": "Base's memory (MB)", "digits": 1, "scale": 1e-6},
    {"key": "when", "title": "When it helps"},
]
OPTIONS: dict[str, tuple[dict[str, Any], str, dict[str, Any], str]] = {
    "one-sided, q = 4": (
        {"queries": 4, "estimator": "one_sided"}, "central, q = 4", {"queries": 4},
        "if forwards are the cost: q + 1 copies give q directions, central needs 2q; the estimate keeps a "
        "second-order bias and the step is normalised, so it wants its own learning rate",
    ),
    "one-sided, q = 7": (
        {"queries": 7, "estimator": "one_sided"}, "central, q = 4", {"queries": 4},
        "seven directions for the forwards of four, if the variance of the estimate is the limit",
    ),
    f"top_layers = {TOP}, q = 4": (
        {"queries": 4, "top_layers": TOP}, "all layers, q = 4", {"queries": 4},
        "with several queries: the lower layers run once for all copies; also a smaller trained subspace",
    ),
    f"top_layers = {TOP}, q = 1": (
        {"queries": 1, "top_layers": TOP}, "all layers, q = 1", {"queries": 1},
        "less with one query: only two copies share the prefix",
    ),
    "Rademacher noise, q = 4": (
        {"queries": 4, "noise": "rademacher"}, "Gaussian noise, q = 4", {"queries": 4},
        "if a generator's bits must equal on every backend; time only if noise is a visible share, as with many "
        "adapters and few tokens",
    ),
    "regenerated noise (master), q = 4": (
        {"queries": 4}, "Algorithm 1's copies, q = 4", {"queries": 4, "algorithm1": True},
        "memory: one state instead of 2q; the noise is made twice instead of once",
    ),
}  # fmt: skip


def option_forms(model: str) -> dict[str, tuple[Form, Form]]:
    """Option to its form and its base's."""
    return {
        name: (Form(LENGTH, BATCH, values, model=model), Form(LENGTH, BATCH, base, model=model))
        for name, (values, _, base, _) in OPTIONS.items()
    }


def predictions(values: dict[str, Any], base: dict[str, Any], dims: Any) -> dict[str, float]:
    """Expected time over the base's: by blocks run, and with the head counted as well (products of
    one token)."""
    blocks = sum(inputs * outputs for inputs, outputs in map(dims.linear_shape, (
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    )))  # fmt: skip
    head = dims.hidden * dims.vocab

    def cost(settings: dict[str, Any], with_head: bool) -> float:
        copies = (
            settings["queries"] + 1
            if settings.get("estimator") == "one_sided"
            else 2 * settings["queries"]
        )
        top = min(settings.get("top_layers") or dims.layers, dims.layers)
        layers = (dims.layers - top) + copies * top
        return layers * blocks + copies * head if with_head else layers

    return {
        "predicted_ratio": cost(values, False) / cost(base, False),
        "predicted_with_head_ratio": cost(values, True) / cost(base, True),
    }


def state_bytes(form: Form, forms: Forms) -> int:
    """Return what the form keeps from step to step: B, or 2q copies of it (float32)."""
    copies = 2 * form.values["queries"] if form.values.get("algorithm1") else 1
    return 4 * copies * forms.program(form.values).layout.size


def option_rows(
    options: dict[str, tuple[Form, Form]],
    seconds: dict[str, dict[Form, list[float]]],
    growth: dict[Form, int],
    forms: Forms,
) -> list[dict[str, Any]]:
    """Predictions next to measurements; memory is what the step and its state add to the
    weights."""
    rows = []
    for name, pair in options.items():
        option_s, base_s = (seconds[name][form] for form in pair)
        values, base_name, base_values, when = OPTIONS[name]
        states = [state_bytes(form, forms) for form in pair]
        rows.append({
            "option": name,
            "base": base_name,
            "length": LENGTH,
            "rows": BATCH,
            "option_s": option_s,
            "base_s": base_s,
            **predictions(values, base_values, forms.dims),
            "measured_ratio": median(option_s) / median(base_s),
            "growth_bytes": growth[pair[0]] + states[0],
            "base_growth_bytes": growth[pair[1]] + states[1],
            "state_bytes": states[0],
            "base_state_bytes": states[1],
            "when": when,
        })  # fmt: skip
    return rows


def arguments(parser: argparse.ArgumentParser) -> None:
    add_programs(parser)
    add_arguments(parser, "--note")


def main() -> None:
    args = parse_args(__doc__, arguments)
    options = option_forms(args.model)
    with folder_of(args) as folder:
        growth = growths(
            list(dict.fromkeys(form for pair in options.values() for form in pair)), folder
        )
    forms = Forms(args.model)
    seconds = {name: forms.seconds(pair, args.repeats) for name, pair in options.items()}
    title = (
        f"Options beyond the paper on {args.model.split(':')[-1]}, {LENGTH} tokens, eager PyTorch"
    )
    finish(
        "prge/options",
        option_rows(options, seconds, growth, forms),
        args,
        COLUMNS,
        title=title,
        notes=args.note,
    )


if __name__ == "__main__":
    main()
