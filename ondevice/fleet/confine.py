"""Takes from a fleet's processes the rights that they do not need.

The process of a device that talks to the network (`node`) keeps almost none. On Linux, Landlock
lets it read Python and the files that name resolution reads, write nothing, start no program, and
connect to the server's port only. The rows, the model and the device's copy of the fleet stay with
the process behind its socket, which never sees the network.
"""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import sys
from collections.abc import Iterable
from pathlib import Path

log = logging.getLogger("ondevice.fleet")
DATA_BYTES = 2 << 30
FILE_BYTES = 64 << 20
FILES = 1024
"""Most memory, longest file (its log) and most open files of the process for the network."""
RESOLVING = (
    "/etc/hosts",
    "/etc/resolv.conf",
    "/etc/nsswitch.conf",
    "/etc/host.conf",
    "/etc/gai.conf",
)
SYSTEM = ("/usr", "/lib", "/lib64", "/etc/localtime")
DNS_PORT = 53

_NO_NEW_PRIVILEGES = 38  # prctl
# Landlock's system calls, the same on every architecture
_CREATE = 444
_ADD = 445
_RESTRICT = 446
_PATH = 1
_PORT = 2
_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_READ_FOLDER = 1 << 3
_FILE_RIGHTS_BITS = {1: 13, 2: 14, 3: 15, 4: 15}  # by Landlock's version; 16 from version 5 on
_BIND_OR_CONNECT = 3
_CONNECT = 2
_OTHERS_SOCKETS_AND_SIGNALS = 3


class _Rules(ctypes.Structure):
    _fields_ = [
        ("files", ctypes.c_uint64),
        ("network", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    ]


class _Below(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("rights", ctypes.c_uint64), ("folder", ctypes.c_int32)]


class _Port(ctypes.Structure):
    _fields_ = [("rights", ctypes.c_uint64), ("port", ctypes.c_uint64)]


def shed() -> None:
    """Gain no right by starting a program (as sudo does), write files for this user only, and leave
    no core file, which would have rows in it."""
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)


def confine(files: Iterable[Path], ports: Iterable[int]) -> bool:
    """Keep only what a device's process for the network needs; returns False without Landlock.

    Args:
        files: more files that it may read.
        ports: TCP ports that it may connect to.
    """
    shed()
    for limit, most in (
        (resource.RLIMIT_DATA, DATA_BYTES),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NOFILE, FILES),
    ):
        hard = resource.getrlimit(limit)[1]
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(limit, (most, most))
    version = -1
    if sys.platform == "linux":
        version = _call(_CREATE, None, 0, 1)
    if version < 1:
        log.warning("no Landlock here: the process for the network may read what its user may")
        return False
    _restrict(version, files, ports)
    return True


def _restrict(version: int, files: Iterable[Path], ports: Iterable[int]) -> None:
    rules = _Rules(files=(1 << _FILE_RIGHTS_BITS.get(version, 16)) - 1)
    if version >= 4:
        rules.network = _BIND_OR_CONNECT
    if version >= 6:
        rules.scoped = _OTHERS_SOCKETS_AND_SIGNALS
    ruleset = _checked(_CREATE, ctypes.byref(rules), ctypes.sizeof(rules), 0)
    python = [sys.prefix, sys.base_prefix, *filter(os.path.isabs, sys.path)]
    for path in {*python, *SYSTEM, *RESOLVING, *map(str, files)}:
        _allow(ruleset, path, _READ_FILE | _READ_FOLDER)
    _allow(ruleset, os.devnull, _READ_FILE | _WRITE_FILE)
    for port in (*ports, DNS_PORT) if version >= 4 else ():
        _checked(_ADD, ruleset, _PORT, ctypes.byref(_Port(_CONNECT, port)), 0)
    _checked(_RESTRICT, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    """Allow rights below a folder, or to a file; what does not exist needs none."""
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not os.path.isdir(path):
            rights &= ~_READ_FOLDER
        _checked(_ADD, ruleset, _PATH, ctypes.byref(_Below(rights, opened)), 0)
    finally:
        os.close(opened)


def _call(number: int, *arguments: object) -> int:
    return ctypes.CDLL(None, use_errno=True).syscall(number, *arguments)


def _checked(number: int, *arguments: object) -> int:
    result = _call(number, *arguments)
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"Landlock: {os.strerror(error)}")
    return result
