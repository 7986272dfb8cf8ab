"""Checks a model's request before any call, and shapes results, for every Toolbox alike.

The model reads what is written here, so texts are short and say what would be right.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, Protocol

import jsonschema
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from agentrl.types import ToolRequest, ToolResult, ToolSpec, ToolStatus, why_unusable

logger = logging.getLogger(__name__)

_MAX_PROBLEM_CHARS = 300
_MAX_NAMES_SHOWN = 20


class ArgumentCheck:
    """The JSON schema of one tool's arguments. A schema that is itself broken checks nothing, and is logged."""

    def __init__(self, spec: ToolSpec) -> None:
        self._spec = spec
        self._validator: Validator | None = None
        self._is_compiled = False  # with the first call: most of the tools of a large server are never called

    def problem(self, arguments: Mapping[str, Any]) -> str | None:
        """What is wrong with `arguments`, for the model; None if they are allowed."""
        unusable = why_unusable(arguments)
        if unusable is not None:
            return f"the arguments object {unusable}"
        if not self._is_compiled:
            self._validator, self._is_compiled = self._compile(self._spec), True
        if self._validator is None:
            return None
        try:
            error = jsonschema.exceptions.best_match(self._validator.iter_errors(dict(arguments)))
        except (Unresolvable, RecursionError) as failure:
            logger.warning("tool %s: its argument schema cannot be checked here (%s)", self._spec.name, failure)
            self._validator = None
            return None
        except ArithmeticError:  # of a number against a `multipleOf` or a bound
            return "a number is out of range"
        if error is None:
            return None
        where = ".".join(str(part) for part in error.absolute_path)
        return shorten(f"{where}: {error.message}" if where else error.message, limit=_MAX_PROBLEM_CHARS)

    def _compile(self, spec: ToolSpec) -> Validator | None:
        validator_class = validator_for(spec.parameters, default=jsonschema.Draft202012Validator)
        try:
            validator_class.check_schema(dict(spec.parameters))
        except jsonschema.SchemaError as error:
            logger.warning("tool %s: invalid argument schema, the server must check (%s)", spec.name, error.message)
            return None
        # An explicit registry: a schema never makes this process fetch a URL.
        return validator_class(dict(spec.parameters), registry=Registry())


class CheckedTool(Protocol):
    """What a Toolbox keeps per tool."""

    @property
    def spec(self) -> ToolSpec:
        """The tool as the model sees it."""
        ...

    @property
    def check(self) -> ArgumentCheck:
        """Its compiled argument schema."""
        ...


def refuse(request: ToolRequest, tools: Mapping[str, CheckedTool]) -> ToolResult | None:
    """The result of a request that must not be sent: malformed, unknown tool, bad arguments. None: send it."""
    if request.error is not None:
        return failure(ToolStatus.MALFORMED, request.error)
    tool = tools.get(request.name)
    if tool is None:
        return failure(ToolStatus.UNKNOWN_TOOL, _unknown_tool(request.name, list(tools)))
    problem = tool.check.problem(request.arguments)
    if problem is not None:
        return failure(ToolStatus.BAD_ARGUMENTS, f"invalid arguments for {request.name}: {problem}")
    return None


def failure(status: ToolStatus, message: str) -> ToolResult:
    """A result that is no success; the model reads `error: <message>`."""
    return ToolResult(status=status, content=f"error: {message}", error=message)


def cut(text: str, *, max_chars: int) -> str:
    """`text`, valid as UTF-8 and at most `max_chars` long; what is missing is said at the end."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    if len(text) <= max_chars:
        return text
    note = f"\n[result cut: it has {len(text)} characters, the limit is {max_chars}]"
    return text[: max(0, max_chars - len(note))] + note


def shorten(text: str, *, limit: int) -> str:
    """The first `limit` characters, with `...` where something is missing."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _unknown_tool(name: str, known: list[str]) -> str:
    nearest = get_close_matches(name, known, n=1)
    if nearest:
        return f"unknown tool {shorten(name, limit=80)!r}, did you mean {nearest[0]!r}?"
    shown = ", ".join(known[:_MAX_NAMES_SHOWN]) + (", ..." if len(known) > _MAX_NAMES_SHOWN else "")
    return f"unknown tool {shorten(name, limit=80)!r}; available: {shown or 'none'}"
