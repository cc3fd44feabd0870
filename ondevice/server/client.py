"""The Python client of a daemon, on the standard library only.

from ondevice.server.client import Client
client = Client("http://127.0.0.1:8765")
rows = client.upload("dataset", "rows.jsonl")
job = client.create_job(model="tiny:llama", dataset=rows["id"], config={"train": {"steps": 50}})
for event in client.events(job["id"]):
    print(event["event"], event.get("loss"))
client.download_adapter(job["id"], "adapter")
"""

from __future__ import annotations

import io
import json
import secrets
import shutil
import time
import zipfile
from collections.abc import Callable, Iterator
from copy import copy
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ondevice.artifact.files import atomic_directory, atomic_file, atomic_write, sha256_file
from ondevice.core.errors import BusyError, ConfigError, DeviceError
from ondevice.server.transport import RefusedError, Transport, refusal

__all__ = ["Client", "RefusedError"]
PART_BYTES = 4 << 20
PAGE = 1000
"""Entries of a list per request."""
POLL_S = 0.2
ENDED = ("done", "failed", "cancelled")
CHECKED_BYTES_PER_S = 1 << 20
"""Bytes per second that even a small board checks of an upload."""


class Client(Transport):
    """A client of the daemon at an address.

    Args:
        url: `http://` or `https://` with host and port; if None, `$ONDEVICE_URL` or this machine.
        token: for a daemon that needs one; if None, `$ONDEVICE_TOKEN`.
        ca: a PEM file with a certificate to trust, such as your own.
        timeout_s: of one request, or of silence in a stream (the daemon sends a ping every 15 s).
    """

    def health(self) -> dict[str, Any]:
        """Return whether the daemon works, its version, and whether it needs a token."""
        return self.ask("GET", "/v1/health")

    def system(self) -> dict[str, Any]:
        """Return memory, disk, temperatures and power of its machine."""
        return self.ask("GET", "/v1/system")

    def metrics(self) -> dict[str, Any]:
        """Return figures of the daemon."""
        return self.ask("GET", "/v1/metrics")

    def fleets(self) -> list[dict[str, Any]]:
        """Return the fleets that the daemon's machine takes part in: rounds, bytes, hash."""
        return self.ask("GET", "/v1/fleets")

    def models(self) -> list[dict[str, Any]]:
        """Return the models that a job can use."""
        rows = self._all("/v1/models")
        return [row for row in rows if row["kind"] not in ("adapter", "artifact")]

    def artifacts(self) -> list[dict[str, Any]]:
        """Return the exported programs that a job can use."""
        return self.ask("GET", "/v1/artifacts")

    def delete_model(self, model: str) -> None:
        """Delete a model of the store that no waiting or running job uses."""
        self.ask("DELETE", f"/v1/models/{quote(model)}")

    def delete_artifact(self, artifact: str) -> None:
        """Delete an exported program that no waiting or running job uses."""
        self.ask("DELETE", f"/v1/artifacts/{quote(artifact)}")

    def datasets(self) -> list[dict[str, Any]]:
        """Return data sets in the store."""
        return self._all("/v1/datasets")

    def delete_dataset(self, dataset: str) -> None:
        """Delete a data set that no waiting or running job uses."""
        self.ask("DELETE", f"/v1/datasets/{quote(dataset)}")

    def preview(self, dataset: str, model: str | None = None, **options: Any) -> dict[str, Any]:
        """Return rows as the model or the artifact sees them, with its tokenizer."""
        return self.ask(
            "POST", f"/v1/datasets/{quote(dataset)}/preview", {"model": model, **options}
        )

    def upload(
        self, kind: str, path: str | Path, name: str | None = None, **options: Any
    ) -> dict[str, Any]:
        """Upload a file or a folder (as a zip) in parts; return its `kind` and `id` in the store.

        Args:
            kind: dataset, model, artifact or adapter.
            name: if None, the file's.
            options: `task`, `columns`, `skip_bad_rows`.

        Raises:
            RefusedError: with file, line, field and reason of each problem.
        """
        path = Path(path)
        if path.is_dir():
            return self._upload_folder(kind, path, name or path.name, options)
        if not path.is_file():
            raise ConfigError(f"no such file: {path}", hint="check the path")
        request = {
            "kind": kind, "name": name or path.name, "bytes": path.stat().st_size, "sha256": sha256_file(path),
            **options,
        }  # fmt: skip
        upload = self.ask("POST", "/v1/uploads", request)
        place = f"/v1/uploads/{upload['id']}"
        offset = 0
        with open(path, "rb") as file:
            while (
                offset < request["bytes"]
            ):  # the daemon knows how much has arrived, also after a lost response
                file.seek(offset)
                part = file.read(PART_BYTES)
                offset = self.ask("PUT", place, part, query={"offset": offset})["received_bytes"]
        patient = copy(self)
        patient.timeout_s += (
            request["bytes"] / CHECKED_BYTES_PER_S
        )  # it is silent until its check ends
        return patient.ask("POST", f"{place}/finish")

    def plan(self, **job: Any) -> dict[str, Any]:
        """Check a job and plan its memory, without queueing it."""
        return self.ask("POST", "/v1/jobs", {**job, "dry_run": True})

    def create_job(self, **job: Any) -> dict[str, Any]:
        """Queue a job: model or artifact, dataset, and optionally eval_dataset, adapter, config,
        name, priority, window, limits, force. The data set `thumbs` is the store's ratings."""
        headers = {"Idempotency-Key": secrets.token_hex(16)}
        try:
            return self.ask("POST", "/v1/jobs", job, headers=headers)
        except (
            DeviceError
        ):  # the response may be lost after the job was made: with one key it is made once
            return self.ask("POST", "/v1/jobs", job, headers=headers)

    def jobs(self, *states: str) -> list[dict[str, Any]]:
        """Return all jobs, or those in `states`."""
        return self._all("/v1/jobs", {"state": list(states)})

    def job(self, job: str) -> dict[str, Any]:
        """Return one job."""
        return self.ask("GET", f"/v1/jobs/{quote(job)}")

    def change_job(self, job: str, **values: Any) -> dict[str, Any]:
        """Change a job's priority, window or limits."""
        return self.ask("PATCH", f"/v1/jobs/{quote(job)}", values)

    def pause(self, job: str) -> dict[str, Any]:
        """Pause a job after the current step, with its state saved."""
        return self.ask("POST", f"/v1/jobs/{quote(job)}/pause")

    def resume(self, job: str) -> dict[str, Any]:
        """Resume a paused or failed job."""
        return self.ask("POST", f"/v1/jobs/{quote(job)}/resume")

    def cancel(self, job: str) -> dict[str, Any]:
        """Cancel a job for good."""
        return self.ask("POST", f"/v1/jobs/{quote(job)}/cancel")

    def delete_job(self, job: str) -> None:
        """Delete an ended job; its adapters stay."""
        self.ask("DELETE", f"/v1/jobs/{quote(job)}")

    def log(self, job: str) -> str:
        """Return the last part of a job's log."""
        return self._send("GET", f"/v1/jobs/{quote(job)}/log").decode(errors="replace")

    def events(self, job: str, after: int = 0, *, follow: bool = True) -> Iterator[dict[str, Any]]:
        """Yield a job's events after id `after`, each with its `id`, across lost connections.

        Args:
            follow: wait for more events until the job ends.
        """
        failures = 0
        query = {"follow": str(follow).lower()}
        while True:
            try:
                for number, event in self._server_sent(
                    f"/v1/jobs/{quote(job)}/events", query | {"after": after}
                ):
                    after = number
                    failures = 0
                    yield {"id": number, **event}
                if not follow or self.job(job)["state"] in ENDED:
                    return
            except DeviceError:
                failures += 1
                if failures > 10:
                    raise DeviceError(
                        f"the daemon at {self.url} does not respond",
                        hint="is it running? `ondevice serve`",
                    ) from None
                time.sleep(min(5.0, 0.2 * 2**failures))

    def wait(self, job: str, timeout_s: float = float("inf")) -> dict[str, Any]:
        """Wait for the end of a job, and return it.

        Raises:
            BusyError: the job has not ended after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while (row := self.job(job))["state"] not in ENDED:
            if time.monotonic() > deadline:
                raise BusyError(
                    f"job {job} is {row['state']}", expected=f"the end within {timeout_s:g} s"
                )
            time.sleep(POLL_S)
        return row

    def adapters(self) -> list[dict[str, Any]]:
        """Return the adapters of the store."""
        return self._all("/v1/adapters")

    def download_adapter(self, adapter: str, folder: str | Path) -> Path:
        """Write an adapter's files into `folder`, as PEFT loads them, over an adapter that is
        there.

        Raises:
            StorageError: `folder` holds something other than an adapter.
        """
        content = self._send("GET", f"/v1/adapters/{quote(adapter)}/download")
        folder = Path(folder)
        with atomic_directory(folder, marker="adapter_config.json") as partial:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                for name in archive.namelist():
                    (partial / Path(name).name).write_bytes(archive.read(name))
        return folder

    def forms(self) -> list[dict[str, Any]]:
        """Return the formats that an adapter can be converted to."""
        return self.ask("GET", "/v1/forms")

    def convert(self, adapter: str, to: str, **options: Any) -> dict[str, Any]:
        """Start converting an adapter, with the options `model` and `dtype`."""
        return self.ask("POST", "/v1/conversions", {"adapter": adapter, "to": to, **options})

    def conversions(self) -> list[dict[str, Any]]:
        """Return all conversions, the newest first."""
        return self.ask("GET", "/v1/conversions")

    def wait_for_conversion(
        self, conversion: str, told: Callable[[str], None] = lambda stage: None
    ) -> dict[str, Any]:
        """Wait for the end of a conversion, and return it; call `told` with each stage.

        Raises:
            RefusedError: it failed, with the reason.
        """
        stage = ""
        while (row := self.ask("GET", f"/v1/conversions/{quote(conversion)}"))["state"] in (
            "waiting",
            "running",
        ):
            if row["stage"] != stage:
                told(stage := row["stage"])
            time.sleep(POLL_S)
        if row["state"] == "failed":
            raise refusal(422, json.dumps(row["error"]).encode())
        return row

    def download_conversion(self, conversion: str, path: str | Path) -> Path:
        """Write the file of a conversion, or a zip of its folder; leave nothing if it fails."""
        with self._answer("GET", f"/v1/conversions/{quote(conversion)}/download") as response:
            with atomic_file(path) as partial, open(partial, "wb") as file:
                shutil.copyfileobj(response, file, 1 << 20)
                if response.length:  # a body that was cut off reads as its end
                    raise OSError(f"{response.length} bytes are missing")
        return Path(path)

    def delete_conversion(self, conversion: str) -> None:
        """Delete a conversion and its file; a running one is stopped."""
        self.ask("DELETE", f"/v1/conversions/{quote(conversion)}")

    def delete_adapter(self, adapter: str) -> None:
        """Delete an adapter that is not active."""
        self.ask("DELETE", f"/v1/adapters/{quote(adapter)}")

    def activate(self, adapter: str) -> dict[str, Any]:
        """Use an adapter."""
        return self.ask("POST", f"/v1/adapters/{quote(adapter)}/activate")

    def roll_back(self) -> dict[str, Any]:
        """Activate what was active before."""
        return self.ask("POST", "/v1/adapters/rollback")

    def generate(
        self, model: str | None, prompt: str | list[dict[str, str]], **options: Any
    ) -> dict[str, Any]:
        """Generate with the base model (`base`) and with the adapter (`adapted`).

        `model` is None if `artifact` is given."""
        return self.ask("POST", "/v1/generate", {"model": model, "prompt": prompt, **options})

    def predict(self, model: str, rows: list[Any], **options: Any) -> dict[str, Any]:
        """Predict rows, with or without labels, at most 1,000 and 1 MiB of them.

        Args:
            model: an adapter, a model or an artifact (`artifact:ID`).
            rows: objects with the columns of the training's files, or texts.
            options: `adapter`, `task`, `max_new_tokens`.
        """
        return self.ask("POST", "/v1/predict", {"model": model, "rows": rows, **options})

    def judge(
        self,
        prompt: str | list[dict[str, str]],
        answer: str,
        liked: bool,
        *,
        model: str,
        adapter: str | None = None,
    ) -> dict[str, Any]:
        """Store a rating, thumbs up or down, of a reply; a new rating replaces the last one."""
        values = {
            "prompt": prompt,
            "answer": answer,
            "liked": liked,
            "model": model,
            "adapter": adapter,
        }
        return self.ask("POST", "/v1/thumbs", values)

    def rate(self, response: str, rating: str, index: int = 0) -> dict[str, Any]:
        """Rate one of the daemon's last answers, `up` or `down`, by the id of its response."""
        values = {"id": response, "rating": rating, "index": index}
        return self.ask("POST", "/v1/feedback", values)

    def thumbs(self, limit: int = 100) -> list[dict[str, Any]]:
        """Return the rated replies, the newest first."""
        return self.ask("GET", "/v1/thumbs", query={"limit": limit})

    def export_thumbs(self, path: str | Path) -> int:
        """Write all rated replies as JSON lines, ready to train on; return their number."""
        content = self._send("GET", "/v1/thumbs/export")
        atomic_write(Path(path), content)
        return content.count(b"\n")

    def delete_thumb(self, thumb: str) -> None:
        """Forget a judgement."""
        self.ask("DELETE", f"/v1/thumbs/{quote(thumb)}")

    def _upload_folder(
        self, kind: str, folder: Path, name: str, options: dict[str, Any]
    ) -> dict[str, Any]:
        import tempfile

        with tempfile.TemporaryDirectory() as scratch:
            packed = Path(scratch) / "folder.zip"
            with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
                for path in sorted(folder.rglob("*")):
                    if path.is_file():
                        archive.write(path, path.relative_to(folder).as_posix())
            return self.upload(kind, packed, name, **options)

    def _all(self, path: str, query: dict[str, Any] | None = None) -> list[dict[str, Any]]:
        """Return all entries of a list, page by page."""
        entries: list[dict[str, Any]] = []
        while True:
            after = None
            if entries:
                after = entries[-1]["id"]
            part = self.ask("GET", path, query={**(query or {}), "limit": PAGE, "after": after})
            if isinstance(part, dict):  # OpenAI's form of a list
                part = part["data"]
            entries += part
            if len(part) < PAGE:
                return entries
