"""`format`: whether every tool call of a Record was well-formed. Judged from the calls that were stored with it.

1 if there is at least one call and each one could be parsed, names a tool the Task offers, and has arguments the tool's
schema allows, without arguments the schema does not name; else 0. A Record without calls gets 0: there is nothing to
reward. What the tool did with the call does not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from agentrl.types import DispatchedSamplingTask, ToolSpec, ToolStatus

# Where one of these stands, the names of all arguments are not in the schema's own `properties`.
_SAY_MORE_NAMES = frozenset({"additionalProperties", "patternProperties", "$ref", "allOf", "anyOf", "oneOf"})
_BAD_STATUSES = frozenset({ToolStatus.MALFORMED.value, ToolStatus.UNKNOWN_TOOL.value, ToolStatus.BAD_ARGUMENTS.value})


def tool_format(calls: Sequence[DispatchedSamplingTask], tools: Sequence[ToolSpec]) -> float:
    """The score of a Record's tool calls, 0.0 or 1.0."""
    specs = {tool.name: tool for tool in tools}
    return float(bool(calls) and all(_is_valid(call, specs) for call in calls))


def _is_valid(call: DispatchedSamplingTask, specs: Mapping[str, ToolSpec]) -> bool:
    if call.status in _BAD_STATUSES:
        return False
    spec = specs.get(str(call.request.get("name", "")))
    arguments = call.request.get("arguments")
    return spec is not None and isinstance(arguments, Mapping) and _allowed(arguments, schema=spec.parameters)


def _allowed(arguments: Mapping[str, Any], *, schema: Mapping[str, Any]) -> bool:
    validator_class = validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        validator_class.check_schema(dict(schema))
        if not schema.keys() & _SAY_MORE_NAMES and arguments.keys() - schema.get("properties", {}).keys():
            return False
        return validator_class(dict(schema), registry=Registry()).is_valid(dict(arguments))
    except (jsonschema.SchemaError, Unresolvable, RecursionError):
        return True  # the schema is the tool's fault; the call was accepted with it
    except ArithmeticError:  # a number that nothing can be compared with
        return False
