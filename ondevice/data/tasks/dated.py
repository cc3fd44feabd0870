"""Chat templates that write the date, as Llama 3.2's: a run renders all rows at its start's date."""

from __future__ import annotations

import copy
import json
import re
import string
from datetime import datetime
from typing import Any

CLOCK = "strftime_now"
"""The function by which transformers gives templates the clock."""
_PERCENT = "\x00"
_FORMAT = re.compile(r"""(["'])([^"'\\\n]*%[^"'\\\n]*)\1""")


def dated(tokenizer: Any, when: datetime | None) -> Any:
    """Return a copy of the tokenizer whose chat template sees `when` as the present."""
    template: Any = getattr(tokenizer, "chat_template", None)
    if when is None or CLOCK not in json.dumps(template):
        return tokenizer
    result = copy.copy(tokenizer)
    if isinstance(template, dict):
        result.chat_template = {name: _clock(when, text) + text for name, text in template.items()}
    else:
        result.chat_template = _clock(when, template) + template
    return result


def _clock(when: datetime, template: str) -> str:
    """Write a macro that stands before the template's own clock.

    transformers turns a function that is given to a template into a text, so the clock has to be a part of it. The
    macro knows the value of every text in the template that may be a format. In another one, which the template
    composes, it replaces each directive of strftime, with or without glibc's `-`.
    """
    values = [["%%", _PERCENT]]
    for letter in string.ascii_letters:
        for directive in (f"%{letter}", f"%-{letter}"):
            value = when.strftime(directive)
            if value != directive:
                values.append([directive, value.replace("%", _PERCENT)])
    values.append([_PERCENT, "%"])
    known = {text: when.strftime(text) for _, text in _FORMAT.findall(template)}
    return (
        f"{{%- macro {CLOCK}(format) -%}}{{%- set known = {json.dumps(known)} -%}}"
        "{%- if format in known -%}{{- known[format] -}}{%- else -%}{%- set now = namespace(text=format) -%}"
        f"{{%- for directive, value in {json.dumps(values)} -%}}"
        "{%- set now.text = now.text | replace(directive, value) -%}{%- endfor -%}"
        "{{- now.text -}}{%- endif -%}{%- endmacro +%}"
    )
