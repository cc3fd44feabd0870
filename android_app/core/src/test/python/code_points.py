"""Writes CodePoints.kt: which characters are letters, numbers and white space to `tokenizers`.

The sets are read out of the library's own regular expressions and `Digits`, so that the app splits text as
Python does on every Android version, whatever Unicode version the phone knows.

    python code_points.py > ../../main/kotlin/org/ondevice/core/CodePoints.kt
"""

from __future__ import annotations

from tokenizers import Regex, __version__, pre_tokenizers

TEMPLATE = """package org.ondevice.core

/**
 * Letters, numbers and white space as `tokenizers` {version} knows them: `\\\\p{{L}}`, `\\\\p{{N}}` and `\\\\s` of its
 * regular expressions, and what its `Digits` takes for a number. Written by `src/test/python/code_points.py`.
 */
internal object CodePoints {{
    private const val LETTER = 1
    private const val NUMBER = 2
    private const val SPACE = 4
    private const val NUMERIC = 8

    private val kinds = ByteArray(0x110000)

    init {{
        mark(LETTERS, LETTER)
        mark(NUMBERS, NUMBER)
        mark(SPACES, SPACE)
        mark(NUMERICS, NUMERIC)
    }}

    fun isLetter(point: Int): Boolean = kinds[point].toInt() and LETTER != 0

    fun isNumber(point: Int): Boolean = kinds[point].toInt() and NUMBER != 0

    fun isWhiteSpace(point: Int): Boolean = kinds[point].toInt() and SPACE != 0

    /** `[^\\\\s\\\\p{{L}}\\\\p{{N}}]` */
    fun isOther(point: Int): Boolean = kinds[point].toInt() and (LETTER or NUMBER or SPACE) == 0

    /** Rust's `char::is_numeric`. */
    fun isNumeric(point: Int): Boolean = kinds[point].toInt() and NUMERIC != 0

    /** Ranges are pairs of numbers in base 36: how many points to leave out, and how many belong. */
    private fun mark(ranges: String, kind: Int) {{
        var point = 0
        var belongs = false
        for (word in ranges.split(' ')) {{
            val count = word.toInt(36)
            if (belongs) for (index in point until point + count) kinds[index] = (kinds[index].toInt() or kind).toByte()
            point += count
            belongs = !belongs
        }}
    }}
}}

private const val LETTERS = {letters}

private const val NUMBERS = {numbers}

private const val SPACES = {spaces}

private const val NUMERICS = {numerics}
"""
POINTS = [point for point in range(0x110000) if not 0xD800 <= point < 0xE000]


def members(splitter: pre_tokenizers.PreTokenizer) -> list[int]:
    """Code points that `splitter` cuts out of a text of all of them, each between two `-`."""
    found = []
    for start in range(0, len(POINTS), 4096):
        part = POINTS[start : start + 4096]
        text = "".join(f"-{chr(point)}-" for point in part)
        pieces = {begin for _, (begin, end) in splitter.pre_tokenize_str(text) if end - begin == 1}
        found += [point for index, point in enumerate(part) if 3 * index + 1 in pieces and point != ord("-")]
    return found


def matching(pattern: str) -> list[int]:
    return members(pre_tokenizers.Split(Regex(f"(?<=-){pattern}(?=-)"), "isolated"))


def base36(value: int) -> str:
    digits = ""
    while value or not digits:
        digits = "0123456789abcdefghijklmnopqrstuvwxyz"[value % 36] + digits
        value //= 36
    return digits


def ranges(points: list[int]) -> str:
    """The points as a Kotlin text of gaps and lengths, on lines that fit."""
    words, end = [], 0
    for point in points:
        if words and point == end:
            words[-1] += 1
        else:
            words += [point - end, 1]
        end = point + 1
    lines, line = [], ""
    for word in map(base36, words):
        if len(line) + len(word) > 110:
            lines.append(line)
            line = ""
        line += word + " "
    lines.append(line.rstrip())
    return "\n    " + " +\n    ".join(f'"{line}"' for line in lines)


def source() -> str:
    """The whole of CodePoints.kt."""
    return TEMPLATE.replace("\\\\", "\\").format(
        version=__version__,
        letters=ranges(matching(r"\p{L}")),
        numbers=ranges(matching(r"\p{N}")),
        spaces=ranges(matching(r"\s")),
        numerics=ranges(members(pre_tokenizers.Digits(individual_digits=True))),
    )


if __name__ == "__main__":
    print(source(), end="")
