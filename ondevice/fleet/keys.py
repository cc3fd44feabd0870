"""A device's key: it signs what a server could otherwise forge in the device's name.

The key is the one that Flower's server admits (`certificates`): ECDSA on P-384, in OpenSSH's form.
A charter names the devices of a fleet by the SHA-256 of their public keys, so a device knows its
fellows without asking the server."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ondevice.core.errors import ConfigError, MissingPackageError
from ondevice.fleet.codes import Code, Refusal

REPLY_DOMAIN = b"ondevice-fleet-answer-1\0"
"""Prefix of the bytes that a device signs of a reply by file."""
MOST_KEY_BYTES = 256
MOST_SIGNATURE_BYTES = 128
EXPECTED = "an ECDSA key on P-384: devices/NAME.key of `ondevice fleet certificates`"


@dataclass(frozen=True)
class Signed:
    """A signature, and the public key that it belongs to (DER)."""

    signer: bytes
    signature: bytes

    def fingerprint(self) -> str:
        """Return the signer's name in a charter."""
        return fingerprint(self.signer)


class DeviceKey:
    """A device's private key.

    Args:
        file: in OpenSSH's form, without a passphrase.

    Raises:
        ConfigError: it is not such a key.
        MissingPackageError: `cryptography`, which comes with Flower, is not installed.
    """

    def __init__(self, file: Path) -> None:
        ec, _, serialization = _cryptography()
        try:
            key = serialization.load_ssh_private_key(Path(file).read_bytes(), password=None)
        except Exception as error:
            raise ConfigError(
                f"{file} is not a private key", expected=EXPECTED, received=str(error)[:200]
            ) from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(
            key.curve, ec.SECP384R1
        ):
            raise ConfigError(f"{file} is a key of another kind", expected=EXPECTED)
        self._key = key
        self.public = _der(key.public_key(), serialization)

    def sign(self, data: bytes) -> Signed:
        """Return the signature of `data`."""
        ec, hashes, _ = _cryptography()
        return Signed(self.public, self._key.sign(data, ec.ECDSA(hashes.SHA256())))


def verify(signed: Signed, data: bytes) -> None:
    """Check a signature.

    Raises:
        Refusal: it is not one of `data` by its signer.
    """
    ec, hashes, serialization = _cryptography()
    try:
        key = serialization.load_der_public_key(signed.signer)
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(
            key.curve, ec.SECP384R1
        ):
            raise ValueError
        if _der(key, serialization) != signed.signer:  # one name for each key
            raise ValueError
        key.verify(signed.signature, data, ec.ECDSA(hashes.SHA256()))
    except Exception:
        raise Refusal(
            Code.SIGNATURE, "a signature is not valid", expected="the signature of a device's key"
        ) from None


def fingerprint(public: bytes) -> str:
    """Return a public key's name in a charter: the SHA-256 of its DER form, 64 hexadecimal
    digits."""
    return hashlib.sha256(public).hexdigest()


def fingerprints(folder: Path) -> tuple[str, ...]:
    """Return the names of the public keys (`*.pub`) in a folder, sorted.

    Raises:
        ConfigError: the folder has none, or a file is not a public key.
        MissingPackageError: `cryptography` is not installed.
    """
    _, _, serialization = _cryptography()
    files = sorted(Path(folder).glob("*.pub"))
    if not files:
        raise ConfigError(f"{folder} has no public key", expected="NAME.pub for each device")
    names = set()
    for file in files:
        try:
            names.add(
                fingerprint(
                    _der(serialization.load_ssh_public_key(file.read_bytes()), serialization)
                )
            )
        except Exception as error:
            raise ConfigError(
                f"{file} is not a public key", expected=EXPECTED, received=str(error)[:200]
            ) from None
    return tuple(sorted(names))


def _der(public: Any, serialization: Any) -> bytes:
    return public.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def _cryptography() -> Any:
    try:
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        raise MissingPackageError(
            "cryptography is not installed", hint="pip install 'ondevice-train[fleet]'"
        ) from None
    return ec, hashes, serialization
