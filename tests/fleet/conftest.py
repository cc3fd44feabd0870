"""The command line in this process, on one thread."""

from __future__ import annotations

import pytest

from tests.cli.command import CommandLine


@pytest.fixture
def ondevice(capsys) -> CommandLine:
    return CommandLine(capsys)


@pytest.fixture(autouse=True)
def one_thread():
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
