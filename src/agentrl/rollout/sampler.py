"""Samplers: how one Record is made and scored. Subclass `AsyncSampler` for another kind of agent."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from agentrl.errors import ChatError, EngineError, EngineErrorKind, RolloutError, ScoringError
from agentrl.rollout.agent import Agent, RolloutResult, run_rollout
from agentrl.rollout.deadlines import deadline
from agentrl.scoring import checked_score
from agentrl.types import Record, RecordStatus, StopReason, Task, ToolStatus, Turn

SCORING_TIMEOUT_S = 3600.0  # more than any judge's own deadlines add up to


class AsyncSampler(ABC):
    """Makes one Record of a claimed Task. One instance, one Record; no state outlives it.

    `run` samples, `evaluate_record` scores; `sample` joins them and turns every failure into a typed one. The worker
    calls `sample` inside the claim (lease, heartbeat, settlement), so subclasses never touch the store.
    """

    def __init__(self, task: Task, *, record: Record, committed: Sequence[Turn], agent: Agent) -> None:
        self.task = task
        self.record = record
        self.committed = committed
        self.agent = agent
        self.unjudged: Record | None = None  # after `sample`: the running header, if its judge was only away

    @abstractmethod
    async def run(self) -> RolloutResult:
        """Sample the trajectory, committing every turn through `agent.commit_turn`."""

    @abstractmethod
    async def evaluate_record(self, result: RolloutResult) -> float:
        """Score a trajectory the policy ended: a finite number. Raises ScoringError when none can be had."""

    async def scored_record(self, result: RolloutResult) -> Record:
        """The header with its score, for samplers that keep more than one to override. Raises ScoringError."""
        return replace(result.record, score=await self.evaluate_record(result))

    async def sample(self) -> tuple[Record, tuple[Turn, ...]]:
        """Run and score: the final header and its turns; of a Record that was put down, the running header.

        Cancellation and StaleClaimError pass through.
        """
        try:
            async with self.agent.toolbox.for_record() as toolbox, deadline(self.agent.rollout.record_timeout_s):
                self.agent = replace(self.agent, toolbox=toolbox)
                result = await self.run()
        except EngineError as error:
            return self._failed(_stop_reason_of(error), str(error)), ()
        except (RolloutError, ScoringError) as error:  # not complete, so nothing that could be judged again
            return self._failed(StopReason.ABORTED, str(error)), ()
        except ChatError as error:
            return self._failed(StopReason.ENGINE_ERROR, f"no summary to go on with: {error}"), ()
        except TimeoutError:
            limit = self.agent.rollout.record_timeout_s
            return self._failed(StopReason.TIMEOUT, f"no result within turn or record_timeout_s = {limit:g}"), ()
        if result.stop_reason is None:
            return result.record, result.turns
        if result.stop_reason.is_infrastructure:
            return self._failed(result.stop_reason, _tool_problems(result.turns)), result.turns
        unjudged = replace(result.record, answer=result.answer)  # kept: it is judged again from the store
        try:
            async with asyncio.timeout(SCORING_TIMEOUT_S):
                scored = await self.scored_record(result)
            scored = replace(scored, score=checked_score(type(self).__name__, scored.score))
        except TimeoutError:
            return self._failed(StopReason.JUDGE_ERROR, "no score in time", record=unjudged), result.turns
        except ScoringError as error:
            self.unjudged = result.record if error.retryable else None
            return self._failed(StopReason.JUDGE_ERROR, str(error), record=unjudged), result.turns
        final = replace(
            scored,
            status=RecordStatus.FINISHED,
            stop_reason=result.stop_reason,
            answer=result.answer,
            scorer=self.task.scorer,
            finished_at=self.agent.clock(),
        )
        return final, result.turns

    def _failed(self, reason: StopReason, message: str, *, record: Record | None = None) -> Record:
        """A typed failure without a score."""
        return replace(
            record or self.record,
            status=RecordStatus.FAILED,
            stop_reason=reason,
            error=message,
            finished_at=self.agent.clock(),
        )


class MCPSampler(AsyncSampler):
    """The default agent: multi-turn tool use over MCP, scored by the Task's scorer."""

    async def run(self) -> RolloutResult:
        """The loop of `rollout.agent`."""
        return await run_rollout(self.task, record=self.record, committed=self.committed, agent=self.agent)

    async def evaluate_record(self, result: RolloutResult) -> float:
        """What the Task's scorer says; without an answer (the policy's fault) every scorer of answers says 0."""
        scored = await self.agent.scoring.score(
            self.task,
            scorer=self.task.scorer,
            record=result.record,
            turns=result.turns,
            answer=result.answer,
            tools=self.agent.toolbox.list_tools(),
        )
        return scored.value


def _tool_problems(turns: Sequence[Turn]) -> str:
    """What the calls of the last turn that failed by infrastructure say."""
    calls = turns[-1].tools if turns else ()
    return "; ".join(f"{call.status}: {call.error}" for call in calls if ToolStatus(call.status).ends_record)


def _stop_reason_of(error: EngineError) -> StopReason:
    match error.kind:
        case EngineErrorKind.TIMEOUT:
            return StopReason.TIMEOUT
        case EngineErrorKind.ABORTED:
            return StopReason.ABORTED
        case _:
            return StopReason.ENGINE_ERROR
