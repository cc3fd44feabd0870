"""The Python client of a daemon: the standard library and nothing else.

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
"""Entries of a list that are asked for at once."""
ENDED = ("done", "failed", "cancelled")
CHECKED_BYTES_PER_S = 1 << 20
"""How fast even a small board checks an upload."""


class Client(Transport):
    """A daemon, by its address.

    Args:
        url: `http://` or `https://` with host and port; `$ONDEVICE_URL`, else this machine's, if None.
        token: for a daemon that needs one; `$ONDEVICE_TOKEN` if None.
        ca: a PEM file with the certificate to trust, for one of your own.
        timeout_s: of one request; of a stream, how long it may be silent (the daemon says something every 15 s).
    """

    def health(self) -> dict[str, Any]:
        """Ask if the daemon works, for its version, and if it needs a token."""
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
        """Return models that a job can name."""
        return [
            row
            for row in self.ask("GET", "/v1/models")["data"]
            if row["kind"] not in ("adapter", "artifact")
        ]

    def artifacts(self) -> list[dict[str, Any]]:
        """Return exported programs that a job can name."""
        return self.ask("GET", "/v1/artifacts")

    def delete_model(self, model: str) -> None:
        """Delete a model of the store that no waiting or running job names."""
        self.ask("DELETE", f"/v1/models/{quote(model)}")

    def delete_artifact(self, artifact: str) -> None:
        """Delete an exported program that no waiting or running job names."""
        self.ask("DELETE", f"/v1/artifacts/{quote(artifact)}")

    def datasets(self) -> list[dict[str, Any]]:
        """Return data sets in the store."""
        return self._all("/v1/datasets")

    def delete_dataset(self, dataset: str) -> None:
        """Delete rows that no waiting or running job names."""
        self.ask("DELETE", f"/v1/datasets/{quote(dataset)}")

    def preview(self, dataset: str, model: str | None = None, **options: Any) -> dict[str, Any]:
        """Return rows as the model sees them, or `artifact`, by its own tokenizer."""
        return self.ask(
            "POST", f"/v1/datasets/{quote(dataset)}/preview", {"model": model, **options}
        )

    def upload(
        self, kind: str, path: str | Path, name: str | None = None, **options: Any
    ) -> dict[str, Any]:
        """Send a file (rows; a zip) or a folder (as a zip) in parts; return `{"kind", "id"}` of the thing in the store.

        Args:
            kind: dataset, model, artifact or adapter.
            name: the file's, if None.
            options: `task`, `columns`, `skip_bad_rows`.

        Raises:
            RefusedError: with file, line, field and reason of what is wrong.
        """
        path = Path(path)
        if path.is_dir():
            return self._upload_folder(kind, path, name or path.name, options)
        if not path.is_file():
            raise ConfigError(f"there is no file {path}", hint="check the path")
        request = {
            "kind": kind, "name": name or path.name, "bytes": path.stat().st_size, "sha256": sha256_file(path),
            **options,
        }  # fmt: skip
        upload = self.ask("POST", "/v1/uploads", request)
        place, offset = f"/v1/uploads/{upload['id']}", 0
        with open(path, "rb") as file:
            while (
                offset < request["bytes"]
            ):  # the daemon says how much has arrived, also after a lost answer
                file.seek(offset)
                part = file.read(PART_BYTES)
                offset = self.ask("PUT", place, part, query={"offset": offset})["received_bytes"]
        patient = copy(self)
        patient.timeout_s += (
            request["bytes"] / CHECKED_BYTES_PER_S
        )  # it says nothing before its check has ended
        return patient.ask("POST", f"{place}/finish")

    def plan(self, **job: Any) -> dict[str, Any]:
        """Check a job and plan its memory; nothing is queued."""
        return self.ask("POST", "/v1/jobs", {**job, "dry_run": True})

    def create_job(self, **job: Any) -> dict[str, Any]:
        """Queue a job: model or artifact, dataset, and maybe eval_dataset, adapter, config, name, priority, window,
        limits, force."""
        headers = {"Idempotency-Key": secrets.token_hex(16)}
        try:
            return self.ask("POST", "/v1/jobs", job, headers=headers)
        except (
            DeviceError
        ):  # its answer may be lost, and the job made: with the same key it is made once
            return self.ask("POST", "/v1/jobs", job, headers=headers)

    def jobs(self, *states: str) -> list[dict[str, Any]]:
        """Return all jobs, or those in `states`."""
        return self._all("/v1/jobs", {"state": list(states)})

    def job(self, job: str) -> dict[str, Any]:
        """Return one job."""
        return self.ask("GET", f"/v1/jobs/{quote(job)}")

    def change_job(self, job: str, **values: Any) -> dict[str, Any]:
        """Set another priority, window or limits."""
        return self.ask("PATCH", f"/v1/jobs/{quote(job)}", values)

    def pause(self, job: str) -> dict[str, Any]:
        """Stop after the running step, with the state saved."""
        return self.ask("POST", f"/v1/jobs/{quote(job)}/pause")

    def resume(self, job: str) -> dict[str, Any]:
        """Go on with a paused or failed job."""
        return self.ask("POST", f"/v1/jobs/{quote(job)}/resume")

    def cancel(self, job: str) -> dict[str, Any]:
        """End a job for good."""
        return self.ask("POST", f"/v1/jobs/{quote(job)}/cancel")

    def delete_job(self, job: str) -> None:
        """Forget an ended job; its adapters stay."""
        self.ask("DELETE", f"/v1/jobs/{quote(job)}")

    def log(self, job: str) -> str:
        """Read the end of what its workers printed."""
        return self._send("GET", f"/v1/jobs/{quote(job)}/log").decode(errors="replace")

    def events(self, job: str, after: int = 0, *, follow: bool = True) -> Iterator[dict[str, Any]]:
        """Yield a job's events behind id `after`, each with its id under `id`; go on over lost connections.

        Args:
            follow: wait for more until the job has ended.
        """
        failures, query = 0, {"follow": str(follow).lower()}
        while True:
            try:
                for number, event in self._server_sent(
                    f"/v1/jobs/{quote(job)}/events", query | {"after": after}
                ):
                    after, failures = number, 0
                    yield {"id": number, **event}
                if not follow or self.job(job)["state"] in ENDED:
                    return
            except DeviceError:
                failures += 1
                if failures > 10:
                    raise DeviceError(
                        f"the daemon at {self.url} does not answer",
                        hint="is it running? `ondevice serve`",
                    ) from None
                time.sleep(min(5.0, 0.2 * 2**failures))

    def wait(
        self, job: str, timeout_s: float = float("inf"), poll_s: float = 0.2
    ) -> dict[str, Any]:
        """Wait for the end of a job, and return it.

        Raises:
            BusyError: it has not, after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        while (row := self.job(job))["state"] not in ENDED:
            if time.monotonic() > deadline:
                raise BusyError(
                    f"job {job} is {row['state']}", expected=f"its end in {timeout_s:g} s"
                )
            time.sleep(poll_s)
        return row

    def adapters(self) -> list[dict[str, Any]]:
        """Return adapters in the store."""
        return self._all("/v1/adapters")

    def download_adapter(self, adapter: str, folder: str | Path) -> Path:
        """Write an adapter's two files into `folder`, as PEFT loads them; an adapter that is there is replaced.

        Raises:
            StorageError: `folder` holds something else than an adapter.
        """
        content, folder = self._send("GET", f"/v1/adapters/{quote(adapter)}/download"), Path(folder)
        with atomic_directory(folder, marker="adapter_config.json") as partial:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                for name in archive.namelist():
                    (partial / Path(name).name).write_bytes(archive.read(name))
        return folder

    def forms(self) -> list[dict[str, Any]]:
        """Return the forms that an adapter can be converted to."""
        return self.ask("GET", "/v1/forms")

    def convert(self, adapter: str, to: str, **options: Any) -> dict[str, Any]:
        """Begin to convert an adapter; options: `model`, `dtype`. Return the conversion, with its id."""
        return self.ask("POST", "/v1/conversions", {"adapter": adapter, "to": to, **options})

    def conversions(self) -> list[dict[str, Any]]:
        """Return all conversions, the newest first."""
        return self.ask("GET", "/v1/conversions")

    def wait_for_conversion(
        self, conversion: str, told: Callable[[str], None] = lambda stage: None, poll_s: float = 0.2
    ) -> dict[str, Any]:
        """Wait for the end of a conversion, and return it; `told` is given each stage.

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
            time.sleep(poll_s)
        if row["state"] == "failed":
            raise refusal(422, json.dumps(row["error"]).encode())
        return row

    def download_conversion(self, conversion: str, path: str | Path) -> Path:
        """Write what a conversion made: one file, or a zip of the folder; nothing is left if it breaks off."""
        with self._answer("GET", f"/v1/conversions/{quote(conversion)}/download") as response:
            with atomic_file(path) as partial, open(partial, "wb") as file:
                shutil.copyfileobj(response, file, 1 << 20)
                if response.length:  # a body that was cut off reads as its end
                    raise OSError(f"{response.length} bytes are missing")
        return Path(path)

    def delete_conversion(self, conversion: str) -> None:
        """Forget a conversion and its file; one that runs is ended."""
        self.ask("DELETE", f"/v1/conversions/{quote(conversion)}")

    def delete_adapter(self, adapter: str) -> None:
        """Delete an adapter that is not in use."""
        self.ask("DELETE", f"/v1/adapters/{quote(adapter)}")

    def activate(self, adapter: str) -> dict[str, Any]:
        """Use an adapter."""
        return self.ask("POST", f"/v1/adapters/{quote(adapter)}/activate")

    def roll_back(self) -> dict[str, Any]:
        """Use what was in use before."""
        return self.ask("POST", "/v1/adapters/rollback")

    def generate(
        self, model: str | None, prompt: str | list[dict[str, str]], **options: Any
    ) -> dict[str, Any]:
        """Answer a prompt: the base model's answer is under `base`, the adapter's under `adapted`; `model` is None
        where `artifact` is given."""
        return self.ask("POST", "/v1/generate", {"model": model, "prompt": prompt, **options})

    def judge(
        self,
        prompt: str | list[dict[str, str]],
        answer: str,
        liked: bool,
        *,
        model: str,
        adapter: str | None = None,
    ) -> dict[str, Any]:
        """Keep a thumb, up or down, for an answer of a model; judged again, the same answer changes its thumb."""
        values = {
            "prompt": prompt,
            "answer": answer,
            "liked": liked,
            "model": model,
            "adapter": adapter,
        }
        return self.ask("POST", "/v1/thumbs", values)

    def thumbs(self, limit: int = 100) -> list[dict[str, Any]]:
        """Return judged answers, the newest first."""
        return self.ask("GET", "/v1/thumbs", query={"limit": limit})

    def export_thumbs(self, path: str | Path) -> int:
        """Write all judged answers into a file of JSON lines, as `ondevice data` reads them; return how many."""
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
        """Return a whole list, page by page."""
        entries: list[dict[str, Any]] = []
        while True:
            after = entries[-1]["id"] if entries else None
            part = self.ask("GET", path, query={**(query or {}), "limit": PAGE, "after": after})
            entries += part
            if len(part) < PAGE:
                return entries
