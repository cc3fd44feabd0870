"""Every figure in the sentences of results' pages and of `develop` is the one that was read against
its source.

    python -m tests.docs.test_result_figures        records the figures as the pages have them

`result_figures.txt` has each page's figures in their order. Each rounds a number of the result
files that the page's tables come from, or is computed in `COMPUTED`, and has to go on doing so, or
nobody measured it here and `GIVEN` says what it is. `test_page_figures` has the other pages, with a
source for each figure.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest

from ondevice.exporters import android_npu
from ondevice.exporters.executorch import answers
from ondevice.fleet.privacy import epsilon
from ondevice.methods.prge.program import ROUGH_SCALE
from tests.docs.documents import prose
from tests.docs.test_figures import rows_of
from tests.docs.test_page_figures import (
    FIGURE,
    PAPER,
    RESULT,
    ahead_of_default,
    ahead_of_paper,
    of,
    start,
)

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("result_figures.txt")
PAGES = (
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs/results").glob("*.md"))),
    *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "develop").glob("*.md"))),
    *("runtime_ops/README.md", "android_app/README.md"),
)
CELL = re.compile(r"(?<![\w.,\-/])\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?(?![\w.,]*\d|-[a-z])")
"""In a table that is written by hand every number is a figure."""
VERSION = re.compile(
    r"\b(?:PEFT|QNN|ExecuTorch|`huggingface_hub`|Linux|Android|Python|CUDA|Flower) "
    r"\d+(?:\.\d+)+"
)
"""Of a product whose name stands before it."""
GENERATED = re.compile(r"<!-- generated:.*?<!-- /generated -->", re.DOTALL)
"""Written by `docs/generate.py` from the code."""
NAMED_RESULT = re.compile(r"<!-- results: ([\w/]+)")
SMOLLM2_LAYERS = 30
SMOLLM2_LAYER = 2 * 576 * 576 + 2 * 192 * 576 + 3 * 1536 * 576
"""Weights of its linear layers."""
SCALES = (1, 100, 1e3, 1e-3, 1e-6, 1e-9, 2**-10, 2**-20, 2**-30)
"""From a file's unit to that of a sentence: %, ms, kB, MB, GB, KiB, MiB, GiB."""


def figures(root: Path, page: str) -> list[str]:
    """The figures of a page's sentences and hand-written tables, in their order."""
    text = RESULT.sub("", (root / page).read_text(encoding="utf-8"))
    text = GENERATED.sub("", text)
    text = VERSION.sub("", PAPER.sub("", prose(text)))
    text = re.sub(r"\]\([^)]*\)", "]", text)
    found = []
    for line in text.splitlines():
        found += (CELL if line.lstrip().startswith("|") else FIGURE).findall(line)
    return found


def numbers(value: Any) -> Iterator[float]:
    """Yield the numbers of a result; of a list of them also median and mean."""
    if isinstance(value, dict):
        for part in value.values():
            yield from numbers(part)
    elif isinstance(value, list):
        for part in value:
            yield from numbers(part)
        plain = [part for part in value if isinstance(part, (int, float))]
        if plain:
            yield from (median(plain), fmean(plain))
    elif isinstance(value, str):
        yield from (float(part.replace(",", "")) for part in CELL.findall(value))
    elif isinstance(value, (int, float)):
        yield float(value)


def measured(root: Path, page: str) -> set[float]:
    """The numbers of all result files of a page's tables."""
    names = set(NAMED_RESULT.findall((root / page).read_text(encoding="utf-8")))
    found = set[float]()
    for name in names:
        for path in (root / "benchmarks/results" / name).glob("*.json"):
            result = json.loads(path.read_text(encoding="utf-8"))
            found |= set(numbers([result["rows"], result.get("notes", [])]))
    return found


def rounds_one(figure: str, values: set[float]) -> bool:
    """Return True if the figure is one of the values, in some unit, to its own digits."""
    plain = figure.replace(",", "")
    digits = len(plain.partition("e")[0].partition(".")[2])
    kind = "e" if "e" in plain else "f"
    wanted = float(plain)
    return any(
        float(f"{value * scale:.{digits}{kind}}") == wanted for value in values for scale in SCALES
    )


def blocks(root: Path, of: str, than: str, key: str, name: str = "mesp/blocks") -> float:
    """How many times one program's number is another's."""
    rows = {row["program"]: row for row in rows_of(root, f"{name}/amd-epyc-2-cores")}
    parts = [rows[program][key] for program in (of, than)]
    one, other = (median(part) if isinstance(part, list) else part for part in parts)
    return one / other


def kernels(root: Path, form: str) -> float:
    """How many times the stock kernels' CPU seconds this project's take."""
    stock = f"blocks, {form}, stock kernels"
    return blocks(root, f"blocks, {form}", stock, "step_cpu_s", "mesp/blocks_kernels")


def fleets(key: str, **where: Any) -> Callable[[Path], float]:
    name = "fleet/sst2/2x-nvidia-h200"
    return lambda root: abs(of(root, name, key, **where))


def fewer_liars(root: Path) -> float:
    """Points that 2 liars of 10 cost."""
    name = "fleet/sst2/nvidia-h200"
    trimmed, hostile = (
        of(root, name, "against_central", setting=setting)
        for setting in ("trimmed-10", "hostile-10")
    )
    return trimmed - hostile


def rte(root: Path) -> float:
    """P-RGE's accuracy on RTE after 2,000 steps."""
    where = {"task": "rte", "variant": "diag q4 adam cal256 refresh100", "steps": 2000}
    return of(root, "prge/race/nvidia-h100-80gb-hbm3", "mean", **where, rate=0.005)


def rte_behind(root: Path) -> float:
    name = "prge/quality/nvidia-h100-80gb-hbm3"
    return 100 * (of(root, name, "mean_accuracy", task="rte", method="fo lora-fa") - rte(root))


def sliding(key: str, scale: float) -> Callable[[Path], float]:
    """Of SlideFormer at 7B with 16 rows."""
    name = "slideformer/step/nvidia-h200"
    where = {"shape": "Qwen2.5-7B", "batch": 16, "variant": "slideformer", "group": 0}
    return lambda root: scale * of(root, name, key, **where)


def of_npu(root: Path) -> float:
    """MB of a layer's file."""
    return of(root, "mesp/npu/amd-epyc-2-cores", "program_mb", steps=100) / SMOLLM2_LAYERS


def elapsed(root: Path) -> float:
    """Seconds of a step in products of integers for each CPU second, on two cores."""
    rows = rows_of(root, "mesp/blocks_kernels/amd-epyc-2-cores")
    [row] = [row for row in rows if row["program"] == "blocks, products of integers"]
    return median(row["step_s"]) / median(row["step_cpu_s"])


def unrolled(root: Path) -> float:
    rows = {
        row["form"]: row for row in rows_of(root, "prge/npu_rows/intel-r-xeon-r-processor-2-cores")
    }
    return rows["8 rows unrolled"]["lowering_s"] / rows["one batch of 8"]["lowering_s"]


def weights_of_trl(root: Path) -> float:
    """What a step of DPO does not add, of TRL's peak."""
    ours, _, trl = (
        row
        for row in rows_of(root, "training/trl/nvidia-h100-80gb-hbm3")
        if row["objective"] == "dpo"
    )
    return (ours["peak_bytes"] - ours["above_bytes"]) / trl["peak_bytes"]


def of_fsdp2(root: Path) -> float:
    """FSDP2's seconds a step for each of SlideFormer's, 1.5B and 8 rows."""
    step_s = {
        row["variant"]: median(row["step_s"])
        for row in rows_of(root, "slideformer/step/nvidia-h200")
        if (row["shape"], row["batch"]) == ("Qwen2.5-1.5B", 8) and row.get("step_s")
    }
    return step_s["fsdp2"] / step_s["slideformer"]


def full_on_alpaca(root: Path) -> float:
    where = {"task": "alpaca", "method": "full", "learning_rate": 3e-5}
    return of(root, "lsp/quality/2x-nvidia-h200", "mean_best_loss", **where)


def epsilon_of_answers(root: Path) -> float:
    pytest.importorskip("dp_accounting")
    return epsilon(20.0, 100)


COMPUTED: dict[tuple[str, str], Callable[[Path], float]] = {
    ("docs/results/android.md", "1.6"): unrolled,
    ("docs/results/fleet.md", "4.7"): epsilon_of_answers,
    ("docs/results/mesp.md", "0.61"): elapsed,
    ("docs/results/revffn.md", "1.82"): full_on_alpaca,
    ("docs/results/slideformer.md", "2.54"): of_fsdp2,
    ("docs/results/training.md", "0.84"): weights_of_trl,
    ("docs/results/android.md", "20.2"): of_npu,
    ("docs/results/android.md", "7.1"): lambda root: 2e-6 * SMOLLM2_LAYER,
    ("docs/results/android.md", "3e-2"): lambda root: android_npu.PERTURBATION_SCALE,
    ("docs/results/exits.md", "1.25"): lambda root: answers.NUDGED,
    ("docs/results/exits.md", "1e-4"): lambda root: answers.LOGIT_ERROR["none"],
    ("docs/results/fleet.md", "6.3"): fleets("against_central", setting="dirichlet"),
    ("docs/results/fleet.md", "1.8"): fewer_liars,
    ("docs/results/limits.md", "3e-2"): lambda root: ROUGH_SCALE,
    ("docs/results/limits.md", "9"): rte_behind,
    ("docs/results/limits.md", "0.566"): rte,
    ("docs/results/lsp.md", "0.807"): lambda root: start(root, "lsp", "mean_accuracy"),
    ("docs/results/revffn.md", "10.6"): sliding("gpu_peak_bytes", 1e-9),
    ("docs/results/revffn.md", "99"): sliding("host_bytes", 1e-9),
    ("docs/results/revffn.md", "0.96"): sliding("of_resident", 1.0),
    ("docs/results/revffn.md", "39.6"): lambda root: 100 * (1 - 39.5 / 65.4),
    ("docs/results/limits.md", "1.6"): ahead_of_default,
    ("docs/results/limits.md", "7.6"): ahead_of_paper,
    ("docs/results/mesp.md", "0.9956"): lambda root: of(
        root, "mesp/npu/amd-epyc-2-cores", "min_gradient_cosine", steps=100
    ),
    ("docs/results/mesp.md", "0.28"): lambda root: blocks(
        root, "blocks, float32", "joint graph", "step_s"
    ),
    ("docs/results/mesp.md", "0.015"): lambda root: blocks(
        root, "blocks, float32", "joint graph", "planned_bytes"
    ),
    ("docs/results/mesp.md", "0.24"): lambda root: kernels(root, "products of integers"),
    ("docs/results/mesp.md", "0.75"): lambda root: kernels(root, "float32"),
    ("docs/results/mesp.md", "0.545"): lambda root: start(root, "mesp", "accuracy_before"),
    ("docs/results/mesp.md", "0.756"): lambda root: start(root, "mesp", "mean_accuracy"),
}
"""Figures that come from several numbers, or from another page's result."""

PAPERS = "the paper's"
GIVEN: dict[str, dict[str, str]] = {
    "docs/results/exits.md": {"3.2": "a model's name"},
    "docs/results/fleet.md": {"24": "the machine's memory", "240": "a message's bytes"},
    "docs/results/jetson.md": {"1.97": PAPERS},
    "docs/results/mesp.md": dict.fromkeys(
        ("280", "485", "452", "492", "262.6", "368.4"), PAPERS
    ),
    "docs/results/limits.md": {
        "1": "a size above which a file is sampled", "64": "a width that QNN's compiler needs",
        "255": "the square root of float16's largest number",
    },
    "docs/results/models.md": {
        **dict.fromkeys(("5.17", "5.23"), "a version of transformers"),
        "15": "a limit that the tests keep", "1.6": "the standard error of 500 rows, 85% right",
    },
    "docs/results/planning.md": dict.fromkeys(("10", "5"), "a bound of the rule"),
    "docs/results/prge.md": dict.fromkeys(
        ("91.6", "88.8", "94.2", "1.79", "4.3", "4.70"), PAPERS
    ),
    "docs/results/revffn.md": dict.fromkeys(("14.3e9", "66.7", "57.1"), PAPERS),
    "docs/results/serve.md": dict.fromkeys(
        ("24", "64", "256", "1,048,576"), "a limit that the daemon keeps"
    ),
    "docs/results/slideformer.md": {
        "3.85": "a goal", **dict.fromkeys(("6.53", "428"), "arithmetic over a model's shape"),
    },
    "develop/architecture.md": {
        "1.5": "368,640 numbers in float32", "1e-6": "a tolerance of the tests",
        "2": "a size that is named as an example", "0": "a rank",
    },
    "develop/artifact.md": {
        **dict.fromkeys(("100", "1", "0"), "a shape or a label of the format"),
        "1e-6": "a tolerance of the format",
    },
    "develop/block-programs.md": dict.fromkeys(
        ("64", "0", "1", "2", "32", "4"), "a shape or a size of the format"
    ),
    "develop/fleet-protocol.md": {
        **dict.fromkeys(
            ("1", "2", "3", "4", "8", "11", "29", "32", "33", "38", "59", "239"),
            "bytes of the format",
        ),
        **dict.fromkeys(("0.5", "7", "32767"), "an example of the format"),
        **dict.fromkeys(("6.7", "6.12"), "a version of Linux"),
        "1e-5": "a setting", "200": "what the test asks",
    },
    "runtime_ops/README.md": {"3.24": "a version of CMake"},
    "android_app/README.md": dict.fromkeys(("2", "30", "4"), "a limit that the app keeps"),
}  # fmt: skip
"""By page, the figures that nobody measured here, each with what it is."""


def recorded() -> dict[str, list[str]]:
    """The figures of each page."""
    found: dict[str, list[str]] = {}
    page = ""
    for line in RECORD.read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            found[page] += line.split()
        else:
            page = line
            found[page] = []
    return found


def record(root: Path) -> None:
    """Write the figures as they are."""
    lines = []
    for page in PAGES:
        listed = figures(root, page)
        lines.append(page)
        if listed:
            lines += textwrap.wrap(
                " ".join(listed), 100, initial_indent="  ", subsequent_indent="  "
            )
    RECORD.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_the_figures_of_a_page_are_those_that_were_read_against_their_sources(
    page: str, root: Path
) -> None:
    assert figures(root, page) == recorded().get(page, []), (
        f"{page}: hold what changed against its result, then python -m {__name__} records it"
    )


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_has_a_source(page: str, root: Path) -> None:
    """A result that was measured again takes its sentences with it, and a sentence without a source
    goes."""
    values = measured(root, page)
    sourced = {one for where, one in COMPUTED if where == page} | GIVEN.get(page, {}).keys()
    held = set(recorded().get(page, [])) - sourced
    assert sorted(one for one in held if not rounds_one(one, values)) == []


@pytest.mark.parametrize(("page", "figure"), COMPUTED)
def test_a_computed_figure_is_what_it_is_computed_to(page: str, figure: str, root: Path) -> None:
    value = COMPUTED[page, figure](root)
    digits = len(figure.partition("e")[0].partition(".")[2])
    kind = "e" if "e" in figure else "f"
    assert float(f"{value:.{digits}{kind}}") == float(figure)
    assert figure in figures(root, page)


@pytest.mark.parametrize("page", GIVEN)
def test_a_given_figure_stands_on_its_page(page: str, root: Path) -> None:
    assert sorted(GIVEN[page].keys() - set(figures(root, page))) == []


def test_a_wrong_figure_is_found(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs/page.md"
    page.write_text("It took 0.28 of it, to 2.5e-6.\n\n| rows | 12 | 1,200 | 0.5 s |\n")
    assert figures(tmp_path, "docs/page.md") == ["0.28", "2.5e-6", "12", "1,200", "0.5"]
    assert rounds_one("0.28", {0.2849}) and not rounds_one("0.28", {0.2851})
    assert rounds_one("28", {0.2849}) and rounds_one("1.5", {1.5 * 2**30})
    assert rounds_one("2.5e-6", {2.46e-6}) and not rounds_one("2.5e-6", {2.46e-5})


if __name__ == "__main__":
    record(ROOT)
