"""A round as a picture: what a camera would see, turned and small, gives the file's bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ondevice.fleet import qr
from ondevice.fleet.carry import MOST_BYTES, Parcel, files_of
from tests.fleet.fleets import charter, fails

pytest.importorskip("segno", reason="segno is not installed; try: make fleet-test")
pytest.importorskip("zxingcpp", reason="zxing-cpp is not installed; try: make fleet-test")


@pytest.mark.flower
def test_a_picture_of_a_round_gives_its_bytes(tmp_path: Path) -> None:
    from PIL import Image

    first = files_of(Parcel(charter().to_bytes(), 3, [], b"t" * 33))[0]
    largest = bytes(np.random.default_rng(0).integers(0, 256, MOST_BYTES, dtype=np.uint8))
    for place, data in enumerate((first, largest)):
        file = tmp_path / f"geräte {place}.png"
        qr.write(data, file)
        assert qr.read(file) == data
        assert qr.shown(data).count("\n") > 20
        turned = Image.open(file).convert("L").rotate(7, expand=True, fillcolor=255)
        turned.resize((turned.width * 3 // 4, turned.height * 3 // 4)).save(tmp_path / "seen.jpg")
        assert qr.read(tmp_path / "seen.jpg") == data
    plain = tmp_path / "round.odfleet"
    plain.write_bytes(first)
    assert qr.read(plain) == first
    Image.new("L", (90, 90), 255).save(tmp_path / "white.png")
    with fails("one"):
        qr.read(tmp_path / "white.png")
    plain.rename(tmp_path / "no.png")
    with fails(None):
        qr.read(tmp_path / "no.png")
