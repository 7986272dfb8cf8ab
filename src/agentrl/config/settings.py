"""Every setting of `RunConfig` in one flat index by leaf name, for the loader and the documentation."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from agentrl.config.section import Section
from agentrl.config.sections import RunConfig
from agentrl.errors import ConfigError

_NONE_WORDS = frozenset({"none", "null", ""})
_INT64 = range(-(2**63), 2**63)  # what the database can hold
_SHOWN_CHARACTERS = 200
BOOLEAN_WORDS = frozenset({"true", "false", "1", "0", "yes", "no", "on", "off"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One field of one section, under the leaf name that is its flag."""

    name: str
    section: str
    field: FieldInfo

    @property
    def is_boolean(self) -> bool:
        """Whether the bare flag, without a value, means true."""
        return self.field.annotation is bool

    @property
    def is_optional(self) -> bool:
        """Whether `none` is a value."""
        return NoneType in get_args(self.field.annotation)

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that are its only values; empty where it takes others."""
        options = (self.field.annotation, *get_args(self.field.annotation))
        return tuple(str(word) for option in options if get_origin(option) is Literal for word in get_args(option))

    @property
    def default(self) -> Any:
        """The value when no source gives one."""
        return self.field.get_default(call_default_factory=True)

    @property
    def description(self) -> str:
        """The sentence that documents the setting."""
        return self.field.description or ""

    @property
    def kind(self) -> str:
        """The type in a user's words, with its bounds: `float > 0`, `GRPO | GSPO | ...`."""
        return " ".join([_kind_of(self.field.annotation), *_bounds_of(_adapter(self.section, self.name))])

    def parse(self, value: Any, *, origin: str) -> Any:
        """The validated value of `value`, which is text (flag, environment) or what a YAML or JSON file held.

        Raises ConfigError naming `origin`, the value and what is expected.
        """
        if self.is_optional and (value is None or (isinstance(value, str) and value.strip().lower() in _NONE_WORDS)):
            return None
        try:
            if isinstance(value, str) and get_origin(self.field.annotation) in {dict, list}:
                value = json.loads(value)
            parsed = _adapter(self.section, self.name).validate_python(value)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = "".join(f"[{part}]" for part in first["loc"] if isinstance(part, str))
            raise self._refusal(value, origin=origin + where, reason=first["msg"]) from None
        except (json.JSONDecodeError, RecursionError) as error:
            raise self._refusal(value, origin=origin, reason=f"no JSON ({error})") from None
        if isinstance(parsed, int) and parsed not in _INT64:
            raise self._refusal(value, origin=origin, reason="the number does not fit 64 bits")
        return parsed

    def _refusal(self, value: Any, *, origin: str, reason: str) -> ConfigError:
        shown = shown_value(value)
        near = difflib.get_close_matches(str(value), self.choices, n=1)
        if near:
            reason = f"no such choice, did you mean {near[0]}?"
        hint = f"give {self.kind}, for example --{self.name} {show_value(self.default)}"
        return ConfigError(f"{origin} = {shown}: {reason[0].lower()}{reason[1:]}; {hint} ({self.description})")


@cache
def settings_index() -> Mapping[str, Setting]:
    """All settings by leaf name, in the order of the sections."""
    index: dict[str, Setting] = {}
    for section, model in sections().items():
        for name, field in model.model_fields.items():
            if name in index:
                raise AssertionError(f"leaf name {name} stands in sections {index[name].section} and {section}")
            index[name] = Setting(name=name, section=section, field=field)
    return index


@cache
def sections() -> Mapping[str, type[Section]]:
    """The section models by name."""
    models: dict[str, type[Section]] = {}
    for name, field in RunConfig.model_fields.items():
        if not isinstance(field.annotation, type) or not issubclass(field.annotation, Section):
            raise AssertionError(f"RunConfig.{name} is no section")
        models[name] = field.annotation
    return models


def shown_value(value: Any) -> str:
    """A value somebody gave, as a message quotes it: on one line, cut if long."""
    text = json.dumps(value, default=str)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def show_value(value: Any) -> str:
    """A value as a user would write it on a command line."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict | list):
        return f"'{json.dumps(value)}'"
    return str(value)


@cache
def _adapter(section: str, name: str) -> TypeAdapter[Any]:
    field = sections()[section].model_fields[name]
    annotation: Any = field.annotation
    annotated: Any = Annotated[annotation, *field.metadata] if field.metadata else annotation
    return TypeAdapter(annotated, config=ConfigDict(allow_inf_nan=False))


def _kind_of(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        return " | ".join(str(choice) for choice in get_args(annotation))
    if origin in {Union, UnionType}:
        return " or ".join(_kind_of(option) for option in get_args(annotation))
    if origin is dict:
        return "JSON object"
    if origin is list:
        return "JSON list"
    names: dict[Any, str] = {
        bool: "true | false",
        str: "text",
        Path: "path",
        NoneType: "none",
        int: "integer",
        float: "number",
    }
    return names[annotation]


def _bounds_of(adapter: TypeAdapter[Any]) -> list[str]:
    signs = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
    schema = adapter.json_schema()
    options = schema.get("anyOf", [schema])
    return [f"{sign} {option[key]:g}" for option in options for key, sign in signs.items() if key in option]
