"""Chat templates compiled the way transformers compiles them, so that both render the same text. Pure.

The environment (block trimming, `tojson`, `raise_exception`, `strftime_now`, loop controls, `generation` blocks)
follows what chat templates on model hubs are written for; templates run sandboxed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentrl.errors import ConfigError

_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """One compiled chat template, for `ChatFormat`."""

    def __init__(self, source: str, *, variables: Mapping[str, str], now: Callable[[], datetime]) -> None:
        """Compile `source`; `variables` are the special token strings templates refer to (`bos_token`, ...).

        Raises:
            ConfigError: the template is no valid Jinja.
        """
        self.source = source
        self._variables = dict(variables)
        try:
            self._compiled = _environment(now).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"chat template, line {error.lineno}: {error.message}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
    ) -> str:
        """The text of a conversation.

        Raises:
            ConfigError: the template refuses these messages.
        """
        try:
            return self._compiled.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ConfigError(f"the chat template refuses a conversation of roles [{roles}]: {error}") from error


class ToolEntry(dict[str, Any]):
    """A tool as templates see it, never changed after construction: its JSON is written once, not at every turn."""

    __slots__ = ("_texts",)

    def __init__(self, tool: Mapping[str, Any]) -> None:
        super().__init__(tool)
        self._texts: dict[str, str] = {}

    def remembered(self, layout: str, write: Callable[[], str]) -> str:
        """The text that `write` gave for this layout the first time."""
        text = self._texts.get(layout)
        if text is None:
            text = self._texts[layout] = write()
        return text


def normalize_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """What templates expect of a message: no keys that are None, reasoning under its two common names."""
    kept = {key: value for key, value in message.items() if value is not None}
    reasoning = next((kept[key] for key in _REASONING_KEYS if key in kept), None)
    return kept if reasoning is None else {"thinking": reasoning, **kept, "reasoning_content": reasoning}


class _GenerationBlock(jinja2.ext.Extension):
    """Accepts `{% generation %}...{% endgeneration %}`: marks assistant text in some templates, renders its body."""

    tags = {"generation"}  # noqa: RUF012 - the attribute jinja2 reads, a class variable by its design

    def parse(self, parser: Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_render_body"), [], [], body).set_lineno(line)

    def _render_body(self, caller: Callable[[], str]) -> str:
        return caller()


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: now().strftime(layout)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    def write() -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    if isinstance(value, ToolEntry):
        return value.remembered(f"{ensure_ascii} {indent} {separators} {sort_keys}", write)
    return write()


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
