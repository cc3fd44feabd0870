"""The API is what its OpenAPI document says: schemathesis over every operation, and the ways that matter by hand."""

from __future__ import annotations

import asyncio
import json
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from ondevice.core.errors import ConfigError, DeviceError, StorageError
from ondevice.server.client import Client, RefusedError
from tests.sampling import part_of
from tests.server.running import refused, rows, settings, wait_for

schemathesis = pytest.importorskip("schemathesis", reason="a development package")
from schemathesis import checks  # noqa: E402
from starlette.requests import Request  # noqa: E402

from ondevice.server.app import create_app  # noqa: E402
from ondevice.server.refusals import refuse_error  # noqa: E402
from ondevice.server.routes import json_response  # noqa: E402

CHECKS = (
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
)


OPERATIONS = {
    operation.ok().label: operation.ok()
    for operation in schemathesis.openapi.from_dict(create_app().openapi()).get_all_operations()
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_no_request_makes_the_server_stumble(name: str, served) -> None:
    """Half of the requests are wrong in a way of their own; half name what is there, to get behind the first check."""
    modes = list(schemathesis.GenerationMode)

    @given(case=st.one_of(*(OPERATIONS[name].as_strategy(generation_mode=mode) for mode in modes)))
    @examples(
        max_examples=part_of(40),
        deadline=None,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    def ask(case: Any) -> None:
        check(case, served)

    ask()


def check(case: Any, served: Any) -> None:
    """Send a request, and hold the answer against the document."""
    if any(
        zlib.crc32(repr(part).encode()) % 2 for part in (case.body, case.query)
    ):  # `hash` is another in each run
        known = {"job": served.job["id"], "dataset": served.dataset, "adapter": served.job["id"]}
        case.path_parameters = {
            key: known.get(key, value) for key, value in (case.path_parameters or {}).items()
        }
        if case.operation.path == "/v1/jobs" and isinstance(case.body, dict):
            case.body |= {"model": "tiny:llama", "dataset": served.dataset, "dry_run": True}
        if case.operation.path == "/v1/generate" and isinstance(case.body, dict):
            case.body |= {"model": "tiny:llama", "max_new_tokens": 1, "adapter": None}
        if case.operation.path.endswith("completions") and isinstance(case.body, dict):
            case.body |= {"model": "tiny:llama", "max_tokens": 1, "max_completion_tokens": 1}
    if case.method == "DELETE" and not case.operation.path.startswith(
        ("/v1/uploads", "/v1/session")
    ):
        case.path_parameters = {key: "not-there" for key in case.path_parameters or {}}
    if case.operation.path.endswith("/events"):
        case.query = {**(case.query or {}), "follow": "false"}
    response = case.call(base_url=served.daemon.address, timeout=120)
    case.validate_response(response, checks=CHECKS)
    if response.status_code >= 400 and case.method != "HEAD":
        told = response.json()
        told = (
            told["error"] if isinstance(told["error"], dict) else told
        )  # the form of OpenAI's errors
        assert {"error", "message", "expected", "received", "hint"} <= told.keys()


def test_the_committed_document_is_what_the_daemon_says(served, root: Path) -> None:
    committed = json.loads((root / "docs/reference/openapi.json").read_text())
    assert committed == served.client.ask("GET", "/v1/openapi.json"), "try: make docs"
    assert all(path.startswith("/v1/") or path == "/metrics" for path in committed["paths"])
    assert {scheme["type"] for scheme in committed["components"]["securitySchemes"].values()} == {
        "http",
        "apiKey",
    }
    open_to_all = {path for path, verbs in committed["paths"].items() for verb in verbs.values()
                   if verb.get("security", committed["security"]) == []}  # fmt: skip
    assert open_to_all == {"/v1/health", "/v1/session"}


def test_a_full_disk_is_told_as_one() -> None:
    request = Request({"type": "http", "path": "/v1/uploads", "headers": []})
    answer = asyncio.run(refuse_error(request, StorageError("the disk is full")))
    assert answer.status_code == 507 and json.loads(answer.body)["message"] == "the disk is full"


def test_a_job_from_upload_to_adapter(served, tmp_path) -> None:
    client, job = served.client, served.job
    assert job["state"] == "done" and job["attempt"] == 1 and job["error"] is None
    assert job["progress"]["step"] == job["progress"]["steps"] == 40
    assert job["progress"]["backend"] == "torch-cpu" and 0 < job["progress"]["final_loss"] < 10
    (dataset,) = [item for item in client.datasets() if item["id"] == served.dataset]
    assert (dataset["rows"], dataset["format"], dataset["problems"]) == (12, "classification", [])
    seen = client.preview(served.dataset, "tiny:llama", rows=2)
    assert [[part["trained"] for part in example] for example in seen["examples"]] == [
        [False, True]
    ] * 2
    assert seen["labels"] == {"no": 6, "yes": 6} and seen["file"] == "rows.jsonl"
    (adapter,) = [item for item in client.adapters() if item["job"] == job["id"]]
    assert (
        adapter["name"] == "first"
        and adapter["rank"] == 8
        and adapter["base_model"] == "tiny:llama"
    )
    folder = client.download_adapter(adapter["id"], tmp_path / "adapter")
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    from ondevice.models import save_tiny

    model = transformers.AutoModelForCausalLM.from_pretrained(save_tiny(tmp_path / "model"))
    assert peft.PeftModel.from_pretrained(model, str(folder)).peft_config["default"].r == 8


def test_a_dry_run_gives_the_plan_and_queues_nothing(served) -> None:
    before = len(served.client.jobs())
    planned = served.client.plan(model="tiny:llama", dataset=served.dataset, config=settings())
    plan = planned["plan"]
    assert plan["fits"] and plan["total_bytes"] == sum(plan["parts_bytes"].values())
    assert plan["parts_bytes"].keys() <= plan["meaning"].keys() and all(plan["meaning"].values())
    assert planned["config"]["train"]["steps"] == 40 and planned["config"]["method"]["rank"] == 2
    assert len(served.client.jobs()) == before
    tight = served.client.plan(
        model="tiny:llama", dataset=served.dataset, limits={"memory_bytes": 1 << 26}
    )["plan"]
    assert not tight["fits"] and tight["usable_bytes"] == 1 << 26


def test_a_job_that_does_not_fit_its_limit_fails_with_the_plan(served) -> None:
    job = served.client.create_job(
        model="tiny:llama",
        dataset=served.dataset,
        config=settings(),
        limits={"memory_bytes": 500 << 20},
    )
    ended = served.client.wait(job["id"], 120)
    assert ended["state"] == "failed" and ended["attempt"] == 1
    assert ended["error"]["error"] == "DoesNotFitError" and "runtime" in ended["error"]["message"]
    served.client.delete_job(job["id"])


def test_time_is_a_limit_too_and_the_state_is_kept(served) -> None:
    client = served.client
    job = client.create_job(
        model="tiny:llama",
        dataset=served.dataset,
        config=settings(steps=1_000_000),
        limits={"time_s": 1},
    )["id"]
    ended = client.wait(job, 120)
    assert ended["state"] == "failed" and "limits.time_s" in ended["error"]["try"]
    client.change_job(job, limits={"time_s": 3600}, priority=7)
    assert client.resume(job)["priority"] == 7
    client.cancel(job)
    assert client.wait(job, 120)["state"] == "cancelled"
    client.delete_job(job)


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"model": None}, 422, "a model or an artifact"),
        ({"model": "nothing-like-this"}, 404, "no such model"),
        ({"model": "../../etc"}, 404, "no such model"),
        ({"model": "/etc/passwd"}, 404, "no such model"),
        ({"model": "package:requests"}, 404, "no such model"),
        ({"dataset": "data-0"}, 404, "no such data set"),
        ({"dataset": "../datasets"}, 404, "no such data set"),
        ({"adapter": "a"}, 404, "no such adapter"),
        ({"artifact": "a", "model": None}, 404, "no such artifact"),
        ({"config": {"train": {"out": "/tmp/x"}}}, 422, "train.out"),
        ({"config": {"data": {"path": "/etc/passwd"}}}, 422, "data.path"),
        (
            {"config": {"train": {"objective": "command", "objective_command": "touch /tmp/x"}}},
            422,
            "has not allowed",
        ),
        (
            {"config": {"method": {"name": "slideformer", "disk_folder": "/etc"}}},
            422,
            "a path of the server",
        ),
        ({"config": {"model": {"source": "/"}}}, 422, "model.source"),
        ({"config": {"export": {}}}, 422, "export"),
        ({"config": {"train": {}, "train.out": "/tmp/x"}}, 422, "'train.out' is not a section"),
        ({"config": {"model.source": "/"}}, 422, "'model.source' is not a section"),
        ({"config": {"data": {}, "data.path": "/etc/passwd"}}, 422, "'data.path' is not a section"),
        ({"config": {"export.target": "x"}}, 422, "'export.target' is not a section"),
        ({"config": {"train": {"out.x": 1}}}, 422, "has a dot"),
        (
            {"model": None, "artifact": "a", "config": {"data.eval_path": "/etc/passwd"}},
            422,
            "'data.eval_path'",
        ),
        (
            {"model": None, "artifact": "a", "config": {"train.memory_limit_bytes": 9}},
            422,
            "'train.memory_limit",
        ),
        (
            {"model": None, "artifact": "a", "config": {"data": {"eval_path": "/etc/passwd"}}},
            422,
            "'data.eval_path'",
        ),
        ({"config": {"data": {"task": "\ud800"}}}, 422, "surrogate"),
        ({"config": {"data": {"\udfff": "x"}}}, 422, "surrogate"),
        ({"config": {"method": {"name": ["a"]}}}, 422, "unknown method"),
        ({"config": {"train": {"steps": 10**400}}}, 422, "64 bits"),
        ({"config": {"method": {"learning_rate": float("inf")}}}, 422, "not finite"),
        (
            {"config": {"data": {"task": [[[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]]}}},
            422,
            "nested too deeply",
        ),
        ({"name": "\ud800"}, 422, "name"),
        ({"config": {"train": {"setps": 3}}}, 422, "did you mean 'steps'"),
        (
            {"config": {"method": {"name": "prge", "outer_loop": False}}},
            422,
            "'method.outer_loop' is now 'method.batch_queries'",
        ),
        ({"config": {"method": {"name": "magic"}}}, 422, "unknown method"),
        ({"config": {"method": "magic"}}, 422, ""),
        ({"config": {"train": 3}}, 422, "not a section"),
        ({"window": {"start": "25:00", "end": "06:00"}}, 422, "window"),
        ({"surprise": 1}, 422, "unknown key 'surprise'"),
        ({"limits": {"retries": -1}}, 422, "'limits.retries': expected 0 or more, received -1"),
    ],
)
def test_mistakes_in_a_job_are_told(
    served, change: dict[str, Any], status: int, words: str
) -> None:
    before = len(served.client.jobs())
    with pytest.raises(RefusedError) as caught:
        served.client.create_job(
            **{"model": "tiny:llama", "dataset": served.dataset, "config": settings()} | change
        )
    assert (
        caught.value.status == status
        and words in str(caught.value)
        and "Traceback" not in str(caught.value)
    )
    assert len(served.client.jobs()) == before


def test_an_error_about_half_a_surrogate_pair_is_valid_json() -> None:
    answer = json_response(422, {"received": "\ud800 and \u00e9"})
    assert (
        json.loads(answer.body) == {"received": "? and \u00e9"}
        and answer.media_type == "application/json"
    )


def test_a_running_job_cannot_be_deleted_nor_its_data(served) -> None:
    client = served.client
    config = settings(steps=1_000_000)  # a short one might be done before it is paused
    job = client.create_job(model="tiny:llama", dataset=served.dataset, config=config, priority=-9)[
        "id"
    ]
    client.pause(job)
    wait_for(lambda: client.job(job)["state"] == "paused", "it is paused")
    for path in (f"/v1/jobs/{job}", f"/v1/datasets/{served.dataset}"):
        with pytest.raises(RefusedError) as caught:
            client.ask("DELETE", path)
        assert caught.value.status == 409
    with refused(409):
        client.cancel(served.job["id"])  # it is done
    client.cancel(job)
    client.delete_job(job)
    with pytest.raises(RefusedError):
        client.job(job)


def test_the_curve_and_the_log(served) -> None:
    points = served.client.ask("GET", f"/v1/jobs/{served.job['id']}/metrics", query={"points": 10})
    assert len(points) == 10 and [points[0]["step"], points[-1]["step"]] == [0, 39]
    every = served.client.ask("GET", f"/v1/jobs/{served.job['id']}/metrics")
    assert [point["step"] for point in every] == list(range(40)) and every[-1]["loss"] > 0
    assert isinstance(served.client.log(served.job["id"]), str)


def test_activate_roll_back_and_generate(served, tmp_path) -> None:
    client, first = served.client, served.job["id"]
    folder = client.download_adapter(first, tmp_path / "adapter")
    second = client.upload("adapter", folder, name="again")["id"]
    link = served.daemon.store / "active"
    while any(
        row["active"] for row in client.adapters()
    ):  # what other tests of this daemon have activated
        client.roll_back()
    assert client.activate(first) == {"active": first} and client.activate(second) == {
        "active": second
    }
    assert (link / "adapter_model.safetensors").is_file() and link.resolve().name == second
    with refused(409):
        client.ask("DELETE", f"/v1/adapters/{second}")
    said = client.generate("tiny:llama", [{"role": "user", "content": "hello"}], max_new_tokens=6)
    assert said["adapter"] == second and said["adapted"] is not None
    assert (
        client.generate("tiny:llama", "hello", max_new_tokens=6, adapter=first)["adapter"] == first
    )
    assert client.roll_back() == {"active": first} and link.resolve().name == first
    assert client.roll_back() == {"active": None} and not link.exists()
    assert client.generate("tiny:llama", "hello", max_new_tokens=6)["adapted"] is None
    with refused(409):
        client.roll_back()
    client.ask("DELETE", f"/v1/adapters/{second}")


def test_a_model_is_uploaded_and_trained(served, tmp_path) -> None:
    from ondevice.models import save_tiny

    client = served.client
    model = client.upload("model", save_tiny(tmp_path / "model"), name="my-tiny")["id"]
    (listed,) = [item for item in client.models() if item["id"] == model]
    assert (
        listed["kind"] == "folder"
        and listed["model_type"] == "llama"
        and listed["num_hidden_layers"] == 2
    )
    with refused(409):
        client.upload("model", tmp_path / "model", name="my-tiny")
    job = client.create_job(model=model, dataset=served.dataset, config=settings(steps=3))["id"]
    assert client.wait(job, 120)["state"] == "done"
    (tmp_path / "model" / "modeling_x.py").write_text("import os")
    with refused(422):
        client.upload("model", tmp_path / "model", name="with-code")


def test_bad_rows_are_listed_and_can_be_left_out(served, tmp_path) -> None:
    path = rows(tmp_path / "rows.jsonl")
    path.write_text(path.read_text() + '{"text": "x", "label": \n{"text": "", "label": "no"}\n')
    with pytest.raises(RefusedError) as caught:
        served.client.upload("dataset", path)
    collected = [
        (problem["file"], problem["line"], problem["field"]) for problem in caught.value.problems
    ]
    assert (
        collected == [("rows.jsonl", 13, ""), ("rows.jsonl", 14, "text")]
        and caught.value.exit_code == 3
    )
    assert all(problem["reason"] for problem in caught.value.problems)
    dataset = served.client.upload("dataset", path, skip_bad_rows=True)["id"]
    kept = served.client.ask("GET", f"/v1/datasets/{dataset}")
    assert kept["rows"] == 12 and [problem["line"] for problem in kept["problems"]] == [13, 14]
    served.client.ask("DELETE", f"/v1/datasets/{dataset}")


def test_parts_of_an_upload(served, tmp_path) -> None:
    client, content = served.client, rows(tmp_path / "rows.jsonl").read_bytes()
    request = {"kind": "dataset", "name": "rows.jsonl", "bytes": len(content)}
    place = f"/v1/uploads/{client.ask('POST', '/v1/uploads', request)['id']}"
    assert client.ask("PUT", place, content[:100], query={"offset": 0})["received_bytes"] == 100
    for offset, part, status in ((0, content[:100], 409), (200, b"x", 409), (100, content, 409)):
        with pytest.raises(RefusedError) as caught:
            client.ask("PUT", place, part, query={"offset": offset})
        assert caught.value.status == status
    with refused(409):
        client.ask("POST", f"{place}/finish")
    assert client.ask("GET", place)["received_bytes"] == 100
    client.ask("PUT", place, content[100:], query={"offset": 100})
    created = client.ask("POST", f"{place}/finish")
    client.ask("DELETE", f"/v1/datasets/{created['id']}")
    with pytest.raises(RefusedError):
        client.ask("GET", place)
    wrong = client.ask("POST", "/v1/uploads", request | {"sha256": "0" * 64})["id"]
    client.ask("PUT", f"/v1/uploads/{wrong}", content, query={"offset": 0})
    with refused(422):
        client.ask("POST", f"/v1/uploads/{wrong}/finish")


def test_an_artifact_must_be_whole(served, tmp_path) -> None:
    manifest = {"schema_version": 1, "files": {"../../secret": "0" * 64}, "program": "program.pte"}
    before = served.client.artifacts()  # those of other tests
    for files in (
        {"manifest.json": "{}"},
        {"manifest.json": json.dumps(manifest)},
        {"program.txt": "x"},
    ):
        with zipfile.ZipFile(tmp_path / "artifact.zip", "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
        with pytest.raises(RefusedError) as caught:
            served.client.upload("artifact", tmp_path / "artifact.zip", name="mine")
        assert caught.value.status == 422 and str(served.daemon.store) not in str(caught.value)
    assert served.client.artifacts() == before


def test_a_client_without_a_daemon_says_so() -> None:
    with pytest.raises(DeviceError):
        Client("http://127.0.0.1:9").health()
    with pytest.raises(ConfigError):
        Client("ftp://x")


def test_columns_of_other_names_and_other_kinds_of_files(served, tmp_path: Path) -> None:
    client: Client = served.client
    data = tmp_path / "tickets.tsv"
    data.write_text("Body\tTeam\nIt broke.\trepairs\nWhere is it?\tpost\n")
    columns = {"text": "Body", "label": "Team"}
    placed = client.upload("dataset", data, columns=columns)
    found = next(one for one in client.datasets() if one["id"] == placed["id"])
    assert (found["format"], found["rows"]) == ("classification", 2)
    looked = client.preview(placed["id"], "tiny:llama", column=["text=Body", "label=Team"])
    assert looked["labels"] == {"repairs": 1, "post": 1} and looked["max_length_tokens"] % 8 == 0
    assert looked["notes"][0] == "columns: text is 'Body', label is 'Team'"
    with refused(422):
        client.preview(placed["id"], "tiny:llama", column=["Body"])


def test_a_template_is_no_file_of_the_server(served, tmp_path: Path) -> None:
    """A task that names a path would be read by the daemon, for whoever may upload."""
    client: Client = served.client
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "a", "label": "b"}\n{"text": "c", "label": "d"}\n')
    with refused(422):
        client.upload("dataset", data, task="/etc/x.yaml")
    placed = client.upload("dataset", data)
    with refused(422):
        client.preview(placed["id"], "tiny:llama", task="/etc/x.yaml")
    with refused(422):
        client.plan(
            model="tiny:llama", dataset=placed["id"], config={"data": {"task": "/etc/x.yaml"}}
        )
