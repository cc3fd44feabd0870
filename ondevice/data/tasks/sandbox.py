"""Chat templates under limits: a template is a program of the model's author, and may fill memory.

transformers renders in Jinja's sandbox, which keeps a template from files and code, but not from
`'A' * 10**9` or from nested loops. `LimitedEnvironment` is that sandbox with a budget for each
rendering: characters and list entries that it creates, and processor time. The result's size of an
operator, a method or a filter is estimated before it runs.
"""

from __future__ import annotations

import functools
import operator
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping, Set
from itertools import islice
from typing import Any

from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from ondevice.core.errors import DataError

MOST = 32_000_000
"""Characters that one rendering may create, including intermediate texts."""
ENTRY = 16
"""Characters that a list's or dictionary's entry counts as, for its bytes and the time to visit it."""
MOST_S = 5.0
"""Processor time of one rendering."""
WIDEST = 1000
"""Largest width, indentation or precision that a filter or a format takes."""
LONGEST_INT_BITS = 4096
DEEPEST = 500
"""Levels of lists in lists: hashing deeper tuples would end the process, Python counts no levels there."""
_COUNTS = ("default", "d", "int", "float", "truncate")
"""Filters whose numbers are values, not widths."""
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    **{"eq": operator.eq, "ne": operator.ne, "gt": operator.gt, "lt": operator.lt},
    **{"gteq": operator.ge, "lteq": operator.le},
    "in": lambda item, values: item in values,
    "notin": lambda item, values: item not in values,
}
_budget = threading.local()


class TemplateLimitError(SecurityError):
    """A template asks for more than a rendering may take."""


def begin() -> None:
    """Begin a rendering with a full budget."""
    _budget.left = MOST
    _budget.until_s = time.thread_time() + MOST_S


def spend(count: int) -> None:
    """Take characters or entries from the budget; `count` is known before they are made."""
    _budget.left = getattr(_budget, "left", MOST) - count
    if _budget.left < 0:
        raise TemplateLimitError(f"the template makes more than {MOST:,} characters")
    if time.thread_time() > getattr(_budget, "until_s", float("inf")):
        raise TemplateLimitError(f"the template takes more than {MOST_S:g} s")


def weigh(value: Any) -> int:
    """Count the characters of a value when it is written out, shared parts each time."""
    total = 0
    level = [value]
    for _ in range(DEEPEST):
        inner: list[Any] = []
        for one in level:
            if isinstance(one, str | bytes):
                total += len(one)
            elif isinstance(one, range):
                total += ENTRY * len(one)
            elif isinstance(one, Collection):
                total += ENTRY * len(one)
                inner += one
                if isinstance(one, Mapping):
                    inner += one.values()
            if total > MOST:
                raise TemplateLimitError(f"the template makes more than {MOST:,} characters")
        if not inner:
            return total
        level = inner
    raise TemplateLimitError(f"the template nests lists deeper than {DEEPEST} levels")


def _size(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, list | tuple | dict):
        return ENTRY * len(value)
    return 1


def _compared(function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """Compare two values: lists that share parts may take exponential time, so they are weighed."""
    weigh([value for value in (left, right) if not isinstance(value, str)])
    spend(1)
    return function(left, right)


def _hashed(value: Any) -> Any:
    """Return a value that is hashed next: tuples that share parts take time as comparisons do."""
    if isinstance(value, tuple):
        weigh(value)
    return value


def _hashing(test: Callable[..., bool]) -> Callable[..., bool]:
    """Return a test of an environment and a value that looks the value up in a dictionary."""

    @functools.wraps(test)
    def limited(environment: Any, value: Any) -> bool:
        return test(environment, _hashed(value))

    return limited


def _check_widths(text: str, values: tuple[Any, ...] = ()) -> None:
    """Refuse widths in a format that are wider than any text needs; `values` may be widths too."""
    numbers = [int(number[:9]) for number in re.findall(r"\d+", text)]
    if re.search(r":[^}]*\{|\*", text):
        numbers += [value for value in values if isinstance(value, int)]
    if max(numbers, default=0) > WIDEST:
        raise TemplateLimitError(f"the template formats wider than {WIDEST} characters")


def _joined(parts: Any, separator: Any) -> list[Any]:
    items = list(islice(parts, MOST // ENTRY))
    spend(weigh(items) + len(items) * len(str(separator)))
    return items


def _before_method(
    text: str, name: str, arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[Any, ...]:
    """Spend what a method of a text makes; return its arguments, those of `join` as a list."""
    if name == "join":
        return (_joined(arguments[0], text),)
    if name == "replace":
        old, new = [*map(str, [*arguments, *named.values()]), "", ""][:2]
        spend(len(text) + (text.count(old) if old else len(text) + 1) * len(new))
    elif name in ("format", "format_map"):
        values = (*arguments, *named.values())
        _check_widths(text, values)
        spend(len(text) * WIDEST if re.search(r"\d", text) else len(text))
        spend(sum(map(weigh, values)) * max(1, text.count("{")))
    elif name == "translate":
        spend(len(text) * max(1, weigh([*arguments])))
    else:  # a number is a width, for each tab of `expandtabs`
        widest = max((value for value in arguments if isinstance(value, int)), default=0)
        spend(len(text) + max(0, widest) * (1 + text.count("\t")))
    return arguments


def _limited_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that spends the size of its arguments and its result."""

    @functools.wraps(function)
    def limited(*arguments: Any, **named: Any) -> Any:
        values = (*arguments, *named.values())
        spend(sum(weigh(value) for value in values if not isinstance(value, Context)))
        numbers = [value for value in values[1:] if isinstance(value, int)]
        if name not in _COUNTS and max(numbers, default=0) > WIDEST:
            raise TemplateLimitError(f"filter '{name}': a width above {WIDEST}")
        texts = [value for value in values if isinstance(value, str)]
        if name == "format" and texts:
            _check_widths(texts[0], values)
            spend(len(texts[0]) * WIDEST if re.search(r"\d|\*", texts[0]) else 0)
        elif name == "replace" and len(texts) > 2:
            spend((texts[0].count(texts[1]) if texts[1] else len(texts[0]) + 1) * len(texts[2]))
        elif name == "wordwrap" and len(texts) > 1:
            spend(len(texts[0]) * max(map(len, texts[1:])))
        elif name in ("indent", "tojson") and (numbers or len(texts) > 1):
            width = max([*numbers, *map(len, texts[1:])])
            lines = [text.count("\n") for text in texts] or [weigh(values[0])]
            spend(width * max(lines))
        elif name == "join":
            # The list is before the separator; a context or an environment may stand before both.
            lists = [i for i, value in enumerate(arguments) if hasattr(value, "__iter__")]
            if lists:
                at = lists[0]
                separator = next((text for text in texts if text is not arguments[at]), "")
                joined = _joined(arguments[at], separator)
                arguments = (*arguments[:at], joined, *arguments[at + 1 :])
        result = function(*arguments, **named)
        spend(_size(result))
        return result

    return limited


class _Filters(dict[str, Callable[..., Any]]):
    """Filters by name, each limited when it is looked up."""

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return _limited_filter(name, super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        if name in self:
            return self[name]
        return default


class _Counted(NodeTransformer):
    """Puts a call into each loop and for each comparison, each `~` and each key that is hashed."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("turn", [], node), lineno=node.lineno))
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        left = node.expr
        parts: list[nodes.Expr] = []
        for operand in node.ops:
            name = nodes.Const(operand.op, lineno=node.lineno)
            parts.append(_call("compared", [name, left, operand.expr], node))
            left = operand.expr
        result = parts[0]
        for part in parts[1:]:
            result = nodes.And(result, part)
        return result

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("concatenated", node.nodes, node)

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _call("hashed", [node.key], node)
        return node

    def visit_Slice(self, node: nodes.Slice) -> nodes.Node:
        self.generic_visit(node)
        for name in ("start", "stop", "step"):
            bound = getattr(node, name)
            if bound is not None:
                setattr(node, name, _call("hashed", [bound], node))
        return node


def _call(name: str, arguments: list[nodes.Expr], at: nodes.Node) -> nodes.Call:
    return nodes.Call(
        nodes.EnvironmentAttribute(name, lineno=at.lineno),
        arguments,
        [],
        None,
        None,
        lineno=at.lineno,
    )


class _Rendering(Context):
    """The variables of one rendering, whose budget begins with them."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        begin()


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with a budget for each rendering."""

    intercepted_binops = frozenset({"*", "**", "%", "+", "-"})
    context_class = _Rendering

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, finalize=self._written, **named)
        self.filters = _Filters(self.filters)
        for name, test in self.tests.items():
            if test in _COMPARISONS.values() or name == "in":
                self.tests[name] = functools.partial(_compared, test)
            elif name in ("filter", "test"):
                self.tests[name] = _hashing(test)
        self.globals.pop("lipsum", None)  # random text of any length

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Counted().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    @staticmethod
    def turn() -> None:
        """Do nothing: the call itself is counted."""

    @staticmethod
    def compared(name: str, left: Any, right: Any) -> Any:
        """Compare what `==`, `<` or `in` compares."""
        return _compared(_COMPARISONS[name], left, right)

    @staticmethod
    def hashed(value: Any) -> Any:
        """Return the key of an entry, or a bound of a slice."""
        return _hashed(value)

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, _hashed(argument))

    @staticmethod
    def concatenated(*parts: Any) -> str:
        """Join what `~` joins."""
        spend(sum(map(weigh, parts)))
        return "".join(map(str, parts))

    @staticmethod
    def _written(value: Any) -> Any:
        spend(weigh(value))
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        sizes = [value for value in (left, right) if isinstance(value, str | bytes | list | tuple)]
        if operator == "*" and sizes:
            times = right if sizes[0] is left else left
            spend(_size(sizes[0]) * max(0, times) if isinstance(times, int) else 0)
        elif operator == "+" and sizes:
            spend(sum(map(_size, sizes)))
        elif operator == "%" and isinstance(left, str):
            values = right
            if not isinstance(right, tuple):
                values = (right,)
            _check_widths(left, values)
            spend(len(left) * WIDEST if re.search(r"\d|\*", left) else len(left))
            spend(sum(map(weigh, values)) * max(1, left.count("%")))
        elif operator == "-" and isinstance(left, Set):
            weigh([left, right])
        elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() + right.bit_length()
            if operator == "**":
                bits = left.bit_length() * max(1, right)
            if bits > LONGEST_INT_BITS:
                limit = f"{LONGEST_INT_BITS} bits"
                raise TemplateLimitError(f"the template computes a number of more than {limit}")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        spend(1)
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps `format`
        text, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(text, str):
            args = _before_method(text, name, args, kwargs)
        elif name in ("count", "index", "isdisjoint"):  # they compare each entry
            weigh([text, *args])
        elif not isinstance(__obj, Macro):  # others may hash or compare what they receive
            weigh([*args, *kwargs.values()])
        result = super().call(__context, __obj, *args, **kwargs)
        spend(_size(result))
        return result


class _Generation(Extension):
    """Replaces `{% generation %}`, which marks answers in training templates, by its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def variables_of(source: str) -> frozenset[str]:
    """Return the variables of a template that a caller may set.

    Jinja computes constants such as `'A' * 10**9` while it looks for variables, so the environment
    is the limited one here, too.

    Raises:
        DataError: the template cannot be read.
    """
    environment = LimitedEnvironment(extensions=["jinja2.ext.loopcontrols", _Generation])
    try:
        tree = environment.parse(source)
    except TemplateError as error:
        raise DataError(
            f"the tokenizer's chat template cannot be read: {error}",
            hint="correct chat_template.jinja next to the model's tokenizer.json",
        ) from None
    stored = {node.name for node in tree.find_all(nodes.Name) if node.ctx == "store"}
    asked = {
        test.node.name
        for test in tree.find_all(nodes.Test)
        if test.name == "defined" and isinstance(test.node, nodes.Name)
    }
    # A name that the template sets is its own, unless it first asks whether the name is defined.
    return frozenset(meta.find_undeclared_variables(tree) - (stored - asked))


def install() -> None:
    """Let transformers render every chat template of this process in the limited environment."""
    from transformers.utils import chat_template_utils

    templates: Any = chat_template_utils
    # The module names the class when it compiles a template: no other place renders one.
    if templates.ImmutableSandboxedEnvironment is not LimitedEnvironment:
        templates.ImmutableSandboxedEnvironment = LimitedEnvironment
        templates._compile_jinja_template.cache_clear()
