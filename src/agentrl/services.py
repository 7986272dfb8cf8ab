"""The nouns of the inference side: policy versions, services, and what is known of their health. Pure.

`agentrl.types` offers them under its own name as well; import them from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVersion:
    """Published weights. `path` is a `save_pretrained` directory every inference service can read."""

    version: int
    path: str
    created_at: datetime | None = None
    canary: CanaryReference | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryReference:
    """What every service must answer at one policy version: the trainer's own log-probs of the canary prompts.

    `logprobs` are of all prompt tokens but the first of each prompt, in order, at temperature 1.
    """

    prompts: tuple[tuple[int, ...], ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryAnswer:
    """What a service answered to the canary prompts. Times are seconds since 1970 by the engine's clock."""

    policy_version: int
    logprobs: tuple[float, ...]
    started_s: float
    finished_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineQuarantine:
    """A service answered its canaries wrongly: tokens it sampled in [since_s, until_s) must not be trained.

    `since_s` is its last right answer (0: there was none), `until_s` the next one (None: not yet), by its own clock.
    """

    id: str  # "<service>@<since_s in ms>"
    service_id: str
    policy_version: int
    deviation: float  # nats, see algo.canary.deviation
    since_s: float
    until_s: float | None = None
    raised_at: datetime | None = None  # the database server's clock, as the entry was written


class ServiceStatus(StrEnum):
    """Whether an inference service may be used."""

    UP = "UP"
    DRAINING = "DRAINING"  # finishes the groups it works on, takes no new ones
    DOWN = "DOWN"
    QUARANTINED = "QUARANTINED"  # its canaries deviate: like DOWN, and what it sampled lately is not trained


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceService:
    """One engine behind one URL. UP only while it serves `policy_version` and its heartbeat is fresh."""

    id: str
    base_url: str
    status: ServiceStatus
    policy_version: int
    engine: str = "embedded"  # "embedded" | "sglang"
    num_running: int = 0
    num_waiting: int = 0
    heartbeat_at: datetime | None = None
    canary: CanaryAnswer | None = None  # the latest one
    last_good_s: float = 0.0  # start of its last right canary answer, by its own clock; 0: none


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineUse:
    """Some tokens were sampled by a service in [first_s, last_s], seconds since 1970 by that engine's own clock."""

    service_id: str
    first_s: float
    last_s: float
