"""Resources by aapt2: R.java, the APK without code, and what Robolectric needs to find them."""

from __future__ import annotations

import shutil
from pathlib import Path

from tools.steps import APP_ROOT, BUILD, FETCHED, digest, is_fresh, run, tool, write_atomically

MAIN = APP_ROOT / "app" / "src" / "main"
BASE_APK = BUILD / "base.apk"
TEST_CONFIG = BUILD / "test-config" / "com" / "android" / "tools" / "test_config.properties"


def link() -> Path:
    """Compile and link the resources against the framework that the app is compiled against."""
    stamp = BUILD / ".resources"
    wanted = digest([MAIN / "res", MAIN / "AndroidManifest.xml", APP_ROOT / "pom.xml", Path(__file__)])
    generated = BUILD / "gen" / "org" / "ondevice" / "app" / "R.java"
    if is_fresh(stamp, wanted, BASE_APK, generated, TEST_CONFIG):
        return BASE_APK
    compiled = BUILD / "compiled-resources.zip"
    shutil.rmtree(BUILD / "gen", ignore_errors=True)
    run([tool("aapt2"), "compile", "--dir", MAIN / "res", "-o", compiled], what="compiling resources")
    run(
        [
            tool("aapt2"), "link", "-o", BASE_APK, "-I", FETCHED / "android.jar",
            "--manifest", MAIN / "AndroidManifest.xml", "--java", BUILD / "gen",
            "--auto-add-overlay", "--no-version-vectors", compiled,
        ],
        what="linking resources",
    )  # fmt: skip
    properties = {
        "android_merged_manifest": MAIN / "AndroidManifest.xml",
        "android_resource_apk": BASE_APK,
        "android_merged_assets": BUILD / "assets",
        "android_custom_package": "org.ondevice.app",
    }
    (BUILD / "assets").mkdir(exist_ok=True)
    # A properties file reads a backslash and a colon as its own signs.
    lines = [f"{key}={str(value).replace(chr(92), chr(92) * 2)}\n" for key, value in properties.items()]
    write_atomically(TEST_CONFIG, "".join(lines))
    write_atomically(stamp, wanted)
    return BASE_APK
