"""The tiny models: what a plan reads of them without transformers is what transformers builds."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ondevice.models.registry import family_classes
from ondevice.models.tiny import tiny_dims

WITHOUT = """
import sys
sys.modules["transformers"] = sys.modules["torch"] = None
from ondevice.models import read_dims
print(read_dims("tiny:qwen2_moe").layers)
"""


@pytest.mark.parametrize("family", list(family_classes()))
def test_dimensions_are_those_of_the_model(family: str) -> None:
    pytest.importorskip("transformers")
    from ondevice.models.load import tiny_model

    assert tiny_dims(family) == (tiny_model(family).dims, family_classes()[family])


def test_dimensions_need_neither_torch_nor_transformers() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
