"""The version of this package, from its distribution's metadata."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from ondevice.core.errors import MissingPackageError

DISTRIBUTION = "ondevice-train"


def own_version() -> str:
    """Return the installed version.

    Raises:
        MissingPackageError: the files are on the path, and the distribution is not installed.
    """
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        raise MissingPackageError(
            f"the metadata of {DISTRIBUTION} is missing: its files are on Python's path, but it is not installed",
            expected=f"an installed {DISTRIBUTION}",
            hint="pip install -e . in the checkout, or pip install ondevice-train",
        ) from None
