"""The browse agent of agent_config.yml as rollouts use it."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.chat import ChatFormat
from agentrl.cli.agents import browser_of, open_agents
from agentrl.config import RolloutConfig, RunConfig
from agentrl.store import MemoryStore
from tiny_chat import write_tiny_chat

AGENTS = """
browse_agent:
  status: {status}
  models: [{{base_url: "http://127.0.0.1:1/v1", model: "reader"}}]
  browse_tools: [fetch]
  min_prompt_length: 10
  max_prompt_length: 20
  timeout: 7
  default_purpose: {{fetch: "the gist"}}
"""


@pytest.mark.parametrize("status", ["true", "false"])
async def test_the_browse_agent_of_the_file_reaches_the_rollouts_if_it_is_switched_on(
    tmp_path: Path, status: str
) -> None:
    path = tmp_path / "agent_config.yml"
    path.write_text(AGENTS.format(status=status))
    chat = ChatFormat.load(write_tiny_chat(tmp_path / "chat"))
    config = RunConfig(rollout=RolloutConfig(agent_config_path=path))
    async with open_agents(config, MemoryStore()) as agents:
        browser = browser_of(agents, chat=chat)
    if status == "false":
        assert browser is None
        return
    assert browser is not None
    assert (browser.model.models, browser.tools) == (("reader",), ("fetch",))
    assert browser.default_purposes == {"fetch": "the gist"}
    assert (browser.min_result_tokens, browser.max_result_tokens, browser.timeout_s) == (10, 20, 7.0)
    assert len(browser.encode("seven..")) == 7
