"""Resources by aapt2: R.java, the APK without code, and what Robolectric needs to find them."""

from __future__ import annotations

import shutil
import xml.etree.ElementTree as ET
from pathlib import Path

from tools.steps import APP_ROOT, BUILD, FETCHED, digest, is_fresh, run, tool, write_atomically

ANDROID = "http://schemas.android.com/apk/res/android"
PACKAGE, VERSION_CODE, VERSION_NAME = "org.ondevice.app", "1", "0.1.0"
MIN_SDK, TARGET_SDK = "26", "35"
MAIN = APP_ROOT / "app" / "src" / "main"
BASE_APK = BUILD / "base.apk"
TEST_CONFIG = BUILD / "test-config" / "com" / "android" / "tools" / "test_config.properties"


def merged_manifest(flavour: str) -> Path:
    """The app's manifest with what Gradle would add: package, versions and how libraries are loaded.

    Libraries are mapped from the APK; the DSP loads QNN's from files, so that flavour has them unpacked. The
    manifests of AARs add nothing: fetch.py refuses one that asks for something.
    """
    ET.register_namespace("android", ANDROID)
    root = ET.parse(MAIN / "AndroidManifest.xml").getroot()
    root.set("package", PACKAGE)
    root.set(f"{{{ANDROID}}}versionCode", VERSION_CODE)
    root.set(f"{{{ANDROID}}}versionName", VERSION_NAME)
    sdk = ET.Element("uses-sdk")
    sdk.set(f"{{{ANDROID}}}minSdkVersion", MIN_SDK)
    sdk.set(f"{{{ANDROID}}}targetSdkVersion", TARGET_SDK)
    root.insert(0, sdk)
    for application in root.iter("application"):
        application.set(f"{{{ANDROID}}}extractNativeLibs", "true" if flavour == "qnn" else "false")
    out = BUILD / "AndroidManifest.xml"
    write_atomically(out, ET.tostring(root, encoding="unicode") + "\n")
    return out


def link(flavour: str, about: Path) -> Path:
    """Compile and link the resources against the framework that the app is compiled against.

    `about` says which ExecuTorch is packed; it becomes an asset that the app shows.
    """
    stamp = BUILD / ".resources"
    wanted = digest([MAIN / "res", MAIN / "AndroidManifest.xml", APP_ROOT / "pom.xml", about, Path(__file__)], flavour)
    generated = BUILD / "gen" / "org" / "ondevice" / "app" / "R.java"
    if is_fresh(stamp, wanted, BASE_APK, generated, TEST_CONFIG):
        return BASE_APK
    manifest = merged_manifest(flavour)
    compiled, assets = BUILD / "compiled-resources.zip", BUILD / "assets"
    write_atomically(assets / "runtime.json", about.read_bytes())
    shutil.rmtree(BUILD / "gen", ignore_errors=True)
    run([tool("aapt2"), "compile", "--dir", MAIN / "res", "-o", compiled], what="compiling resources")
    run(
        [
            tool("aapt2"), "link", "-o", BASE_APK, "-I", FETCHED / "android.jar",
            "--manifest", manifest, "--java", BUILD / "gen", "-A", assets,
            "--auto-add-overlay", "--no-version-vectors", "--warn-manifest-validation", compiled,
        ],
        what="linking resources",
    )  # fmt: skip
    properties = {
        "android_merged_manifest": manifest,
        "android_resource_apk": BASE_APK,
        "android_merged_assets": assets,
        "android_custom_package": PACKAGE,
    }
    # A properties file reads a backslash and a colon as its own signs.
    lines = [f"{key}={str(value).replace(chr(92), chr(92) * 2)}\n" for key, value in properties.items()]
    write_atomically(TEST_CONFIG, "".join(lines))
    write_atomically(stamp, wanted)
    return BASE_APK
