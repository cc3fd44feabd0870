"""Results to tables: the format, the rendering, the markers, and that every committed result is
valid."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import jsonschema
import pytest

from benchmarks import committed, tables

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SCHEMA = json.loads((RESULTS / "schema.json").read_text())
COMMITTED = sorted(RESULTS.glob("*/*/*.json"))


@pytest.fixture
def document() -> dict:
    """The example of benchmarks/results/README.md."""
    match = re.search(r"```json\n(.*?)```", (RESULTS / "README.md").read_text(), re.DOTALL)
    assert match is not None
    return json.loads(match[1])


def test_the_documented_example_is_valid(document: dict) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(document, SCHEMA)


@pytest.mark.parametrize("key", ["command", "versions", "machine", "date", "rows"])
def test_a_result_without_its_provenance_is_not_valid(document: dict, key: str) -> None:
    del document[key]
    with pytest.raises(jsonschema.ValidationError) as refused:
        jsonschema.validate(document, SCHEMA)
    assert refused.value.validator == "required" and key in refused.value.message


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.relative_to(RESULTS).as_posix())
def test_committed_results_are_valid(path: Path) -> None:
    document = json.loads(path.read_text())
    jsonschema.validate(document, SCHEMA)
    assert path.parent.relative_to(RESULTS).as_posix() == document["benchmark"]
    assert committed.concise(document) == document
    named = re.findall(r"-m benchmarks\.([\w.]+)", tables.render(document))
    assert named and all(
        (ROOT / "benchmarks" / f"{name.replace('.', '/')}.py").is_file() for name in named
    )
    keys = {key for row in document["rows"] for key in row}
    assert {column["key"] for column in document.get("columns", [])} - keys == set()


def test_a_result_is_rendered_as_a_markdown_table(document: dict) -> None:
    assert tables.render(document).splitlines() == [
        "**One dual forward against two forwards**: Xeon, 2 cores, 24 GiB, torch 2.13.0, 2026-11-21, "
        "`python -m benchmarks.prge.inner_loop --repeats 3`",
        "",
        "| Batch | Step (s) | Peak (MB) |",
        "| ---: | ---: | ---: |",
        "| 2 | 0.224 (0.221 to 0.230) | 654.0 |",
        "| 16 | 1.710 (1.690 to 1.740) | – |",
    ]


def test_render_without_columns_takes_the_keys_and_names_the_gpus(document: dict) -> None:
    del document["columns"], document["title"]
    document["machine"]["gpus"] = [{"name": "NVIDIA H200", "memory_bytes": 1}] * 2
    document["rows"] = [{"method": "a|b", "tokens_s": 9531.26, "fits": True, "loss": 0.123456}]
    lines = tables.render(document).splitlines()
    assert lines[0].startswith("2 × NVIDIA H200, 2 cores")
    assert lines[2:] == [
        "| method | tokens_s | fits | loss |",
        "| --- | ---: | --- | ---: |",
        "| a\\|b | 9,531 | yes | 0.123 |",
    ]


def test_a_recorded_command_is_shown_in_its_current_form(document: dict) -> None:
    document["command"] = "python -m benchmarks.prge_step --skip forms,programs --repeats 3"
    document["notes"] = [
        "By `torchrun -m benchmarks._ranks_step cuda`, `python -m benchmarks.slideformer.step`."
    ]
    lines = tables.render(document).splitlines()
    assert lines[0].endswith("`python -m benchmarks.prge.options --repeats 3`")
    assert (
        lines[-1]
        == "By `torchrun -m benchmarks.slideformer.ranks cuda`, `python -m benchmarks.slideformer.step`."
    )


def test_a_caption_says_which_products_of_integers_a_processor_has(document: dict) -> None:
    document["machine"]["instructions"] = "AVX2"
    assert f"{document['machine']['cpu']}, AVX2, 2 cores" in tables.caption(document)
    document["machine"]["gpus"] = [{"name": "NVIDIA H200", "memory_bytes": 1}]
    assert "AVX2" not in tables.caption(document)


def test_update_writes_between_the_markers_and_is_idempotent(
    document: dict, tmp_path: Path
) -> None:
    folder = tmp_path / "inner_loop"
    folder.mkdir()
    (folder / "xeon.json").write_text(json.dumps(document))
    other = copy.deepcopy(document)
    other["machine"]["cpu"] = "Cortex"
    (folder / "cortex.json").write_text(json.dumps(other))
    text = "before\n\n<!-- results: inner_loop -->\nold\n<!-- /results -->\n\nafter\n"
    new = tables.update(text, tmp_path)
    assert new.startswith("before\n\n<!-- results: inner_loop -->\n**One dual") and new.endswith(
        "\n\nafter\n"
    )
    assert "Xeon" in new and "Cortex" in new and "old" not in new
    assert tables.update(new, tmp_path) == new
    one = tables.update(text.replace("inner_loop", "inner_loop/xeon"), tmp_path)
    assert "Xeon" in one and "Cortex" not in one


def test_a_marker_without_result_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as missing:
        tables.update("<!-- results: nothing_here -->\n<!-- /results -->", tmp_path)
    assert "nothing_here" in str(missing.value)
    shown = tables.update("<!-- results: prge/race -->\n<!-- /results -->", tmp_path)
    assert shown.splitlines()[1] == "Not measured yet: `python -m benchmarks.prge.race --record`."


def test_a_result_of_another_machine_goes_into_the_documentation(
    document: dict, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(committed, "RESULTS", tmp_path / "benchmarks" / "results")
    (tmp_path / "README.md").write_text("<!-- results: prge/inner_loop -->\n<!-- /results -->\n")
    (tmp_path / "measured elsewhere.json").write_text(json.dumps(document))
    assert tables.main([str(tmp_path / "measured elsewhere.json")]) == 0
    assert (tmp_path / "benchmarks/results/prge/inner_loop/xeon-2-cores.json").is_file()
    assert (
        "**One dual forward" in (tmp_path / "README.md").read_text()
        and tables.main(["--check"]) == 0
    )
    assert tables.main(["no.json"]) == tables.main(["--chekc"]) == 2


def test_a_result_that_was_copied_whole_is_found_and_made_concise(
    document: dict, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(committed, "RESULTS", tmp_path / "benchmarks" / "results")
    document["rows"][0]["step_s"] = [0.1, 0.2, 0.3, 0.4, 1 / 3]
    copied = committed.write(document, committed.place_of(document))
    assert tables.main(["--check"]) == 1
    assert tables.main([]) == 0 and tables.main(["--check"]) == 0
    assert json.loads(copied.read_text())["rows"][0]["step_s"] == [0.1, 0.3, 0.4]
