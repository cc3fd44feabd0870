"""Every figure in a sentence for readers is a setting, or stands in a committed result.

A figure is a decimal number, a power of ten, or a number with a unit. Tables between result markers are written by
`make docs` from the files and need no entry here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ondevice.core.registry import method_config
from ondevice.exits.check import LOGIT_ERROR
from ondevice.exporters.android_cpu import target as cpu
from tests.docs.documents import prose
from tests.docs.test_figures import rows_of

FOLDERS = ("docs", "docs/methods", "docs/howto", "docs/tutorials")
UNITS = "%|s|ms|seconds|minutes|hours|points|kB|bytes|KiB|MB|GB|TB|MiB|GiB|times"
FIGURE = re.compile(
    rf"(?<![\w.\-/])(?:\d+(?:,\d{{3}})*(?:\.\d+)?(?= ?(?:{UNITS})(?!\w))|\d+(?:\.\d+)?e-?\d+"
    r"|\d+\.\d+(?![\w.]*\d?\.\d))"
)
RESULT = re.compile(r"<!-- results:.*?<!-- /results -->", re.DOTALL)
PAPER = re.compile(r"\[\d{4}\.\d{5}\]")
"""The number of a preprint."""
VERSIONS = {"3.10", "3.11", "3.12", "3.13", "1.5", "0.21", "5.13", "8.7", "1.15", "3.2", "2.5"}
"""Of Python, packages, Linux, a GPU and models."""
SETTINGS: dict[str, dict[str, str]] = {
    "README.md": {"93": "the package's size"},
    "docs/quickstart.md": {"10": "disk that the installation needs", "93": "the package's size"},
    "docs/security.md": dict.fromkeys(
        ("100", "5", "10", "20", "0.1", "512", "8"), "a limit that the daemon keeps"
    ),
    "docs/methods/full.md": dict.fromkeys(("16", "14"), "weights, gradients and moments, by type"),
    "docs/methods/index.md": dict.fromkeys(("12",), "state of a parameter, by type"),
    "docs/methods/lsp.md": {
        **dict.fromkeys(("2", "0.6"), "weights by type: 16 bits and 4.5"),
        "10": "a bound that `auto` takes", "15": "a limit that the run set",
    },
    "docs/methods/mesp.md": {"1e-6": "a tolerance of the tests"},
    "docs/methods/mezo.md": {
        **dict.fromkeys(("0.43", "0.17", "1.05", "0.90"), "a paper's table"),
        "1e-6": "the paper's", **dict.fromkeys(("1e-8", "5e-3"), "rounding, by type"),
    },
    "docs/methods/prge.md": dict.fromkeys(("3e-2", "1e-4"), "what to try"),
    "docs/methods/revffn.md": {"8": "AdamW's moments in float32"},
    "docs/methods/slideformer.md": dict.fromkeys(("12", "8"), "state of a parameter, by type"),
    "docs/howto/data.md": {"99": "a share that the limit's rule names"},
    "docs/howto/evaluate-fuse-chat.md": {"95": "the interval that is printed"},
    "docs/howto/exits.md": dict.fromkeys(
        ("0.4", "1e-3", "5e-3"), "a tolerance of the tests"
    ),
    "docs/howto/export.md": {
        "4.13": "4 bits and 8 bits a scale of 64", "1e-6": "a tolerance of the tests",
        "3e-2": "a scale below which an export warns",
    },
    "docs/howto/fleet.md": {
        "240": "a message of 4 directions and 8 steps", "10": "four messages of a secure round",
        "2": "a limit of files that people carry", "7.4": "an adapter's numbers in float32",
    },
    "docs/howto/models.md": {
        **dict.fromkeys(("93", "253"), "a package's size"), "0.6": "a model's size",
    },
    "docs/howto/preferences.md": {"95": "the interval that is printed"},
    "docs/howto/serve.md": dict.fromkeys(
        ("1", "15", "2", "512", "20", "5"), "a limit that the daemon keeps"
    ),
    "docs/howto/train-on-a-score.md": dict.fromkeys(("3e-2", "1e-1"), "what to try"),
    "docs/tutorials/big-model.md": {"12": "state of a parameter, by type"},
    "docs/tutorials/fleet.md": {"240": "a message of 4 directions and 8 steps"},
    "docs/tutorials/jetson.md": {"6": "the daemon's default limit"},
    "docs/tutorials/phone.md": {"2": "a limit of files that people carry"},
}  # fmt: skip
"""By page, the figures that nobody measured here, each with what it is."""


def of(root: Path, name: str, key: str, **where: Any) -> float:
    """Return one number of a result's only row with these values."""
    [row] = [
        row
        for row in rows_of(root, name)
        if all(row.get(column) == value for column, value in where.items())
    ]
    return float(row[key])


def start(root: Path, method: str, key: str) -> float:
    return of(root, "training/defaults/nvidia-h200", key, method=method, set="sst2")


def race(root: Path, variant: str, steps: int) -> float:
    name = "prge/race/nvidia-h100-80gb-hbm3"
    rates = {"fo full adam": 0.0005, "diag q4 r64 adam refresh100": 0.005}
    return of(root, name, "mean", task="sst2", variant=variant, steps=steps, rate=rates[variant])


def ahead_of_default(root: Path) -> float:
    points = race(root, "fo full adam", 1000) - race(root, "diag q4 r64 adam refresh100", 2000)
    return 100 * points


def ahead_of_paper(root: Path) -> float:
    name = "prge/quality/nvidia-h100-80gb-hbm3"
    first = of(root, name, "mean_accuracy", task="sst2", method="fo lora-fa")
    paper = of(root, name, "mean_accuracy", task="sst2", method="zo q=4", steps=20_000)
    return 100 * (first - paper)


def behind_a_gradient(root: Path) -> float:
    """Points that P-RGE loses with A of activations, after 1,000 steps on SST-2."""
    where = {"task": "sst2", "steps": 1000}
    ours, other = (
        of(root, "prge/race/nvidia-h200", "mean", variant=variant, **where)
        for variant in ("diag q4 r64 adam refresh100", "act q4")
    )
    return 100 * (ours - other)


def planned_within(root: Path) -> float:
    rows = rows_of(root, "planning/accuracy/intel-r-xeon-r-processor-2-cores")
    return 100 * max(
        abs(row["run_ratio"] - 1) for row in rows if "executorch" not in str(row["method"]).lower()
    )


def cosine(form: str, key: str = "gradient_cosine_float32") -> Callable[[Path], float]:
    return lambda root: of(root, "mesp/gradients/amd-epyc-2-cores", key, form=f"blocks, {form}")


def default(method: str, key: str = "learning_rate") -> Callable[[Path], float]:
    return lambda root: getattr(method_config(method), key)


def allowed(quantize: str, kind: str) -> Callable[[Path], float]:
    return lambda root: cpu.TOLERANCE[quantize][kind]


def off_grid(form: str, model: str) -> Callable[[Path], float]:
    name, model = "models/low_bits/amd-epyc-2-cores", f"SmolLM2-135M, {model}"
    return lambda root: of(root, name, "gradient_cosine", form=form, model=model)


def bits_of(form: str) -> Callable[[Path], float]:
    name, model = "models/low_bits/amd-epyc-2-cores", "SmolLM2-135M, tuned"
    return lambda root: of(root, name, "bits", form=form, model=model)


def lost_by_exit(title: str) -> Callable[[Path], float]:
    name = "exits/rounding/2x-nvidia-h200"
    return lambda root: of(root, name, "loss", task="sst2", base="float32", exit=title)


MEASURED: dict[tuple[str, str], Callable[[Path], float]] = {
    ("docs/methods/full.md", "1e-5"): default("full"),
    ("docs/methods/lora.md", "3e-4"): default("lora"),
    ("docs/methods/lsp.md", "3e-5"): default("lsp"),
    ("docs/methods/mezo.md", "1e-5"): default("mezo"),
    ("docs/methods/mezo.md", "1e-3"): default("mezo", "perturbation_scale"),
    ("docs/methods/prge.md", "6.4"): behind_a_gradient,
    ("docs/methods/prge.md", "5e-3"): default("prge"),
    ("docs/methods/prge.md", "1e-2"): default("prge", "perturbation_scale"),
    ("docs/howto/exits.md", "1e-5"): lambda root: LOGIT_ERROR["float32"],
    ("docs/howto/exits.md", "1e-2"): lambda root: LOGIT_ERROR["float16"],
    ("docs/howto/exits.md", "6.4"): lost_by_exit("`gguf` Q4_0, merged"),
    ("docs/howto/exits.md", "3.8"): lost_by_exit("`gguf-pair` Q4_0"),
    ("docs/howto/exits.md", "1.8"): lost_by_exit("`mlx-model` 4 bits, merged"),
    ("docs/howto/export.md", "1e-5"): allowed("none", "loss"),
    ("docs/howto/export.md", "1e-4"): allowed("q4", "loss"),
    ("docs/howto/export.md", "5e-2"): allowed("8da4w", "loss"),
    ("docs/howto/export.md", "1e-3"): allowed("q4", "loss_free"),
    ("docs/howto/export.md", "1e-1"): allowed("8da4w", "loss_free"),
    ("docs/methods/lora.md", "0.545"): lambda root: start(root, "lora", "accuracy_before"),
    ("docs/methods/lora.md", "0.748"): lambda root: start(root, "lora", "mean_accuracy"),
    ("docs/methods/mezo.md", "0.545"): lambda root: start(root, "mezo", "accuracy_before"),
    ("docs/methods/mezo.md", "0.657"): lambda root: start(root, "mezo", "mean_accuracy"),
    ("docs/methods/index.md", "1.6"): ahead_of_default,
    ("docs/methods/index.md", "7.6"): ahead_of_paper,
    ("docs/howto/export.md", "0.997"): cosine("8-bit weights"),
    ("docs/howto/export.md", "0.9997"): cosine("4-bit weights"),
    ("docs/howto/export.md", "0.996"): cosine("4-bit weights, scales in 8 bits"),
    ("docs/howto/export.md", "0.994"): cosine("products of integers"),
    ("docs/howto/export.md", "0.981"): off_grid("int8", "dithered"),
    ("docs/howto/export.md", "0.998"): off_grid("int8", "tuned"),
    ("docs/howto/export.md", "0.692"): off_grid("q4, nearest levels", "dithered"),
    ("docs/howto/export.md", "0.790"): off_grid("q4, levels chosen on rows", "dithered"),
    ("docs/howto/export.md", "0.977"): off_grid("q4, levels chosen on rows", "tuned"),
    ("docs/howto/export.md", "0.976"): off_grid("q4dq, levels chosen on rows", "tuned"),
    ("docs/howto/export.md", "0.815"): off_grid("q4dq, levels chosen on rows", "dithered"),
    ("docs/howto/export.md", "0.703"): off_grid("q4dq, nearest levels", "dithered"),
    ("docs/howto/export.md", "0.891"): off_grid("q4dq, nearest levels", "tuned"),
    ("docs/howto/export.md", "4.55"): bits_of("q4dq, nearest levels"),
    ("docs/howto/export.md", "0.892"): off_grid("q4, nearest levels", "tuned"),
    ("docs/howto/export.md", "0.9"): lambda root: cpu.LEAST["8da8w"]["gradient_cosine"],
    ("docs/howto/export.md", "0.5"): lambda root: cpu.LEAST_COSINE_FLOAT32,
    ("docs/howto/plan-and-doctor.md", "12"): planned_within,
    ("docs/tutorials/big-model.md", "0.92"): lambda root: of(
        root, "slideformer/auto/nvidia-h200", "of_resident", shape="Qwen2.5-7B", batch=8, variant="auto"
    ),
}  # fmt: skip
"""By page and figure, the number of a result or of the code that it rounds."""


def pages(root: Path) -> list[str]:
    found = [path for folder in FOLDERS for path in sorted((root / folder).glob("*.md"))]
    return ["README.md", *(str(path.relative_to(root)) for path in found)]


def figures(root: Path, page: str) -> set[str]:
    """The figures of a page's sentences, without results, code, links' targets and versions."""
    text = RESULT.sub("", (root / page).read_text(encoding="utf-8"))
    text = re.sub(r"\]\([^)]*\)", "]", PAPER.sub("", prose(text)))
    return set(FIGURE.findall(text)) - VERSIONS


def test_every_figure_in_a_sentence_has_a_source(root: Path) -> None:
    for page in pages(root):
        measured = {figure for place, figure in MEASURED if place == page}
        known = measured | set(SETTINGS.get(page, {}))
        found = figures(root, page)
        assert sorted(found - known) == [], f"{page}: measure it and name its result, or cut it"
        assert sorted(measured - found) == [], f"{page}: no longer there; take it off the list"


@pytest.mark.parametrize(("page", "figure"), MEASURED)
def test_a_figure_is_what_its_result_rounds_to(page: str, figure: str, root: Path) -> None:
    value = MEASURED[page, figure](root)
    digits = len(figure.partition("e")[0].partition(".")[2])
    assert float(f"{value:.{digits}{'e' if 'e' in figure else 'f'}}") == float(figure)


def test_a_figure_without_a_source_is_found(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    page = tmp_path / "README.md"
    page.write_text(
        "It reached 0.81, in 3.5 s, with `lr 0.3` ([a](b-0.7.md)), 1,200 MB, 12 rows, 2e-5."
    )
    assert figures(tmp_path, "README.md") == {"0.81", "3.5", "1,200", "2e-5"}


def test_the_readme_s_half_is_a_half(root: Path) -> None:
    """The heading above its table."""
    assert "## Half of the memory" in (root / "README.md").read_text(encoding="utf-8")
    [path] = (root / "benchmarks/results/mesp/trainer").glob("*.json")
    peaks = {
        row["method"]: max(row["peak_bytes"]) for row in rows_of(root, f"mesp/trainer/{path.stem}")
    }
    assert peaks["ondevice, mesp"] < 0.55 * peaks["peft + Trainer"]
