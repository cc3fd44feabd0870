"""Malformed uploads: rows, safetensors and zips that are broken in ways that a mutation is sure to break.

    python -m tests.server.malformed --count 10000

Each is sent as a client sends it. The daemon must answer with 4xx and a reason, keep nothing of it, write nothing
outside its store, and go on. A flipped bit may leave a file whole (in a text, or in a date of a zip): such a file
may be taken, and then it must be what was sent.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import struct
import tempfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ondevice.artifact.adapter import Adapter, save_adapter
from ondevice.server.client import Client, RefusedError
from tests.server.running import DaemonProcess, wait_for

ESCAPED = f"escaped-{os.getpid()}"
"""In the names of files that must not be written; other people's /tmp may hold such names, too."""
GOOD_ROWS = [
    {"prompt": f"question {number}", "completion": f"answer {number}"} for number in range(6)
]


def jsonl(chance: random.Random) -> tuple[str, bytes, bool]:
    """Rows with one thing wrong: (what, content, whether it is surely wrong)."""
    lines = [json.dumps(row).encode() for row in GOOD_ROWS]
    place = chance.randrange(len(lines))
    broken = chance.choice(
        [
            (
                "not UTF-8",
                lambda line: line[:12] + bytes([chance.randrange(0x80, 0xC0)]) + line[12:],
            ),
            ("cut off", lambda line: line[: chance.randrange(1, len(line))]),
            ("a NUL", lambda line: line[:14] + b"\0" + line[14:]),
            (
                "no object",
                lambda line: chance.choice([b"[1, 2]", b"3", b'"text"', b"null", b"true"]),
            ),
            ("a key twice", lambda line: line[:-1] + b', "prompt": "again"}'),
            ("a key is missing", lambda line: b'{"prompt": "alone"}'),
            (
                "a number for a text",
                lambda line: b'{"prompt": "x", "completion": %d}' % chance.randrange(10**9),
            ),
            ("an empty answer", lambda line: b'{"prompt": "x", "completion": "  "}'),
            ("half a surrogate pair", lambda line: b'{"prompt": "x", "completion": "\\ud800"}'),
            ("nested", lambda line: b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
            (
                "a number without end",
                lambda line: b'{"prompt": "x", "completion": ' + b"9" * 5000 + b"}",
            ),
            ("NaN", lambda line: b'{"prompt": "x", "completion": NaN}'),
            (
                "rubbish",
                lambda line: chance.randbytes(chance.randrange(1, 200)).replace(b"\n", b"") or b"?",
            ),
            ("UTF-16", None),
            ("a list without its end", None),
            ("nothing", None),
        ]
    )
    what, change = broken
    if what == "UTF-16":
        return what, b"\n".join(lines).decode().encode("utf-16"), True
    if what == "a list without its end":
        return what, b"[" + b",".join(lines), True
    if what == "nothing":
        return what, chance.choice([b" ", b"\n\n", b"\xef\xbb\xbf", b"\t \n"]), True
    assert change is not None
    lines[place] = change(lines[place])
    return what, b"\n".join(lines) + b"\n", bool(lines[place].strip())


def adapter_files(folder: Path) -> dict[str, bytes]:
    """The two files of a small adapter."""
    values = np.random.default_rng(0)
    tensors = {}
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.q_proj"
        tensors[f"{name}.lora_A.weight"] = values.standard_normal((2, 64), dtype=np.float32)
        tensors[f"{name}.lora_B.weight"] = values.standard_normal((64, 2), dtype=np.float32)
    save_adapter(Adapter(tensors, 2, 16.0, ("q_proj",), "tiny:llama"), folder)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def packed(files: dict[str, bytes]) -> bytes:
    """A zip."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data)
    return content.getvalue()


def safetensors(chance: random.Random, files: dict[str, bytes]) -> tuple[str, bytes, bool]:
    """A whole zip with a broken adapter."""
    weights = files["adapter_model.safetensors"]
    size = struct.unpack("<Q", weights[:8])[0]
    header, body = json.loads(weights[8 : 8 + size]), weights[8 + size :]
    tensor = chance.choice([name for name in header if name != "__metadata__"])
    edits: dict[str, Callable[[], Any]] = {
        "offsets that overlap": lambda: header[tensor].update(data_offsets=[0, 8]),
        "offsets beyond the end": lambda: header[tensor].update(
            data_offsets=[len(body), len(body) + 512]
        ),
        "a huge shape": lambda: header[tensor].update(shape=[2**40, 2**40]),
        "a negative shape": lambda: header[tensor].update(shape=[-1, 64]),
        "a wrong shape": lambda: header[tensor].update(shape=[128]),
        "another dtype": lambda: header[tensor].update(
            dtype=chance.choice(["I64", "F99", "BOOL", 7])
        ),
        "another name": lambda: header.update(evil=header.pop(tensor)),
        "a tensor less": lambda: header.pop(tensor),
        "a name with a path": lambda: header.update({"../../x": header.pop(tensor)}),
    }
    what = chance.choice(
        [*edits, "cut off", "a huge header", "no header", "flipped", "not finite", "config"]
    )
    changed = dict(files)
    if what in edits:
        edits[what]()
        head = json.dumps(header).encode()
        weights = struct.pack("<Q", len(head)) + head + body
    elif what == "cut off":
        weights = weights[: chance.randrange(len(weights))]
    elif what == "a huge header":
        weights = struct.pack("<Q", chance.choice([2**63, 2**40, len(weights) * 2])) + weights[8:]
    elif what == "no header":
        weights = struct.pack("<Q", size) + chance.randbytes(size) + body
    elif what == "flipped":  # the file records a digest of its tensors
        at = 8 + size + chance.randrange(len(body))
        weights = (
            weights[:at] + bytes([weights[at] ^ (1 << chance.randrange(8))]) + weights[at + 1 :]
        )
    elif what == "not finite":
        weights = weights[: 8 + size] + struct.pack("<f", float("nan")) + body[4:]
    else:
        config = json.loads(files["adapter_config.json"])
        key, value = chance.choice(
            [("peft_type", "IA3"), ("r", 3), ("lora_alpha", "much"), ("use_dora", True), ("target_modules", ["k_proj"]),
             ("bias", "all"), ("modules_to_save", ["head"]), ("lora_alpha", float("inf")),
             ("rank_pattern", {"q_proj": 1})]
        )  # fmt: skip
        config[key] = value
        changed["adapter_config.json"] = chance.choice(
            [json.dumps(config).encode(), b"{", b"\xff\xfe", b"[]", json.dumps({"r": 2}).encode()]
        )
    changed["adapter_model.safetensors"] = weights
    return what, packed(changed), True


def hostile_zip(chance: random.Random, files: dict[str, bytes]) -> tuple[str, bytes, bool]:
    """A zip that lies, leads elsewhere, or is damaged."""
    names = {
        "upwards": f"{'../' * chance.randrange(1, 9)}{ESCAPED}-{chance.randrange(10**6)}.json",
        "absolute": f"/tmp/ondevice-{ESCAPED}-{chance.randrange(10**6)}.json",
        "backslashes": f"..\\..\\{ESCAPED}-{chance.randrange(10**6)}.json",
        "a drive": f"C:{ESCAPED}.json",
        "in the middle": f"a/../../{ESCAPED}.json",
        "hidden": ".bashrc.json",
        "no letters": "\u202egnp.json",
        "a line break": "a\nb.json",
        "long": "x" * 300 + ".json",
        "deep": "/".join("abcdefghij") + ".json",
        "a pickle": chance.choice(
            ["adapter_model.bin", "x.pt", "x.pkl", "x.pth", "x.ckpt", "run.py", "x.so", "x"]
        ),
    }
    others = [
        "a link",
        "twice",
        "other case",
        "too dense",
        "cut off",
        "rubbish",
        "empty",
        "encrypted",
        *["flipped"] * 6,
    ]
    what = chance.choice([*names, *others, "a lie about the size", "a file that is a folder"])
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items() if what != "empty" else ():
            archive.writestr(name, data)
        if what in names:
            archive.writestr(names[what], b"{}")
        elif what == "a link":
            entry = zipfile.ZipInfo("link.json")
            entry.external_attr = 0o120777 << 16
            archive.writestr(entry, "/etc/passwd")
        elif what == "twice":
            with warnings.catch_warnings(action="ignore"):
                archive.writestr("adapter_config.json", b"{}")
        elif what == "other case":
            archive.writestr("Adapter_Config.json", b"{}")
        elif what == "too dense":
            archive.writestr("zeros.json", b"0" * (1 << 22))
        elif what == "a file that is a folder":
            archive.writestr("adapter_config.json/x.json", b"{}")
    data = bytearray(content.getvalue())
    if what == "cut off":
        return what, bytes(data[: chance.randrange(1, len(data))]), True
    if what == "flipped":
        for _ in range(chance.randrange(1, 4)):
            first = chance.choice(
                (0, len(data) - 160)
            )  # anywhere, or in the list of files at the end
            data[chance.randrange(first, len(data))] ^= 1 << chance.randrange(8)
        return what, bytes(data), False
    if what == "rubbish":
        return what, chance.randbytes(chance.randrange(1, 4000)), True
    if what == "encrypted":
        for mark in (b"PK\x03\x04", b"PK\x01\x02"):
            at = data.index(mark) + (6 if mark == b"PK\x03\x04" else 8)
            data[at] |= 1
    if what == "a lie about the size":
        at = data.index(b"PK\x01\x02") + 24
        data[at : at + 4] = struct.pack("<I", chance.choice([1, 10, 2**31]))
    return what, bytes(data), True


def attack(client: Client, store: Path, scratch: Path, count: int, seed: int) -> dict[str, int]:
    """Send `count` malformed uploads; gives how many of each outcome, after checking each answer.

    Raises:
        AssertionError: an answer without a reason, one of another status, a file that stayed, a daemon that died.
    """
    chance, outcomes = random.Random(seed), Counter[str]()
    whole = adapter_files(scratch / "whole")
    wait_for(
        lambda: not client.jobs("queued", "running", "pausing", "cancelling"),
        "the jobs before it write no more",
    )
    before = _files(store)
    good = {"dataset": "\n".join(map(json.dumps, GOOD_ROWS)).encode(), "adapter": packed(whole)}
    for kind, content in good.items():  # what the mutations begin with is taken
        client.ask("DELETE", f"/v1/{kind}s/{_send(client, kind, content)['id']}")
    for number in range(count):
        kind = ("dataset", "adapter", "adapter")[number % 3]
        if kind == "dataset":
            what, content, sure = jsonl(chance)
        elif number % 3 == 1:
            what, content, sure = safetensors(chance, whole)
        else:
            what, content, sure = hostile_zip(chance, whole)
        case = f"upload {number} ({kind}: {what})"
        try:
            placed = _send(client, kind, content)
        except RefusedError as error:
            assert 400 <= error.status < 500, f"{case}: {error.status} {error}"
            assert (
                error.message and "Traceback" not in str(error) and str(store) not in str(error)
            ), f"{case}: {error}"
            if kind == "dataset" and error.problems:
                problem = error.problems[0]
                assert (
                    problem["line"] >= 1 and problem["reason"] and problem["file"] == "rows.jsonl"
                ), case
            outcomes[f"refused with {error.status}"] += 1
            continue
        assert not sure, f"{case} was taken"
        if kind == "adapter":
            taken = client.download_adapter(placed["id"], scratch / "taken")
            assert {path.name: path.read_bytes() for path in sorted(taken.iterdir())} == whole, case
            client.ask("DELETE", f"/v1/adapters/{placed['id']}")
        else:
            client.ask("DELETE", f"/v1/datasets/{placed['id']}")
        outcomes["whole all the same"] += 1
    assert _files(store) == before, sorted(_files(store) ^ before)[:5]
    escaped = [
        path for place in ("/tmp", store.parent, "/") for path in Path(place).glob(f"*{ESCAPED}*")
    ]
    assert not escaped, escaped
    assert client.health()["status"] == "ok"
    return dict(outcomes)


def _send(client: Client, kind: str, content: bytes) -> dict[str, Any]:
    name = "rows.jsonl" if kind == "dataset" else "an adapter"
    upload = client.ask("POST", "/v1/uploads", {"kind": kind, "name": name, "bytes": len(content)})
    place = f"/v1/uploads/{upload['id']}"
    client.ask("PUT", place, content, query={"offset": 0})
    return client.ask("POST", f"{place}/finish")


def _files(store: Path) -> set[str]:
    """List the store's files, without the database and the log, which grow."""
    paths = (path.relative_to(store) for path in store.rglob("*"))
    return {
        str(path)
        for path in paths
        if path.parts[0] != "logs" and not path.name.startswith("ondevice.db")
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        with DaemonProcess(Path(scratch) / "store") as daemon:
            report = attack(daemon.client, daemon.store, Path(scratch), given.count, given.seed)
    print(json.dumps({"uploads": given.count, **report}))


if __name__ == "__main__":
    main()
