"""Bring what the chain needs: jars from Maven Central (`locked`), and an ExecuTorch runtime for Android.

The runtime is, in this order: the file that EXECUTORCH_AAR names; `org.pytorch:executorch-android` from Maven
Central; where that cannot be had, the same classes and libraries as the npm package `react-native-executorch`
(MIT) ships them, pinned by its SHA-512. build/runtime/runtime.json says which one it is, and the app shows it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import tarfile
import tempfile
import xml.etree.ElementTree as ET
import zipfile
from pathlib import Path

from tools import locked
from tools.steps import APP_ROOT, BUILD, FETCHED, BuildError, digest, is_fresh, run, tool, write_atomically

RUNTIME = BUILD / "runtime"
ABIS = ("arm64-v8a", "x86_64")
NPM_NAME, NPM_VERSION, NPM_EXECUTORCH = "react-native-executorch", "0.9.3", "1.2.0"
NPM_SHA512 = "eanpDe8sFFxbKfCh0lqrSVyU4/deiF1pZWtZOjZSV+w+qfuNsdrkQkoscxvhMwJOnvXNkBt4BXAr8pAlGOXStA=="
QNN_NOTE = (
    "licence: com.qualcomm.qti:qnn-runtime is under Qualcomm's own licence, which its POM names: object code inside\n"
    "your own app only, never by itself. Nothing of it is in this repository; this build downloads it because FLAVOUR=qnn asked."
)


def properties() -> dict[str, str]:
    """The versions that pom.xml names."""
    space = "{http://maven.apache.org/POM/4.0.0}"
    found = ET.parse(APP_ROOT / "pom.xml").getroot().find(f"{space}properties")
    if found is None:
        raise BuildError("pom.xml: expected <properties> with the versions, received none")
    return {item.tag.removeprefix(space): (item.text or "").strip() for item in found if isinstance(item.tag, str)}


def chain() -> None:
    """dx, ASM, the framework, fbjni and nativeloader under build/fetched."""
    versions = properties()
    wanted = {
        "dx.jar": ("com/jakewharton/android/repackaged", "dalvik-dx", versions["dx.version"]),
        "asm.jar": ("org/ow2/asm", "asm", versions["asm.version"]),
        "asm-tree.jar": ("org/ow2/asm", "asm-tree", versions["asm.version"]),
        "android.jar": ("org/robolectric", "android-all", versions["android.version"]),
        "fbjni.aar": ("com/facebook/fbjni", "fbjni", versions["fbjni.version"]),
        "nativeloader.jar": ("com/facebook/soloader", "nativeloader", versions["nativeloader.version"]),
    }
    stamp, now = FETCHED / ".chain", digest([APP_ROOT / "pom.xml", locked.LIST, Path(__file__)])
    if is_fresh(stamp, now, *(FETCHED / name for name in wanted)):
        return
    for name, (group, artifact, version) in wanted.items():
        file = locked.fetch(f"{group}/{artifact}/{version}/{artifact}-{version}{Path(name).suffix}")
        write_atomically(FETCHED / name, file.read_bytes())
    write_atomically(stamp, now)


def runtime(flavour: str) -> dict:
    """executorch.jar and jni/<abi>/*.so under build/runtime; what they are, as runtime.json says."""
    given = os.environ.get("EXECUTORCH_AAR", "")
    poms = [APP_ROOT / "pom.xml", locked.LIST, Path(__file__)]
    wanted = digest([*poms, Path(given)] if given and Path(given).is_file() else poms, flavour, given)
    stamp, about = RUNTIME / ".stamp", RUNTIME / "runtime.json"
    if is_fresh(stamp, wanted, about, RUNTIME / "executorch.jar", *(RUNTIME / "jni" / abi for abi in ABIS[:1])):
        return json.loads(about.read_text(encoding="utf-8"))
    folder = RUNTIME.with_name("runtime.new")  # takes the old one's place when it is whole
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if given:
        if not Path(given).is_file():
            raise BuildError(f"EXECUTORCH_AAR: expected an AAR file, received {given}, which is not there")
        unpack_aar(Path(given), folder, "executorch.jar")
        info = {"source": "EXECUTORCH_AAR", "name": Path(given).name, "executorch": "unknown"}
    elif flavour == "qnn":
        info = _qnn(folder)
    else:
        info = _maven(folder) or _npm(folder)
    unpack_aar(FETCHED / "fbjni.aar", folder, "fbjni.jar")
    shutil.copyfile(FETCHED / "nativeloader.jar", folder / "nativeloader.jar")
    for abi in list((folder / "jni").iterdir()):
        if not (abi / "libexecutorch.so").is_file():  # Qualcomm's is for phones alone
            shutil.rmtree(abi)
    info |= {"flavour": flavour, "abis": sorted(path.name for path in (folder / "jni").iterdir())}
    info["sha256"] = {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*.so"))
    }
    write_atomically(folder / about.name, json.dumps(info, indent=2) + "\n")
    shutil.rmtree(RUNTIME, ignore_errors=True)
    folder.rename(RUNTIME)
    write_atomically(stamp, wanted)
    return info


def unpack_aar(aar: Path, folder: Path, classes: str) -> None:
    """classes.jar under another name and the libraries of our ABIs, into `folder`.

    An AAR that wants a permission or a component is refused.
    """
    with zipfile.ZipFile(aar) as archive:
        names = archive.namelist()
        check_manifest(aar.name, archive.read("AndroidManifest.xml").decode("utf-8"))
        write_atomically(folder / classes, archive.read("classes.jar"))
        for name in names:
            match = re.fullmatch(r"jni/([^/]+)/([^/]+\.so)", name)
            if match and match[1] in ABIS:
                write_atomically(folder / "jni" / match[1] / match[2], archive.read(name))


def check_manifest(name: str, text: str) -> None:
    """A library's manifest adds nothing here silently."""
    root = ET.fromstring(text)
    android = "{http://schemas.android.com/apk/res/android}"
    asked = [item.get(f"{android}name", "?") for item in root.iter("uses-permission")]
    parts = [item.tag for application in root.iter("application") for item in application]
    if asked or parts:
        raise BuildError(
            f"{name}: expected a library without permissions and components, received {asked + parts}\n"
            "try: take another version, or write what it needs into app/src/main/AndroidManifest.xml and allow it here"
        )


def _maven(folder: Path) -> dict | None:
    version = properties()["executorch.version"]
    name = f"org.pytorch:executorch-android:{version}"
    try:
        aar = locked.fetch(f"org/pytorch/executorch-android/{version}/executorch-android-{version}.aar")
    except locked.NotThere:
        print(f"apk: {name} is not on the Maven Central that this machine reaches", flush=True)
        return None
    unpack_aar(aar, folder, "executorch.jar")
    return {"source": "Maven Central", "name": name, "executorch": version}


def _npm(folder: Path) -> dict:
    name = f"{NPM_NAME}@{NPM_VERSION}"
    print(f"apk: taking ExecuTorch {NPM_EXECUTORCH} from npm's {name} instead", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        run([tool("npm"), "pack", "--silent", name], what=f"fetching {name} from npm", cwd=Path(scratch))
        archive = next(Path(scratch).glob("*.tgz"))
        received = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        if received != NPM_SHA512:
            raise BuildError(f"{name}: expected SHA-512 {NPM_SHA512}, received {received}")
        with tarfile.open(archive) as tar:
            wanted = {"package/android/libs/classes.jar": folder / "executorch.jar"}
            for abi in ABIS:
                inside = f"package/third-party/android/libs/executorch/{abi}/libexecutorch.so"
                wanted[inside] = folder / "jni" / abi / "libexecutorch.so"
            for inside, path in wanted.items():
                member = tar.extractfile(inside)
                if member is None:
                    raise BuildError(f"{name}: expected the file {inside}, received a folder or a link")
                write_atomically(path, member.read())
    return {"source": "npm", "name": name, "executorch": NPM_EXECUTORCH}


def _qnn(folder: Path) -> dict:
    print(QNN_NOTE, flush=True)
    versions = properties()
    version, qnn = versions["executorch.version"], versions["qnn.version"]
    runtime_name = f"org.pytorch:executorch-android-qnn:{version}"
    qnn_name = f"com.qualcomm.qti:qnn-runtime:{qnn}"
    try:
        aar = locked.fetch(f"org/pytorch/executorch-android-qnn/{version}/executorch-android-qnn-{version}.aar")
        libraries = locked.fetch(f"com/qualcomm/qti/qnn-runtime/{qnn}/qnn-runtime-{qnn}.aar")
    except BuildError as error:
        raise BuildError(
            f"FLAVOUR=qnn: expected {runtime_name} and {qnn_name} from Maven Central\n{error}\n"
            f"{locked.LIST.name} lists neither: they could not be fetched when it was written, so nobody has\n"
            "checked their bytes. Compare what --add records with what Qualcomm and PyTorch publish.\n"
            "or: FLAVOUR=cpu, or EXECUTORCH_AAR=FILE with a build of your own"
        ) from None
    unpack_aar(aar, folder, "executorch.jar")
    unpack_aar(libraries, folder, "qnn-runtime.jar")
    info = {"source": "Maven Central", "name": runtime_name, "executorch": version}
    return info | {"qnn": qnn_name}
