"""Passwords and tokens in the configuration: what is shown and stored instead of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from typing import Any

from agentrl.config.sections import RunConfig
from agentrl.errors import ConfigError

MASK = "***"

_SECRET_FIELDS = frozenset({"mcp_auth_token"})
_URI_FIELDS = frozenset({"db_connection_string", "inference_url", "mcp_manager_url"})
_URI_LIST_FIELD = "inference_url"
SETTINGS_WITH_SECRETS = _SECRET_FIELDS | _URI_FIELDS
_NEXT_URL = re.compile(r",\s*(?=[A-Za-z][A-Za-z0-9+.-]*://)")
_CREDENTIALS = re.compile(r"(?s)(?P<shown>\A\s*(?:[A-Za-z][A-Za-z0-9+.-]*://)?[^:]*):.*@")  # up to the last @
_QUERY_SECRET = re.compile(r"(?i)([?&;][^=&;]*(?:key|token|password|secret|signature)[^=&;]*=)[^&;#,\s]+")
_SESSION_TOKEN = re.compile(r"(?i)(AWS_SESSION_TOKEN:)[^&;#,\s]+")  # in MongoDB's authMechanismProperties


def masked(config: RunConfig) -> dict[str, Any]:
    """The configuration as plain JSON values by section, without passwords and tokens: for printing and storing."""
    dumped: dict[str, dict[str, Any]] = config.model_dump(mode="json")
    return {
        section: {name: _masked_value(name, value) for name, value in fields.items()}
        for section, fields in dumped.items()
    }


def secret_settings(config: RunConfig) -> Mapping[str, str]:
    """The settings whose value holds a secret, by name, in full."""
    shown = masked(config)
    dumped: dict[str, dict[str, Any]] = config.model_dump(mode="json")
    return {
        name: value
        for section, fields in dumped.items()
        for name, value in fields.items()
        if shown[section][name] != value
    }


def require_secrets(config: RunConfig, names: Set[str]) -> None:
    """Refuse a configuration read back from where secrets were masked, if one of these settings lacks its secret.

    Raises ConfigError.
    """
    dumped: dict[str, dict[str, Any]] = config.model_dump(mode="json")
    for fields in dumped.values():
        for name in fields.keys() & names & SETTINGS_WITH_SECRETS:
            if MASK in (fields[name] or ""):
                raise ConfigError(
                    f"{name} = {fields[name]}: its secret is not kept with the run; give {name} again, in the "
                    f"environment as AGENTRL_{name.upper()} or as --{name}"
                )


def masked_uri(text: str) -> str:
    """A URI without its password and secret query parameters.

    A password with characters that should have been escaped is hidden as well, rather too much than too little.
    """
    without_password = _CREDENTIALS.sub(rf"\g<shown>:{MASK}@", text)
    return _SESSION_TOKEN.sub(rf"\1{MASK}", _QUERY_SECRET.sub(rf"\1{MASK}", without_password))


def masked_uris(text: str) -> str:
    """Comma-separated URIs, each as by `masked_uri`. Here a password must not contain what begins the next one."""
    return ",".join(map(masked_uri, _NEXT_URL.split(text)))


def _masked_value(name: str, value: Any) -> Any:
    if value is None:
        return None
    if name in _SECRET_FIELDS:
        return MASK
    if name == _URI_LIST_FIELD:
        return masked_uris(value)
    return masked_uri(value) if name in _URI_FIELDS else value
