"""Every error of pydantic becomes our words, at the place that the document has."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, get_args

import pytest
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticKnownError
from pydantic_core.core_schema import ErrorType

from ondevice.core.wrong_values import (
    EXPECTED,
    MISSING,
    OWN_WORDS,
    UNKNOWN,
    Problem,
    problems_of,
)

CONTEXT: dict[str, Any] = {
    "gt": 1.0, "ge": 1.0, "lt": 2.0, "le": 2.0, "multiple_of": 3.0, "min_length": 2, "max_length": 4,
    "actual_length": 9, "pattern": "^a$", "expected": "'a' or 'b'", "discriminator": "'name'", "tag": "c",
    "expected_tags": "'a', 'b'", "error": "leave one out", "class": "Thing", "class_name": "Thing",
    "field_type": "List", "method_name": "keys", "attribute": "x", "max_digits": 3, "decimal_places": 2,
    "whole_digits": 4, "tz_expected": 0, "tz_actual": 1, "expected_schemes": "'https'", "expected_version": 4,
    "encoding": "utf-8", "encoding_error": "no", "mapping_type": "dict",
}  # fmt: skip
"""A context with the fields of every error."""
PYDANTIC = re.compile(
    "Input should|should be|Value error|Assertion failed|Extra inputs|Field required|unable to|valid int"
    "|discriminator|_type|None|instance of|pydantic|[{}]"
)


def error(kind: str) -> dict[str, Any]:
    known = PydanticKnownError(kind, CONTEXT)  # type: ignore[arg-type]
    return {"type": kind, "loc": ("a",), "msg": known.message(), "input": 7, "ctx": CONTEXT}


@pytest.mark.parametrize("kind", get_args(ErrorType))
def test_each_error_of_pydantic_is_said_in_our_words(kind: str) -> None:
    (problem,) = problems_of([error(kind)], {"a": 7})
    assert problem.path == "a" and "'a'" in str(problem)
    assert not PYDANTIC.search(str(problem)), problem
    assert kind in EXPECTED or kind in (*MISSING, *UNKNOWN, *OWN_WORDS)
    assert (problem.expected is not None) == (kind in EXPECTED)


class Left(BaseModel, extra="forbid"):
    name: Literal["left"] = "left"
    count: int = Field(default=1, ge=1)
    nothing: int | None = None


class Right(BaseModel, extra="forbid"):
    name: Literal["right"] = "right"
    size: float


class Part(BaseModel):
    text: str


class Body(BaseModel, extra="forbid"):
    side: Annotated[Left | Right, Field(discriminator="name")]
    content: str | list[Part] = ""
    weights: dict[str, float] = {}


def found(values: Any) -> list[Problem]:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(Body).validate_python(values)
    return problems_of(caught.value.errors(), values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"side": {"name": "left", "cuont": 3}}, ["unknown key 'side.cuont'"]),
        ({"side": {"name": "right"}}, ["'side.size' is missing"]),
        ({"side": {"name": "left", "count": 0}}, ["'side.count': expected 1 or more, received 0"]),
        ({"side": {"name": "up"}}, ["'side': expected 'left' or 'right' as its name, received {'name': 'up'}"]),
        ({"side": {}}, ["'side': expected an object with the key 'name', received {}"]),
        ({"side": {"name": "left"}, "content": 5}, ["'content': expected text, or a list, received 5"]),
        ({"side": {"name": "left"}, "content": [{}]}, ["'content.0.text' is missing"]),
        ({"side": {"name": "left"}, "weights": {"a": "b"}}, ["'weights.a': expected a number, received 'b'"]),
        ({"side": {"name": "left", "nothing": "many"}}, ["'side.nothing': expected a whole number, received 'many'"]),
        ({}, ["'side' is missing"]),
        ([], ["expected an object with keys, received []"]),
    ],
)  # fmt: skip
def test_the_place_is_that_of_the_document_without_tags_of_unions(
    values: Any, words: list[str]
) -> None:
    assert [str(problem) for problem in found(values)] == words


def test_a_long_value_is_shortened() -> None:
    (problem,) = found({"side": {"name": "left", "count": "x" * 10**6}})
    assert len(str(problem)) < 500
