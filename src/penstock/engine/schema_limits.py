"""What a JSON schema from a stranger may have, checked before anything is built from it.

The library that builds constraints bounds nearly all of its work by itself. What it does not bound is here: text of
any length, and three things whose cost grows faster than the schema.
"""

import json
from collections.abc import Iterator
from typing import Any

from penstock.errors import SettingError

MAX_BYTES = 64 * 1024
MAX_PROPERTIES = 1000  # of one object: the time grows with their square (0.1 s for these)
MAX_PATTERN_PROPERTIES = 64  # together: each is compared with each (0.04 s)
MAX_JOINED_PATTERNS = 8  # time and memory double with each one that must hold at the same time (0.01 s)

_PATTERNS = ("pattern", "format", "patternProperties")
_UNIONS = ("anyOf", "oneOf")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")


def schema_text(schema: object) -> str:
    """The schema as JSON, with the names in their order, which is that of the answer's. What is no JSON object, or
    too large, is refused."""
    if not isinstance(schema, dict):
        raise SettingError("json_format", ..., f"an object as the schema, not {type(schema).__name__}")
    if _least_bytes(schema) <= MAX_BYTES:
        try:
            text = json.dumps(schema, allow_nan=False)
        except RecursionError as error:
            raise too_deep() from error
        except (TypeError, ValueError) as error:
            raise SettingError("json_format", ..., because=f"the schema is not JSON: {error}") from error
        if len(text) <= MAX_BYTES:
            return text
    raise SettingError(
        "json_format", ..., "a smaller one", because=f"the schema has more than {MAX_BYTES} bytes"
    )


def too_deep() -> SettingError:
    return SettingError("json_format", ..., "a flatter one", because="the schema is nested too deeply")


def _least_bytes(root: object) -> int:
    """What it takes as JSON at least; it is not looked at beyond what is too much."""
    num_bytes = 0
    stack = [root]
    while stack and num_bytes <= MAX_BYTES:
        node = stack.pop()
        num_bytes += 1
        if isinstance(node, str):
            num_bytes += len(node)
        elif isinstance(node, dict | list):
            num_bytes += len(node)
            if num_bytes <= MAX_BYTES:
                stack += node
                if isinstance(node, dict):
                    stack += node.values()
    return num_bytes


def check_counts(schema: dict[str, Any]) -> None:
    """Refuse what would take too long, of a schema that is small enough."""
    num_patterns = num_pattern_properties = 0
    has_joins = False
    for node in _objects(schema):
        num_properties = _length(node.get("properties"))
        if num_properties > MAX_PROPERTIES:
            _refuse(f"an object of {num_properties} properties", MAX_PROPERTIES)
        num_pattern_properties += _length(node.get("patternProperties"))
        num_patterns += sum(isinstance(node.get(name), str) for name in ("pattern", "format"))
        has_joins = has_joins or _joins_patterns(node)
    if num_pattern_properties > MAX_PATTERN_PROPERTIES:
        _refuse(f"{num_pattern_properties} patternProperties", MAX_PATTERN_PROPERTIES)
    num_patterns += num_pattern_properties
    if has_joins and num_patterns > MAX_JOINED_PATTERNS:
        _refuse(
            f"{num_patterns} patterns and formats, and joins schemas that have some (by allOf, or by keywords beside "
            "$ref, anyOf or oneOf)",
            MAX_JOINED_PATTERNS,
        )


def _refuse(what: str, limit: int) -> None:
    raise SettingError(
        "json_format", ..., "a simpler one", because=f"the schema has {what}; {limit} are accepted"
    )


def _objects(root: Any) -> Iterator[dict[str, Any]]:
    """Every object in it, itself included."""
    stack = [root]
    while stack:
        node = stack.pop()
        if isinstance(node, dict):
            yield node
            stack.extend(node.values())
        elif isinstance(node, list):
            stack.extend(node)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, dict) else 0


def _joins_patterns(node: dict[str, Any]) -> bool:
    """Whether patterns of several parts of this schema may have to hold at the same time."""
    all_of = node.get("allOf")
    parts = [*all_of] if isinstance(all_of, list) else []
    parts += [node[name] for name in _UNIONS if name in node]
    parts += [{name: node[name]} for name in _REFERENCES if name in node]
    if not parts:
        return False
    apart = {"allOf", "$defs", "definitions", *_UNIONS, *_REFERENCES}
    parts.append({name: value for name, value in node.items() if name not in apart})
    return sum(any(_has_pattern(inner) for inner in _objects(part)) for part in parts) > 1


def _has_pattern(node: dict[str, Any]) -> bool:
    # What is referred to may have patterns.
    return any(name in node for name in (*_PATTERNS, *_REFERENCES))
