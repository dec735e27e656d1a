"""JSON Schemas, changed without changing what they ask for: for llguidance, as part of another schema, or closed.

A change concerns subschemas only: names of properties and values of `const`, `enum` and `default` stay as given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]

JSON_WHITESPACE = r" |\n {0,16}"
"""Whitespace allowed between the parts of a JSON answer. JSON allows any amount, which weak models never end."""

JSON_OPTIONS = {"whitespace_flexible": True, "whitespace_pattern": JSON_WHITESPACE}
"""Options of llguidance, which it reads from `x-guidance` in a schema too."""

MAX_LENGTH = 2**31 - 1
"""Largest `maxLength` that llguidance takes; no answer is so long."""

MAX_COMPARED = 200
"""Subschemas of a `oneOf` that are compared with each other."""

MAX_REFERENCES = 8
"""References from one to the next that are followed to a subschema of a `oneOf`."""

FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
"""Values of `format` that llguidance enforces; all others are annotations."""

_COUNTS = frozenset(
    ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains")
)
_WITH_A_SCHEMA = frozenset(
    {
        "additionalItems",
        "additionalProperties",
        "contains",
        "contentSchema",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)
_WITH_SCHEMAS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
_WITH_NAMED_SCHEMAS = frozenset(
    ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")
)
_IN_PLACE = frozenset(
    {
        "$dynamicRef",
        "$recursiveRef",
        "$ref",
        "allOf",
        "anyOf",
        "dependencies",
        "dependentSchemas",
        "else",
        "if",
        "not",
        "oneOf",
        "then",
    }
)
"""Keywords whose subschemas apply to the same value as the schema itself."""

_ABOUT_PARTS = frozenset(
    {
        "additionalItems",
        "additionalProperties",
        "const",
        "contains",
        "dependentRequired",
        "enum",
        "items",
        "maxProperties",
        "minProperties",
        "patternProperties",
        "prefixItems",
        "properties",
        "propertyNames",
        "required",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)
"""Keywords about the properties and items of a value."""

_NOTHING: dict[str, Callable[[Any, Schema], bool]] = {
    "uniqueItems": lambda value, _: value is False,
    "not": lambda value, _: value is False,
    "propertyNames": lambda value, _: _is_any(value),
    "unevaluatedItems": lambda value, _: _is_any(value),
    "unevaluatedProperties": lambda value, _: _is_any(value),
    "dependencies": lambda value, _: value == {},
    "dependentRequired": lambda value, _: value == {},
    "dependentSchemas": lambda value, _: value == {},
    "additionalItems": lambda _, schema: not isinstance(schema.get("items"), list),
    "if": lambda _, schema: "then" not in schema and "else" not in schema,
    "then": lambda _, schema: "if" not in schema,
    "else": lambda _, schema: "if" not in schema,
    "minContains": lambda _, schema: "contains" not in schema,
    "maxContains": lambda _, schema: "contains" not in schema,
}
"""Keywords that llguidance refuses or misreads, and when they ask for nothing."""


def normalized(schema: Schema) -> Schema:
    """Returns an equal schema in the form that llguidance reads: whole numbers are integers, and keywords that ask for
    nothing are left out.

    Raises ValueError for what llguidance would round.
    """
    document = _Document(schema)

    def normalize(part: Schema, _: int) -> Schema:
        return _with_plain_one_of(_normalized(part), document)

    result: Schema = document.rebuilt(normalize)
    return result


def closed(schema: Schema) -> Schema:
    """Returns the schema without the properties that its objects do not list, unless the schema says otherwise.

    An object stays open where a closed one could have no values: next to subschemas for the same value.
    """
    document = _Document(schema)
    closable = _closable(document)

    def close(part: Schema, original: int) -> Schema:
        if original not in closable or not _lists_all(part):
            return part
        return {"additionalProperties": False, **{key: value for key, value in part.items() if value is not None}}

    result: Schema = document.rebuilt(close)
    return result


def embedded(schema: Schema, place: str) -> Schema:
    """Returns the schema as a part, at the pointer `place` ("#/..."), of another: `$ref` still means its own root.

    Raises ValueError for a nested `$id`, by which references have another root.
    """
    document = _Document(schema)
    if document.has_nested_id:
        raise ValueError("a subschema with an $id of its own is not supported")

    def embed(part: Schema, original: int) -> Schema:
        kept = {key: value for key, value in part.items() if key not in ("$id", "$anchor")}
        if document.pointers[original] == "" and isinstance(kept.get("id"), str):
            del kept["id"]
        pointer = document.pointer(part.get("$ref"))
        return kept if pointer is None else {**kept, "$ref": place + pointer}

    result: Schema = document.rebuilt(embed)
    return result


class _Document:
    """A schema with the places of its subschemas, those that only a `$ref` makes one included."""

    def __init__(self, root: Schema) -> None:
        self.root = root
        self.pointers: dict[int, str] = {}
        """JSON pointer of each subschema by its identity."""
        self.has_nested_id = False
        self._anchors: dict[str, str] = {}
        self._base = next((root[key].rstrip("#") for key in ("$id", "id") if isinstance(root.get(key), str)), "")
        waiting: list[tuple[str, Any]] = [("", root)]
        while waiting:
            pointer, schema = waiting.pop()
            if not isinstance(schema, dict) or id(schema) in self.pointers:
                continue
            self.pointers[id(schema)] = pointer
            self.has_nested_id |= pointer != "" and isinstance(schema.get("$id"), str)
            if isinstance(schema.get("$anchor"), str):
                self._anchors[schema["$anchor"]] = pointer
            waiting += [(f"{pointer}/{path}", part) for path, part in _parts(schema)]
            target = self.pointer(schema.get("$ref"))
            if target is not None:
                waiting.append((target, self._at(target)))

    def pointer(self, ref: object) -> str | None:
        """Returns the JSON pointer of a `$ref` into this document; None for another."""
        if not isinstance(ref, str) or self.has_nested_id:
            return None
        local = ref[len(self._base) :] if self._base and ref.startswith(self._base) else ref
        if local in ("", "#"):
            return ""
        return local[1:] if local.startswith("#/") else self._anchors.get(local[1:]) if local[0] == "#" else None

    def target(self, ref: object) -> Any:
        """Returns the subschema of a `$ref`, None if it is not in this document."""
        pointer = self.pointer(ref)
        return None if pointer is None else self._at(pointer)

    def _at(self, pointer: str) -> Any:
        value: Any = self.root
        for name in unquote(pointer).split("/")[1:]:
            key = name.replace("~1", "/").replace("~0", "~")
            if isinstance(value, list):
                value = value[int(key)] if key.isdecimal() and int(key) < len(value) else None
            else:
                value = value.get(key) if isinstance(value, dict) else None
        return value

    def rebuilt(self, change: Callable[[Schema, int], Schema]) -> Any:
        """Returns a copy in which each subschema is what `change` returns for its copy and its identity."""

        def rebuild(value: Any) -> Any:
            if isinstance(value, list):
                return [rebuild(item) for item in value]
            if not isinstance(value, dict):
                return value
            copy = {key: rebuild(item) for key, item in value.items()}
            return change(copy, id(value)) if id(value) in self.pointers else copy

        return rebuild(self.root)


def _parts(schema: Schema) -> Iterator[tuple[str, Any]]:
    """Yields the subschemas of a schema, and the JSON pointers to them from it."""
    for key, value in schema.items():
        if key in _WITH_A_SCHEMA and isinstance(value, dict):
            yield key, value
        elif key in _WITH_SCHEMAS and isinstance(value, list):
            yield from ((f"{key}/{place}", item) for place, item in enumerate(value))
        elif key in _WITH_NAMED_SCHEMAS and isinstance(value, dict):
            for name, item in value.items():
                yield f"{key}/{name.replace('~', '~0').replace('/', '~1')}", item


def _is_any(schema: object) -> bool:
    return schema is True or schema == {}


# ---- normalized


def _normalized(schema: Schema) -> Schema:
    # A null `type` may be meant as the type "null": llguidance refuses it.
    given = {key: value for key, value in schema.items() if value is not None or key in ("const", "default", "type")}
    result: Schema = {}
    for key, item in given.items():
        value = item
        if key in _NOTHING and _NOTHING[key](value, given):
            continue
        if key == "format" and isinstance(value, str) and value not in FORMATS:
            continue
        if key in _COUNTS and isinstance(value, float) and value.is_integer():
            value = int(value)
        if key == "maxLength" and isinstance(value, int) and value > MAX_LENGTH:
            value = MAX_LENGTH
        result[key] = value
    for key in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        if key in result:
            result[key] = _inward(result[key], upward=key in ("minimum", "exclusiveMinimum"))
    for value in (result.get("const"), result.get("enum")):
        _check_numbers(value)
    if not _IN_PLACE & result.keys():
        # Without subschemas for the same value, what no keyword evaluates is what the schema does not list.
        for strict, plain in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
            if strict in result and plain not in result:
                result[plain] = result.pop(strict)
    return result


def _with_plain_one_of(schema: Schema, document: _Document) -> Schema:
    """Returns an equal schema with an `anyOf` for a `oneOf` whose subschemas exclude each other."""
    options = schema.get("oneOf")
    if not isinstance(options, list) or "anyOf" in schema:
        return schema
    if not _exclude_each_other(options, document):
        names = [_only_required(option) for option in options]
        if None in names or len(set(names)) < len(names) or schema.get("type") != "object":
            return schema
        options = [
            {"required": [name], "properties": {other: False for other in names if other != name}} for name in names
        ]
    return {("anyOf" if key == "oneOf" else key): options if key == "oneOf" else schema[key] for key in schema}


def _only_required(option: object) -> str | None:
    """Returns the one property whose presence is all that a schema asks for, None if it asks for something else."""
    match option:
        case {"required": [str(name)], **others} if not others:
            return name
    return None


def _exclude_each_other(options: list[Any], document: _Document) -> bool:
    """Returns whether the types, or texts of a property that all require, tell the schemas apart."""
    if len(options) > MAX_COMPARED:
        return False
    facts = [_Facts(option, document) for option in options]
    return all(one.excludes(other) for place, one in enumerate(facts) for other in facts[:place])


class _Facts:
    """What is surely true of the values of a schema: their types, and texts that required properties can have."""

    def __init__(self, schema: Any, document: _Document) -> None:
        for _ in range(MAX_REFERENCES):
            if isinstance(schema, dict) and "$ref" in schema and "type" not in schema:
                schema = document.target(schema["$ref"])
        given = schema if isinstance(schema, dict) else {}
        types = given.get("type")
        listed = types if isinstance(types, list) else [types]
        is_known = all(isinstance(name, str) for name in listed)
        self._types = {"number" if name == "integer" else name for name in listed} if is_known else None
        self._texts: dict[str, set[str]] = {}
        required = given.get("required")
        properties = given.get("properties")
        for name, part in properties.items() if isinstance(properties, dict) else ():
            if isinstance(part, dict) and isinstance(required, list) and name in required:
                values = [part["const"]] if "const" in part else part.get("enum")
                if isinstance(values, list) and all(isinstance(value, str) for value in values):
                    self._texts[name] = set(values)

    def excludes(self, other: _Facts) -> bool:
        if self._types is None or other._types is None:
            return False
        common = self._types & other._types
        is_told_apart = any(not self._texts[name] & other._texts[name] for name in self._texts.keys() & other._texts)
        return not common or (common == {"object"} and is_told_apart)


def _inward(limit: Any, *, upward: bool) -> Any:
    """Returns an integer that a float cannot hold as the next float within the limit."""
    if not isinstance(limit, int) or isinstance(limit, bool) or abs(limit) >= 2**1023 or int(float(limit)) == limit:
        return limit
    nearest = float(limit)
    if (nearest < limit) if upward else (nearest > limit):
        nearest = math.nextafter(nearest, math.inf if upward else -math.inf)
    return int(nearest)


def _check_numbers(value: Any) -> None:
    if isinstance(value, int) and abs(value) > 2**53 and (abs(value) >= 2**1023 or int(float(value)) != value):
        raise ValueError(f"the number {str(value)[:40]} has too many digits")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_numbers(item)


# ---- closed


def _closable(document: _Document) -> set[int]:
    """Returns the identities of the subschemas of which only values of listed properties may be left out."""
    marks: dict[int, bool] = {}
    waiting: list[tuple[Any, bool]] = [(document.root, True)]
    while waiting:
        schema, may_close = waiting.pop()
        # What is reached twice is closed only if both ways allow it.
        if not isinstance(schema, dict) or marks.get(id(schema)) in (False, may_close):
            continue
        marks[id(schema)] = may_close
        given = {key for key, value in schema.items() if value is not None}
        parts_may = may_close and "patternProperties" not in given and _is_open_union(schema, given, document)
        waiting += [
            (part, parts_may) for path, part in _parts(schema) if not path.startswith(("$defs/", "definitions/"))
        ]
        waiting.append((document.target(schema.get("$ref")), parts_may))
    return {identity for identity, may_close in marks.items() if may_close}


def _is_open_union(schema: Schema, given: set[str], document: _Document) -> bool:
    """Returns whether no two subschemas apply to one value, and a stricter one only takes values away.

    In a `oneOf` a stricter subschema may add values: those that two subschemas allow.
    """
    applied = _IN_PLACE & given
    if not applied:
        return True
    one_of, all_of = schema.get("oneOf"), schema.get("allOf")
    if applied == {"oneOf"}:
        is_one = isinstance(one_of, list) and _exclude_each_other(one_of, document)
    else:
        is_one = applied in ({"anyOf"}, {"$ref"}) or (
            isinstance(all_of, list) and applied == {"allOf"} and len(all_of) == 1
        )
    return is_one and not _ABOUT_PARTS & given


def _lists_all(schema: Schema) -> bool:
    """Returns whether an object lists its properties, and none of its keywords needs or allows others."""
    given = {key: value for key, value in schema.items() if value is not None}
    listed = given.get("properties")
    if given.get("type") != "object" or not isinstance(listed, dict):
        return False
    others = _IN_PLACE | (_ABOUT_PARTS - {"properties", "required", "minProperties", "maxProperties"})
    least, required = given.get("minProperties", 0), given.get("required", [])
    return (
        not others & given.keys()
        and isinstance(required, list)
        and all(isinstance(name, str) and name in listed for name in required)
        and isinstance(least, int | float)
        and least <= len(listed)
    )
