"""Block programs of families with traits of their own: the export's check holds them against eager PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

from ondevice.artifact.manifest import read_manifest
from ondevice.core.config import ExportConfig, ModelConfig
from ondevice.core.registry import method_config, target
from ondevice.exporters.base import ExportJob
from ondevice.methods.mesp.blocks import BlockFunctions
from ondevice.models import load_model, save_tiny


def job(folder: Path, method: str) -> ExportJob:
    settings = ExportConfig(target="android-cpu", lengths_tokens=(16,), check_steps=1, batch_size=2, eval_batch_size=2)
    return ExportJob(ModelConfig(source=str(folder)), method_config(method, {"rank": 2}), settings)


@pytest.mark.parametrize(
    ("family", "sizes", "kinds"),
    [
        ("granite", {}, ()),
        ("gemma3_text", {"layers": 3}, (0, 1, 0)),
        ("smollm3", {"layers": 3}, (0, 1, 0)),
    ],
)
def test_a_block_program_does_what_eager_does(family: str, sizes: dict, kinds: tuple, tmp_path: Path) -> None:
    """Factors are folded into weights, and every kind of layer has functions; a failed check would raise."""
    report = target("android-cpu").export(job(save_tiny(tmp_path / "m", family, **sizes), "mesp"), tmp_path / "out")
    assert report.check["max_rel_gradient_error"] < 1e-4
    spec = read_manifest(tmp_path / "out").program_spec
    assert spec.kinds == kinds
    assert ("block_backward_2x16_1" in spec.methods) == bool(kinds)
    assert (f"`_1` for layers {1}" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")) == bool(kinds)


def test_a_window_that_no_row_reaches_makes_no_kind(tmp_path: Path) -> None:
    loaded = load_model(str(save_tiny(tmp_path / "m", "smollm3", layers=3)))
    functions = BlockFunctions(loaded, method_config("mesp"))
    assert functions.kinds(16) == (0, 1, 0)
    functions = BlockFunctions(load_model(str(save_tiny(tmp_path / "g", "mistral", sliding_window=7))), functions.config)
    assert functions.kinds(16) == functions.kinds(4) == (0, 0)


@pytest.mark.parametrize(
    ("family", "words"), [("gemma3_text", "norm weights of 1 + w"), ("smollm3", "without a rotary")]
)
def test_a_trait_that_a_program_does_not_do_is_named(family: str, words: str, tmp_path: Path) -> None:
    problems = target("android-cpu").check(job(save_tiny(tmp_path / "m", family), "prge"))
    assert len(problems) == 1 and words in problems[0]


def test_a_model_whose_blocks_are_unknown_is_refused(tmp_path: Path) -> None:
    from tests.models.test_any_decoder import save

    for method in ("mesp", "prge"):
        (problem,) = target("android-cpu").check(job(save(tmp_path / method, "gpt_neox"), method))
        assert "not known here" in problem
