"""Arguments that formats write as bare text, made values by the tool's JSON schema. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.chat.formats.json_calls import decode_all
from agentrl.types import ToolSpec

_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_TYPE_OF_WORD = {True: "boolean", False: "boolean", None: "null"}
_MAX_DEPTH = 8


def value_of(text: str, *, argument: str, tool: ToolSpec | None) -> Any:
    """The value of an argument. It stays text where the schema allows a string or says nothing.

    Text that is no value of the type the schema asks for stays text, too: checking the arguments is done by who runs
    the tool.
    """
    types = _types_of(argument, tool=tool)
    word = text.strip()
    if word in _PYTHON_WORDS and _TYPE_OF_WORD[_PYTHON_WORDS[word]] in types:
        return _PYTHON_WORDS[word]
    if word == "null" and "null" in types:
        return None
    if not types or "string" in types:
        return text
    try:
        return decode_all(text)
    except (ValueError, RecursionError):
        return text


def _types_of(argument: str, *, tool: ToolSpec | None) -> frozenset[str]:
    if tool is None:
        return frozenset()
    properties = tool.parameters.get("properties")
    schema = properties.get(argument) if isinstance(properties, Mapping) else None
    return frozenset(_schema_types(schema, root=tool.parameters, depth=0))


def _schema_types(schema: Any, *, root: Mapping[str, Any], depth: int) -> list[str]:
    """The `type` names a schema allows, those of its alternatives included; empty where it does not say."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return []
    declared = schema.get("type")
    if isinstance(declared, str):
        return [declared]
    if isinstance(declared, Sequence):
        return [name for name in declared if isinstance(name, str)]
    if isinstance(schema.get("$ref"), str):
        return _schema_types(_referenced(schema["$ref"], root=root), root=root, depth=depth + 1)
    if "const" in schema or isinstance(schema.get("enum"), list):
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return [_type_of(value) for value in values]
    alternatives = [entry for word in ("anyOf", "oneOf") for entry in schema.get(word) or ()]
    return [name for entry in alternatives for name in _schema_types(entry, root=root, depth=depth + 1)]


def _referenced(reference: str, *, root: Mapping[str, Any]) -> Any:
    """What a local reference such as `#/$defs/Point` names; None where it names nothing."""
    found: Any = root
    for part in reference.removeprefix("#/").split("/"):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _type_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return _TYPE_OF_WORD[value]
    names: Mapping[type, str] = {str: "string", int: "integer", float: "number", list: "array"}
    return names.get(type(value), "object")
