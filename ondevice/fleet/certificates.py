"""Keys for a fleet over Flower: a certificate authority, the server's certificate, and a key pair
for each device.

For a new fleet. Existing certificates can be used under the same names.
"""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path
from typing import Any

from ondevice.artifact.files import atomic_write, private
from ondevice.core.errors import ConfigError, MissingPackageError

CERTIFICATES = ("ca.crt", "server.pem", "server.key")
"""Files of a folder of certificates; a device needs only the first."""
DEVICES = "devices"
"""Folder of the devices' keys next to them: NAME.key stays with its device, the server admits
NAME.pub."""
DAYS = 825


def make(folder: Path, hosts: tuple[str, ...], devices: int) -> list[Path]:
    """Write certificates for a server under `hosts`, and keys for `devices` devices; return the
    files.

    Raises:
        ConfigError: the folder has certificates already.
        MissingPackageError: `cryptography`, which comes with Flower, is not installed.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
    except ImportError:
        raise MissingPackageError(
            "cryptography is not installed", hint="pip install 'ondevice-train[fleet]'"
        ) from None
    folder = Path(folder)
    if any((folder / name).exists() for name in CERTIFICATES):
        raise ConfigError(f"{folder} has certificates already", hint="choose another folder")
    now = datetime.datetime.now(datetime.UTC)

    def named(name: str) -> Any:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

    def builder(subject: Any, key: Any) -> Any:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(named("ondevice fleet"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=DAYS))
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(root.public_key()),
                critical=False,
            )
        )

    root, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    authority = (
        builder(named("ondevice fleet"), root)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(x509, signs=True), critical=True)
        .sign(root, hashes.SHA256())
    )
    names = [_name(x509, host) for host in dict.fromkeys((*hosts, "localhost", "127.0.0.1"))]
    certificate = (
        builder(named(hosts[0]), server)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(x509, signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(root, hashes.SHA256())
    )
    # The authority's own key is not stored: nobody can make a second server that devices would
    # trust.
    formats = serialization.PrivateFormat
    plain = serialization.NoEncryption()
    pem = serialization.Encoding.PEM
    files = {
        "ca.crt": authority.public_bytes(pem),
        "server.pem": certificate.public_bytes(pem),
        "server.key": server.private_bytes(pem, formats.PKCS8, plain),
    }
    for number in range(1, devices + 1):
        secret, public = device_key()
        files[f"{DEVICES}/{number}.key"] = secret
        files[f"{DEVICES}/{number}.pub"] = public
    with private():
        for name, data in files.items():
            atomic_write(folder / name, data)
    return [folder / name for name in files]


def device_key() -> tuple[bytes, bytes]:
    """Return a new private key of a device and its public one, in OpenSSH's form."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    ssh = serialization.PublicFormat.OpenSSH
    return (
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.OpenSSH,
            serialization.NoEncryption(),
        ),
        key.public_key().public_bytes(serialization.Encoding.OpenSSH, ssh),
    )


def _usage(x509: Any, signs: bool) -> Any:
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only",
              "decipher_only")  # fmt: skip
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        **dict.fromkeys(others, False),
    )


def _name(x509: Any, host: str) -> Any:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
