"""Columns of a file, templates of one's own, small tables, and errors in the words of the API."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from ondevice.core.errors import ConfigError
from ondevice.data.tasks.looking import look_at
from ondevice.server.client import Client
from ondevice.server.words import error_for_api, fields, hint_for_api
from tests.server.running import refused, settings


def tickets(path: Path, count: int = 20) -> Path:
    teams = ("repairs", "post")
    lines = [f"{i};It broke on day {i}.;{teams[i % 2]}" for i in range(count)]
    path.write_text("\n".join(["Id;Body;Team", *lines]) + "\n")
    return path


def test_the_longest_texts_and_a_column_of_few_values_are_suggested(tmp_path: Path) -> None:
    look = look_at(tickets(tmp_path / "tickets.csv"))
    assert look.columns == ("Id", "Body", "Team") and look.format is None
    assert next(iter(look.suggested)) == "classification"
    assert look.suggested["classification"] == {"text": "Body", "label": "Team"}
    assert look.rows[0] == {"Id": "0", "Body": "It broke on day 0.", "Team": "repairs"}


def test_a_file_whose_names_fit_says_its_format(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"Text": "a", "Label": "x"}\n{"Text": "b", "Label": "y"}\n')
    assert look_at(file).format == "classification"


def test_columns_are_seen_and_named_before_the_upload_is_finished(served, tmp_path: Path) -> None:
    client: Client = served.client
    content = tickets(tmp_path / "tickets.csv").read_bytes()
    request = {"kind": "dataset", "name": "tickets.csv", "bytes": len(content)}
    place = f"/v1/uploads/{client.ask('POST', '/v1/uploads', request)['id']}"
    with refused(409):
        client.ask("GET", f"{place}/columns")
    client.ask("PUT", place, content, query={"offset": 0})
    named = {"columns": {"text": "Body", "label": "Team"}}
    assert client.ask("GET", f"{place}/columns")["suggested"]["classification"] == named["columns"]
    asked = {"model": "tiny:llama", "column": ["text=Body", "label=Team"]}
    seen = client.ask("POST", f"{place}/preview", asked)
    assert seen["labels"] == {"repairs": 10, "post": 10}
    placed = client.ask("POST", f"{place}/finish", named)["id"]
    assert client.ask("GET", f"/v1/datasets/{placed}")["columns"] == named["columns"]
    assert client.ask("GET", f"/v1/datasets/{placed}/columns")["columns"] == ["Id", "Body", "Team"]
    client.ask("DELETE", f"/v1/datasets/{placed}")


def test_a_template_of_ones_own_is_stored_previewed_trained_and_kept(
    served, tmp_path: Path
) -> None:
    """The adapter records the template's text, so it answers after the template is deleted."""
    client: Client = served.client
    template = {
        "name": "ticket-team",
        "prompt": "Ticket: {Body}\nTeam:",
        "label": ["Team"],
        "candidates": {"repairs": "the workshop", "post": "the counter"},
    }
    made = client.ask("POST", "/v1/templates", template)
    assert made["fields"] == {"Body": ["Body"], "label": ["Team"]}
    assert client.ask("GET", "/v1/templates") == [made] and made["labels"] == [
        "the workshop",
        "the counter",
    ]
    for name in ("ticket-team", "sst2", "SST-2".lower()):
        with refused(409):
            client.ask("POST", "/v1/templates", template | {"name": name})
    for wrong in ({"name": "../x"}, {"name": "other", "prompt": "no field"}, {"name": "a.b"}):
        with refused(422):
            client.ask("POST", "/v1/templates", template | wrong)
    file = tickets(tmp_path / "tickets.csv")
    dataset = client.upload("dataset", file, columns={"text": "Body", "label": "Team"})["id"]
    seen = client.preview(dataset, "tiny:llama", task="ticket-team", rows=1)
    text = "".join(part["text"] for part in seen["examples"][0])
    assert text.startswith("Ticket: It broke on day 0.\nTeam: the workshop")
    config = settings(steps=2) | {"data": {"task": "ticket-team"}}
    job = client.create_job(model="tiny:llama", dataset=dataset, config=config, priority=-1)["id"]
    assert client.wait(job, 120)["state"] == "done"
    client.ask("DELETE", "/v1/templates/ticket-team")
    with refused(404):
        client.ask("DELETE", "/v1/templates/ticket-team")
    task = client.ask("GET", f"/v1/adapters/{job}/task")
    assert task["task"] == "ticket-team" and task["inputs"] == {"Body": "Body"}
    (answer,) = client.predict(job, [{"Body": "It broke."}])["data"]
    assert answer["prediction"] in ("the workshop", "the counter")


def test_a_template_that_something_reads_by_is_not_deleted(served, tmp_path: Path) -> None:
    client: Client = served.client
    template = {"name": "held", "prompt": "{Body}", "label": ["Team"]}
    client.ask("POST", "/v1/templates", template)
    dataset = client.upload("dataset", tickets(tmp_path / "tickets.csv"), task="held")["id"]
    with refused(409):
        client.ask("DELETE", "/v1/templates/held")
    client.ask("DELETE", f"/v1/datasets/{dataset}")
    client.ask("DELETE", "/v1/templates/held")


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "xlsx"])
def test_a_table_comes_back_as_it_was_sent(served, kind: str) -> None:
    client: Client = served.client
    rows = [{"text": 'schön "1"; 漢字\nx', "n": "=1+1"}, {"text": "b", "n": "2"}]
    sent = {"name": f"a.{kind}", "columns": ["text", "n"], "rows": rows}
    content = client._send("POST", "/v1/tables/write", sent, None, None)
    read = client.ask("POST", "/v1/tables/read", content, query={"name": f"a.{kind}"})
    assert read == {"columns": ["text", "n"], "rows": rows}
    assert not list((served.daemon.store / "uploads").glob(".table-*")), "nothing is stored"


def test_the_numbers_of_a_sheet_stay_numbers(served) -> None:
    openpyxl = pytest.importorskip("openpyxl")
    sent = {"name": "a.xlsx", "like": "b.xlsx", "columns": ["n"], "rows": [{"n": "12"}]}
    content = served.client._send("POST", "/v1/tables/write", sent, None, None)
    sheet = openpyxl.load_workbook(io.BytesIO(content)).active
    assert sheet["A2"].value == 12


def test_tables_that_cannot_be_read_are_refused_in_words(served) -> None:
    client: Client = served.client
    for name, content, words in (
        ("a.xlsx", b"no zip", "a"),
        ("a.csv", b"", "row"),
        ("a.jsonl", b'{"a": 1}\n{"a": \n', "line 2"),
        ("a.csv", b"text\n" + b"x\n" * 10_001, "too many rows"),
    ):
        with refused(422) as caught:
            client.ask("POST", "/v1/tables/read", content, query={"name": name})
        assert words in str(caught.value) and str(served.daemon.store) not in str(caught.value)
    for name in ("a.exe", "../../etc/passwd", "a.parquet"):
        with refused(422):
            client.ask("POST", "/v1/tables/read", b"text\na\n", query={"name": name})


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        ("--steps 40 or more", "`train.steps` 40 or more"),
        ("choose another name, or --overwrite", "choose another name"),
        ("`ondevice data 'x.csv'` lists every bad row", None),
        ("--column text=a --column label=b for classes", "`columns` text=a, label=b for classes"),
        ("a higher --memory-limit; or --device-file FILE", "a higher `limits.memory_bytes`"),
        ("pip install --upgrade x", "pip install --upgrade x"),
        ("`ondevice serve token` makes one", "`ondevice serve token` makes one"),
        ("install g++ (macOS: xcode-select --install) or set CXX",) * 2,
        (None, None),
    ],
)
def test_a_hint_for_the_command_line_becomes_one_for_the_api(
    hint: str | None, words: str | None
) -> None:
    assert hint_for_api(hint) == words


def test_every_flag_of_a_job_has_a_field() -> None:
    assert fields()["--rank"] == "method.rank" and fields()["--batch-size"] == "train.batch_size"
    told = error_for_api(ConfigError("--packing needs rows", hint="leave --packing out").to_dict())
    assert (
        told["message"] == "`data.packing` needs rows" and told["try"] == "leave `data.packing` out"
    )
