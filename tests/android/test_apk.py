"""The built APK, taken apart: signature, permissions, classes, libraries, resources, and the kernels it brings."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.android import formats

ROOT = Path(__file__).resolve().parents[2]
APP = ROOT / "android_app"
TOOLS = ("aapt2", "zipalign", "apksigner", "dexdump", "javac", "mvn", "npm")
MACHINES = {"arm64-v8a": 183, "x86_64": 62}  # EM_AARCH64, EM_X86_64
SYSTEM_LIBRARIES = {"libc.so", "libm.so", "libdl.so", "liblog.so", "libandroid.so", "libz.so"}
PERMISSIONS = {
    "android.permission.FOREGROUND_SERVICE",
    "android.permission.FOREGROUND_SERVICE_SPECIAL_USE",
    "android.permission.POST_NOTIFICATIONS",
    "android.permission.RECEIVE_BOOT_COMPLETED",
    "android.permission.WAKE_LOCK",
}
DOMAINS = [
    place + kind for place in ("", "device_") for kind in ("root", "file", "database", "sharedpref")
] + ["external"]
SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For programs that end before the JVM's second compiler pays: half the time of Kotlin's compiler."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def needs_tools() -> None:
    """Skip by name where the tools are not installed; with ONDEVICE_REQUIRE_ANDROID=1 that is a failure."""
    missing = [name for name in TOOLS if shutil.which(name) is None]
    if missing and os.environ.get("ONDEVICE_REQUIRE_ANDROID") == "1":
        pytest.fail(
            f"ONDEVICE_REQUIRE_ANDROID=1, and these are missing: {', '.join(missing)}; try: .ci/android-tools"
        )
    if missing:
        pytest.skip(f"no {', '.join(missing)} on this machine; try: .ci/android-tools")


def run(*command: str | Path, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        errors="replace",
    )
    assert done.returncode == 0, (
        f"{command[0]} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    )
    return done.stdout


@pytest.fixture(scope="module")
def apk() -> Path:
    """The APK that `make apk` builds; made or brought up to date first."""
    needs_tools()
    run(sys.executable, APP / "build_apk.py", JAVA_TOOL_OPTIONS=SHORT_LIVED)
    return APP / "build" / "ondevice-debug.apk"


@pytest.fixture(scope="module")
def manifest(apk: Path) -> str:
    return run("aapt2", "dump", "xmltree", apk, "--file", "AndroidManifest.xml")


@pytest.fixture(scope="module")
def classes(apk: Path) -> set[str]:
    with zipfile.ZipFile(apk) as archive:
        dex = [name for name in archive.namelist() if re.fullmatch(r"classes\d*\.dex", name)]
        return set().union(*(formats.dex_classes(archive.read(name)) for name in dex))


@pytest.fixture(scope="module")
def libraries(apk: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(apk) as archive:
        return {name: archive.read(name) for name in archive.namelist() if name.startswith("lib/")}


def elements(manifest: str, tag: str) -> list[dict[str, str]]:
    """Attributes of every element of a name in aapt2's tree."""
    collected = []
    for block in re.split(r"\n\s*(?=E: )", manifest):
        if re.match(rf"\s*(N:.*\n\s*)?E: {tag} ", block):
            pairs = re.findall(
                r"A: (?:[^\s:=]+:)*?//?[^\s=]*?:?(\w+)\(0x\w+\)=(?:\"([^\"]*)\"|(\S+))", block
            )
            pairs += re.findall(r"A: (package)=\"([^\"]*)\"()", block)
            collected.append({name: text or value for name, text, value in pairs})
    return collected


def test_signature_and_alignment(apk: Path) -> None:
    said = run("apksigner", "verify", "--verbose", "--min-sdk-version", "26", apk)
    assert "Verified using v2 scheme (APK Signature Scheme v2): true" in said
    run("zipalign", "-c", "-p", "4", apk)


def test_libraries_lie_on_pages_of_16_kb(apk: Path, libraries: dict[str, bytes]) -> None:
    """Phones with Android 15 and pages of 16 KB map them from the APK: where they begin, and their segments."""
    raw, page = apk.read_bytes(), 16384
    with zipfile.ZipFile(apk) as archive:
        entries = [entry for entry in archive.infolist() if entry.filename.startswith("lib/")]
    assert len(entries) == len(libraries) >= 4
    for entry in entries:
        name_bytes, extra_bytes = struct.unpack_from("<HH", raw, entry.header_offset + 26)
        start = entry.header_offset + 30 + name_bytes + extra_bytes
        assert raw[start : start + 4] == b"\x7fELF" and start % page == 0, (
            f"{entry.filename} begins at {start}"
        )
        assert formats.elf(libraries[entry.filename]).alignment % page == 0, entry.filename


def test_a_changed_apk_does_not_verify(apk: Path, tmp_path: Path) -> None:
    data = bytearray(apk.read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "changed.apk").write_bytes(data)
    done = subprocess.run(
        ["apksigner", "verify", str(tmp_path / "changed.apk")], capture_output=True
    )
    assert done.returncode != 0


def test_package_and_versions(apk: Path) -> None:
    badging = run("aapt2", "dump", "badging", apk)
    assert "package: name='org.ondevice.app'" in badging
    assert "sdkVersion:'26'" in badging and "targetSdkVersion:'35'" in badging
    assert "application-label:'ondevice'" in badging
    assert "launchable-activity: name='org.ondevice.app.MainActivity'" in badging
    assert re.search(r"native-code: 'arm64-v8a' 'x86_64'", badging)


def test_no_way_to_the_network(manifest: str) -> None:
    asked = {element["name"] for element in elements(manifest, "uses-permission")}
    assert asked == PERMISSIONS
    network = re.findall(
        r"android\.permission\.\w*(?:INTERNET|NETWORK|WIFI|BLUETOOTH|NFC)\w*", manifest
    )
    assert network == []


def test_the_manifest_names_the_components(manifest: str, classes: set[str]) -> None:
    services = {element["name"]: element for element in elements(manifest, "service")}
    train = services["org.ondevice.app.TrainService"]
    assert int(train["foregroundServiceType"], 16) == 0x40000000  # specialUse
    assert train["exported"] == "false"
    assert (
        services["org.ondevice.app.ChargingJob"]["permission"]
        == "android.permission.BIND_JOB_SERVICE"
    )
    (provider,) = elements(manifest, "provider")
    assert provider["exported"] == "false" and provider["grantUriPermissions"] == "true"
    (application,) = elements(manifest, "application")
    assert application["allowBackup"] == "false"
    assert [a["name"] for tag in ("activity", "service", "receiver", "provider") for a in elements(manifest, tag)
            if a["exported"] == "true"] == ["org.ondevice.app.MainActivity"]  # fmt: skip
    names = [
        application["name"],
        *services,
        provider["name"],
        *(a["name"] for a in elements(manifest, "activity")),
    ]
    assert [name for name in names if name not in classes] == []


def test_nothing_private_is_copied_to_another_phone(apk: Path, manifest: str) -> None:
    """What no rule excludes is copied: each domain that Android 12 and later know is excluded, in both ways."""
    (application,) = elements(manifest, "application")
    rules = "xml/data_extraction_rules"
    (number,) = re.findall(rf"resource (0x\w+) {rules}", run("aapt2", "dump", "resources", apk))
    assert application["dataExtractionRules"] == f"@{number}"
    tree = run("aapt2", "dump", "xmltree", apk, "--file", f"res/{rules}.xml")
    for way in ("cloud-backup", "device-transfer"):
        inside = re.split(r"E: (?:cloud-backup|device-transfer) ", tree)[
            1 if way == "cloud-backup" else 2
        ]
        assert re.search(rf"E: {way} ", tree) and "E: include" not in inside
        domains = re.findall(r'A: domain="(\w+)"', inside)
        assert sorted(domains) == sorted(DOMAINS) and inside.count('A: path="."') == len(DOMAINS)


def test_the_apk_has_the_classes(classes: set[str]) -> None:
    for wanted in (
        "org.ondevice.app.MainActivity",
        "org.ondevice.app.ModuleProgram",
        "org.ondevice.core.Trainer",
        "org.ondevice.core.Tokenizer",
        "org.pytorch.executorch.Module",
        "com.facebook.jni.HybridData",
        "com.facebook.soloader.nativeloader.NativeLoader",
        "kotlin.Unit",
        "com.google.gson.stream.JsonReader",
    ):
        assert wanted in classes, wanted
    foreign = {
        name
        for name in classes
        if name.startswith(("android.", "androidx.", "java.", "org.junit.", "org.robolectric."))
    }
    assert foreign == set()


def test_no_lambda_is_left_for_the_phone(apk: Path, tmp_path: Path) -> None:
    """Android 8 has neither LambdaMetafactory nor StringConcatFactory: no call goes through them."""
    with zipfile.ZipFile(apk) as archive:
        for name in archive.namelist():
            if re.fullmatch(r"classes\d*\.dex", name):
                archive.extract(name, tmp_path)
                code = run("dexdump", "-d", tmp_path / name)
                assert "Opened" in code and "invoke-virtual" in code
                assert "invoke-custom" not in code


def test_the_apk_has_the_libraries(apk: Path, libraries: dict[str, bytes]) -> None:
    with zipfile.ZipFile(apk) as archive:
        packed = [
            i.filename
            for i in archive.infolist()
            if i.filename.startswith("lib/") and i.compress_type != 0
        ]
    assert packed == []
    for abi, machine in MACHINES.items():
        names = {name.rsplit("/", 1)[1] for name in libraries if name.startswith(f"lib/{abi}/")}
        assert {"libexecutorch.so", "libfbjni.so"} <= names
        for name in names:
            actual = formats.elf(libraries[f"lib/{abi}/{name}"])
            assert actual.machine == machine, name
            assert set(actual.needed) <= SYSTEM_LIBRARIES | names, (
                f"{abi}/{name} needs {actual.needed}"
            )


def test_cpp_symbols_resolve_inside_the_apk(libraries: dict[str, bytes]) -> None:
    """ExecuTorch and fbjni come from different places: what one takes of C++ the other gives."""
    for abi in MACHINES:
        parts = [
            formats.symbols(data)
            for name, data in libraries.items()
            if name.startswith(f"lib/{abi}/")
        ]
        taken = set().union(*(part[0] for part in parts))
        given = set().union(*(part[1] for part in parts))
        mangled = {name for name in taken if name.startswith("_Z")}
        assert any("8facebook3jni" in name for name in mangled)
        assert sorted(mangled - given) == []


def test_the_apk_has_the_resources(apk: Path) -> None:
    strings = run("aapt2", "dump", "resources", apk)
    assert "string/app_name" in strings and "(night" in strings
    plain = set(
        re.findall(
            r"<string name=\"(\w+)\"",
            (APP / "app/src/main/res/values/strings.xml").read_text("utf-8"),
        )
    )
    assert len(plain) > 50
    assert [name for name in sorted(plain) if f"string/{name}\n" not in strings] == []
    with zipfile.ZipFile(apk) as archive:
        about = json.loads(archive.read("assets/runtime.json"))
    assert about["flavour"] == "cpu" and about["abis"] == sorted(MACHINES)


KINDS = (
    "functional",
    "q4",
    pytest.param("8da4w", marks=pytest.mark.nightly),
    "blocks",
    "blocks, sgd",
)
FORMS = (
    "blocks, int8",
    "blocks, q4",
    pytest.param("blocks, q4dq", marks=pytest.mark.nightly),
    "blocks, 8da8w",
    "blocks, 8da4w",
)


@pytest.mark.parametrize("name", [*KINDS, *FORMS])
def test_the_runtime_has_every_kernel_of_an_export(name: str, libraries: dict[str, bytes]) -> None:
    """A program of this checkout's exporter needs no kernel that the packaged ExecuTorch lacks."""
    pytest.importorskip("executorch")
    from tests.programs import program as exported_program

    artifact = exported_program(name)
    exported = json.loads((artifact / "manifest.json").read_text("utf-8"))
    # A program has its functions in this project's ops as well; a host without them leaves those.
    methods = exported["program_spec"]["methods"].items()
    ops = {op for at, method in methods if not at.startswith("fused_") for op in method["ops"]}
    assert len(ops) > 10
    program = (artifact / exported["program"]).read_bytes()
    assert program[4:8] == b"ET12"
    for abi in MACHINES:
        library = libraries[f"lib/{abi}/libexecutorch.so"]
        assert b"ET12" in library and b"XnnpackBackend\0" in library
    assert missing(ops.difference(exported["custom_ops"]), libraries) == []


def missing(ops: Collection[str], libraries: dict[str, bytes]) -> list[str]:
    """Return the kernels that the runtime of one of the machines lacks."""
    runtimes = [libraries[f"lib/{abi}/libexecutorch.so"] for abi in MACHINES]
    return [
        op for op in sorted(ops) if any(op.encode() + b"\0" not in runtime for runtime in runtimes)
    ]


def test_the_runtime_has_every_kernel_of_a_block_whose_scales_have_8_bits(
    libraries: dict[str, bytes],
) -> None:
    """Of `q4dq`, forward: how weights become dense; the nightly job lowers all of the program."""
    pytest.importorskip("executorch")
    from ondevice.api.export import export_jobs
    from ondevice.core.registry import target
    from ondevice.exporters.android_cpu.target import AndroidCpu
    from ondevice.exporters.executorch.lower import lower_portable
    from ondevice.models import load_model
    from tests.programs import config

    (job,) = export_jobs(config("blocks, q4dq", **{"export.kernels": "stock"}))
    program = AndroidCpu(target("android-cpu")).program(job.method)
    built = program.build(load_model(job.model.source), job.method, job.export, job.seed)
    (block,) = (module for module in built.modules if module.name == "block_forward_1x16")
    ops = lower_portable([block]).ops[block.name]
    assert "quantized_decomposed::embedding_4bit.out" in ops
    assert missing(ops, libraries) == []


def test_the_runtime_has_every_kernel_of_a_program_that_answers(
    libraries: dict[str, bytes],
) -> None:
    pytest.importorskip("executorch")
    from tests.programs import program as exported_program

    described = json.loads(
        (exported_program("blocks of granite") / "answers/answers.json").read_text("utf-8")
    )
    assert "llama::custom_sdpa.out" in described["ops"]
    rounded = "quantized_decomposed::embedding_byte.out"  # of the 8- and 4-bit forms
    assert missing([*described["ops"], rounded], libraries) == []


def test_a_kernel_that_does_not_exist_is_noticed(libraries: dict[str, bytes]) -> None:
    absent = "aten::no_such_kernel.out"
    assert missing([absent, "aten::add.out"], libraries) == [absent]
