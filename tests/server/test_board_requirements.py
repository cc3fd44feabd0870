"""The packages that a board installs from an artifact's requirements file are enough for the daemon."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ondevice.core.registry import target as find_target


@pytest.mark.parametrize("target", ["jetson", "cuda-server"])
def test_every_package_of_the_extra_serve_is_pinned(target: str, root: Path) -> None:
    extra = re.search(r"^serve = \[(.*)\]$", (root / "pyproject.toml").read_text(), re.MULTILINE)
    assert extra is not None
    wanted = set(re.findall(r'"([\w-]+)', extra[1]))
    assert "fastapi" in wanted
    for name, text in find_target(target).data.requirements.items():
        assert wanted <= set(re.findall(r"^([\w-]+)==", text, re.MULTILINE)), name
