"""Every file that the build takes from Maven Central, by its SHA-256: maven.sha256, in sha256sum's own format.

What Maven's local repository lacks is fetched here, and nothing gets into it before its bytes are the listed ones.
Maven then runs offline, so no plugin and no library runs that was not checked. MAVEN_CENTRAL names a mirror, and
MAVEN_REPOSITORY another local repository than Maven's own.

    python3 -m tools.locked --tests      fetch what is missing and check the rest, for the tests, too
    python3 -m tools.locked --write      list what the repository holds: after a change of versions, from an empty one
    python3 -m tools.locked --add PATH   list one more file as Maven Central has it now
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tools.steps import APP_ROOT, BuildError, write_atomically

LIST = APP_ROOT / "maven.sha256"
CENTRAL = "https://repo.maven.apache.org/maven2"
KINDS = (".aar", ".jar", ".pom", ".signature")
ON_DEMAND = ("org/pytorch/", "com/qualcomm/")
"""Runtimes: the one that is asked for is fetched."""
TESTS = "org/robolectric/android-all-instrumented/"
"""Frameworks of 300 MB that only tests need."""


class NotThere(BuildError):
    """Maven Central, as this machine reaches it, has no such file."""


def repository() -> Path:
    """Maven's local repository."""
    return Path(os.environ.get("MAVEN_REPOSITORY") or Path.home() / ".m2" / "repository")


def listed() -> dict[str, str]:
    """SHA-256 by path in the repository."""
    lines = LIST.read_text(encoding="utf-8").splitlines()
    return {path: value for value, path in (line.split("  ", 1) for line in lines if line)}


def fetch(path: str) -> Path:
    """A listed file, in Maven's local repository, with the listed bytes."""
    wanted, file = listed().get(path), repository() / path
    if wanted is None:
        raise BuildError(
            f"{path}: expected a SHA-256 in {LIST.name}, received none\n"
            f"try: python3 -m tools.locked --add {path}    (and read what it adds)"
        )
    if file.is_file():
        _check(path, wanted, file.read_bytes(), f"delete {file} and build again")
    else:
        data = _download(path)
        _check(path, wanted, data, "another network; or take the new version into maven.sha256 on purpose")
        write_atomically(file, data)
    return file


def fetch_all(tests: bool) -> None:
    """Every listed file but runtimes."""
    paths = [path for path in listed() if not path.startswith(ON_DEMAND) and (tests or not path.startswith(TESTS))]
    missing = sum(not (repository() / path).is_file() for path in paths)
    if missing:
        print(
            f"apk: fetching {missing} files from Maven Central (670 MB the first time, 430 without tests)", flush=True
        )
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(fetch, paths))


def write() -> None:
    """List what the repository holds now; what is fetched on demand stays as it is listed."""
    kept = {path: value for path, value in listed().items() if path.startswith(ON_DEMAND)} if LIST.exists() else {}
    root = repository()
    files = [file for file in root.rglob("*") if file.suffix in KINDS and file.is_file()]
    for path in (file.relative_to(root).as_posix() for file in files):
        if not path.startswith(ON_DEMAND):
            kept[path] = hashlib.sha256((root / path).read_bytes()).hexdigest()
    _save(kept)


def add(path: str) -> None:
    """List one more file as it is on Maven Central now."""
    value = hashlib.sha256(_download(path)).hexdigest()
    _save({**listed(), path: value})
    print(f"{value}  {path}")


def _save(values: dict[str, str]) -> None:
    write_atomically(LIST, "".join(f"{value}  {path}\n" for path, value in sorted(values.items())))


def _check(path: str, wanted: str, data: bytes, hint: str) -> None:
    received = hashlib.sha256(data).hexdigest()
    if received != wanted:
        raise BuildError(f"{path}: expected SHA-256 {wanted}, received {received}\ntry: {hint}")


def _download(path: str) -> bytes:
    url = f"{os.environ.get('MAVEN_CENTRAL', CENTRAL).rstrip('/')}/{path}"
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.read()
    except urllib.error.HTTPError as error:
        kind = NotThere if error.code == 404 else BuildError
        raise kind(f"{url}: expected a file, received {error.code} {error.reason}") from None
    except OSError as error:
        raise BuildError(f"{url} cannot be fetched: {error}\ntry: MAVEN_CENTRAL=URL for a mirror") from None


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tests", action="store_true", help="also what only tests need")
    parser.add_argument("--write", action="store_true", help="list what the repository holds now")
    parser.add_argument("--add", metavar="PATH", help="list one more file")
    arguments = parser.parse_args()
    try:
        if arguments.add:
            add(arguments.add)
        elif arguments.write:
            write()
        else:
            fetch_all(arguments.tests)
    except BuildError as error:
        print(f"apk: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
