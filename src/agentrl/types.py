"""The nouns of AgentRL (docs/architecture.md, vocabulary) as frozen values. Pure: no I/O, no torch, no database.

A Task is one problem; its `num_generations` Records are the group. A Record is a list of Turns; a Turn is one model
completion and its tool results, each stored as one DispatchedSamplingTask. A settled group becomes DBRecordData rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from agentrl.outcomes import EpisodeResult as EpisodeResult
from agentrl.outcomes import StopReason as StopReason
from agentrl.services import CanaryAnswer as CanaryAnswer
from agentrl.services import CanaryReference as CanaryReference
from agentrl.services import EngineQuarantine as EngineQuarantine
from agentrl.services import EngineUse as EngineUse
from agentrl.services import InferenceService as InferenceService
from agentrl.services import PolicyVersion as PolicyVersion
from agentrl.services import ServiceStatus as ServiceStatus
from agentrl.steps import Alarm as Alarm
from agentrl.steps import StepStatus as StepStatus
from agentrl.steps import TrainStep as TrainStep
from agentrl.tool_calls import Recovery as Recovery
from agentrl.tool_calls import ResultOrigin as ResultOrigin
from agentrl.tool_calls import ToolCall as ToolCall
from agentrl.tool_calls import ToolRequest as ToolRequest
from agentrl.tool_calls import ToolResult as ToolResult
from agentrl.tool_calls import ToolSpec as ToolSpec
from agentrl.tool_calls import ToolStatus as ToolStatus
from agentrl.tool_calls import why_unusable as why_unusable

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
Answer = str | int | float | bool | list[Any] | dict[str, Any]
SCHEMA_VERSION = 2  # 2: a dispatch leaves out what its ids, or its only policy version, say already
BRANCH = "branch"  # in the request of a model call that starts a new context: {"strategy", "because", ...}
EPISODE = "episode"  # in that of a call that starts an episode after the first: {"number", "after"}
CONVERSATION = "conversation"  # strategy of a branch that is another conversation of the Record, or a return to it
FINAL_ANSWER = "final_answer"  # in that of a forced final answer: the stop reason it stands for


class TaskStatus(StrEnum):
    """Life of a Task: pending -> running -> settled -> consumed. An expired lease turns running back to pending."""

    PENDING = "pending"
    RUNNING = "running"
    SETTLED = "settled"
    CONSUMED = "consumed"


class RecordStatus(StrEnum):
    """Life of a Record: running -> finished (scored) or failed (typed stop reason, no score)."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"


class DispatchKind(StrEnum):
    """What a DispatchedSamplingTask was sent to."""

    MODEL = "model"
    TOOL = "tool"
    JUDGE = "judge"
    BROWSE = "browse"


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem at one epoch of one split. Never changes; its state lives in the store."""

    id: str  # "<split>:<epoch>:<item_id>"
    item_id: str  # id of the JSONL row
    split: str
    epoch: int
    query: str
    answer: Answer
    scorer: str = "em"
    answer_schema: str = "answer"
    num_generations: int
    system_prompt: str | None = None
    query_prompt: str | None = None  # template with {query}; None: the query itself
    tools: tuple[str, ...] | None = None  # names the model may see; None: all
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskClaim:
    """The right to work on a Task until `lease_until`. `fence` grows with every claim of the Task."""

    task: Task
    owner: str  # unique per claim
    fence: int
    lease_until: datetime  # UTC, the database server's clock


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Completion tokens [start, end) were sampled from policy `version`, as reported by the engine."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTokens:
    """What the engine saw and produced in one turn, as a delta to the parent turn.

    The engine's full input was: tokens of the parent chain (prompt and completion of every ancestor) + `prompt_ids`.

        turn 0: prompt_ids = P0            completion_ids = A0     parent_turn = -1    engine saw P0
        turn 1: prompt_ids = tool results  completion_ids = A1     parent_turn = 0     engine saw P0 A0 T1
    """

    parent_turn: int  # index of the parent turn in the Record; -1: this turn starts a branch
    prompt_ids: tuple[int, ...]  # only the new tokens
    completion_ids: tuple[int, ...]  # sampled tokens, stop token included
    logprobs: tuple[float, ...]  # of completion_ids under the distribution actually sampled from
    version_spans: tuple[VersionSpan, ...]  # cover completion_ids without gaps
    finish_reason: str  # "stop" | "length"


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchedSamplingTask:
    """One request sent out on behalf of a Record, and its reply.

    Model calls carry `tokens`; `request` holds the sampling parameters and `response` {"text", "reasoning", ...}.
    Tool calls hold {"name", "arguments", "call_id"} in `request` and {"content"} in `response`.
    """

    id: str  # "<record>/<turn>.<fence>[.<attempt>]" for the model call (attempts from 2), that + "/<index>" for tools
    record_id: str
    task_id: str
    turn: int
    index: int  # 0 for the model call, then 1.. for the turn's other calls
    kind: DispatchKind
    target: str  # service id, or "server.tool"
    status: str  # "ok", or a ToolStatus / EngineErrorKind value
    request: Mapping[str, Any]
    response: Mapping[str, Any]
    started_at: datetime
    finished_at: datetime
    tokens: TurnTokens | None = None
    error: str | None = None
    cost_nano_usd: int = 0  # by the price table of the run; whole 1e-9 US dollars, so that sums are exact


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One model completion and the tool results that answered it."""

    model: DispatchedSamplingTask
    tools: tuple[DispatchedSamplingTask, ...] = ()

    @property
    def index(self) -> int:
        """Position in the Record, from 0."""
        return self.model.turn

    @property
    def tokens(self) -> TurnTokens:
        """Token delta of the model call."""
        if self.model.tokens is None:
            raise ValueError(f"turn {self.model.id} has no tokens: it was not sampled by a token-exact engine")
        return self.model.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One trajectory: its header. The turns themselves are read with `load_turns`."""

    id: str  # "<task>/g<generation>"
    task_id: str
    split: str
    generation: int
    fence: int
    status: RecordStatus
    turn_ids: tuple[str, ...] = ()  # ids of the committed model calls, in order: the commit point of each turn
    turn_prompt_tokens: tuple[int, ...] = ()  # of each committed turn: tokens of its context that were not sampled
    stop_reason: StopReason | None = None
    answer: str | None = None
    score: float | None = None
    scorer: str | None = None
    turn_scores: tuple[float | None, ...] = ()  # scores of single turns, each ends an episode; empty: `score` alone
    episodes: tuple[EpisodeResult, ...] = ()  # of a meta-episode, in order; `answer` and `score` are the last one's
    error: str | None = None
    worker: str = ""
    num_prompt_tokens: int = 0  # tokens of the longest context, not sampled
    num_completion_tokens: int = 0
    num_tool_calls: int = 0
    started_at: datetime | None = None
    finished_at: datetime | None = None
    cost_nano_usd: int = 0  # of its committed calls
    attempt: int = 1  # grows when a failed Record is sampled again; earlier attempts are in Quarantine

    @property
    def is_final(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.status is not RecordStatus.RUNNING


class GroupOutcome(StrEnum):
    """What became of a settled group."""

    TRAINABLE = "trainable"
    DROPPED = "dropped"  # see drop_reason
    EVALUATED = "evaluated"  # not a training split


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettlement:
    """The decision on a complete group, made once, by whoever settles it."""

    task_id: str
    outcome: GroupOutcome
    drop_reason: str | None = None
    rewards: Mapping[str, float]  # record id -> reward; infrastructure failures are absent
    advantages: Mapping[str, float]  # record id -> advantage, the mean over its sampled tokens
    num_failed: int = 0  # the shortfall: Records without a score
    scores: Mapping[str, float] = field(default_factory=dict)  # record id -> the scorer's number, before shaping
    untrained: Mapping[str, str] = field(default_factory=dict)  # record id -> why a scored Record gives no rows
    engines: tuple[EngineUse, ...] = ()  # what sampled the scored Records, and when
    episode_scores: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # record id -> of a meta-episode
    score_version: str | None = None  # whose Scores `scores` are; None: those the Records were finished with


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceSummary:
    """What the planner needs to know of a DBRecordData row without loading its tokens."""

    id: str
    num_tokens: int
    num_trained_tokens: int
    min_policy_version: int
    num_shared_tokens: int = 0  # leading tokens it has in common with the row before it in its group


@dataclass(frozen=True, slots=True, kw_only=True)
class SettledGroup:
    """A settled Task as the planner sees it."""

    settlement: GroupSettlement
    sequences: tuple[SequenceSummary, ...]
    settled_at: datetime
    mean_tool_calls: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DBRecordData:
    """One training sequence. All arrays are aligned with `token_ids`; entry i describes token i itself.

    token_ids            P0 P0 A0 A0 T1 T1 A1 A1      (prompt, answer, tool result, answer)
    loss_mask             0  0  1  1  0  0  1  1      sampled by the policy and trained
    behaviour_logprobs    0  0  l  l  0  0  l  l      of the engine; None for supervised rows
    advantages            0  0  a  a  0  0  a  a
    policy_versions      -1 -1  3  3 -1 -1  4  4      of the engine; -1 where not sampled
    """

    id: str  # "<record>/s<k>"
    task_id: str
    record_id: str
    split: str
    token_ids: Int32Array
    loss_mask: BoolArray
    advantages: Float32Array
    behaviour_logprobs: Float32Array | None
    policy_versions: Int32Array
    reward: float
    turn_ids: tuple[str, ...] = ()
    score_version: str | None = None  # of the settlement it was made in

    @property
    def summary(self) -> SequenceSummary:
        """The planner's view. Supervised rows count as sampled by version -1 (never stale)."""
        versions = self.policy_versions[self.loss_mask]
        return SequenceSummary(
            id=self.id,
            num_tokens=int(self.token_ids.size),
            num_trained_tokens=int(self.loss_mask.sum()),
            min_policy_version=int(versions.min()) if versions.size else -1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """A process that takes part in a run: sampler, trainer, evaluator."""

    id: str
    kind: str
    host: str
    pid: int
    num_running: int = 0  # rollouts in flight
    phase: str = ""  # what it is doing, for the live view
    started_at: datetime | None = None
    heartbeat_at: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeVerdict:
    """A judge's verdict, kept so that the same question is not paid for twice."""

    key: str  # of question, answer, truth, judge model and prompt version
    verdict: str
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """What one version of a scorer says of one attempt at a Record. Never changes; other versions stand beside it."""

    record_id: str
    attempt: int
    version: str  # "<scorer> @<fingerprint of its rules, prompts and models>"
    scorer: str
    value: float
    episode_values: tuple[float, ...] = ()  # of a meta-episode: one per episode, `value` is that of the last
    call_ids: tuple[str, ...] = ()  # the judge calls made for it; none where the cache knew
    scored_at: datetime | None = None

    @property
    def id(self) -> str:
        """One per attempt and version: writing it twice is writing it once."""
        return f"{self.record_id}#{self.attempt} {self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of one completion. Training needs the neutral values of everything but temperature."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None  # what is drawn, where the engine draws by seed: 0 to 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One completion asked of an engine."""

    rid: str  # fixed-width or uuid-terminated: engines abort by prefix
    input_ids: Sequence[int]
    params: SamplingParams
    deadline_s: float  # total, retries included
    session: str = ""  # requests of one session stick to one service (prefix cache)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateReply:
    """What an engine produced. Checked: ids, log-probs and version spans have equal lengths."""

    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version_spans: tuple[VersionSpan, ...]
    finish_reason: str  # "stop" | "length"
    service_id: str
    num_cached_tokens: int = 0
    engine_times: tuple[float, float] | None = None  # start and end by the engine's clock, where it tells
    cost_nano_usd: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatReply:
    """What a chat model behind an OpenAI-compatible address said, and what it used: for judges and browse agents."""

    text: str
    model: str  # the configured model that answered: not the first one after a failover
    finish_reason: str = "stop"  # "length": cut by the model's own limit
    prompt_tokens: int = 0
    completion_tokens: int = 0
    num_attempts: int = 1  # requests sent, over all models
    cost_nano_usd: int = 0
