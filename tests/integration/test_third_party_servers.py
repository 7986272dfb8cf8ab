"""MCP servers from PyPI that nobody here wrote, attached by configuration alone and called in a rollout."""

import json
import subprocess
from dataclasses import replace
from datetime import UTC, datetime
from importlib.util import find_spec

import pytest
from aiohttp import web

from agentrl.chat import ChatFormat
from agentrl.config import InferenceConfig, RolloutConfig, ToolsConfig
from agentrl.rollout.agent import Agent
from agentrl.rollout.sampler import MCPSampler
from agentrl.store import MemoryStore
from agentrl.tools import open_toolbox
from agentrl.types import Record, RecordStatus, StopReason, Task, ToolStatus
from left_behind import expect_nothing_left_behind
from refusing_endpoint import served
from scripted_engine import ScriptedEngine
from tiny_chat import write_tiny_chat

MODULES = ("mcp_server_time", "mcp_server_git", "mcp_server_fetch")
MISSING = [module for module in MODULES if find_spec(module) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}; pip install -e '.[dev]'")

PAGE = "<html><body><article><h1>Owls</h1><p>The barn owl hunts by ear.</p></article></body></html>"


@pytest.fixture(autouse=True)
async def nothing_is_left_behind():
    with expect_nothing_left_behind():
        yield


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def rollout(model_dir, toolbox, *texts):
    async def commit(record, turn):
        return replace(record, turn_ids=(*record.turn_ids, turn.model.id))

    agent = Agent(
        chat=ChatFormat.load(model_dir),
        client=ScriptedEngine(model_dir, lambda context, depth: texts[depth]),
        toolbox=toolbox,
        journal=MemoryStore(),
        commit_turn=commit,
        rollout=RolloutConfig(max_new_tokens=1000, max_prompt_tokens=20_000),
        inference=InferenceConfig(context_length=30_000),
        tool_timeout_s=30.0,
        clock=lambda: datetime.now(UTC),
    )
    task = Task(id="train:0:q", item_id="q", split="train", epoch=0, query="?", answer="5", num_generations=1)
    record = Record(
        id="train:0:q/g0", task_id=task.id, split="train", generation=0, fence=1, status=RecordStatus.RUNNING
    )
    return await MCPSampler(task, record=record, committed=(), agent=agent).sample()


def make_repository(folder):
    git = ["git", "-C", str(folder), "-c", "user.name=A", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    (folder / "owl.txt").write_text("barn owl\n", encoding="utf-8")
    subprocess.run([*git, "add", "owl.txt"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "An owl is added"], check=True)


async def page(_request):
    return web.Response(text=PAGE, content_type="text/html")


async def test_three_servers_from_pypi_are_attached_by_files_alone_and_called_in_one_rollout(tmp_path):
    repository = tmp_path / "repository"
    repository.mkdir()
    make_repository(repository)
    json_file, yaml_file = tmp_path / "servers.json", tmp_path / "tools.yaml"
    fetch = ["-m", "mcp_server_fetch", "--ignore-robots-txt", "--allow-private-ips"]
    servers = {
        "time": {"command": "python", "args": ["-m", "mcp_server_time", "--local-timezone", "UTC"]},
        "fetch": {"command": "python", "args": fetch, "scope": "per_rollout"},
    }
    json_file.write_text(json.dumps({"mcpServers": servers}), encoding="utf-8")
    yaml_file.write_text(
        f"tools: [{{config: {{command: python, args: [-m, mcp_server_git, -r, {repository}], env: [HTTPS_PROXY]}}}}]",
        encoding="utf-8",
    )
    app = web.Application()
    app.router.add_get("/owl", page)
    async with served(app) as url:
        toolbox = await open_toolbox(
            ToolsConfig(mcp_config=json_file, tool_config_path=yaml_file, tool_connect_timeout_s=60)
        )
        record, turns = await rollout(
            write_tiny_chat(tmp_path / "chat"),
            toolbox,
            call("convert_time", source_timezone="Asia/Tokyo", time="12:00", target_timezone="UTC")
            + call("git_log", repo_path=str(repository))
            + call("fetch", url=f"{url}/owl"),
            call("convert_time", source_timezone="Nowhere/Land", time="12:00", target_timezone="UTC")
            + call("git_log", repo=str(repository)),
            "<answer>5</answer>",
        )
        await toolbox.close()
    assert (record.stop_reason, record.score) == (StopReason.ANSWER, 1.0)
    assert [tool.status for tool in turns[0].tools] == [ToolStatus.OK] * 3
    converted, log, text = (tool.response["content"] for tool in turns[0].tools)
    assert "03:00" in converted
    assert "An owl is added" in log
    assert "barn owl hunts by ear" in text
    assert [tool.status for tool in turns[1].tools] == [ToolStatus.TOOL_ERROR, ToolStatus.BAD_ARGUMENTS]
