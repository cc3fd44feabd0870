"""Data files of every format that the app reads, good rows and bad ones."""

from __future__ import annotations

import json
from typing import Any

LONG = "The film drags on and on, scene after scene, and yet by the end I was moved. " * 6
CHAT = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello! 👋"}]},
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "2+2?\n"},
            {"role": "assistant", "content": "4"},
            {"role": "user", "content": "And 3+3?"},
            {"role": "assistant", "content": "\n6 ça va"},
            {"role": "user", "content": "bye"},
        ]
    },
    {
        "messages": [
            {"role": "user", "content": "old " * 30},
            {"role": "assistant", "content": "first"},
            {"role": "user", "content": LONG},
            {"role": "assistant", "content": "cafe\u0301 ok"},
        ]
    },
    {"messages": [{"role": "assistant", "content": "no question"}]},
    {"messages": [{"role": "user", "content": "no answer"}]},
    {"messages": []},
    {"messages": [{"role": "robot", "content": "x"}]},
]

FILES: dict[str, list[Any]] = {
    "sst2_task": [
        {"task": "sst2", "prompt_fields": {"sentence": " A warm, funny film. "}, "label": 1},
        {"task": "SST-2", "prompt_fields": {"text": "Dull."}, "label": "negative"},
        {"task": "sst2", "prompt_fields": {"sentence": LONG}, "label": 0.0},
        {"task": "sst2", "prompt_fields": {"sentence": "x"}, "label": 7},
        {"task": "rte", "prompt_fields": {"sentence": "x"}, "label": 1},
        {"task": "sst2", "prompt_fields": {"sentence": ""}, "label": 1},
    ],
    "completion": [
        {"prompt": "Capital of France?", "completion": " Paris"},
        {"prompt": "", "completion": "only an answer"},
        {"prompt": "日本語の", "completion": "答え 👩‍🚀"},
        {"prompt": "joined wo", "completion": "rds"},
        {"prompt": LONG, "completion": " good"},
        {"prompt": "x", "completion": LONG},
        {"prompt": "x", "completion": " "},
        {"prompt": "x", "completion": None},
        {"prompt": "x"},
        {"prompt": "Capital of France?", "completion": " Paris"},
        [1, 2],
        "text",
    ],
    "text": [{"text": "short"}, {"text": LONG}, {"text": "a"}, {"text": "two\nlines"}, {"text": 5}],
    "classification": [
        {"text": " so good ", "label": "Positive"},
        {"sentence": "bad", "label": "negative"},
        {"text": "meh", "label": "neutral"},
        {"text": "x", "label": None},
        {"text": "x", "label": [1]},
        {"text": "", "label": "negative"},
        {"text": LONG, "label": "Negative"},
    ],
    "numbers": [
        {"text": "one", "label": 1},
        {"text": "two", "label": 2.0},
        {"text": "ten", "label": 10},
        {"text": "yes", "label": True},
    ],
    "multiple_choice": [
        {"question": "Largest planet?", "choices": ["Mars", "Jupiter", "Venus"], "answer": "B"},
        {"question": "1+1?", "choices": ["1", "2"], "answer": 1},
        {"question": "Colour?", "choices": ["red", "blue"], "answer": "blue"},
        {"question": "?", "choices": ["only"], "answer": 0},
        {"question": "?", "choices": ["a", "b"], "answer": "z"},
    ],
    "chat": CHAT,
    "instruct": [
        {"instruction": "Translate to German.", "input": "good morning", "output": "Guten Morgen"},
        {"instruction": "Say hi.", "input": "", "output": "hi"},
        {"prompt": "Name a colour.", "response": "red"},
        {"instruction": "", "output": "x"},
        {"instruction": "Sum it up.", "context": LONG, "response": "moving"},
    ],
    "rte": [
        {
            "task": "rte",
            "prompt_fields": {"sentence1": "A man sleeps.", "sentence2": "A man is awake."},
            "label": "not_entailment",
        }
    ],
    "boolq": [
        {"task": "boolq", "prompt_fields": {"passage": "Water boils.", "question": "does water boil?"}, "label": True}
    ],
    "copa": [
        {
            "task": "copa",
            "prompt_fields": {
                "premise": "It rained.",
                "choice1": "I got wet.",
                "choice2": "The Sun shone.",
                "question": "effect",
            },
            "label": 0,
        }
    ],
    "winogrande": [
        {
            "task": "winogrande",
            "prompt_fields": {"sentence": "Ann thanked Bea because _ had helped.", "option1": "Ann", "option2": "Bea"},
            "label": "2",
        },
        {"task": "winogrande", "prompt_fields": {"sentence": "no blank", "option1": "a", "option2": "b"}, "label": "1"},
    ],
    "squad": [
        {
            "task": "squad",
            "prompt_fields": {"title": "T", "context": "C is D.", "question": "What is C?"},
            "label": [{"text": "D"}, {"text": " D "}],
        }
    ],
    "wsc": [
        {
            "task": "wsc",
            "prompt_fields": {
                "text": "Ann saw Bea when She left.",
                "target": {"span1_text": "Ann", "span2_text": "She"},
            },
            "label": 1,
        }
    ],
}

ODD_LINES = (
    b'\xef\xbb\xbf{"prompt": "p", "completion": "c"}\r\n',
    b"\r\n",
    b'{"prompt": "p"\r\n',
    b'{"prompt": "a", "prompt": "b", "completion": "c"}\r\n',
    b'{"prompt": "\xff", "completion": "c"}\n',
    b'{"prompt": "z\\u0000", "completion": "c"}\n',
    b'{"prompt": "\\ud800", "completion": "c"}\n',
    b'{"prompt": \'single\', "completion": "c"}\n',
    b"null\n",
    '{"prompt": "ü", "completion": "ß 😀"}'.encode(),
)


def files() -> dict[str, bytes]:
    """Content by name."""
    made = {
        name: "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
        for name, rows in FILES.items()
    }
    return made | {"odd_lines": b"".join(ODD_LINES)}
