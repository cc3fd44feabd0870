"""The APK itself: resources, dex and libraries in one archive, aligned and signed."""

from __future__ import annotations

import os
import shutil
import zipfile
from pathlib import Path

from tools.fetch import RUNTIME
from tools.steps import BUILD, digest, is_fresh, run, tool, write_atomically

# A fixed date keeps two builds of the same sources alike.
DATE = (1981, 1, 1, 0, 0, 0)
PAGE_BYTES = "16384"
KEYSTORE = BUILD / "debug.keystore"
PASSWORD = "android"  # noqa: S105  the debug key's customary password; it protects nothing


def keystore() -> Path:
    """A debug key of this checkout; never used for a release."""
    if not KEYSTORE.is_file():
        beside = KEYSTORE.with_suffix(".new")
        beside.unlink(missing_ok=True)
        run(
            [
                tool("keytool"), "-genkeypair", "-keystore", beside, "-storetype", "PKCS12", "-alias", "debug",
                "-storepass", PASSWORD, "-keypass", PASSWORD, "-keyalg", "RSA", "-keysize", "2048",
                "-validity", "10000", "-dname", "CN=ondevice debug",
            ],
            what="making the debug key",
        )  # fmt: skip
        os.replace(beside, KEYSTORE)
    return KEYSTORE


def bundle(base: Path, dex: list[Path], out: Path) -> Path:
    """Libraries are stored, not packed, so that Android maps them from the APK; zipalign puts them on pages.

    A page may have 16 KB from Android 15 on. Debian's zipalign knows no such option for libraries alone (`-P 16`), so
    everything that is stored begins on one: a few KB more.
    """
    stamp = BUILD / f".{out.stem}"
    wanted = digest([base, *dex, RUNTIME / "runtime.json", keystore(), Path(__file__)])  # runtime.json hashes libraries
    if is_fresh(stamp, wanted, out):
        return out
    raw, aligned, signed = (out.with_name(f".{out.stem}-{step}.apk") for step in ("raw", "aligned", "signed"))
    shutil.copyfile(base, raw)
    with zipfile.ZipFile(raw, "a") as archive:
        for path in dex:
            _add(archive, path, path.name, zipfile.ZIP_DEFLATED)
        for path in sorted((RUNTIME / "jni").rglob("*.so")):
            _add(archive, path, f"lib/{path.parent.name}/{path.name}", zipfile.ZIP_STORED)
    run([tool("zipalign"), "-f", PAGE_BYTES, raw, aligned], what="zipalign")
    run(
        [
            tool("apksigner"), "sign", "--ks", keystore(), "--ks-pass", f"pass:{PASSWORD}", "--ks-key-alias", "debug",
            "--v4-signing-enabled", "false", "--out", signed, aligned,
        ],
        what="apksigner",
    )  # fmt: skip
    run([tool("apksigner"), "verify", "--min-sdk-version", "26", signed], what="verifying the signature")
    run([tool("zipalign"), "-c", PAGE_BYTES, signed], what="verifying the alignment")
    os.replace(signed, out)
    write_atomically(stamp, wanted)
    for path in (raw, aligned):
        path.unlink()
    return out


def _add(archive: zipfile.ZipFile, path: Path, name: str, how: int) -> None:
    info = zipfile.ZipInfo(name, DATE)
    info.compress_type = how
    info.external_attr = 0o644 << 16
    archive.writestr(info, path.read_bytes())
