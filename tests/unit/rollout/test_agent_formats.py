"""The rollout loop in every tool-call format: a call runs, and one that cannot be read is answered."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.chat.formats import CALL_FORMATS, get_call_format
from agentrl.rollout import run_rollout
from agentrl.store import MemoryStore
from agentrl.tools import FunctionToolbox
from agentrl.types import StopReason, ToolRequest
from factories import make_task
from group_run import claim_task, make_agent, make_config
from scripted_engine import ScriptedEngine
from tiny_chat import write_tiny_chat

UNREADABLE = {
    "qwen3_coder": "<tool_call>add 2 3</tool_call>",
    "llama3": '<|python_tag|>{"name": "add", "parameters": {2, 3}}',
    "pythonic": "[add(2, 3)]",
    "deepseekv3": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n2, 3\n```<｜tool▁call▁end｜>",
    "deepseekv31": "<｜tool▁call▁begin｜>add<｜tool▁sep｜>{2, 3}<｜tool▁call▁end｜>",
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {2, 3}}]',
    "minicpm": "<|tool_call_start|>add(2, 3)<|tool_call_end|>",
    "mirorl": "<use_mcp_tool><tool_name>add</tool_name></use_mcp_tool>",
}


def add(a: int, b: int) -> str:
    """Sum of two integers."""
    return str(a + b)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat(tmp_path_factory.mktemp("chat"))


@pytest.mark.parametrize("name", sorted(CALL_FORMATS))
async def test_a_call_runs_and_one_that_cannot_be_read_is_answered(model_dir: Path, name: str) -> None:
    toolbox = FunctionToolbox([add])
    call = ToolRequest(call_id="", name="add", arguments={"a": 2, "b": 3})
    good = get_call_format(name).render([call], tools=toolbox.list_tools())
    bad = UNREADABLE.get(name, "<tool_call>add 2 3</tool_call>")
    texts = [f"<think>{good}</think>{bad}", good, "<answer>5</answer>"]
    store = MemoryStore()
    claim = await claim_task(store, make_task(answer="5"))
    record, _ = await store.open_records(claim)
    engine = ScriptedEngine(model_dir, lambda context, depth: texts[depth])
    config = make_config(max_new_tokens=600, max_prompt_tokens=3000, tool_call_parser=name)
    agent = make_agent(config, store=store, engine=engine, toolbox=toolbox)
    result = await run_rollout(claim.task, record=record, committed=(), agent=agent)
    assert (result.stop_reason, result.answer) == (StopReason.ANSWER, "5")
    calls = [tool for turn in result.turns for tool in turn.tools]
    assert [(tool.status, tool.request["arguments"]) for tool in calls] == [("malformed", {}), ("ok", {"a": 2, "b": 3})]
    context = engine.tokenizer.decode(list(engine.requests[-1].input_ids), skip_special_tokens=False)
    assert get_call_format(name).how in context  # the model was told how to write it
    assert "5" in str(calls[1].response["content"])
