"""The page in Debian's Chromium, over a daemon that trains a real tiny model. `make browser` installs what it needs."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the serve extra is not installed")

from ondevice.server.app import PAGE
from ondevice.server.guard import CSP
from ondevice.server.security import create_token
from ondevice.server.store import Store
from tests.server.running import DaemonProcess, rows
from tests.warm import Warm

SCRIPTS = Path(__file__).with_name("browser")
MODULES = SCRIPTS / "node_modules"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
LABELS = (("schlecht", "nein"), ("schön", "ja"))
SCRIPT_LIMIT_S = 560
pytestmark = pytest.mark.timeout(600)


def missing() -> str:
    """Name the packages that the browser tests lack here; empty if none."""
    lacks = [] if CHROMIUM else ["chromium"]
    lacks += [] if shutil.which("node") else ["node"]
    lacks += [] if (MODULES / "playwright-core").is_dir() else ["playwright-core"]
    return ", ".join(lacks)


needs_browser = pytest.mark.skipif(
    bool(missing()) and not os.environ.get("ONDEVICE_REQUIRE_BROWSER"),
    reason=f"no {missing()}; try: make browser",
)


def play(script: str, **environment: str) -> dict[str, Any]:
    """Run a scenario; what it printed last."""
    done = subprocess.run(
        ["node", str(SCRIPTS / f"{script}.js")],
        env={**os.environ, "CHROMIUM": CHROMIUM or "chromium", **environment},
        capture_output=True,
        text=True,
        timeout=SCRIPT_LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout.splitlines()[-1])


def write_rows(path: Path, count: int = 16) -> Path:
    rows = [
        {"text": f"{LABELS[i % 2][0]} {i} 漢字 שלום", "label": LABELS[i % 2][1]}
        for i in range(count)
    ]
    path.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )
    return path


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("page") / "store", python=warm.python) as running:
        yield running


@pytest.fixture(scope="module")
def story(daemon: DaemonProcess) -> dict[str, Any]:
    """The whole run, played once: its job and the adapter that the browser downloaded."""
    folder = daemon.store.parent
    rows = write_rows(folder / "rows.jsonl")
    bad = folder / "bad.jsonl"
    bad.write_text(
        rows.read_text(encoding="utf-8")
        .replace('"label"', '"lable"', 3)
        .replace('"lable"', '"label"', 2)
    )
    return play(
        "story", ONDEVICE_URL=daemon.address, ROWS=str(rows), BAD_ROWS=str(bad), OUT=str(folder)
    )


@pytest.mark.slow
@needs_browser
def test_a_job_in_the_browser_from_rows_to_an_adapter_that_peft_loads(
    story: dict[str, Any], tmp_path: Path
) -> None:
    """Bad rows, good rows, masks, plan, live curve, pause, resume, a killed worker, download; then peft."""
    import torch
    from peft import PeftModel

    from ondevice.models import load_model

    zipfile.ZipFile(story["file"]).extractall(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "ondevice_task.json",
    }
    ids = torch.arange(3, 19)[None]
    model = load_model("tiny:llama").model
    with torch.no_grad():
        before = model(ids).logits
        adapted = PeftModel.from_pretrained(model, str(tmp_path))(ids).logits
    assert (adapted - before).abs().max() > 1e-3


@pytest.mark.slow
@needs_browser
def test_every_view_at_360_px_in_light_and_dark_within_the_csp(
    daemon: DaemonProcess, story: dict[str, Any]
) -> None:
    play("layout", ONDEVICE_URL=daemon.address, JOB=story["job"])


@pytest.mark.slow
@needs_browser
def test_a_job_with_the_keyboard_alone(daemon: DaemonProcess, story: dict[str, Any]) -> None:
    play("keyboard", ONDEVICE_URL=daemon.address)


@pytest.mark.slow
@needs_browser
def test_an_exported_program_from_its_zip_to_a_finished_job(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    from ondevice.api.export import export
    from ondevice.api.runfile import RunConfig

    values = {
        "method.name": "prge",
        "method.rank": 2,
        "method.queries": 2,
        "export.target": "cuda-server",
    }
    values |= {"model.source": "tiny:llama", "export.lengths_tokens": [32], "export.batch_size": 2}
    folder = export(RunConfig.load(None, values), tmp_path / "program").path
    packed = shutil.make_archive(str(tmp_path / "packed"), "zip", folder)
    play(
        "artifact",
        ONDEVICE_URL=daemon.address,
        ARTIFACT=packed,
        ROWS=str(write_rows(tmp_path / "rows.jsonl")),
    )


@needs_browser
def test_a_conversation_with_both_models(daemon: DaemonProcess, tmp_path: Path) -> None:
    """Turns, streaming, stop, thumbs, export: what was downloaded is read as rows."""
    import numpy as np

    from ondevice.artifact.adapter import Adapter, save_adapter
    from ondevice.data import read_rows

    linear, random = "model.layers.0.self_attn.q_proj", np.random.default_rng(0)
    shapes = {"A": (4, 64), "B": (64, 4)}
    tensors = {
        f"{linear}.lora_{side}.weight": random.normal(size=shape).astype("f4")
        for side, shape in shapes.items()
    }
    save_adapter(Adapter(tensors, 4, 8.0, ("q_proj",), "tiny:llama"), tmp_path / "mine")
    adapter = daemon.client.upload("adapter", tmp_path / "mine")["id"]
    played = play("conversation", ONDEVICE_URL=daemon.address, ADAPTER=adapter, OUT=str(tmp_path))
    assert [row.label for row in read_rows(played["file"]).items] == ["down", "up"]
    assert set(zipfile.ZipFile(played["zip"]).namelist()) == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


@needs_browser
def test_a_finished_job_answers_pasted_texts_and_a_file(served: Any, tmp_path: Path) -> None:
    """The downloaded answers have the texts as they were pasted, and the labels of POST /v1/predict."""
    texts = ['schön "1", 漢字', "schlecht 2"]
    job = served.job["id"]
    environment = {"SHOT": os.environ.get("ONDEVICE_SCREENSHOT", "")}
    file = rows(tmp_path / "rows.jsonl")
    played = play("use", ONDEVICE_URL=served.daemon.address, JOB=job, ROWS=str(file), **environment)
    read = list(csv.DictReader(io.StringIO(played["csv"].removeprefix("\ufeff"))))
    answers = served.client.predict(job, texts)["data"]
    assert [row["text"] for row in read] == texts
    assert [row["prediction"] for row in read] == [row["prediction"] for row in answers]
    for row, answer in zip(read, answers, strict=True):
        assert float(row["probability"]) == pytest.approx(answer["probability"], abs=1e-6)


@needs_browser
def test_columns_templates_and_methods_are_chosen_in_words(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    """A table with foreign columns becomes a job with a template; its answers come back as tables."""
    openpyxl = pytest.importorskip("openpyxl", reason="the tables extra is not installed")
    teams = ("repairs", "post")
    tickets = tmp_path / "tickets.csv"
    lines = [
        f"{i};{'broken' if i % 2 else 'lost'} parcel {i} 漢字;{teams[i % 2]}" for i in range(24)
    ]
    tickets.write_text("\n".join(["Id;Body;Team", *lines]) + "\n", encoding="utf-8")
    book = openpyxl.Workbook()
    for row in (("Number", "Message"), *((i, f"broken parcel {i} שלום") for i in range(3))):
        book.active.append(row)
    book.save(tmp_path / "new tickets.xlsx")
    out = Path(os.environ.get("ONDEVICE_SCREENSHOTS", tmp_path))
    files = {"TICKETS": str(tickets), "NEW_TICKETS": str(tmp_path / "new tickets.xlsx")}
    played = play("columns", ONDEVICE_URL=daemon.address, OUT=str(out), **files)["files"]

    sheet = openpyxl.load_workbook(played["xlsx"]).active
    head, *rows = sheet.iter_rows(values_only=True)
    assert head[:3] == ("Number", "Message", "prediction") and len(rows) == 3
    assert rows[1][:2] == (1, "broken parcel 1 שלום") and rows[1][2] in (
        "the workshop",
        "the counter",
    )
    table = Path(played["csv"]).read_text(encoding="utf-8-sig")
    read = list(csv.DictReader(io.StringIO(table)))
    assert [row["prediction"] for row in read] == [row[2] for row in rows]
    objects = [json.loads(line) for line in Path(played["jsonl"]).read_text().splitlines()]
    assert [row["Number"] for row in objects] == ["0", "1", "2"]


@needs_browser
def test_signing_in_with_a_token(tmp_path: Path, warm: Warm) -> None:
    store = Store(tmp_path / "store")
    token = create_token(store)
    store.close()
    with DaemonProcess(tmp_path / "store", token=token, python=warm.python) as daemon:
        play("signin", ONDEVICE_URL=daemon.address, TOKEN=token)


@needs_browser
def test_what_was_filled_in_and_sent_stays(tmp_path: Path, warm: Warm) -> None:
    rows, bad, large = (
        write_rows(tmp_path / "rows.jsonl"),
        tmp_path / "bad.jsonl",
        tmp_path / "large.jsonl",
    )
    bad.write_text('{"text": "a", "label": "b"}\n{"text": 1}\n')
    large.write_text(
        "".join(json.dumps({"text": f"{n} " + "x" * 60_000}) + "\n" for n in range(150))
    )
    store = Store(tmp_path / "store")
    token = create_token(store)
    store.close()
    files = {"ROWS": str(rows), "BAD_ROWS": str(bad), "LARGE": str(large)}
    with DaemonProcess(tmp_path / "store", token=token, python=warm.python) as daemon:
        play("kept", ONDEVICE_URL=daemon.address, TOKEN=token, **files)


@needs_browser
def test_lists_of_many_jobs_are_read_wide_and_narrow(tmp_path: Path, warm: Warm) -> None:
    """Long names beside long reasons keep their width, on a phone a list stays short; Try begins with the adapter."""
    import numpy as np

    from ondevice.artifact.adapter import Adapter, save_adapter
    from ondevice.server.queue import Queue

    name, reason = (
        "Größe der Zettel aus dem Archiv, 漢字 und שלום",
        "a loss that is not a number " * 12,
    )
    store = Store(tmp_path / "store")
    queue = Queue(store)
    for number in range(12):
        spec = {
            "name": f"{name} {number}",
            "model": "package:some-model-with-a-long-name",
            "dataset": "data-1",
            "limits": {},
        }
        queue.create({**spec, "config": {"method": {"name": "slideformer"}}})
        job = queue.claim()
        assert job is not None
        queue.ended(
            job.id, "refused", reason=reason, error={"message": reason, "error": "TrainingError"}
        )
    store.close()
    pair = {f"model.layers.0.self_attn.q_proj.lora_{side}.weight": np.ones(shape, "f4")
            for side, shape in {"A": (4, 64), "B": (64, 4)}.items()}  # fmt: skip
    save_adapter(Adapter(pair, 4, 8.0, ("q_proj",), "tiny:llama"), tmp_path / "mine")
    with DaemonProcess(tmp_path / "store", python=warm.python) as daemon:
        adapter = daemon.client.upload("adapter", tmp_path / "mine")["id"]
        play("lists", ONDEVICE_URL=daemon.address, NAME=name, ADAPTER=adapter)


@pytest.mark.skipif(shutil.which("node") is None, reason="no node; try: make browser")
@pytest.mark.parametrize("scenario", ["curve", "waiting"])
def test_what_needs_no_browser(scenario: str) -> None:
    """The curve is cut where a run is resumed; a wait leaves nothing behind."""
    play(scenario)


def test_the_page_has_no_inline_code_and_names_nothing_outside() -> None:
    """Everything that the CSP would stop is found without a browser: inline code and styles, other hosts."""
    for path in PAGE.rglob("*"):
        if path.suffix not in (".html", ".css", ".js") or "vendor" in path.parts:
            continue
        text = path.read_text(encoding="utf-8")
        for wrong in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "https://",
            "//cdn",
        ):
            assert wrong not in text, f"{path.name}: {wrong}"
        if path.suffix == ".html":
            for wrong in ("<style", " style=", " onclick=", " onload=", "<script>"):
                assert wrong not in text, f"{path.name}: {wrong}"
    assert "unsafe" not in CSP and "http" not in CSP


@pytest.mark.skipif(not (MODULES / "uplot").is_dir(), reason="no uplot; try: make browser")
def test_the_vendored_uplot_is_the_pinned_one() -> None:
    source, copy = MODULES / "uplot", PAGE / "vendor" / "uplot"
    pinned = json.loads((SCRIPTS / "package.json").read_text())["devDependencies"]["uplot"]
    assert json.loads((source / "package.json").read_text())["version"] == pinned
    assert f"uPlot) {pinned} " in (copy / "README.md").read_text()
    originals = {
        "uPlot.iife.min.js": "dist/uPlot.iife.min.js",
        "uPlot.min.css": "dist/uPlot.min.css",
    }
    for name, original in {**originals, "LICENSE.txt": "LICENSE"}.items():
        assert (copy / name).read_bytes() == (source / original).read_bytes(), name


@needs_browser
def test_ratings_become_a_job_that_is_offered_and_shows_before_and_after(
    tmp_path: Path, warm: Warm
) -> None:
    """No job and no reply without a press; the kept-back ratings are a data set of their own."""
    with DaemonProcess(tmp_path / "store", python=warm.python) as running:
        for number in range(20):
            turns = [{"role": "user", "content": f"Frage {number} 漢字?"}]
            running.client.judge(turns, f"Antwort {number}", number % 2 == 0, model="tiny:llama")
        played = play(
            "judged",
            ONDEVICE_URL=running.address,
            SHOTS=os.environ.get("ONDEVICE_SCREENSHOTS", ""),
        )
        done = running.client.job(played["job"])
        assert done["state"] == "done" and done["progress"]["evaluation"]["rows"] == 4
