"""Child processes of Python: how every one of them is started."""

from __future__ import annotations

import sys


def python_command(*arguments: str, python: str | None = None) -> list[str]:
    """Return the command that runs Python on `arguments`, such as `-m NAME`.

    With `-P`, because `-m` and `-c` import from the working folder first, where others may write: a `pip.py` there
    would run in place of pip.

    Args:
        python: another interpreter than this one.
    """
    return [python or sys.executable, "-P", *arguments]
