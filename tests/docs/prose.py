"""Count constructions of our prose and habits of our code that a native engineer would not use.

    python -m tests.docs.prose                        package, README and docs: goal, now, limit
    python -m tests.docs.prose ondevice/data          only these folders or files
    python -m tests.docs.prose --list ondevice/data   and the lines to mend
    python -m tests.docs.prose --check                exit status 1 if a count is above its limit

Phrases are counted per 10,000 words of strings of two words and more, comments and docstrings, or
of Markdown outside code. `LIMITS` says what `--check` allows; lower a limit as soon as it holds.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ("ondevice", "exporters", "runtime_ops")
PAGES = (
    *("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "docs", "examples"),
    *("benchmarks", "android_app/README.md", "android_app/core", *PACKAGE),
)

# Words after which "where" asks for a place or names one.
PLACE_WORDS = re.compile(
    "say|says|said|saying|tell|tells|know|knows|known|see|sees|show|shows|find|finds|return"
    "|decide|decides|decided|choose|chooses|chosen|write|writes|record|records|exactly|directly"
    "|from|to|of|is|are|on|about|begin|begins|began|start|starts|end|ends|ended|stop|stops|stopped"
    "|stay|stays|stayed|lie|lies|lay|remain|remains|left|folder|folders|directory|directories"
    "|file|path|paths|position|positions|index|machine|device|devices|place|places|point|points"
    "|line|section|page"
)
PHRASES = {
    "is no, are no": re.compile(r"\b(?:[Ii]s|[Aa]re|was|were|be) (?:no|none)\b(?! longer)"),
    "what is, what it": re.compile(r"\bwhat (?:is|it)\b", re.IGNORECASE),
    "beside": re.compile(r"\bbeside\b", re.IGNORECASE),
    "alone": re.compile(r"(?<!let )(?<!left )(?<!leave )(?<!stand-)\balone\b", re.IGNORECASE),
}
WHERE_FOR_IF = "where (if, when)"
WHERE = re.compile(r"(\w*)(\W*)\b[Ww]here\b(?![\w.(])")


@dataclass(frozen=True)
class Limit:
    """One line of the table: the goal, and what `--check` allows for the time being."""

    goal: float
    allowed: float


LIMITS = {
    "package: where (if, when)": Limit(10, 7),
    "package: is no, are no": Limit(8, 5),
    "package: what is, what it": Limit(2, 1.2),
    "package: beside": Limit(1, 1),
    "package: alone": Limit(1, 1),
    "package: lines over 100, %": Limit(2, 1.1),
    "package: ternaries per 1,000 statements": Limit(15, 15),
    "package: tuple assignments per 1,000": Limit(6, 3),
    "package: circles of modules": Limit(0, 0),
    "package: own imports in functions": Limit(150, 128),
    "tests: match= patterns": Limit(100, 30),
    "pages: where (if, when)": Limit(10, 7),
    "pages: is no, are no": Limit(8, 1.5),
    "pages: what is, what it": Limit(2, 2),
    "pages: beside": Limit(1, 1),
    "pages: alone": Limit(1, 1),
    "pages: paragraphs over 120 words": Limit(0, 0),
    "pages: with a sentence mean over 20": Limit(0, 0),
}


@dataclass
class Counts:
    """Sums over the files of one kind, and the lines to mend by name of the count."""

    words: int = 0
    statements: int = 0
    lines: int = 0
    hits: dict[str, list[str]] = field(default_factory=dict)

    def add(self, name: str, path: Path, line: int, text: str) -> None:
        """Record one line to mend."""
        hit = f"{path.relative_to(ROOT)}:{line}: {' '.join(text.split())[:160]}"
        self.hits.setdefault(name, []).append(hit)

    def number(self, name: str) -> int:
        """Return how many lines have been recorded for one count."""
        return len(self.hits.get(name, []))


def phrases(text: str) -> Iterator[tuple[str, int]]:
    """Yield the name and the offset of each counted phrase in one text."""
    for name, pattern in PHRASES.items():
        for match in pattern.finditer(text):
            yield name, match.start()
    for match in WHERE.finditer(text):
        word, between = match[1].lower(), match[2]
        if not PLACE_WORDS.fullmatch(word) or set(between) - set(" \n#"):
            yield WHERE_FOR_IF, match.end()


def is_ours(path: Path) -> bool:
    """Return whether a file is read where it stands: not through a link, and nothing built."""
    linked = any(parent.is_symlink() for parent in (path, *path.parents))
    return not linked and not {"build", ".venv", "node_modules", "target"} & set(path.parts)


def python_files(folders: Iterable[Path]) -> Iterator[Path]:
    """Yield each Python file under the folders once; a linked folder is read at its target."""
    for folder in folders:
        if folder.is_file():
            if folder.suffix == ".py":
                yield folder
            continue
        for path in sorted(folder.rglob("*.py")):
            if is_ours(path):
                yield path


def strings(tree: ast.AST) -> Iterator[tuple[int, int, str]]:
    """Yield first line, last line and text of each string of two words or more, f-strings too."""
    inside = set()
    for node in ast.walk(tree):
        text = None
        if isinstance(node, ast.JoinedStr):
            inside.update(id(part) for part in node.values)
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value if id(node) not in inside else None
        if text is not None and len(text.split()) > 1:
            yield node.lineno, node.end_lineno or node.lineno, text


def comments(source: str) -> Iterator[tuple[int, int, str]]:
    """Yield first line, last line and text of each block of comment lines."""
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if block and token.start[0] != last + 1:
            yield first, last, "\n".join(block)
            block = []
        if not block:
            first = token.start[0]
        last = token.start[0]
        block.append(token.string.lstrip("# "))
    if block:
        yield first, last, "\n".join(block)


def line_of(lines: list[str], first: int, last: int, phrase: str) -> int:
    """Return the line from `first` to `last` that holds the last word of a phrase, else `first`."""
    for number in range(first, last + 1):
        if phrase in lines[number - 1]:
            return number
    return first


def count_text(counts: Counts, path: Path, lines: list[str], span: tuple[int, int, str]) -> None:
    """Add the words and phrases of one text that stands in lines `span[0]` to `span[1]`."""
    first, last, text = span
    counts.words += len(re.findall(r"[A-Za-z][A-Za-z'’-]*", text))
    text = re.sub(r"`[^`\n]*`", lambda code: "_" * len(code[0]), text)
    for name, offset in phrases(text):
        before = text[max(0, offset - 12) : offset].split("\n")[-1]
        line = first + text[:offset].count("\n")
        if line > last or not before or before[-6:] not in lines[line - 1]:
            line = line_of(lines, first, last, text[offset - 6 : offset + 6].strip())
        counts.add(name, path, line, lines[line - 1])


def count_python(folders: Iterable[Path]) -> Counts:
    """Count phrases, long lines, ternaries, tuple assignments and imports in functions."""
    counts = Counts()
    for path in python_files(folders):
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines()
        counts.lines += len(lines)
        for number, line in enumerate(lines, 1):
            if len(line) > 100:
                counts.add("lines over 100, %", path, number, line)
        tree = ast.parse(source)
        for span in (*strings(tree), *comments(source)):
            count_text(counts, path, lines, span)
        for node in ast.walk(tree):
            count_node(counts, path, lines, node)
    return counts


def count_node(counts: Counts, path: Path, lines: list[str], node: ast.AST) -> None:
    """Add one node of a syntax tree."""
    if isinstance(node, ast.stmt):
        counts.statements += 1
    if isinstance(node, ast.IfExp):
        name = "ternaries per 1,000 statements"
        counts.add(name, path, node.lineno, lines[node.lineno - 1])
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
        if any(isinstance(target, ast.Tuple) for target in node.targets):
            name = "tuple assignments per 1,000"
            counts.add(name, path, node.lineno, lines[node.lineno - 1])
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        for inner in own_imports_of(node):
            counts.add("own imports in functions", path, inner.lineno, lines[inner.lineno - 1])


def own_imports_of(function: ast.AST) -> Iterator[ast.ImportFrom]:
    """Yield the package's modules that a function imports, without those of functions inside it."""
    pending = list(ast.iter_child_nodes(function))
    while pending:
        node = pending.pop(0)
        if isinstance(node, ast.ImportFrom):
            if (node.module or "").startswith("ondevice"):
                yield node
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            pending.extend(ast.iter_child_nodes(node))


def module_of(path: Path) -> str:
    """Return the name under which the package imports a file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] != "ondevice":
        parts = ("ondevice", *parts)
    return ".".join(parts).removesuffix(".__init__")


def module_graph() -> dict[str, set[str]]:
    """Return which module of the package imports which: at the top, late, and for types."""
    files = {}
    for path in python_files(ROOT / folder for folder in PACKAGE):
        files[module_of(path)] = path
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        edges = graph.setdefault(module, set())
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                edges.update(alias.name for alias in node.names if alias.name in files)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    if inner in files or node.module in files:
                        edges.add(inner if inner in files else node.module)
        edges.discard(module)
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of two modules or more (Tarjan), largest first."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = low[module] = len(order)
        stack.append(module)
        for other in sorted(graph[module]):
            if other not in order:
                visit(other)
                low[module] = min(low[module], low[other])
            elif other in stack:
                low[module] = min(low[module], order[other])
        if low[module] == order[module]:
            at = stack.index(module)
            if len(stack) - at > 1:
                components.append(sorted(stack[at:]))
            del stack[at:]

    sys.setrecursionlimit(10_000)
    for module in sorted(graph):
        if module not in order:
            visit(module)
    return sorted(components, key=len, reverse=True)


def count_circles(counts: Counts, paths: list[Path]) -> None:
    """Add the circles of the package's modules; with paths, those that pass through one of them."""
    inside = {module_of(path) for path in python_files(paths)}
    for circle in circles(module_graph()):
        if paths and not inside & set(circle):
            continue
        counts.hits.setdefault("circles of modules", []).append(
            f"{len(circle)} modules: {', '.join(circle)}"
        )


def count_tests(folders: Iterable[Path]) -> Counts:
    """Count the `match=` patterns in tests."""
    counts = Counts()
    for path in python_files(folders):
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and any(k.arg == "match" for k in node.keywords):
                counts.add("match= patterns", path, node.lineno, lines[node.lineno - 1])
    return counts


def markdown_files(pages: Iterable[Path]) -> Iterator[Path]:
    """Yield each Markdown file of the pages and folders."""
    for page in pages:
        if page.is_file():
            if page.suffix == ".md":
                yield page
        else:
            yield from (path for path in sorted(page.rglob("*.md")) if is_ours(path))


def paragraphs(text: str) -> Iterator[tuple[int, int, str, str]]:
    """Yield kind ("text", "item", "table" or "heading"), first line, last line and text.

    A paragraph ends at an empty line, at a heading, at a table and at each item of a list. Fenced
    and indented code and comments are left out; in a list, indented text continues an item.
    """
    lines = text.splitlines()
    block: list[str] = []
    kind = "text"
    first = 1
    fenced = False
    listed = False
    for number, line in enumerate([*lines, ""], 1):
        bare = line.strip()
        starts = re.match(r"\s*(?:[-*+]|\d+\.)\s", line)
        ends = not bare or bare.startswith(("#", "|", "<!--", "```", ">")) or starts
        if (ends or fenced) and block:
            yield kind, first, number - 1, "\n".join(block)
            block = []
        if bare.startswith("```"):
            fenced = not fenced
            continue
        if fenced or not bare or bare.startswith("<!--"):
            continue
        if bare.startswith("|"):
            yield "table", number, number, bare
        elif bare.startswith("#"):
            yield "heading", number, number, bare.lstrip("# ")
        elif block or starts or listed or not line.startswith("    "):
            listed = bool(starts) or (listed and line.startswith("  "))
            if not block:
                kind = "item" if starts else "text"
                first = number
            block.append(line[starts.end() :] if starts else bare)


def plain(text: str) -> str:
    """Return Markdown as a reader sees it: code as one word, links as their text."""
    text = re.sub(r"`[^`]*`", "code", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"<[^>]+>|\*\*|__", "", text)


def sentence_lengths(text: str) -> list[int]:
    """Return the number of words of each sentence of one paragraph."""
    text = re.sub(r"\b(e\.g|i\.e|cf|vs|etc|Fig|Sec|No)\.", r"\1", text)
    lengths = []
    for sentence in re.split(r"(?<=[.!?])[)\"'’”]*\s+(?=[\"'“(\[]*[A-Z0-9`*])", text):
        words = re.findall(r"[\w’'%.,/+×−–-]*\w[\w’'%]*", sentence)
        if words:
            lengths.append(len(words))
    return lengths


def count_pages(pages: Iterable[Path]) -> Counts:
    """Count phrases, long paragraphs, and pages whose sentences are long."""
    counts = Counts()
    for path in markdown_files(pages):
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines()
        lengths = []
        for kind, first, last, text in paragraphs(source):
            text = plain(text)
            count_text(counts, path, lines, (first, last, text))
            if kind not in ("text", "item"):
                continue
            words = len(text.split())
            if words > 120:
                name = "paragraphs over 120 words"
                counts.add(name, path, first, f"{words} words: {text}")
            lengths += sentence_lengths(text)
        mean = sum(lengths) / max(1, len(lengths))
        if mean > 20:
            counts.add("with a sentence mean over 20", path, 1, f"{mean:.1f} words a sentence")
    return counts


def values(counts: Counts, names: Iterable[str]) -> dict[str, float]:
    """Return the value of each count: per 10,000 words, per 1,000 statements, % or a number."""
    scales = {
        "lines over 100, %": 100 / max(1, counts.lines),
        "ternaries per 1,000 statements": 1000 / max(1, counts.statements),
        "tuple assignments per 1,000": 1000 / max(1, counts.statements),
    }
    for name in (WHERE_FOR_IF, *PHRASES):
        scales[name] = 10_000 / max(1, counts.words)
    return {name: counts.number(name) * scales.get(name, 1) for name in names}


def main() -> int:
    """Print the table; return 1 if `--check` was asked for and a count is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", help="folders or files; default: package and pages")
    parser.add_argument("--list", action="store_true", help="print the lines to mend")
    parser.add_argument("--only", default="", help="with --list: only counts whose name has this")
    parser.add_argument("--check", action="store_true", help="fail if a count is above its limit")
    options = parser.parse_args()

    paths = [Path(path).resolve() for path in options.paths]
    tests = [path for path in paths if ROOT / "tests" in (path, *path.parents)]
    sources = [path for path in paths if path not in tests]
    groups = {}
    if not paths or sources:
        groups["package"] = count_python(sources or [ROOT / folder for folder in PACKAGE])
        count_circles(groups["package"], sources)
        groups["pages"] = count_pages(sources or [ROOT / page for page in PAGES])
    if not paths or tests:
        groups["tests"] = count_tests(tests or [ROOT / "tests"])

    failed = False
    for group, counts in groups.items():
        if counts.words:
            print(f"{group}: {counts.words:,} words, {counts.lines:,} lines of code")
    print(f"{'':42} {'goal':>7} {'now':>7} {'allowed':>8}  ok")
    for name, limit in LIMITS.items():
        group, count = name.split(": ", 1)
        if group not in groups or (group != "tests" and not groups[group].words):
            continue
        now = values(groups[group], [count])[count]
        fits = now <= limit.allowed
        failed = failed or not fits
        note = "NO" if not fits else "yes" if now <= limit.goal else "not yet"
        print(f"{name:42} {limit.goal:7g} {now:7.1f} {limit.allowed:8g}  {note}")
    if options.list:
        for group, counts in groups.items():
            for count, hits in counts.hits.items():
                if options.only in count:
                    print(f"\n{group}: {count} ({len(hits)})")
                    print("\n".join(f"  {hit}" for hit in hits))
    return 1 if options.check and failed else 0


if __name__ == "__main__":
    sys.exit(main())
