"""A body is refused in little time, however much is wrong in it: the event loop serves everybody."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, ValidationError

pytest.importorskip("fastapi", reason="the serve extra is not installed")

from fastapi.routing import APIRoute

from ondevice.core.near import LONGEST_NAME, nearest_value
from ondevice.core.wrong_values import MOST_ERRORS, problems_of
from ondevice.server.app import MODULES
from ondevice.server.openai_requests import ChatRequest
from tests.server.running import refused

COUNT = 4000
"""Wrong items of a body; a body of a mebibyte can have a hundred times as many."""
MOST = 1010
"""Errors of one body. No list without `AT_ONCE` takes more items than a thousand."""
WRONG: tuple[Any, ...] = ([1.5] * COUNT, ["a"] * COUNT, [[1.5]] * COUNT, [{}] * COUNT)


def bodies() -> Iterator[type[BaseModel]]:
    for module in MODULES:
        for route in module.router.routes:
            if isinstance(route, APIRoute) and route.body_field is not None:
                kind = route.body_field.field_info.annotation
                if isinstance(kind, type) and issubclass(kind, BaseModel):
                    yield kind


def errors(kind: type[BaseModel], values: dict[str, Any]) -> list[Any]:
    try:
        kind.model_validate(values)
    except ValidationError as error:
        return list(error.errors(include_url=False))
    return []


def count(found: list[Any]) -> int:
    """Count errors without unknown keys, each of which pydantic names, at 5 µs a key."""
    return sum(error["type"] != "extra_forbidden" for error in found)


@pytest.mark.parametrize("kind", list(dict.fromkeys(bodies())))
def test_a_body_of_many_wrong_items_is_refused_at_the_first_ones(kind: type[BaseModel]) -> None:
    for name in kind.model_fields:
        for value in (*WRONG, {str(number): [1] for number in range(COUNT)}):
            assert count(errors(kind, {name: value})) < MOST, name


def test_many_wrong_parts_of_one_message_are_refused_at_the_first_ones() -> None:
    for value in WRONG:
        assert len(errors(ChatRequest, {"messages": [{"role": "user", "content": value}]})) < MOST


def test_a_list_of_a_million_errors_is_not_read_to_its_end() -> None:
    error = {"type": "int_type", "msg": "", "input": "a"}
    found = problems_of([error | {"loc": (number,)} for number in range(COUNT)], ["a"] * COUNT)
    assert len(found) == MOST_ERRORS


def test_a_long_text_is_not_taken_for_a_misspelt_name() -> None:
    assert nearest_value("lora" * (LONGEST_NAME // 4) + "s", ["lora" * (LONGEST_NAME // 4)]) is None
    assert nearest_value("lorra", ["lora"]) == "lora"


def test_a_refusal_of_many_wrong_items_names_the_first(served: Any) -> None:
    body = {"model": "tiny:llama", "prompt": [1.5] * COUNT, "stop": [1] * COUNT}
    with refused(422) as caught:
        served.client.ask("POST", "/v1/completions", body)
    assert "prompt.0" in caught.value.message


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/jobs"])
@pytest.mark.parametrize("body", [b'{"model": "\xff"}', b"[" * 100_000])
def test_a_body_that_is_not_utf_8_or_deeply_nested_is_refused_with_the_reason(
    served: Any, path: str, body: bytes
) -> None:
    headers = {"Content-Type": "application/json"}
    response = httpx.post(f"{served.daemon.address}{path}", content=body, headers=headers)
    assert response.status_code == 400 and "UTF-8, and not deeply nested" in response.text
