"""Rolls out the rows of an evaluation as a split of their own, named after all that decides what its Records are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agentrl.config import RunConfig
from agentrl.rollout.dataset import TaskRow, build_tasks
from agentrl.rollout.parts import RunParts
from agentrl.rollout.worker import SamplerWorker
from agentrl.scoring import MCPScorerFactory
from agentrl.types import Record, Task

_WITHOUT_INFLUENCE = {"num_generations", "num_samplers", "max_concurrent_samples_per_process"}


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


def reflecting_always(config: RunConfig) -> RunConfig:
    """The configuration with a request to reflect after every answer: no held-out truth may say which are wrong."""
    reflection = config.reflection.model_copy(update={"reflect_when": "always"})
    return config.model_copy(update={"reflection": reflection})


def split_name(parts: RunParts, *, rows: Sequence[TaskRow], policy_version: int, variant: str) -> str:
    """A name for the Records of these rows under these settings, and of no others."""
    config = parts.config
    decisive = {
        "rows": [asdict(row) for row in rows],
        "scorers": sorted({MCPScorerFactory.version(row.scorer, judge=parts.scoring.context.judge) for row in rows}),
        "rollout": config.rollout.model_dump(mode="json", exclude=_WITHOUT_INFLUENCE),
        "reflection": config.reflection.model_dump(mode="json"),
        "inference": [
            config.inference.preferred_sampling_params, config.inference.presence_penalty,
            config.inference.frequency_penalty, config.inference.context_length,
        ],
        "tools": [tool.as_openai() for tool in parts.toolbox.list_tools()],
        "tool_limits": [config.tools.tool_timeout_s, config.tools.max_tool_result_chars],
        "files": [_content(path) for path in _files(config)],
    }  # fmt: skip
    return f"eval-v{policy_version}{variant}-{fingerprint(decisive)}"


def fingerprint(value: Any) -> str:
    """Eight characters that another JSON value does not have."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def _files(config: RunConfig) -> tuple[Path | None, ...]:
    """Files that say how tools are served, results summarised and prompts rendered."""
    tools, rollout = config.tools, config.rollout
    return tools.mcp_config, tools.tool_config_path, rollout.agent_config_path, config.model.chat_template


def _content(path: Path | None) -> str:
    return "" if path is None else hashlib.sha256(path.read_bytes()).hexdigest()
