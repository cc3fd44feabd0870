"""A phone's key and signature, written by the app's Kotlin (`FleetTest.aReplyIsSignedByTheKeyThatTheCharterNames`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from ondevice.fleet.carry import parcel_of
from ondevice.fleet.codes import Refusal
from ondevice.fleet.keys import REPLY_DOMAIN, fingerprints, verify

pytestmark = pytest.mark.flower
pytest.importorskip("cryptography")

PUBLIC = (
    "ecdsa-sha2-nistp384 AAAAE2VjZHNhLXNoYTItbmlzdHAzODQAAAAIbmlzdHAzODQAAABhBIcZGLQiM/ZSOsEZ34j4"
    "6Z0babdlzCHGVf7cS/tgHKKc1DuWf/+Xn5pi50iL6jTkkj9ds24bmVjg2XYOBv9FCoZKisHzd54Wf9ng3Gf4aShVbdwM"
    "XbZYvkVH4sbH3AUACg== phone\n"
)
REPLY = bytes.fromhex(
    "4f444341525259314e080003000000000000004103000102034b78003076301006072a8648ce3d020106052b8104"
    "002203620004871918b42233f6523ac119df88f8e99d1b69b765cc21c655fedc4bfb601ca29cd43b967fff979f9a"
    "62e7488bea34e4923f5db36e1b9958e0d9760e06ff450a864a8ac1f3779e167fd9e0dc67f86928556ddc0c5db658"
    "be4547e2c6c7dc05000a5367003065023004007e903d010e0e128dc4ef396f3bce0a3d9520af0d126e0b4bf15def"
    "93f3eba0f6531b1ec2d5efc130453bbeec6c95023100de399405ac9f6bf930737f8b209327316fa92c20a51e4569"
    "1929abf901832d1ba88b3a47a6d5d42a6d72cec1d6ed6fc7c75dff59"
)


def test_a_reply_that_a_phone_signed_is_taken_and_a_changed_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "phone.pub").write_text(PUBLIC)
    parcel = parcel_of(REPLY)
    assert (parcel.device, parcel.answer) == (3, bytes([1, 2, 3]))
    assert parcel.signed is not None
    assert fingerprints(tmp_path) == (parcel.signed.fingerprint(),)
    verify(parcel.signed, REPLY_DOMAIN + bytes([1, 2, 3]))
    with pytest.raises(Refusal):
        verify(parcel.signed, REPLY_DOMAIN + bytes([1, 2, 4]))
