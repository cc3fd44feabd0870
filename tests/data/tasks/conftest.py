"""Tokenizers with the templates of public models."""

from __future__ import annotations

from typing import Any

import pytest

from tests.data.public_templates import tokenizer_for


@pytest.fixture(scope="module")
def qwen2_5() -> Any:
    return tokenizer_for("qwen2_5")


@pytest.fixture(scope="module")
def qwen3() -> Any:
    return tokenizer_for("qwen3")
