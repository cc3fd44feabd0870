"""YAML as values of bounded depth and size, with the safe types only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ondevice.core.untrusted import MOST_DEPTH, Refused, read_plain

_MOST_BYTES = 256 << 10
_MOST_NODES = 20_000
"""PyYAML reads some 10,000 nodes a second. A run file has about 50."""


def parse_yaml(text: bytes | str, loader: Any = yaml.SafeLoader) -> Any:
    """Read one YAML document with PyYAML's safe types.

    Raises:
        Refused: it is not YAML, too large, nested too deeply, or grows when its aliases are
            replaced by what they stand for.
    """
    if len(text) > _MOST_BYTES:
        raise Refused(f"it is larger than {_MOST_BYTES >> 10} KiB")
    try:
        reader = loader(text if isinstance(text, str) else text.decode("utf-8"))
        try:
            _limit(reader)
            node = reader.get_single_node()
            if node is None:
                return None
            # Before the values are built: `<<` copies the mapping that it names, and ten lines of it fill a memory.
            if _nodes(node, {}) > _MOST_NODES:
                raise Refused("it is too large when its aliases are replaced")
            return reader.construct_document(node)
        finally:
            reader.dispose()
    except Refused:
        raise
    except (
        yaml.YAMLError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        OverflowError,
    ) as error:
        # PyYAML builds dates and numbers without a check: 2001-13-45 is a ValueError of `datetime`.
        raise Refused(" ".join(str(error).split())) from None


def read_yaml(path: Path, loader: Any = yaml.SafeLoader) -> Any:
    """Read a YAML file.

    Raises:
        Refused: as `parse_yaml`, or it is not a plain file.
        OSError: as `open` raises it.
    """
    return parse_yaml(read_plain(path, _MOST_BYTES), loader)


def _limit(reader: Any) -> None:
    """Make PyYAML's composer, which calls itself for each level, stop at the limits.

    The scanner stops as well: it looks ahead at 1,024 open brackets, and goes through all of them
    at each token.
    """
    compose = reader.compose_node
    start = reader.fetch_flow_collection_start
    depth = 0
    nodes = 0

    def limited(parent: Any, index: Any) -> Any:
        nonlocal depth, nodes
        nodes += 1
        if nodes > _MOST_NODES:
            raise Refused(f"it has more than {_MOST_NODES} values")
        if depth > MOST_DEPTH:
            raise Refused(f"it is nested more than {MOST_DEPTH} deep")
        depth += 1
        try:
            return compose(parent, index)
        finally:
            depth -= 1

    def open_bracket(token: Any) -> None:
        if reader.flow_level > MOST_DEPTH:
            raise Refused(f"it is nested more than {MOST_DEPTH} deep")
        start(token)

    reader.compose_node = limited
    reader.fetch_flow_collection_start = open_bracket


def _nodes(node: yaml.Node, counted: dict[int, int]) -> int:
    """Count the nodes of a document with every alias replaced; a node inside itself is refused."""
    if id(node) in counted:
        if not counted[id(node)]:
            raise Refused("an alias stands for a value that contains it")
        return counted[id(node)]
    counted[id(node)] = 0
    children: list[yaml.Node] = []
    if isinstance(node, yaml.MappingNode):
        children = [child for pair in node.value for child in pair]
    elif isinstance(node, yaml.SequenceNode):
        children = node.value
    counted[id(node)] = 1 + sum(_nodes(child, counted) for child in children)
    return counted[id(node)]
