"""The page of RevFFN names the families that the method takes."""

from __future__ import annotations

import re
from pathlib import Path

from ondevice.core.errors import ModelError
from ondevice.methods.revffn.config import check_family
from ondevice.models.load import tiny_model
from ondevice.models.registry import family_classes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "methods" / "revffn.md"


def is_taken(family: str) -> bool:
    try:
        check_family(tiny_model(family).dims)
    except ModelError:
        return False
    return True


def test_the_page_names_every_family_that_revffn_takes() -> None:
    line = next(line for line in PAGE.read_text().splitlines() if line.startswith("Families: "))
    named = re.findall(r"`(\w+)`", line.partition(";")[0])
    assert sorted(named) == sorted(filter(is_taken, family_classes()))
