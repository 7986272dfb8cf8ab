"""Builds the `RunConfig` of a command from every source a setting can come from.

Later wins:  defaults < profile < --config file < environment < command line

Every problem is a ConfigError in one line that names the flag (or file key, or variable), the value and the way out.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from agentrl.config.compatibility import (
    TRANSLATIONS,
    UNAVAILABLE,
    Translation,
    check_available,
    known_names,
    translated_names,
)
from agentrl.config.documents import DocumentError, read_document
from agentrl.config.sections import RunConfig
from agentrl.config.settings import BOOLEAN_WORDS, sections, settings_index, shown_value
from agentrl.errors import ConfigError

ENVIRONMENT_PREFIX = "AGENTRL_"
PLAIN_VARIABLES: Mapping[str, str] = {
    "MODEL_NAME_OR_PATH": "model_name_or_path",
    "DB_CONNECTION_STRING": "db_connection_string",
    "MCP_MANAGER_URL": "mcp_manager_url",
    "TRAIN_FILE": "train_file",
    "INFERENCE_URL": "inference_url",
}
ASSETS_DIR = Path(__file__).resolve().parents[3] / "assets"


class Source(IntEnum):
    """Where a value came from; the higher one wins."""

    PROFILE = 1
    FILE = 2
    ENVIRONMENT = 3
    FLAG = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """One value as a source gave it. `origin` is how the user wrote its name."""

    name: str
    value: Any
    origin: str
    source: Source


def load_config(
    *, profile: str | None, config_file: Path | None, environ: Mapping[str, str], argv_flags: Sequence[str]
) -> RunConfig:
    """The resolved configuration.

    `argv_flags` are tokens such as `["--learning_rate", "1e-4", "--bf16"]`, without positionals. `profile` wins over a
    profile named in any other source. Raises ConfigError.
    """
    higher = [*_from_file(config_file, Source.FILE), *_from_environment(environ), *_from_flags(argv_flags)]
    named = [given for given in higher if given.name == "profile"]
    if profile is None and named:
        profile = settings_index()["profile"].parse(named[-1].value, origin=named[-1].origin)
    lower = _from_file(profile_path(profile), Source.PROFILE) if profile else []
    merged = {given.name: given for given in [*lower, *higher]}
    if profile:
        merged["profile"] = Given(name="profile", value=profile, origin="--profile", source=Source.FLAG)
    return _build(merged)


def profile_path(name: str) -> Path:
    """The YAML file of a profile. Raises ConfigError naming the profiles there are."""
    path = ASSETS_DIR / "profiles" / f"{name}.yml"
    if not path.is_file():
        known = ", ".join(sorted(found.stem for found in path.parent.glob("*.yml"))) or "none"
        raise ConfigError(f"--profile = {json.dumps(name)}: no such profile; known: {known}")
    return path


def split_flags(argv: Sequence[str], *, own: Set[str] = frozenset()) -> tuple[list[str], list[str]]:
    """Divide command-line tokens into (what is no setting or in `own`, flags of known settings with their values)."""
    rest: list[str] = []
    flags: list[str] = []
    position = 0
    while position < len(argv):
        token = argv[position]
        width = 1
        if token.startswith("--") and _leaf(token) in known_names() and _leaf(token) not in own:
            width += _takes_next(token, argv[position + 1 : position + 2])
            flags += argv[position : position + width]
        else:
            rest.append(token)
        position += width
    return rest, flags


def unknown_name(name: str, *, origin: str, known: Sequence[str] = ()) -> ConfigError:
    """The error for a name nobody knows, with the nearest one that exists. `origin` is how the user wrote it."""
    near = difflib.get_close_matches(name, sorted({*known_names(), *known}), n=1, cutoff=0.5)
    way_out = f"did you mean --{near[0]}?" if near else "all names are in docs/configuration.md"
    return ConfigError(f"{origin}: no such setting; {way_out}")


def _from_file(path: Path | None, source: Source) -> list[Given]:
    if path is None:
        return []
    try:
        content = read_document(path, form="json" if path.suffix == ".json" else "yaml")
    except OSError as error:
        raise ConfigError(
            f"--config = {json.dumps(str(path))}: cannot be read ({error.strerror}); give a YAML file"
        ) from None
    except DocumentError as error:
        raise ConfigError(f"{path}: {error}") from None
    if content is None:
        return []
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: holds a {type(content).__name__}; it needs settings as `name: value`")
    return [_checked(given) for given in _flatten(content, path=path, source=source)]


def _flatten(content: Mapping[Any, Any], *, path: Path, source: Source) -> Iterator[Given]:
    """Settings stand under their section (`train: {learning_rate: 1e-4}`) or at the top (`learning_rate: 1e-4`)."""
    index = settings_index()
    for key, value in content.items():
        if key in sections() and isinstance(value, dict):
            for leaf, inner in value.items():
                if leaf in index and index[leaf].section != key:
                    raise ConfigError(f"{path}: {key}.{leaf}: this setting belongs to section {index[leaf].section}")
                yield Given(name=str(leaf), value=inner, origin=f"{path.name}: {leaf}", source=source)
        else:
            yield Given(name=str(key), value=value, origin=f"{path.name}: {key}", source=source)


def _from_environment(environ: Mapping[str, str]) -> list[Given]:
    """Plain names first, so that AGENTRL_ names win over them. An empty variable counts as not set."""
    plain = [(variable, name) for variable, name in PLAIN_VARIABLES.items() if variable in environ]
    prefixed = [
        (variable, variable.removeprefix(ENVIRONMENT_PREFIX).lower())
        for variable in sorted(environ)
        if variable.startswith(ENVIRONMENT_PREFIX)
    ]
    return [
        _checked(Given(name=name, value=environ[variable], origin=f"environment {variable}", source=Source.ENVIRONMENT))
        for variable, name in [*plain, *prefixed]
        if environ[variable]
    ]


def _from_flags(tokens: Sequence[str]) -> list[Given]:
    found: list[Given] = []
    position = 0
    while position < len(tokens):
        token = tokens[position]
        if not token.startswith("--"):
            before = tokens[position - 1] if position else "a flag"
            raise ConfigError(
                f"{before} {json.dumps(token)}: not a value it takes; write --name value, or true or false"
            )
        width = 1 + _takes_next(token, tokens[position + 1 : position + 2])
        flag, has_equals, inline = token.partition("=")
        value = inline if has_equals else tokens[position + 1] if width > 1 else None
        given = _checked(Given(name=_leaf(token), value=value, origin=flag, source=Source.FLAG))
        if value is None:
            if not _is_boolean(given.name):
                raise ConfigError(f"{flag}: needs a value; write {flag} VALUE")
            given = Given(name=given.name, value="true", origin=flag, source=Source.FLAG)
        found.append(given)
        position += width
    return found


def _leaf(token: str) -> str:
    """`--Learning-rate=1` -> `learning_rate`."""
    return token.partition("=")[0].lstrip("-").replace("-", "_")


def _takes_next(token: str, following: Sequence[str]) -> bool:
    """Whether the token after a flag is its value. A bare boolean flag only takes a boolean word."""
    if "=" in token or not following or following[0].startswith("--"):
        return False
    return not _is_boolean(_leaf(token)) or following[0].lower() in BOOLEAN_WORDS


def _is_boolean(name: str) -> bool:
    if name in translated_names():
        return name in translated_names()[name].booleans
    if name in UNAVAILABLE:
        return bool({"true", "false"}.intersection(UNAVAILABLE[name].neutral))
    return name in settings_index() and settings_index()[name].is_boolean


def _checked(given: Given) -> Given:
    if given.name not in known_names():
        raise unknown_name(given.name, origin=given.origin)
    return given


def _build(merged: dict[str, Given]) -> RunConfig:
    index = settings_index()
    for given in merged.values():
        if given.name in UNAVAILABLE:
            check_available(given.name, given.value, origin=given.origin)
    parsed = {
        name: index[name].parse(given.value, origin=given.origin) for name, given in merged.items() if name in index
    }
    for translation in TRANSLATIONS:
        parsed |= _translate(translation, merged, parsed)
    values: dict[str, dict[str, Any]] = {}
    for name, value in parsed.items():
        values.setdefault(index[name].section, {})[name] = value
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(message) from None


def _translate(translation: Translation, merged: Mapping[str, Given], parsed: Mapping[str, Any]) -> dict[str, Any]:
    """The settings a translation sets, unless a stronger source set them. Raises ConfigError on a contradiction."""
    inputs = [merged[name] for name in translation.names if name in merged]
    if not inputs:
        return {}
    index = settings_index()
    results = translation.apply({given.name: given.value for given in inputs}, parsed)
    strongest = max(inputs, key=lambda given: given.source)
    decided: dict[str, Any] = {}
    for name, raw in results.items():
        value = index[name].parse(raw, origin=strongest.origin)
        rival = merged.get(name)
        if rival is None or rival.source < strongest.source or name in translation.restates:
            decided[name] = value
        elif rival.source == strongest.source and value != parsed[name]:
            raise ConfigError(
                f"{strongest.origin} = {shown_value(strongest.value)} means {name} = {value}, but "
                f"{rival.origin} = {shown_value(rival.value)} is given too; remove one of them"
            )
    return decided
