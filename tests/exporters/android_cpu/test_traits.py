"""Block programs of families with traits of their own: the export's check holds them against eager PyTorch."""

from __future__ import annotations

from pathlib import Path

import pytest

from ondevice.core.config import ExportConfig, ModelConfig
from ondevice.core.registry import method_config, target
from ondevice.exporters.base import ExportJob
from ondevice.models import save_tiny


def job(folder: Path, method: str) -> ExportJob:
    settings = ExportConfig(target="android-cpu", lengths_tokens=(16,), check_steps=1)
    return ExportJob(ModelConfig(source=str(folder)), method_config(method, {"rank": 2}), settings)


def test_a_block_program_with_factors_does_what_eager_does(tmp_path: Path) -> None:
    """Granite's factors are folded into the embedding's function and the last norm; a failed check would raise."""
    report = target("android-cpu").export(job(save_tiny(tmp_path / "m", "granite"), "mesp"), tmp_path / "out")
    assert report.check["max_rel_gradient_error"] < 1e-4


@pytest.mark.parametrize(
    ("family", "words"), [("gemma3_text", "norm weights of 1 + w"), ("smollm3", "without a rotary")]
)
@pytest.mark.parametrize("method", ["mesp", "prge"])
def test_a_trait_that_a_program_does_not_do_is_named(family: str, words: str, method: str, tmp_path: Path) -> None:
    problems = target("android-cpu").check(job(save_tiny(tmp_path / "m", family), method))
    assert len(problems) == 1 and words in problems[0]


def test_a_model_whose_blocks_are_unknown_is_refused(tmp_path: Path) -> None:
    from tests.models.test_any_decoder import save

    for method in ("mesp", "prge"):
        (problem,) = target("android-cpu").check(job(save(tmp_path / method, "gpt_neox"), method))
        assert "not known here" in problem
