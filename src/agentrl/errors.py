"""Every error AgentRL raises on purpose.

AgentRLError
├── UserError               the user can fix it: printed as one line, exit code 2, no traceback
│   ├── ConfigError         a setting is unknown, impossible or contradicts another
│   ├── DatasetError        a task file has bad lines; lists them
│   ├── ArchiveError        an export file is damaged or unknown, or its target is in use
│   └── UnavailableError    a service, file, port or program that was asked for is not there
│       └── DatabaseUnavailableError    no database answers; it may be restarting: exit code 1
├── StoreError              the database refused or lost an operation
│   ├── StoredFormatError   a document was written by another release; also a UserError
│   └── StaleClaimError     the writer's lease was taken over; its late work must be dropped
├── EngineError             the inference service failed, with a kind the caller can act on
├── ChatError               no model of a judge or browse agent gave a reply, with a kind
├── ToolServerError         a tool server could not be started or spoken to
├── RolloutError            the environment of a sampler failed; its Record ends as `aborted`, without a score
├── ScoringError            a scorer could not produce a number; never a score of 0
├── TrainingError           the optimizer step would have been wrong; nothing was changed
├── StoppedByAlarmError     the stability watch ended the run, as it was asked to: exit code 3
└── BudgetSpentError        the next call would exceed budget_usd, so it was not made: exit code 4
"""

from __future__ import annotations

from enum import StrEnum


class AgentRLError(Exception):
    """Base of everything AgentRL raises on purpose."""


class UserError(AgentRLError):
    """Something the user can fix; the message names the thing, the value and the way out."""


class ConfigError(UserError, ValueError):
    """A setting is unknown, out of range, or contradicts another one."""


class DatasetError(UserError, ValueError):
    """A task file cannot be used; nothing of it was loaded."""


class ArchiveError(UserError):
    """An export file cannot be written or is not one, or the run it should go to holds documents already."""


class UnavailableError(UserError):
    """A database, server, model directory, port or program is not there."""


class DatabaseUnavailableError(UnavailableError):
    """No database answers at the address given. Its own exit code: a supervisor may try again."""


class StoreError(AgentRLError):
    """The database refused an operation or could not be reached in time."""


class StoredFormatError(UserError, StoreError):
    """A document has a format of another release: nothing is guessed, it is not read."""


class StaleClaimError(StoreError):
    """The fencing token is old: another worker owns the Task now, so this writer must stop."""


class EngineErrorKind(StrEnum):
    """What the caller can do about an engine failure."""

    UNREACHABLE = "unreachable"  # connection refused or reset: try another service
    TIMEOUT = "timeout"  # no answer before the deadline
    REJECTED = "rejected"  # 4xx: the request itself is wrong, retrying cannot help
    OVERLOADED = "overloaded"  # 503, queue full: retry later
    ABORTED = "aborted"  # the engine stopped the generation
    INVALID_SAMPLE = "invalid_sample"  # NaN, ids and log-probs that do not line up: never train on it


class EngineError(AgentRLError):
    """An inference service failed. `kind` says what the caller can do, `retryable` whether retrying may help."""

    def __init__(self, message: str, *, kind: EngineErrorKind) -> None:
        super().__init__(message)
        self.kind = kind

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later or elsewhere."""
        return self.kind in {EngineErrorKind.UNREACHABLE, EngineErrorKind.TIMEOUT, EngineErrorKind.OVERLOADED}


class ChatErrorKind(StrEnum):
    """Why a chat model gave no reply; of the last attempt where there were several."""

    UNREACHABLE = "unreachable"  # connection refused, reset or broken off
    TIMEOUT = "timeout"  # no reply before the deadline
    RATE_LIMITED = "rate_limited"  # 429
    OVERLOADED = "overloaded"  # 5xx
    AUTH = "auth"  # 401, 403: the key is wrong or missing
    REJECTED = "rejected"  # any other 4xx: the request itself is wrong
    INVALID_REPLY = "invalid_reply"  # 200, but no chat completion with text


class ChatError(AgentRLError):
    """No configured chat model gave a reply. `kind` says why; the message never holds a key.

    `cost_nano_usd` is what it may have been billed all the same.
    """

    def __init__(self, message: str, *, kind: ChatErrorKind, cost_nano_usd: int = 0) -> None:
        super().__init__(message)
        self.kind = kind
        self.cost_nano_usd = cost_nano_usd

    @property
    def retryable(self) -> bool:
        """Whether the same request to the same model may succeed later."""
        return self.kind in _RETRYABLE_CHAT_ERRORS


_RETRYABLE_CHAT_ERRORS = frozenset(
    {
        ChatErrorKind.UNREACHABLE,
        ChatErrorKind.TIMEOUT,
        ChatErrorKind.RATE_LIMITED,
        ChatErrorKind.OVERLOADED,
        ChatErrorKind.INVALID_REPLY,
    }
)


class ToolServerError(AgentRLError):
    """A tool server did not start, or died and did not come back within its deadline."""


class RolloutError(AgentRLError):
    """The environment of a sampler failed, not the policy; the Record ends as `aborted`, without a score."""


class ScoringError(AgentRLError):
    """A scorer raised or returned something that is no finite number. `retryable`: what it asks may be back later."""

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.retryable = retryable


class TrainingError(AgentRLError):
    """Stops before the optimizer step: non-finite loss or gradient, or a broken batch. Names the sequences."""


class StoppedByAlarmError(AgentRLError):
    """The stability watch ended the run (`on_alarm`); everything up to its step is saved."""


class BudgetSpentError(AgentRLError):
    """The next call would exceed `budget_usd`: it was not made. Everything committed so far is kept."""
