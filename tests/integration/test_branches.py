"""Branches in a store: a sampler that dies between them is continued, and the audit finds nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.config import RunConfig
from agentrl.inspector.audit import audit_run
from agentrl.protocols import Store
from agentrl.store import MemoryStore
from agentrl.tools import FunctionToolbox
from agentrl.types import PolicyVersion, Recovery, TurnTokens
from audit_run import CALL, CONFIG, add, claim, make_runner, make_task
from scripted_engine import ScriptedEngine
from tiny_chat import write_tiny_chat

TASK = "train:0:q0"


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat(tmp_path_factory.mktemp("chat"))


def with_settings(**settings: object) -> RunConfig:
    wanted = {"max_prompt_tokens": 500, "max_turns": 9, "new_context": "last_k", "last_k_turns": 2} | settings
    return CONFIG.model_copy(update={"rollout": CONFIG.rollout.model_copy(update=wanted)})


def script(context: str, depth: int) -> str:
    """As many dots as results are in sight, and a call."""
    return "." * context.count("<tool_response>") + CALL


class DiedError(RuntimeError):
    """The sampler is gone."""


async def run_group(store: Store, model_dir: Path, *, config: RunConfig, dies_in_request: int | None) -> bool:
    """Claim the Task and run its group on a sampler that dies in the given request; whether it got to the end."""

    def script_until_death(context: str, depth: int) -> str | BaseException:
        return DiedError() if len(engine.requests) == dies_in_request else script(context, depth)

    engine = ScriptedEngine(model_dir, script_until_death)
    runner = make_runner(store, engine, model_dir, config=config)
    runner.agent = replace(runner.agent, toolbox=FunctionToolbox([add], recovery=Recovery.STATELESS))
    claimed = await claim(store, split="train", lease_s=60)
    is_over = True
    try:
        await runner.run(claimed)
    except* DiedError:
        await store.release_claim(claimed)
        is_over = False
    return is_over


async def tokens_of(store: Store) -> list[list[TurnTokens]]:
    records = sorted(await store.list_records(task_id=TASK), key=lambda record: record.id)
    return [[turn.tokens for turn in await store.load_turns(record)] for record in records]


@pytest.mark.parametrize("new_context", ["last_k", "discard_all_tools"])
async def test_samplers_that_die_again_and_again_leave_the_branches_of_one_that_lives(
    store: Store, model_dir: Path, new_context: str
) -> None:
    config = with_settings(new_context=new_context)
    whole = MemoryStore()
    for each in (whole, store):
        await each.publish_policy(PolicyVersion(version=0, path="v0"))
        await each.insert_tasks([make_task("q0")])
    assert await run_group(whole, model_dir, config=config, dies_in_request=None)
    num_deaths = 0
    while not await run_group(store, model_dir, config=config, dies_in_request=4):
        num_deaths += 1
    assert num_deaths >= 4
    assert await tokens_of(store) == await tokens_of(whole)
    assert [tokens.parent_turn for tokens in (await tokens_of(store))[0]].count(-1) > 1
    report = await audit_run(store, config=config, run_dir=None)
    assert report.is_clean, report.as_json()
