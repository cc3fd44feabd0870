"""The systemd unit of `ondevice serve install`: a separate user, which can only write its state."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ondevice.artifact.files import atomic_write
from ondevice.core.errors import ConfigError
from ondevice.core.process import python_command
from ondevice.server.serve import HOST, PORT

UNIT = "ondevice.service"
SYSTEM_FOLDER = Path("/etc/systemd/system")
WATCHDOG_S = 60
STOP_S = 180

_UNIT = """\
[Unit]
Description=ondevice: fine-tuning of language models on this machine
After=network.target

[Service]
Type=notify
NotifyAccess=main
ExecStart={command}
WatchdogSec={watchdog_s}
Restart=always
RestartSec=2
TimeoutStartSec=120
# The running job saves its state when the service stops.
TimeoutStopSec={stop_s}
KillMode=mixed
OOMPolicy=continue
LimitNOFILE=65536

# A user that exists while the service runs; /var/lib/ondevice is all that it owns.
DynamicUser=yes
{credentials}StateDirectory=ondevice
StateDirectoryMode=0700
CacheDirectory=ondevice
CacheDirectoryMode=0700
Environment=ONDEVICE_CACHE=%C/ondevice HOME=%S/ondevice HF_HOME=%C/ondevice/huggingface
UMask=0077
WorkingDirectory=%S/ondevice
# The GPU of a Jetson belongs to these groups.
SupplementaryGroups={groups}

# Each job's memory limit is a cgroup below this one.
Delegate=memory

NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
ProtectClock=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
ProtectProc=invisible
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
RemoveIPC=yes
LockPersonality=yes
KeyringMode=private
SystemCallArchitectures=native
SystemCallFilter=@system-service landlock_create_ruleset landlock_add_rule landlock_restrict_self
SystemCallFilter=~@privileged @obsolete
SystemCallErrorNumber=EPERM
# Of devices, those of an NVIDIA GPU and the usual ones (null, zero, random). Memory may be made
# executable: kernels are compiled where they run.
DevicePolicy=closed
DeviceAllow=char-nvidia* rw
DeviceAllow=char-nvhost* rw
DeviceAllow=char-nvgpu* rw
DeviceAllow=char-nvmap rw
DeviceAllow=char-drm rw
{network}
[Install]
WantedBy=multi-user.target
"""
CREDENTIALS = "%d"
"""systemd's name of the folder with the service's credentials."""
_LOOPBACK_ONLY = """
# Bound to this machine: packets to and from elsewhere are dropped. Take this out to load models
# from a hub.
IPAddressDeny=any
IPAddressAllow=localhost
"""


def unit(
    host: str = HOST,
    port: int = PORT,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    *,
    allow_unknown_fields: bool = False,
    rewards: Sequence[str] = (),
    offline: bool = False,
    groups: tuple[str, ...] = ("video", "render"),
    python: str = sys.executable,
) -> str:
    """Write the unit's text.

    Args:
        allow_unknown_fields, rewards: as for `server.serve.serve`.
        offline: also let the kernel drop what comes from or goes to other machines.
        groups: of the GPU's devices; systemd does not start a unit with an unknown group.
        python: the interpreter with ondevice; everybody must be able to read it, so not in a home.

    Raises:
        ConfigError: a path or host with characters that a unit cannot hold.
    """
    words = python_command(
        "-m", "ondevice", "serve", "--host", host, "--port", str(port), python=python
    )
    if allow_unknown_fields:
        words.append("--allow-unknown-fields")
    words += [word for reward in rewards for word in ("--allow-reward", reward)]
    files = {"tls-cert": tls_cert, "tls-key": tls_key}
    # A DynamicUser cannot read root's key: systemd passes a copy, in a folder of the service.
    credentials = {
        name: str(Path(path).absolute()) for name, path in files.items() if path is not None
    }
    words += [word for name in credentials for word in (f"--{name}", f"{CREDENTIALS}/{name}")]
    bad = [
        path for path in credentials.values() if any(character in path for character in "\n\r\0:")
    ]
    if bad := bad + [word for word in words if any(character in word for character in "\n\r\0")]:
        raise ConfigError("a unit cannot hold this", expected="one line", received=repr(bad[0]))
    command = " ".join(
        word
        if word.startswith(CREDENTIALS)
        else shlex.quote(word).replace("%", "%%").replace("$", "$$")
        for word in words
    )
    loads = "".join(
        f"LoadCredential={name}:{path.replace('%', '%%')}\n" for name, path in credentials.items()
    )
    return _UNIT.format(
        command=command,
        credentials=loads,
        watchdog_s=WATCHDOG_S,
        stop_s=STOP_S,
        groups=" ".join(groups),
        network=_LOOPBACK_ONLY if offline else "",
    )


def existing_groups() -> tuple[str, ...]:
    """List the GPU's groups that this machine has."""
    import grp

    names = {group.gr_name for group in grp.getgrall()}
    return tuple(name for name in ("video", "render") if name in names)


def install(text: str, folder: Path = SYSTEM_FOLDER) -> Path:
    """Write the unit; `systemctl daemon-reload` loads it.

    Raises:
        StorageError: the folder cannot be written: this needs root.
    """
    path = folder / UNIT
    atomic_write(path, text)
    path.chmod(0o644)
    return path
