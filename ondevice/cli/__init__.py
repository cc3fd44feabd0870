"""The command line: one file a verb, and no logic of its own."""

from __future__ import annotations


def main() -> None:
    """Entry point of `ondevice`; every mistake of a user ends in a message and an exit code."""
    from ondevice.cli.app import run

    run()
