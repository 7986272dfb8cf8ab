"""`agent_config.yml`: the chat models of the judge (`scorer_agent`) and of the browse agent (`browse_agent`).

    scorer_agent:
      models:                         # tried in this order
        - {api_key: "${JUDGE_API_KEY}", base_url: "https://host/v1", model: "judge-large"}
        - {api_key: "${OTHER_API_KEY}", base_url: "https://other/v1", model: "judge-small"}
      max_retries: 5

`${NAME}` in a value is the environment variable NAME: keys belong there. A key is a SecretStr from the moment it is
read, so that no message, log line or stored document shows it.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator

from agentrl.config.documents import DocumentError, read_document
from agentrl.errors import ConfigError, UnavailableError

JUDGE_TEMPLATE_FIELDS = frozenset({"question", "labeled_answer", "pred_answer"})
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_KEY = re.compile(r"(?:[!-~](?:[ -~]*[!-~])?)?")  # what an HTTP header can carry
_URL = re.compile(r"https?://[!-?A-~]+")  # printable ASCII but for @
_OWN_BODY_FIELDS = frozenset({"model", "messages", "stream", "n"})


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)


class ChatEndpoint(_Part):
    """One model behind one OpenAI-compatible address."""

    base_url: str = Field(description="Address up to the version, e.g. https://host/v1.")
    model: str = Field(min_length=1, description="Name of the model there.")
    api_key: SecretStr | None = Field(None, description="Bearer token; none for a server that asks for none.")

    @field_validator("base_url")
    @classmethod
    def _is_http(cls, base_url: str) -> str:
        if not _is_address(base_url):
            raise ValueError("needs the form https://host/v1, without a password; the key goes to api_key")
        return base_url.rstrip("/")

    @field_validator("api_key")
    @classmethod
    def _can_be_sent(cls, api_key: SecretStr | None) -> SecretStr | None:
        if api_key is not None and not _KEY.fullmatch(api_key.get_secret_value()):
            raise ValueError(
                "a key is printable ASCII without spaces around it; is there a line break at its end, from a file?"
            )
        return api_key


class _Agent(_Part):
    models: tuple[ChatEndpoint, ...] = Field(min_length=1, description="Tried in this order.")
    status: bool = Field(True, description="Off: this agent is not used.")
    retry_delay: float = Field(ge=0, description="Seconds before the first retry of a model; jittered.")
    max_retries: int = Field(ge=1, description="Requests to one model before the next one is tried.")
    backoff_factor: float = Field(2.0, ge=1, description="Growth of the delay from retry to retry.")
    timeout: float = Field(180.0, gt=0, description="Seconds one request may take.")
    extra_body: dict[str, Any] = Field(default_factory=dict, description="Further fields of every request.")

    @field_validator("extra_body")
    @classmethod
    def _leaves_the_request_alone(cls, extra_body: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(extra_body.keys() & _OWN_BODY_FIELDS):
            raise ValueError(f"{taken[0]} is set by the client itself; remove it")
        return extra_body


class BrowseAgentConfig(_Agent):
    """The agent that summarises long tool results. Lengths are in tokens of `tokenizer_path`."""

    max_retries: int = Field(3, ge=1, description="Requests to one model before the next one is tried.")
    retry_delay: float = Field(2.0, ge=0, description="Seconds before the first retry of a model; jittered.")
    max_prompt_length: int = Field(60_000, ge=1, description="A longer result is cut before it is summarised.")
    min_prompt_length: int = Field(2_000, ge=0, description="A result of at most this length is left as it is.")
    browse_tools: tuple[str, ...] = Field((), description="Tools whose results are summarised.")
    default_purpose: dict[str, str] = Field(default_factory=dict, description="Purpose of calls without one, by tool.")
    tokenizer_path: Path | None = Field(None, description="Tokenizer that counts; none: the policy's.")
    enable_logging: bool = Field(False, description="Every request and reply is in the database, whatever this says.")

    @model_validator(mode="after")
    def _lengths_are_in_order(self) -> BrowseAgentConfig:
        if self.min_prompt_length >= self.max_prompt_length:
            raise ValueError(
                f"min_prompt_length = {self.min_prompt_length} is not below max_prompt_length = "
                f"{self.max_prompt_length}; nothing would ever be summarised"
            )
        return self


class ScorerAgentConfig(_Agent):
    """The judge."""

    max_retries: int = Field(5, ge=1, description="Requests to one model before the next one is tried.")
    retry_delay: float = Field(1.0, ge=0, description="Seconds before the first retry of a model; jittered.")
    judge_prompt_template: str | None = Field(
        None, description="Prompt of scorer `agentcpm`, with {question}, {labeled_answer} and {pred_answer}."
    )

    @field_validator("judge_prompt_template")
    @classmethod
    def _names_the_known_fields(cls, template: str | None) -> str | None:
        if template is None:
            return None
        try:
            named = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
        except ValueError as error:
            raise ValueError(f"{error}; write {{{{ and }}}} for braces that are text") from None
        if unknown := sorted(named - JUDGE_TEMPLATE_FIELDS):
            raise ValueError(
                f"{{{unknown[0]}}} is not known; there are {{question}}, {{labeled_answer}}, {{pred_answer}}"
            )
        if missing := sorted(JUDGE_TEMPLATE_FIELDS - {"question"} - named):
            raise ValueError(f"{{{missing[0]}}} is missing: the judge would decide without it")
        return template


class AgentConfig(_Part):
    """The whole file. An agent that is missing is not used."""

    browse_agent: Annotated[BrowseAgentConfig | None, Field(description="Summarises long tool results.")] = None
    scorer_agent: Annotated[ScorerAgentConfig | None, Field(description="Judges answers.")] = None

    @property
    def judge(self) -> ScorerAgentConfig | None:
        """The scorer agent if there is one and it is switched on."""
        return self.scorer_agent if self.scorer_agent is not None and self.scorer_agent.status else None

    @property
    def browser(self) -> BrowseAgentConfig | None:
        """The browse agent if there is one and it is switched on."""
        return self.browse_agent if self.browse_agent is not None and self.browse_agent.status else None


def load_agent_config(path: Path, *, environ: Mapping[str, str]) -> AgentConfig:
    """Read and check the file. Raises UnavailableError if it is not there, ConfigError naming the key at fault."""
    try:
        raw = read_document(path)
    except FileNotFoundError:
        raise UnavailableError(f"agent_config_path = {path}: there is no such file") from None
    except OSError as error:
        raise ConfigError(f"agent_config_path = {path}: cannot be read ({error.strerror})") from None
    except DocumentError as error:
        raise ConfigError(f"agent_config_path = {path}: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"agent_config_path = {path}: needs browse_agent and scorer_agent as its top-level keys")
    try:
        return AgentConfig.model_validate(_expanded(raw, path=path, where="", environ=environ))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = _place(first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"agent_config_path = {path}: {where}: {message[0].lower()}{message[1:]}") from None


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return _URL.fullmatch(url) is not None and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not close, a port that is none
        return False


def _expanded(value: Any, *, path: Path, where: str, environ: Mapping[str, str]) -> Any:
    """The value with every ${NAME} replaced. Raises ConfigError for a variable that is not set."""
    if isinstance(value, dict):
        return {
            key: _expanded(entry, path=path, where=f"{where}.{key}".lstrip("."), environ=environ)
            for key, entry in value.items()
        }
    if isinstance(value, list):
        return [
            _expanded(entry, path=path, where=f"{where}[{number}]", environ=environ)
            for number, entry in enumerate(value)
        ]
    if not isinstance(value, str):
        return value

    def lookup(match: re.Match[str]) -> str:
        if not environ.get(match[1]):
            raise ConfigError(f"agent_config_path = {path}: {where} names ${{{match[1]}}}, which is not set; export it")
        return environ[match[1]]

    return _VARIABLE.sub(lookup, value)


def _place(loc: tuple[int | str, ...]) -> str:
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc]
    return "".join(parts).lstrip(".") or "the file"
