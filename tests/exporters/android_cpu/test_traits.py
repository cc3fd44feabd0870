"""Block programs of families with traits of their own: the export's check holds them against eager
PyTorch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ondevice.artifact.manifest import read_manifest
from ondevice.core.config import ExportConfig, ModelConfig
from ondevice.core.registry import method_config, target
from ondevice.exporters.base import ExportJob
from ondevice.methods.mesp.block_functions import BlockFunctions
from ondevice.methods.prge import program as program_module
from ondevice.models import load_model, save_tiny, tiny_model
from tests.programs import marks, program


def job(folder: Path, method: str) -> ExportJob:
    settings = ExportConfig(
        target="android-cpu", lengths_tokens=(16,), check_steps=1, batch_size=2, eval_batch_size=2
    )
    return ExportJob(ModelConfig(source=str(folder)), method_config(method, {"rank": 2}), settings)


KINDS = {
    "granite": (),
    "gemma3_text": (0, 1, 0),
    "lfm2": (0, 1, 0),
    "lfm2_moe": (0, 1),
    "smollm3": (0, 1, 0),
}


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        pytest.param(family, kinds, marks=marks(f"blocks of {family}"))
        for family, kinds in KINDS.items()
    ],
)
def test_a_block_program_has_functions_for_every_kind_of_layer(
    family: str, kinds: tuple[int, ...]
) -> None:
    """Its check has compared gradients with eager PyTorch's; conformance does it once more, against
    float64."""
    folder = program(f"blocks of {family}")
    manifest = read_manifest(folder)
    spec = manifest.program_spec
    assert manifest.check["max_rel_gradient_error"] < 1e-4
    assert spec.kinds == kinds
    assert any(
        name.startswith("block_backward") and name.endswith("_1") for name in spec.methods
    ) == bool(kinds)
    assert ("`_1` for layers 1" in (folder / "README.md").read_text(encoding="utf-8")) == bool(
        kinds
    )


def test_a_window_that_no_row_reaches_makes_no_kind(tmp_path: Path) -> None:
    loaded = load_model(str(save_tiny(tmp_path / "m", "smollm3", layers=3)))
    functions = BlockFunctions(loaded, method_config("mesp"))
    assert functions.kinds(16) == (0, 1, 0)
    functions = BlockFunctions(
        load_model(str(save_tiny(tmp_path / "g", "mistral", sliding_window=7))), functions.config
    )
    assert functions.kinds(16) == functions.kinds(4) == (0, 0)


def test_a_trait_that_a_program_does_not_do_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = job(tmp_path, "prge").export
    dims = tiny_model("llama").dims
    other = replace(dims, traits=replace(dims.traits, qk_norm_all=True))
    with monkeypatch.context() as patch:
        known = tuple(name for name in program_module.IN_PROGRAM if name != "qk_norm_all")
        patch.setattr(program_module, "IN_PROGRAM", known)
        (problem,) = program_module.problems(method_config("prge"), export, other)
    assert not program_module.problems(method_config("prge"), export, other)
    assert "norms of q and k over all heads, which a program of prge's step" in problem
    for family in ("gemma3_text", "granite", "phi3", "smollm3"):
        assert not target("android-cpu").check(job(save_tiny(tmp_path / family, family), "prge"))


def test_a_model_whose_blocks_are_unknown_is_refused(tmp_path: Path) -> None:
    from tests.models.test_any_decoder import save

    for method in ("mesp", "prge"):
        problems = target("android-cpu").check(job(save(tmp_path / method, "gpt_neox"), method))
        assert any("not known here" in problem for problem in problems), problems
