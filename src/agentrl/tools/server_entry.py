"""One server as a configuration file describes it, validated and not yet expanded."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentrl.errors import ConfigError
from agentrl.tools.server_config import (
    BREAKER_FAILURES,
    BREAKER_PAUSE_S,
    MAX_RETRIES,
    MAX_SESSIONS,
    RETRY_PAUSE_S,
    SessionScope,
)
from agentrl.types import Recovery

Model = TypeVar("Model", bound=BaseModel)

# Written by editors that share this file format; they mean nothing to a rollout.
_EDITOR_KEYS = frozenset({"alwaysAllow", "autoApprove", "description", "gallery"})


class ServerEntry(BaseModel):
    """The keys of one server; what is None takes the run's setting."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    command: str | None = Field(None, min_length=1)
    args: list[str] = []
    env: dict[str, str] = {}
    cwd: Path | None = None
    url: str | None = Field(None, pattern=r"^(https?://|\$\{)")
    headers: dict[str, str] = {}
    auth_token: str | None = None
    type: str | None = None
    transport: str | None = None
    disabled: bool = False
    recovery: Recovery | None = None
    scope: SessionScope = SessionScope.SHARED
    timeout_s: float | None = Field(None, gt=0)
    connect_timeout_s: float | None = Field(None, gt=0)
    max_in_flight: int | None = Field(None, ge=1)
    sessions: int | None = Field(None, ge=1, le=MAX_SESSIONS)
    rate_limit_per_s: float | None = Field(None, gt=0)
    max_retries: int = Field(MAX_RETRIES, ge=0)
    retry_pause_s: float = Field(RETRY_PAUSE_S, ge=0)
    breaker_failures: int = Field(BREAKER_FAILURES, ge=1)
    breaker_pause_s: float = Field(BREAKER_PAUSE_S, gt=0)
    blacklist: list[str] = []


def parse_entry(entry: Any, *, where: str) -> ServerEntry:
    """A validated entry. Raises ConfigError naming `where` and the key."""
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: expected an object, got {type(entry).__name__}")
    known = {key: value for key, value in entry.items() if key not in _EDITOR_KEYS}
    return validate(ServerEntry, known, where=where)


def validate(model: type[Model], content: Mapping[str, Any], *, where: str) -> Model:
    """`content` as `model`. Raises ConfigError with every problem in one line."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        problems = "; ".join(_describe_problem(problem, model) for problem in error.errors(include_url=False))
        raise ConfigError(f"{where}: {problems}") from error


def _describe_problem(problem: Mapping[str, Any], model: type[BaseModel]) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] != "extra_forbidden":
        return f"{key}: {problem['msg']}"
    if key == "stateless":  # how it was declared before there was a journal
        return 'unknown key \'stateless\': write "recovery": "stateless", or leave it out for "stateful"'
    nearest = get_close_matches(key, list(model.model_fields), n=1)
    return f"unknown key {key!r}" + (f", did you mean {nearest[0]!r}?" if nearest else "")
