"""The one exception of this package."""

from __future__ import annotations


class Refused(ValueError):
    """Content from outside is damaged, of another kind, or over a limit; a caller names the file."""
