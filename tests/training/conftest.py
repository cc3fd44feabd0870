"""One run that others are held against."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.bigram import BigramSession, train


@pytest.fixture(scope="session")
def whole(tmp_path_factory) -> tuple[Path, BigramSession]:
    """60 steps in one go."""
    out, session = tmp_path_factory.mktemp("whole"), BigramSession()
    train(out, 60, session, checkpoint_every=25)
    return out, session
