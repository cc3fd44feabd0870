"""How the APK is built: tools, versions and lists of hashes, and what the build refuses."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.android.test_apk import APP, needs_tools


def test_a_missing_tool_is_named_with_its_package(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(APP / "build_apk.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": str(tmp_path)},
    )
    assert done.returncode == 1
    assert "aapt2 is missing" in done.stderr and "apt-get install -y aapt" in done.stderr


@pytest.fixture(scope="module")
def chain():
    """The chain's modules."""
    sys.path.insert(0, str(APP))
    try:
        from tools import fetch, steps
    finally:
        sys.path.remove(str(APP))
    return fetch, steps


@pytest.mark.parametrize(
    "inside",
    [
        '<uses-permission android:name="android.permission.INTERNET"/>',
        '<application><provider android:name="x.Y" android:authorities="x"/></application>',
    ],
)
def test_a_library_cannot_bring_permissions_or_components(chain, inside: str) -> None:
    fetch, steps = chain
    head = '<manifest xmlns:android="http://schemas.android.com/apk/res/android" package="x">'
    fetch.check_manifest(
        "plain.aar", head + '<uses-sdk android:minSdkVersion="21"/><application/></manifest>'
    )
    with pytest.raises(
        steps.BuildError, match=r"t\.aar: expected a library without permissions and components"
    ):
        fetch.check_manifest("t.aar", head + inside + "</manifest>")


def test_an_unknown_flavour_is_refused() -> None:
    needs_tools()
    done = subprocess.run(
        [sys.executable, str(APP / "build_apk.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "FLAVOUR": "foo"},
    )
    assert (
        done.returncode == 1 and "FLAVOUR: expected one of cpu, qnn, received 'foo'" in done.stderr
    )


def test_the_translation_is_whole() -> None:
    """German has every text of English, and the same places for what is put in."""
    entry = re.compile(r'<(string|string-array|plurals) name="(\w+)"([^>]*)>(.*?)</\1>', re.DOTALL)
    texts = []
    for folder in ("values", "values-de"):
        content = (APP / f"app/src/main/res/{folder}/strings.xml").read_text("utf-8")
        entries = [match.groups()[1:] for match in entry.finditer(content)]
        places = {name: sorted(re.findall(r"%\d\$[sd]|<item", text)) for name, _, text in entries}
        texts.append(
            {name: places[name] for name, more, _ in entries if "translatable" not in more}
        )
    assert texts[0] == texts[1] and len(texts[0]) > 150


def test_gradle_and_maven_name_the_same_versions() -> None:
    pom = dict(re.findall(r"<([\w.]+\.version)>([^<]+)</", (APP / "pom.xml").read_text("utf-8")))
    core = dict(
        re.findall(r"<([\w.]+\.version)>([^<]+)</", (APP / "core/pom.xml").read_text("utf-8"))
    )
    lines = (APP / "gradle.properties").read_text("utf-8").splitlines()
    gradle = dict(
        line.split("=", 1)
        for line in lines
        if "=" in line and not line.startswith(("#", "org.gradle", "android."))
    )
    assert gradle.keys() == {"agp", "kotlin", "executorch", "qnn", "gson"}
    assert gradle["kotlin"] == pom["kotlin.version"] == core["kotlin.version"]
    assert gradle["gson"] == core["gson.version"]
    for name in ("executorch", "qnn"):
        assert gradle[name] == pom[f"{name}.version"], name
    build = (APP / "app/build.gradle.kts").read_text("utf-8")
    resources = (APP / "tools/resources.py").read_text("utf-8")
    ((minimum, target),) = re.findall(r'MIN_SDK, TARGET_SDK = "(\d+)", "(\d+)"', resources)
    assert (
        f"minSdk = {minimum}" in build
        and f"targetSdk = {target}" in build
        and f"compileSdk = {target}" in build
    )
    assert "android.useAndroidX=true" in lines


def test_the_gradle_wrapper_is_whole_and_gradle_s_own() -> None:
    """Android Studio asks for it; the jar is the recorded one."""
    wrapper = APP / "gradle" / "wrapper"
    properties = (wrapper / "gradle-wrapper.properties").read_text("utf-8")
    assert (
        "distributionUrl=https\\://services.gradle.org/distributions/gradle-8.10.2-bin.zip"
        in properties
    )
    # As Gradle publishes it for this distribution.
    assert (
        "distributionSha256Sum=31c55713e40233a8303827ceb42ca48a47267a0ad4bab9177123121e71524c26\n"
        in properties
    )
    digest = hashlib.sha256((wrapper / "gradle-wrapper.jar").read_bytes()).hexdigest()
    assert digest == "2db75c40782f5e8ba1fc278a5574bab070adccb2d21ca5a6e5ed840888448046"
    with zipfile.ZipFile(wrapper / "gradle-wrapper.jar") as archive:
        assert "org/gradle/wrapper/GradleWrapperMain.class" in archive.namelist()
    assert os.access(APP / "gradlew", os.X_OK) and (APP / "gradlew.bat").is_file()


@pytest.fixture
def central(chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`locked` with an empty local repository, and a folder as Maven Central."""
    from tools import locked

    there, here = tmp_path / "central", tmp_path / "repository"
    monkeypatch.setenv("MAVEN_CENTRAL", there.as_uri())
    monkeypatch.setenv("MAVEN_REPOSITORY", str(here))
    monkeypatch.setattr(locked, "LIST", tmp_path / "maven.sha256")
    (there / "a/b/1").mkdir(parents=True)
    (there / "a/b/1/b-1.jar").write_bytes(b"as it was listed")
    return locked, there, here


def test_what_comes_from_maven_central_is_what_was_listed(central) -> None:
    locked, there, here = central
    name = "a/b/1/b-1.jar"
    locked.LIST.write_text("")
    with pytest.raises(
        Exception, match=r"a/b/1/b-1.jar: expected a SHA-256 in maven.sha256, received none"
    ):
        locked.fetch(name)
    locked.add(name)
    (there / name).write_bytes(b"changed on the way")
    with pytest.raises(Exception, match=r"expected SHA-256 \w{64}, received \w{64}"):
        locked.fetch_all(tests=True)
    assert not here.exists()
    (there / name).write_bytes(b"as it was listed")
    locked.fetch_all(tests=True)
    (here / name).write_bytes(b"changed in the local repository")
    with pytest.raises(Exception, match=r"try: delete .*b-1.jar and build again"):
        locked.fetch_all(tests=True)


def test_a_qnn_build_says_that_nobody_has_checked_its_runtime(central, tmp_path: Path) -> None:
    from tools import fetch

    locked, _, here = central
    locked.LIST.write_text("")
    with pytest.raises(Exception) as refusal:
        fetch._qnn(tmp_path)
    for words in (
        "so nobody has\nchecked their bytes",
        "com.qualcomm.qti:qnn-runtime:",
        "expected a SHA-256",
        "FLAVOUR=cpu",
    ):
        assert words in str(refusal.value)
    assert not here.exists()


def test_the_list_has_everything_that_the_build_names() -> None:
    listed = dict(
        line.split("  ")[::-1] for line in (APP / "maven.sha256").read_text("utf-8").splitlines()
    )
    assert all(re.fullmatch(r"[0-9a-f]{64}", value) for value in listed.values())
    for pom in (APP / "pom.xml", APP / "core/pom.xml", APP / "app/pom.xml"):
        text = re.sub(r"<parent>.*?</parent>", "", pom.read_text("utf-8"), flags=re.DOTALL)
        for artifact in re.findall(r"<artifactId>([\w.-]+)</artifactId>\s*<version>", text):
            if artifact not in ("android", "core", "app"):
                assert any(f"/{artifact}/" in path for path in listed), artifact
    # No pom names them: surefire takes them as the tests begin.
    for artifact in ("surefire-junit-platform", "junit-platform-launcher"):
        assert any(f"/{artifact}/" in path for path in listed), artifact


def test_gradle_takes_into_the_apk_what_is_listed() -> None:
    listed = dict(
        line.split("  ")[::-1] for line in (APP / "maven.sha256").read_text("utf-8").splitlines()
    )
    metadata = (APP / "gradle/verification-metadata.xml").read_text("utf-8")
    found = re.findall(
        r'<component group="([\w.]+)" name="([\w-]+)" version="([\w.]+)">\s*'
        r'<artifact name="([\w.-]+)">\s*<sha256 value="(\w+)"',
        metadata,
    )
    assert {name for _, name, *_ in found} == {
        "gson",
        "kotlin-stdlib",
        "fbjni",
        "nativeloader",
        "executorch-android",
    }
    for group, name, version, file, value in found:
        assert listed[f"{group.replace('.', '/')}/{name}/{version}/{file}"] == value
