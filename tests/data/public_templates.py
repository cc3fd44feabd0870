"""The public chat templates in the wheel of `trl`, found and not imported, and a tokenizer with their marks."""

from __future__ import annotations

import os
import re
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest

_MARK = re.compile(
    r"<[|｜][^<>{}'\"\s]{1,40}?[|｜]?>|<[^<>{}'\"\s/|｜]{1,30}[|｜]>|</?[a-z_]{3,30}>|\[/?[A-Z_]{3,20}\]"
)
_WORDS = "Eight. A cat has four legs. Name a fruit. Apple. Pear. Another? weather town Ulm rain It rains."


def folder() -> Path:
    """Return the wheel's templates; without it the tests are skipped, and in CI they fail."""
    try:
        return Path(str(distribution("trl").locate_file("trl/chat_templates")))
    except PackageNotFoundError:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip("pip install --no-deps trl==1.15.0")


def names() -> list[str]:
    """Return the templates of the wheel; none where it is not installed."""
    try:
        return sorted(path.stem for path in folder().glob("*.jinja"))
    except (PackageNotFoundError, pytest.skip.Exception):
        return []


def tokenizer_for(template: str) -> Any:
    """Return a byte-level tokenizer that was trained on a few words, with a template and all marks in it."""
    from transformers import PreTrainedTokenizerFast

    from tests.trained_tokenizers import byte_level

    tokenizer = byte_level([_WORDS], 400, ["<s>", "</s>"])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    source = (folder() / f"{template}.jinja").read_text(encoding="utf-8")
    wrapped.add_tokens(sorted(set(_MARK.findall(source)) - {"<s>", "</s>"}), special_tokens=True)
    wrapped.chat_template = source
    return wrapped
