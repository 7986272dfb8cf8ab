"""A Record that is put down, continued under the next policy version and trained, with the real trainer in a thread."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from agentrl.config import RunConfig
from agentrl.inspector.audit import audit_run
from agentrl.protocols import TrainStore
from agentrl.store import MemoryStore
from agentrl.tools import FunctionToolbox
from agentrl.train.loop import train
from agentrl.types import PolicyVersion, Recovery
from audit_run import CALL, add, claim, make_runner
from factories import make_task
from launched_run import write_run
from scripted_engine import ScriptedEngine

LONG = make_task("long", query="long: 2+3?", answer="5")
SHORT = make_task("short", query="short: 2+3?", answer="5")
NUM_LONG_TURNS = 5
LIMIT_S = 60.0


class TrainersStore:
    """The test's store as the trainer's thread sees it: every call runs on the test's loop.

    The engine serves a version from the moment in which it is published.
    """

    def __init__(self, store: MemoryStore, engine: ScriptedEngine) -> None:
        self._store = store
        self._engine = engine
        self._loop = asyncio.get_running_loop()

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any, **named: Any) -> Any:
            work = asyncio.run_coroutine_threadsafe(getattr(self._store, name)(*arguments, **named), self._loop)
            return await asyncio.wrap_future(work)

        return call

    async def publish_policy(self, version: PolicyVersion) -> None:
        self._engine.version = version.version
        await self.__getattr__("publish_policy")(version)


class Script:
    """Long Tasks take five turns, others one; of any two Records one is right."""

    def __init__(self) -> None:
        self.num_answers = 0

    def __call__(self, context: str, depth: int) -> str:
        done = context.count("<tool_response>")
        if "long" in context and done < NUM_LONG_TURNS - 1:
            return f"{done} {CALL}"
        self.num_answers += 1
        return f"<answer>{4 + self.num_answers % 2}</answer>"


def make_config(folder: Path) -> RunConfig:
    values = {
        "run": {"output_dir": str(folder / "output"), "run_name": "partial"},
        "model": {"model_name_or_path": str(folder / "model")},
        "rollout": {
            "num_generations": 2, "max_new_tokens": 200, "max_prompt_tokens": 3000, "partial_rollout_tokens": 100,
        },
        "inference": {"context_length": 4000},
        "algo": {"tasks_per_step": 1, "max_staleness": 1, "advantage": "group_mean"},
        "train": {"max_steps": 2, "report_to": "none", "data_timeout_s": LIMIT_S, "save_steps": 1},
    }  # fmt: skip
    return RunConfig.model_validate(values)


async def test_rows_of_a_record_that_was_put_down_are_trained_token_by_token_with_their_versions(
    tmp_path: Path,
) -> None:
    torch.set_num_threads(1)
    folder = write_run(tmp_path)
    config = make_config(folder)
    store, engine = MemoryStore(), ScriptedEngine(folder / "model", Script())
    runner = make_runner(store, engine, folder / "model", config=config)
    runner.agent = replace(runner.agent, toolbox=FunctionToolbox([add], recovery=Recovery.STATELESS))
    runner.put_down.idle_grace_s = LIMIT_S  # the trainer starts slowly, and nothing is sampled meanwhile
    seen_by_trainer = TrainersStore(store, engine)

    async def open_store() -> TrainStore:
        return seen_by_trainer

    training = asyncio.create_task(asyncio.to_thread(train, config, open_store=open_store, sinks=list))
    async with asyncio.timeout(LIMIT_S):
        await store.insert_tasks([LONG])
        long = asyncio.create_task(runner.run(await claim(store, split="train", lease_s=600)))
        while runner.put_down.num_waiting < 2:
            await asyncio.sleep(0.01)
        await store.insert_tasks([SHORT])
        await runner.run(await claim(store, split="train", lease_s=600))
        await long
        await training

    steps = await store.list_steps()
    assert [step.task_ids for step in steps] == [(SHORT.id,), (LONG.id,)]
    assert [step.metrics["staleness_max"] for step in steps] == [0, 1]
    replies = dict.fromkeys(  # both Records of a group begin with the same completions
        (tuple(request.input_ids), reply.output_ids, reply.version_spans[0].version)
        for request, reply in zip(engine.requests, engine.replies, strict=True)
    )
    rows = await store.load_sequences(steps[1].sequence_ids)
    assert len(rows) == 2
    for row in rows:
        ids = tuple(row.token_ids.tolist())
        seen = [reply for reply in replies if ids[: len(reply[0]) + len(reply[1])] == reply[0] + reply[1]]
        assert [version for *_, version in seen] == [0, 0, 1, 1, 1]
        for context, output_ids, version in seen:
            trained = slice(len(context), len(context) + len(output_ids))
            assert row.loss_mask[trained].all()
            assert set(row.policy_versions[trained]) == {version}
        assert row.loss_mask.sum() == sum(len(output_ids) for _, output_ids, _ in seen)
    report = await audit_run(store, config=config, run_dir=config.run.run_dir)
    assert [finding for result in report.results for finding in result.findings] == []
