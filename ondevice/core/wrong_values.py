"""Mistakes in values from outside, in our words: every error of pydantic, wherever it was raised.

Settings, flags, requests to the daemon, and files that pydantic checks all say the same: where the value is, what was
expected and what was received.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from ondevice.core.near import nearest_value

MOST_LETTERS = 300
"""Of a quoted value: a document from outside may have a string of a million letters."""
MOST_ERRORS = 1000
"""Errors of one document that are read: a list from outside may have a million wrong items."""

_EXPECTED: dict[str, str] = {
    "json_invalid json_type": "JSON",
    "needs_python_object is_instance_of model_type model_attributes_type dataclass_type": "an object with keys",
    "dataclass_exact_type dict_type frozen_dict_type ordered_dict_type mapping_type": "an object with keys",
    "counter_type arguments_type named_tuple_type": "an object with keys",
    "recursion_loop recursion_depth_exceeded": "a value that does not contain itself",
    "invalid_key": "text as each key",
    "none_required": "null",
    "greater_than": "more than {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "less than {lt}",
    "less_than_equal": "{le} or less",
    "multiple_of": "a multiple of {multiple_of}",
    "finite_number": "a finite number",
    "too_short": "{min_length} or more items",
    "too_long": "at most {max_length} items",
    "list_type tuple_type iterable_type iteration_error deque_type set_type frozen_set_type": "a list",
    "set_item_not_hashable": "texts or numbers as items",
    "string_type": "text",
    "string_unicode bytes_invalid_encoding": "text in UTF-8",
    "string_not_ascii": "text in ASCII",
    "string_too_short": "{min_length} or more characters",
    "string_too_long": "at most {max_length} characters",
    "string_pattern_mismatch": "text of the form {pattern}",
    "enum literal_error": "{expected}",
    "union_tag_invalid": "{expected_tags} as its {discriminator}",
    "union_tag_not_found": "an object with the key {discriminator}",
    "bool_type bool_parsing": "true or false",
    "int_type int_parsing int_from_float": "a whole number",
    "int_parsing_size": "a whole number with fewer digits",
    "float_type float_parsing complex_type complex_str_parsing decimal_type decimal_parsing": "a number",
    "fraction_type fraction_parsing": "a number",
    "decimal_max_digits": "at most {max_digits} digits",
    "decimal_max_places": "at most {decimal_places} decimal places",
    "decimal_whole_digits": "at most {whole_digits} digits before the point",
    "bytes_type": "bytes",
    "bytes_too_short": "{min_length} or more bytes",
    "bytes_too_long": "at most {max_length} bytes",
    "date_type date_parsing date_from_datetime_parsing date_from_datetime_inexact": "a date",
    "time_type time_parsing": "a time",
    "datetime_type datetime_parsing datetime_object_invalid datetime_from_date_parsing": "a date and time",
    "date_past datetime_past": "a time in the past",
    "date_future datetime_future": "a time in the future",
    "timezone_naive": "a time without a time zone",
    "timezone_aware": "a time with a time zone",
    "timezone_offset": "a time with the offset {tz_expected}",
    "time_delta_type time_delta_parsing": "a duration",
    "callable_type": "a function",
    "is_subclass_of": "a class",
    "url_type url_parsing url_syntax_violation": "a URL",
    "url_too_long": "a URL of at most {max_length} characters",
    "url_scheme": "a URL that begins with {expected_schemes}",
    "uuid_type uuid_parsing uuid_version": "a UUID",
    "default_factory_not_called no_such_attribute get_attribute_error": "a value that can be read",
    "frozen_field frozen_instance": "no change: these settings cannot be changed",
    "missing_sentinel_error ellipsis_error": "no value",
    "multiple_argument_values": "one value",
}  # fmt: skip
"""What each of pydantic's errors expects, with the fields of its context in braces."""
EXPECTED = {kind: text for kinds, text in _EXPECTED.items() for kind in kinds.split()}
MISSING = (
    "missing",
    "missing_argument",
    "missing_keyword_only_argument",
    "missing_positional_only_argument",
)
UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument", "unexpected_positional_argument")
OWN_WORDS = ("value_error", "assertion_error")
"""Errors whose text is that of a validator of ours."""


@dataclass(frozen=True)
class Problem:
    """One mistake in a document.

    Attributes:
        kind: pydantic's name of the error.
        loc: pydantic's place, in which a union's key is followed by the member's tag.
        path: dotted place in the document; "" is the whole document.
        value: what was received there.
        message: the mistake, except what was expected and received, if they are known.
        expected: what would have been right, or None.
        received: the value, shortened; None if it says nothing, as where a key is missing.
        meant: the value that was probably meant, or None.
    """

    kind: str
    loc: tuple[int | str, ...]
    path: str
    value: Any
    message: str
    expected: str | None = None
    received: str | None = None
    meant: str | None = None

    @property
    def headline(self) -> str:
        """The mistake in a sentence, for an error that says `expected` and `received` below it."""
        if self.expected is None:
            return self.message
        return f"{self.message or 'the document'} has a wrong value"

    def __str__(self) -> str:
        """Everything in one line."""
        parts = []
        if self.expected is not None:
            parts.append(f"expected {self.expected}")
        if self.received is not None:
            parts.append(f"received {self.received}")
        if self.meant is not None:
            parts.append(f"did you mean '{self.meant}'?")
        return ": ".join(filter(None, (self.message, ", ".join(parts))))


def problems_of(errors: Sequence[Mapping[str, Any]], document: Any) -> list[Problem]:
    """Return the first mistakes that pydantic found in `document`, each place once.

    Args:
        errors: `ValidationError.errors()`.
        document: the value that was validated; its keys tell the document's places from tags of unions.
    """
    found: dict[str, Problem] = {}
    for problem in _each(errors[:MOST_ERRORS], document):
        other = found.get(problem.path)
        if other is None:
            found[problem.path] = problem
        elif other.expected and problem.expected and problem.expected not in other.expected:
            # Each member of a union refused the value: any of them would do.
            expected = f"{other.expected}, or {problem.expected}"
            found[problem.path] = replace(other, expected=expected)
    # A member of a union that refused the whole value says less than one that looked into it.
    looked_into = {path[: dot.start()] for path in found for dot in re.finditer(r"\.", path)}
    return [
        problem
        for problem in found.values()
        if problem.kind in OWN_WORDS or problem.path not in looked_into
    ]


def _each(errors: Sequence[Mapping[str, Any]], document: Any) -> Iterator[Problem]:
    for error in errors:
        kind, loc, value = error["type"], tuple(error["loc"]), error.get("input")
        path = ".".join(_places(loc, document, kind))[:MOST_LETTERS]
        problem = Problem(kind, loc, path, value, f"'{path}'" if path else "")
        if kind in MISSING:
            yield replace(problem, message=f"'{path}' is missing")
        elif kind in UNKNOWN:
            yield replace(problem, message=f"unknown key '{path}'")
        elif kind in OWN_WORDS:
            text = str((error.get("ctx") or {}).get("error") or error["msg"])
            text = text.removeprefix("Value error, ").removeprefix("Assertion failed, ")
            quoted = None if isinstance(value, (Mapping, list, tuple)) else _received(value)
            message = ": ".join(filter(None, (problem.message, text)))
            yield replace(problem, message=message, received=quoted)
        else:
            context = error.get("ctx") or {}
            choices = re.findall("'([^']*)'", str(context.get("expected", "")))
            yield replace(
                problem,
                expected=_expected(kind, context),
                received=_received(value),
                meant=nearest_value(value, choices),
            )


def _places(loc: tuple[int | str, ...], document: Any, kind: str) -> Iterator[str]:
    """Yield the parts of pydantic's place that are keys or numbers of the document, not tags of unions."""
    node = document
    for position, part in enumerate(loc):
        is_last = position == len(loc) - 1
        if _has(node, part):
            node = getattr(node, str(part)) if isinstance(node, BaseModel) else node[part]
        elif not (is_last and kind in MISSING):
            continue
        yield str(part)


def _has(node: Any, part: int | str) -> bool:
    if isinstance(node, BaseModel):
        return str(part) in type(node).model_fields
    if isinstance(node, (list, tuple)):
        return isinstance(part, int) and part < len(node)
    return isinstance(node, Mapping) and part in node


def _expected(kind: str, context: Mapping[str, Any]) -> str:
    text = EXPECTED.get(kind)
    if text is None:  # an error of a later version of pydantic
        return "another value"
    values = {name: _number(value) for name, value in context.items()}
    if kind == "union_tag_invalid":
        values["discriminator"] = str(context["discriminator"]).strip("'")
        values["expected_tags"] = " or ".join(str(context["expected_tags"]).rsplit(", ", 1))
    return text.format_map(values)


def _number(value: Any) -> Any:
    """Return a limit as one writes it: 1, not 1.0."""
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        return int(value)
    return value


def _received(value: Any) -> str:
    return shortened(repr(value))


def shortened(text: str) -> str:
    """Return the beginning of a text that may be long."""
    if len(text) <= MOST_LETTERS:
        return text
    return f"{text[:MOST_LETTERS]}..."
