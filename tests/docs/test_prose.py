"""The counting script sees each construction, and leaves alone what only looks like one."""

from __future__ import annotations

import pytest

from tests.docs import prose


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("None where the file has no header", [prose.WHERE_FOR_IF]),
        ("Where a run is resumed, the step continues", [prose.WHERE_FOR_IF]),
        ("the folder where the adapter is; it says where; SELECT a WHERE b; mx.where(a, b)", []),
        ("this is no tensor, and that one is none", ["is no, are no"] * 2),
        ("it is no longer needed, and x is None", []),
        ("what is left, what it needs", ["what is, what it"] * 2),
        ("the adapter beside the model alone", ["beside", "alone"]),
        ("a stand-alone file, let alone a folder; besides, it is lonely", []),
    ],
)
def test_each_phrase_is_counted_and_its_lookalikes_are_not(text, names):
    assert sorted(name for name, _ in prose.phrases(text)) == sorted(names)


def test_strings_comments_and_docstrings_of_a_file_are_counted_with_their_lines(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    path = tmp_path / "module.py"
    path.write_text(
        '"""Return the mean, 0 where it is empty."""\n'
        "def mean(rows, key='beside'):\n"
        "    from ondevice.core import errors\n"
        "    a, b = 1, 2\n"
        "    # nothing beside the rows\n"
        '    return f"{a} alone of {b}" if rows else None\n'
    )
    counts = prose.count_python([tmp_path])
    lines = {name: [hit.split(":")[1] for hit in hits] for name, hits in counts.hits.items()}
    assert lines == {
        prose.WHERE_FOR_IF: ["1"],
        "beside": ["5"],
        "alone": ["6"],
        "own imports in functions": ["3"],
        "tuple assignments per 1,000": ["4"],
        "ternaries per 1,000 statements": ["6"],
    }


def test_long_paragraphs_and_long_sentences_of_a_page_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    short = "A short sentence. " * 70
    page.write_text(f"# Title\n\n{short}\n\n```\n{short}\n```\n\n- {short[:180]}\n- item\n")
    counts = prose.count_pages([page])
    assert [hit.split(":")[1] for hit in counts.hits["paragraphs over 120 words"]] == ["3"]
    assert not counts.number("with a sentence mean over 20")
    page.write_text("word " * 21 + "\n")
    assert prose.count_pages([page]).number("with a sentence mean over 20") == 1


def test_a_circle_is_seen_through_several_modules():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}
    assert prose.circles(graph) == [["a", "b", "c"]]
    graph["c"] = {"d"}
    assert prose.circles(graph) == []
