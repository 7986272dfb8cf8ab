"""One rollout against a scripted engine, with settings of one's own; commits are kept in a list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from agentrl.chat import ChatFormat
from agentrl.config import InferenceConfig, ReflectionConfig, RolloutConfig
from agentrl.rollout.agent import Agent, RolloutResult, run_rollout
from agentrl.rollout.browse import Browser
from agentrl.rollout.meta_sampler import MetaEpisodeSampler
from agentrl.store import MemoryStore
from agentrl.tools import FunctionToolbox
from agentrl.types import Record, RecordStatus, Recovery, Task, Turn
from scripted_engine import Script, ScriptedEngine

TASK = Task(id="train:0:q", item_id="q", split="train", epoch=0, query="2+3?", answer="5", num_generations=2)
RECORD = Record(
    id="train:0:q/g0", task_id="train:0:q", split="train", generation=0, fence=1, status=RecordStatus.RUNNING
)


@dataclass(kw_only=True)
class Rollout:
    """A rollout to run, once or again from any of its turns."""

    model_dir: Path
    script: Script
    tools: Sequence[Callable[..., object]] = ()
    browser: Browser | None = None
    settings: dict[str, object] = field(default_factory=dict)
    reflection: dict[str, object] = field(default_factory=dict)
    engine: ScriptedEngine = field(init=False)

    async def run(self, *, committed: Sequence[Turn] = ()) -> RolloutResult:
        """Run it on a fresh engine."""
        self.engine = ScriptedEngine(self.model_dir, self.script)
        return await run_rollout(TASK, record=RECORD, committed=committed, agent=self.agent())

    async def sample(self, *, committed: Sequence[Turn] = (), task: Task = TASK) -> tuple[Record, tuple[Turn, ...]]:
        """Run it as a meta-episode, on a fresh engine, and score it."""
        self.engine = ScriptedEngine(self.model_dir, self.script)
        return await MetaEpisodeSampler(task, record=RECORD, committed=committed, agent=self.agent()).sample()

    def agent(self) -> Agent:
        """What the rollout works with."""

        async def commit(record: Record, turn: Turn) -> Record:
            return replace(record, turn_ids=(*record.turn_ids, turn.model.id))

        limits = {"max_new_tokens": 200, "max_prompt_tokens": 1200, "max_turns": 40, "repetition_early_stop_times": -1}
        return Agent(
            chat=ChatFormat.load(self.model_dir),
            client=self.engine,
            toolbox=FunctionToolbox(list(self.tools), recovery=Recovery.STATELESS),
            journal=MemoryStore(),
            commit_turn=commit,
            rollout=RolloutConfig.model_validate(limits | self.settings),
            inference=InferenceConfig(context_length=4000),
            reflection=ReflectionConfig.model_validate(self.reflection),
            tool_timeout_s=5.0,
            clock=lambda: datetime.now(UTC),
            browser=self.browser,
        )
