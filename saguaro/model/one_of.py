"""`oneOf` in JSON schemas: replaced by `anyOf` where no value can match two alternatives.

llguidance compiles a `oneOf` only if it can see that the alternatives exclude each other, and it does not follow
`$ref`, which pydantic and others use for the variants of a tagged union.
"""

import json
from typing import Any

MOST = 64  # largest number of alternatives that are compared with each other
_INITIALS = {'"': "string", "t": "boolean", "f": "boolean", "n": "null"}  # first letter of a JSON value -> type
_LITERAL = ("const", "enum", "default", "examples")  # values, not schemas


def settle(text: str) -> str:
    """A schema with `oneOf` replaced by `anyOf` where both mean the same.

    >>> settle('{"oneOf": [{"type": "null"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "string"}}}')
    '{"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}], "$defs": {"a": {"type": "string"}}}'
    >>> settle('{"oneOf": [{"type": "number"}, {"type": "integer"}]}')
    '{"oneOf": [{"type": "number"}, {"type": "integer"}]}'
    """
    if '"oneOf"' not in text:
        return text
    schema = json.loads(text)
    return json.dumps(_settle(schema, schema), ensure_ascii=False)


def _settle(part: Any, root: Any) -> Any:
    if isinstance(part, list):
        return [_settle(each, root) for each in part]
    if not isinstance(part, dict):
        return part
    ways = part.get("oneOf")
    is_any = isinstance(ways, list) and "anyOf" not in part and _exclude_each_other(ways, root)
    return {
        "anyOf" if is_any and key == "oneOf" else key: value if key in _LITERAL else _settle(value, root)
        for key, value in part.items()
    }


def _exclude_each_other(ways: list[Any], root: Any) -> bool:
    if len(ways) > MOST:
        return False
    facts = [_Facts(way, root) for way in ways]
    return all(one.excludes(other) for at, one in enumerate(facts) for other in facts[:at])


class _Facts:
    """Facts that hold for all values that match a schema."""

    def __init__(self, schema: Any, root: Any) -> None:
        schema = _resolve(schema, root)
        self.values = _values(schema)
        self.types = _types(schema) or (self.values and {_INITIALS[value[0]] for value in self.values})
        needed, properties = schema.get("required"), schema.get("properties")
        self.fields: dict[str, set[str]] = {}  # allowed values of required properties
        if self.types == {"object"} and isinstance(needed, list) and isinstance(properties, dict):
            named = {name: _values(_resolve(properties.get(name), root)) for name in needed if isinstance(name, str)}
            self.fields = {name: values for name, values in named.items() if values is not None}

    def excludes(self, other: "_Facts") -> bool:
        """Whether no value matches both."""
        if self.types is not None and other.types is not None and not self.types & other.types:
            return True
        if self.values is not None and other.values is not None and not self.values & other.values:
            return True
        return any(not values & other.fields[name] for name, values in self.fields.items() if name in other.fields)


def _types(schema: dict[str, Any]) -> set[str] | None:
    """The allowed types; None: any."""
    named = schema.get("type")
    types = [named] if isinstance(named, str) else named
    if not isinstance(types, list) or not all(isinstance(each, str) for each in types):
        return None
    return {"number" if each == "integer" else each for each in types}


def _values(schema: dict[str, Any]) -> set[str] | None:
    """The allowed values as JSON; None if they are not all listed, or not all strings, booleans or null."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(listed, list) or not all(isinstance(each, str | bool | None) for each in listed):
        return None
    return {json.dumps(each) for each in listed}


def _resolve(schema: Any, root: Any) -> dict[str, Any]:
    """Follow `$ref`; an empty schema if it cannot be resolved."""
    for _ in range(16):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema if isinstance(schema, dict) else {}
        way = schema["$ref"]
        if not isinstance(way, str) or not (way == "#" or way.startswith("#/")):
            return {}
        schema = root
        for step in way.split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            schema = schema.get(name) if isinstance(schema, dict) else None
    return {}
