"""The command line in this process, on one thread."""

from tests.cli.conftest import ondevice, one_thread

__all__ = ["ondevice", "one_thread"]
