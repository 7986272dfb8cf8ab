"""Rolls out the rows of an evaluation as a split of their own."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.rollout.dataset import TaskRow, build_tasks
from agentrl.rollout.parts import RunParts
from agentrl.rollout.worker import SamplerWorker
from agentrl.types import Record, Task


async def sample_split(
    parts: RunParts, *, rows: Sequence[TaskRow], split: str, num_generations: int
) -> tuple[list[Task], list[Record]]:
    """The Tasks of the rows and their final Records, newest first. Records that are there already are not repeated."""
    tasks = build_tasks(rows, split=split, epoch=0, num_generations=num_generations)
    await parts.store.insert_tasks(tasks)
    # By the size of a group the worker decides how many Tasks run at a time.
    rollout = parts.config.rollout.model_copy(update={"num_generations": num_generations})
    worker = SamplerWorker.build(
        parts.config.model_copy(update={"rollout": rollout}), split=split, store=parts.store, toolbox=parts.toolbox,
        client=parts.client, chat=parts.chat, sampler_class=parts.sampler_class, scoring=parts.scoring,
        browser=parts.browser,
    )  # fmt: skip
    worker.call_tools_with(parts.caller)
    async with worker.upkeep():
        await worker.drain()
    return tasks, await parts.store.list_records(split=split, limit=len(tasks) * num_generations)
