"""A round's file as a QR code on a screen or on paper, and back from a picture of one."""

from __future__ import annotations

import io
from pathlib import Path

from ondevice.artifact.files import atomic_write
from ondevice.core.errors import FleetError, MissingPackageError

PICTURES = (".png", ".jpg", ".jpeg")
_HINT = "pip install 'ondevice-train[fleet-qr]'"


def write(data: bytes, file: Path) -> None:
    """Write a QR code of `data`, 2,953 bytes at most, as a PNG.

    Raises:
        MissingPackageError: segno is not installed.
    """
    out = io.BytesIO()
    _code(data).save(out, kind="png", scale=4)
    atomic_write(file, out.getvalue())


def shown(data: bytes) -> str:
    """Return a QR code of `data` as text for a terminal, two rows of squares a line; raises as
    `write`."""
    out = io.StringIO()
    _code(data).terminal(out, compact=True)
    return out.getvalue()


def _code(data: bytes):
    try:
        import segno
    except ImportError:
        raise MissingPackageError("segno is not installed", hint=_HINT) from None
    return segno.make_qr(data, error="l", mode="byte")


def read(file: Path) -> bytes:
    """Return a file's bytes; of a picture those of the QR code in it.

    Raises:
        FleetError: the picture shows no QR code that can be read.
        MissingPackageError: zxing-cpp is not installed.
    """
    if file.suffix.lower() not in PICTURES:
        return file.read_bytes()
    try:
        import numpy as np
        import zxingcpp
        from PIL import Image
    except ImportError:
        raise MissingPackageError("zxing-cpp and Pillow are not installed", hint=_HINT) from None
    try:
        picture = np.asarray(Image.open(file).convert("L"))
    except (OSError, Image.DecompressionBombError) as error:
        raise FleetError(f"{file} is not a picture", received=str(error)) from None
    found = zxingcpp.read_barcodes(picture, formats=zxingcpp.BarcodeFormat.QRCode)
    if len(found) != 1:
        raise FleetError(
            f"{file} shows {len(found)} readable QR codes",
            expected="one",
            hint="take a sharper picture of one",
        )
    return bytes(found[0].bytes)
