"""A trained task's prompt as a text, with the names of columns where a row's values would be.

It is rendered by the code that rendered the training's prompts, for READMEs and for programs that
frame a prompt in their own way. A row of the training is never shown.
"""

from __future__ import annotations

from typing import Any

from ondevice.core.errors import DataError, MissingPackageError
from ondevice.data.encode import encode
from ondevice.data.readers.source import Record, Source
from ondevice.data.tasks.trained import TrainedTask

_FIELDS: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "{message}"}]},
    "classification": {"text": "{text}"},
    "completion": {"prompt": "{prompt}"},
    "instruct": {"instruction": "{instruction}"},
    "multiple_choice": {"question": "{question}", "choices": ["{first}", "{second}"]},
}
"""A row of each format that can be asked; the others have no prompt of one text."""
_ANY_LENGTH = 1 << 20


def example_prompt(task: TrainedTask, tokenizer: Any) -> str:
    """Return the prompt of a row whose columns hold their own names in braces.

    Special tokens that the tokenizer adds itself are left out: whoever tokenizes the text adds
    them. Empty if the format has no such prompt, or the task does not take words in braces.
    """
    record = _record(task)
    if record is None:
        return ""
    source = Source("json", iter([Record(1, record)]), [])
    try:
        rows = task.prompt_rows(source, "the example")
        row = next(iter(rows.items))
        if not task.chat_template and row.pairs:
            return row.pairs[row.gold or 0][0]
        framed = task.with_template(tokenizer)
        item = encode(rows, framed, max_length_tokens=_ANY_LENGTH).items[-1]
    except (DataError, MissingPackageError, StopIteration):
        return ""
    return tokenizer.decode(
        item.example.ids[: item.prompt_tokens],
        skip_special_tokens=False,
        clean_up_tokenization_spaces=False,
    )


def _record(task: TrainedTask) -> dict[str, Any] | None:
    """Return a row under the column names of the files that were trained on."""
    rendered = task.found_task()
    if rendered is not None:
        columns = [task.columns.get(field, names[0]) for field, names in rendered.columns.items()]
        return {column: f"{{{column}}}" for column in columns}
    fields = _FIELDS.get(task.format)
    if fields is None or not task.columns:
        return fields
    named = {column: f"{{{column}}}" for column in task.columns.values()}
    return named | {key: fields[key] for key in ("choices",) if key in fields}
