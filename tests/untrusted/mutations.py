"""Damage to files: bytes, fields of documents, names, and files that are another thing than a file.

A mutation is a function of (random, folder): it changes one file of a whole example in place. What
it does is decided by the random numbers only, so a failure is found again by its seed and number.
"""

from __future__ import annotations

import json
import os
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

Random = random.Random
Mutation = Callable[[Random, Path], None]

_NUMBERS = (
    0,
    -1,
    1,
    2,
    7,
    255,
    2**31 - 1,
    2**31,
    -(2**31),
    2**32,
    2**53,
    2**63 - 1,
    2**63,
    2**64,
    10**30,
    10**300,
)
_FLOATS = (0.5, -0.0, 1e-320, 1e308, float("inf"), float("-inf"), float("nan"))
_TEXTS = (
    "", " ", "x", "..", "../outside.safetensors", "/etc/passwd", "a/../../../etc/hostname", "~/x", "a\0b", "\ud800",
    "{layer}", "{layer.__class__}", "{0}", "%s", "{{x}}", "nan", "1e999", "C:\\x",
    "-" * 70_000, "\u202e", "😀", "F32", "true",
)  # fmt: skip
_RAW = (
    "[" * 100_000, '{"a":' * 100_000, "[" * 100_000 + "]" * 100_000, "[" * 900 + "]" * 900,
    "9" * 5_000, "1" + "0" * 400,
    "-" + "9" * 60, "1e99999", "NaN", "Infinity", "-Infinity", '"\\ud800"', '"\\u0000"', "[" + "1," * 100_000 + "1]",
    "{" + ",".join(f'"{n}":{n}' for n in range(5_000)) + "}", "[[[[[[[[]]]]]]]]", "[" + "[]," * 50_000 + "[]]",
)  # fmt: skip
"""JSON that `json.dumps` does not write."""
_MARK = "raw-value-goes-here"
_WORDS = (b"\xff" * 4, b"\0" * 4, b"\xff\xff\xff\x7f", b"\0\0\0\x80", b"\xff" * 7 + b"\x7f", b"\xff" * 8, b"\0" * 8,
          (1 << 40).to_bytes(8, "little"), b"\x01" + b"\0" * 7, b"\xff\xfe", b"\xef\xbb\xbf",
          b"\xc3", b"\xed\xa0\x80")  # fmt: skip


def flip_bytes(draw: Random, data: bytes) -> bytes:
    """Change, copy, insert or remove a few bytes, or cut the end off."""
    content = bytearray(data or b"\0")
    for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
        content = content or bytearray(b"\0")
        # Headers are at the front of most formats, and directories at the end.
        near = draw.choice((len(content), min(len(content), 64), min(len(content), 1024)))
        place = draw.randrange(near)
        place = len(content) - 1 - place if draw.random() < 0.2 else place
        match draw.randrange(7):
            case 0:
                content[place] = draw.randrange(256)
            case 1:
                content[place] ^= 1 << draw.randrange(8)
            case 2:
                word = draw.choice(_WORDS)
                content[place : place + len(word)] = word
            case 3:
                start, count = draw.randrange(len(content)), draw.randrange(1, 64)
                content[place : place + count] = content[start : start + count]
            case 4:
                content[place:place] = draw.choice(_WORDS)
            case 5:
                del content[place : place + draw.randrange(1, 32)]
            case 6 if draw.random() < 0.3:
                del content[draw.randrange(len(content)) :]
            case _:
                content[place] = (content[place] + draw.choice((1, 255))) % 256
    return bytes(content)


def evil_value(draw: Random, old: Any = None) -> Any:
    """Return a value that a field should not have; `_MARK` and a number stand for one of `_RAW`."""
    match draw.randrange(8):
        case 0 | 1:
            return draw.choice(_NUMBERS)
        case 2:
            return draw.choice(_FLOATS)
        case 3 | 4:
            return draw.choice(_TEXTS)
        case 5:
            return f"{_MARK} {draw.randrange(len(_RAW))} "
        case 6:
            return draw.choice((None, True, False, [], {}, [None], [[]], {"a": None}, [1, "a"]))
        case _:
            if isinstance(old, (int, float)) and not isinstance(old, bool):
                return draw.choice(
                    (old + 1, old - 1, -old, old * 2, old * 2**20, str(old), [old], float(old))
                )
            return draw.choice(([old], {"x": old}, str(old), [old, old]))


def change_field(draw: Random, value: Any) -> Any:
    """Return a document with one field changed, removed, renamed or added, at a random place."""
    if isinstance(value, (dict, list)) and value and draw.random() < 0.85:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = draw.choice(keys)
        changed = dict(value) if isinstance(value, dict) else list(value)
        what = draw.random()
        if what < 0.75:
            changed[key] = change_field(draw, value[key])  # type: ignore[index]
        elif what < 0.85:
            del changed[key]  # type: ignore[arg-type]
        elif isinstance(changed, dict):
            name = draw.choice((*_TEXTS, str(key) + "x", "__metadata__"))
            changed[name] = (
                changed.pop(key) if draw.random() < 0.5 else evil_value(draw, value[key])
            )  # type: ignore[index]
        else:
            changed.append(changed[key])  # type: ignore[index]
        return changed
    return evil_value(draw, value)


def json_text(value: Any) -> bytes:
    """Write a document with the values of `_RAW` in the place of their marks."""
    text = json.dumps(value)
    for number, raw in enumerate(_RAW):
        text = text.replace(f'"{_MARK} {number} "', raw)
    return text.encode("utf-8", "surrogatepass")


def json_document(draw: Random, data: bytes) -> bytes:
    """Change a field of a JSON document."""
    return json_text(change_field(draw, json.loads(data)))


def json_lines(draw: Random, data: bytes) -> bytes:
    """Change a field of one of the lines."""
    lines = data.splitlines()
    place = draw.randrange(len(lines))
    lines[place] = json_document(draw, lines[place])
    return b"\n".join(lines) + b"\n"


def tensor_header(draw: Random, data: bytes) -> bytes:
    """Change a field of a safetensors header; its length fits again."""
    length = int.from_bytes(data[:8], "little")
    header = json_document(draw, data[8 : 8 + length])
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


_YAML = (
    "&a [*a, *a]", "[" * 5_000, "{a: " * 5_000, "2001-13-45", "!!python/object/apply:os.system [id]", "9" * 5_000,
    "!!int x", "!!timestamp x", "!!binary x", "!!bool x", "!!float x", "? [1]\n: 2", "0o9", "1:60:60",
    "*nobody", "\x07",
    "\n".join(["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10))]),
    "\n".join(["m0: &m0 {k: v}", *(f"m{n}: &m{n} {{<<: [{', '.join([f'*m{n - 1}'] * 10)}]}}" for n in range(1, 10))]),
)  # fmt: skip


def yaml_document(draw: Random, data: bytes) -> bytes:
    """Change a field of a YAML document, or add lines that harm a careless reader."""
    if draw.random() < 0.3:
        extra = draw.choice(_YAML)
        text = (
            extra
            if "\n" in extra and draw.random() < 0.5
            else f"{draw.choice(('x', 'prompt', 'model'))}: {extra}"
        )
        return (data + text.encode() + b"\n") if draw.random() < 0.7 else text.encode()
    if b"*" in data:  # aliases of aliases, added before, which the copy of a field would write out
        raise ValueError("not changed a second time")
    if draw.random() < 0.5:
        return json_text(change_field(draw, yaml.safe_load(data)))  # JSON is YAML, or nearly
    changed = change_field(draw, yaml.safe_load(data))
    return yaml.safe_dump(changed, allow_unicode=True).encode("utf-8", "surrogatepass")


def text_lines(draw: Random, data: bytes) -> bytes:
    """Repeat, remove, join or lengthen lines of a text."""
    lines = data.split(b"\n")
    place = draw.randrange(len(lines))
    match draw.randrange(6):
        case 0:
            lines[place] += draw.choice(
                (b'"', b",", b";", b"\t", b"\0", b"\r", b"\xff", b"x" * 200_000, b'"' * 9_999)
            )
        case 1:
            del lines[place]
        case 2:
            lines.insert(place, draw.choice(lines))
        case 3:
            lines = lines * draw.randrange(2, 50)
        case 4:
            lines[place] = b'{"a": ' + draw.choice(_RAW).encode() + b"}"
        case _:
            draw.shuffle(lines)
    return b"\n".join(lines)


def zip_entries(draw: Random, data: bytes) -> bytes:
    """Pack the files of a zip again, one under a name that leads elsewhere, as a link, or packed badly."""
    import io

    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    target = io.BytesIO()
    chosen = draw.choice(list(files))
    with zipfile.ZipFile(target, "w") as archive:
        for name, content in files.items():
            entry = zipfile.ZipInfo(name)
            if name == chosen:
                evil = draw.choice(("../x.json", "/etc/x.json", "a/../../x.json", "a\\..\\x.json", "A.JSON", "x.py",
                                    "x\0.json", "🙂.json", "", "/".join("a" * 40) + ".json", "CON.json",
                                    name))  # fmt: skip
                entry = zipfile.ZipInfo(evil)
                entry.external_attr = draw.choice(
                    (0, 0o120777 << 16, 0o010666 << 16, 0o040755 << 16)
                )
                entry.compress_type = draw.choice(
                    (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA)
                )
                content = draw.choice((content, b"\0" * 3_000_000, json_text(evil_value(draw))))
            archive.writestr(entry, content)
            if draw.random() < 0.05:
                archive.writestr(entry, content)
    packed = target.getvalue()
    return flip_bytes(draw, packed) if draw.random() < 0.5 else packed


def other_file(draw: Random, path: Path) -> None:
    """Put something else in the place of a file: nothing, a folder, a link, a pipe, an empty file."""
    path.unlink()
    # Rows may come from a pipe, which their owner names; what was uploaded is a file that the daemon wrote.
    without_pipe = path.stem == "rows" or path.suffix == ".zip"
    match draw.randrange(6 if without_pipe else 7):
        case 0:
            path.mkdir()
        case 1:
            path.symlink_to("/etc/passwd")
        case 2:
            path.symlink_to("../../outside")
        case 3:
            path.symlink_to(path.name)
        case 4:
            path.write_bytes(b"")
        case 5:
            pass
        case _:
            os.mkfifo(path)
