"""10,000 strings that tokenizers find hard, the same at every run."""

from __future__ import annotations

import random
import unicodedata

BLOCKS = [
    (0x20, 0x7E),
    (0xA0, 0x17F),
    (0x180, 0x24F),
    (0x370, 0x3FF),
    (0x400, 0x4FF),
    (0x5D0, 0x5EA),
    (0x620, 0x6FF),
    (0x900, 0x97F),
    (0xE00, 0xE5B),
    (0x1100, 0x11FF),
    (0x1E00, 0x1EFF),
    (0x2000, 0x206F),
    (0x2070, 0x218B),
    (0x2190, 0x23FF),
    (0x2460, 0x24FF),
    (0x3000, 0x30FF),
    (0x3400, 0x3450),
    (0x4E00, 0x9FA5),
    (0xAC00, 0xD7A3),
    (0xF900, 0xFAFF),
    (0xFB00, 0xFB4F),
    (0xFE00, 0xFE0F),
    (0xFF00, 0xFFEF),
    (0x10300, 0x1032F),
    (0x1D400, 0x1D7FF),
    (0x1F300, 0x1F64F),
    (0x1F680, 0x1F6C5),
    (0x20000, 0x20100),
    (0x2F800, 0x2FA1D),
]
MARKS = [
    0x300,
    0x301,
    0x302,
    0x303,
    0x308,
    0x30A,
    0x323,
    0x327,
    0x328,
    0x345,
    0x5B0,
    0x5BC,
    0x64B,
    0x651,
    0x93C,
    0x94D,
    0x3099,
    0x309A,
    0x20D0,
]
EMOJI = ["👨‍👩‍👧‍👦", "🏳️‍🌈", "👍🏽", "🇩🇪🇫🇷", "❤️", "1️⃣", "🤷🏿‍♀️", "😀", "🧑‍🚀", "☂️"]
SPACES = [
    " ",
    "  ",
    "    ",
    "\t",
    "\n",
    "\n\n",
    "\r\n",
    "\r",
    "\u00a0",
    "\u3000",
    "\u2028",
    "\u0085",
    "\u200b",
    "\x0b",
    "\x1c",
    "\ufeff",
    "\u180e",
]
CODE = [
    "def f(x):\n    return x**2  # ²\n",
    "for (int i = 0; i < n; ++i) {\r\n\ta[i] += b[i];\r\n}",
    '{"key": [1, 2.5e-10, null]}',
    "SELECT * FROM t WHERE a='b''c';",
    '<div class="x">\n\n\n  &nbsp;</div>',
    "git commit -m 'it''s'",
    "0xDEADBEEF 1_000_000 3.14159",
    "foo_bar.BazQux->quux::<T>()",
    "\\frac{1}{2}\\sum_{i=1}^{n}",
]
WORDS = [
    "the",
    "It's",
    "WE'LL",
    "they'RE",
    "I'd've",
    "naïve",
    "Straße",
    "don't",
    "CAN'T",
    "'s",
    "'S",
    "''re",
    "x'ſ",
    "İstanbul",
    "ﬀ",
    "Ⅷ",
    "½",
    "٣٤",
    "१२३",
    "一二三",
    "12345678",
    "3.14",
    "café",
    "cafe\u0301",
    "日本語",
    "한국어",
    "שלום",
    "العربية",
    "ไทย",
]


def strings(count: int, specials: list[str], seed: int = 0, normalized: bool = False) -> list[str]:
    """Texts of at most some hundred characters, and a few very long ones.

    Args:
        specials: added tokens, which turn up in the middle of texts.
        normalized: leave out characters whose normalisation the JVM does not know. Java 17 has Unicode 13, and
            `tokenizers` a later one; a character that is new since then and has neither a decomposition nor a
            combining class is the same to both.
    """
    rng = random.Random(seed)
    makers = [
        lambda: "".join(chr(_point(rng)) for _ in range(rng.randint(1, 40))),
        lambda: "".join(chr(_any(rng, normalized)) for _ in range(rng.randint(1, 12))),
        lambda: " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 12))),
        lambda: "".join(rng.choice(WORDS) + rng.choice(SPACES) * rng.randint(0, 3) for _ in range(rng.randint(1, 8))),
        lambda: rng.choice(CODE) + rng.choice(SPACES) + rng.choice(CODE),
        lambda: "".join(rng.choice(EMOJI) + rng.choice(["", " ", "a"]) for _ in range(rng.randint(1, 6))),
        lambda: "".join(
            chr(_point(rng)) + "".join(chr(rng.choice(MARKS)) for _ in range(rng.randint(0, 3)))
            for _ in range(rng.randint(1, 12))
        ),
        lambda: "".join(chr(rng.randint(0, 0x24F)) for _ in range(rng.randint(1, 30))),
        lambda: (
            rng.choice(WORDS)
            + rng.choice(["", " ", "\n"])
            + rng.choice(specials)
            + rng.choice(["", " ", "'s"])
            + rng.choice(WORDS)
        ),
        lambda: "".join(rng.choice([*SPACES, *"ab1'.,-"]) for _ in range(rng.randint(1, 30))),
        lambda: (
            str(rng.randint(0, 10 ** rng.randint(1, 20)))
            + rng.choice([" ", "x", "."])
            + chr(rng.choice([0x660, 0xBD, 0x2160, 0x3007])) * rng.randint(0, 5)
        ),
        lambda: (
            rng.choice(EMOJI)
            + "".join(rng.choice(SPACES) for _ in range(rng.randint(1, 5)))
            + rng.choice(WORDS) * rng.randint(1, 4)
        ),
    ]
    found = [
        *specials,
        *WORDS,
        *EMOJI,
        *SPACES,
        "",
        " ",
        "a" * 20_000,
        "日" * 5_000,
        " " * 3_000 + "x",
        "ab " * 4_000,
        "é" * 1_000,
        "".join(CODE) * 20,
    ]
    while len(found) < count:
        found.append(makers[len(found) % len(makers)]())
    return found[:count]


def _point(rng: random.Random) -> int:
    return rng.randint(*rng.choice(BLOCKS))


def _any(rng: random.Random, normalized: bool) -> int:
    while True:
        point = rng.randint(1, 0x10FFFF) if rng.random() < 0.3 else rng.randint(1, 0x33FF)
        character = chr(point)
        if 0xD800 <= point < 0xE000:
            continue
        if normalized and (
            unicodedata.category(character) == "Cn" or (point > 0x700 and unicodedata.combining(character))
        ):
            continue
        return point
