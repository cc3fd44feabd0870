"""Class files to dex: Maven compiles and holds our code against API 26, Lower makes them Java 8, dx writes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tools.fetch import RUNTIME
from tools.steps import APP_ROOT, BUILD, FETCHED, digest, is_fresh, maven, run, tool, write_atomically

MIN_SDK = 26
DEX = BUILD / "dex"
LOWERED = BUILD / "lowered"
TOOLS = BUILD / "tools"
OURS = ("core", "app")


def _sources() -> list[Path]:
    folders = [APP_ROOT / part / "src" / "main" / "kotlin" for part in OURS]
    poms = [APP_ROOT / "pom.xml", *(APP_ROOT / part / "pom.xml" for part in OURS)]
    return [*folders, *poms, BUILD / "gen", RUNTIME / "executorch.jar"]


def compiled() -> dict[str, Path]:
    """The app's jars by name, its own and those it needs at run time; compiled anew when a source has changed."""
    libraries = APP_ROOT / "app" / "target" / "libraries"
    own = {
        "core": APP_ROOT / "core" / "target" / "core-0.1.0.jar",
        "app": APP_ROOT / "app" / "target" / "app-0.1.0.jar",
    }
    stamp, wanted = BUILD / ".classes", digest(_sources())
    if not is_fresh(stamp, wanted, libraries, *own.values()):
        print("apk: compiling Kotlin", flush=True)
        maven("package", "-Dmaven.test.skip=true", what="compiling core and app")
        write_atomically(stamp, wanted)
    jars = dict(own)
    for jar in sorted(libraries.glob("*.jar")):
        if not jar.name.startswith(("core-", "annotations-")):
            jars[jar.stem] = jar
    for jar in sorted(RUNTIME.glob("*.jar")):
        jars[jar.stem] = jar
    return jars


def tools() -> list[str | Path]:
    """The command that runs one of tools/java, compiled when its source has changed."""
    asm = [str(FETCHED / name) for name in ("asm.jar", "asm-tree.jar")]
    sources = sorted((APP_ROOT / "tools" / "java").glob("*.java"))
    stamp, wanted = TOOLS / ".stamp", digest(sources)
    if not is_fresh(stamp, wanted):
        shutil.rmtree(TOOLS, ignore_errors=True)
        run([tool("javac"), "-cp", os.pathsep.join(asm), "-d", TOOLS, *sources], what="compiling tools/java")
        write_atomically(stamp, wanted)
    return [tool("java"), "-cp", os.pathsep.join([str(TOOLS), *asm])]


def lower(jars: dict[str, Path]) -> dict[str, Path]:
    """Every jar as Java 8 class files that Android can run."""
    java = tools()
    program = APP_ROOT / "tools" / "java"
    out = {name: LOWERED / f"{name}.jar" for name in jars}
    pairs: list[str | Path] = []
    stamps = {}
    for name, jar in jars.items():
        wanted = digest([jar, program])
        if not is_fresh(LOWERED / f".{name}", wanted, out[name]):
            pairs += [jar, out[name]]
            stamps[name] = wanted
    if pairs:
        run([*java, "Lower", *pairs], what="lowering class files")
    for name, wanted in stamps.items():
        write_atomically(LOWERED / f".{name}", wanted)
    return out


def dex() -> list[Path]:
    """classes.dex (and classes2.dex when one cannot hold all methods) under build/dex."""
    jars = lower(compiled())
    stamp, wanted = BUILD / ".dex", digest([*jars.values(), Path(__file__)])
    if not is_fresh(stamp, wanted, DEX / "classes.dex"):
        print("apk: writing dex", flush=True)
        shutil.rmtree(DEX, ignore_errors=True)
        DEX.mkdir(parents=True)
        command = [tool("java"), "-Xmx2g", "-cp", FETCHED / "dx.jar", "com.android.dx.command.Main", "--dex"]
        run(
            [*command, "--multi-dex", f"--min-sdk-version={MIN_SDK}", f"--output={DEX}", *jars.values()],
            what="dx",
        )
        write_atomically(stamp, wanted)
    return sorted(DEX.glob("classes*.dex"))
