import sys

import pytest

from agentrl.config import ToolsConfig
from agentrl.errors import ConfigError
from agentrl.tools.config_file import load_server_configs
from agentrl.types import Recovery

SHIPPED = """
tools:
  - class_name: "mirorl.tools.mcp_tool.MCPTool"
    config:
      command: "python"
      args: ["servers/search_server.py"]
      env: ["SERPER_API_KEY", "HTTPS_PROXY"]
      server_name: "search_and_scrape_webpage"
      max_retries: 5
      delay_between_retries: 1
      connection_timeout: 5
      execution_timeout: 600
      blacklist: ["scrape"]
    tool_schema:
      type: "mcp"
      function: {}
"""


def load(tmp_path, text, *, environment=None, **settings):
    path = tmp_path / "mcp_tool_config.yaml"
    path.write_text(text, encoding="utf-8")
    return load_server_configs(ToolsConfig(tool_config_path=path, **settings), environment=environment or {})


def test_the_file_of_the_other_trainer_loads_unchanged(tmp_path):
    (server,) = load(tmp_path, SHIPPED, environment={"SERPER_API_KEY": "k${X}", "OTHER": "o"})
    assert (server.name, server.command) == ("search_and_scrape_webpage", sys.executable)
    assert server.args == ("servers/search_server.py",)
    assert server.env == {"SERPER_API_KEY": "k${X}"}
    assert (server.max_retries, server.retry_pause_s) == (5, 1)
    assert (server.connect_timeout_s, server.timeout_s) == (5, 600)
    assert server.blacklist == {"scrape"}
    assert server.recovery is Recovery.STATEFUL


def test_a_missing_tool_schema_means_mcp_and_missing_keys_take_the_settings_of_the_run(tmp_path):
    (server,) = load(tmp_path, "tools: [{config: {command: npx}}]", tool_timeout_s=7)
    assert (server.name, server.command, server.args, server.env) == ("npx", "npx", (), {})
    assert (server.timeout_s, server.connect_timeout_s) == (7, None)


def test_servers_without_a_name_are_called_after_their_script_and_never_the_same(tmp_path):
    text = """
tools:
  - config: {command: python, args: ["-u", "tools/web.py", "--fast"]}
  - config: {command: python, args: ["other/web.py"]}
  - config: {command: python, args: ["-m", "mcp_server_time"]}
  - config: {command: uvx, args: ["mcp-server-git"]}
"""
    assert [server.name for server in load(tmp_path, text)] == ["web", "web-2", "mcp_server_time", "mcp-server-git"]


def test_server_name_chooses_among_the_servers(tmp_path):
    text = "tools: [{config: {command: a, server_name: one}}, {config: {command: b, server_name: two}}]"
    assert [server.name for server in load(tmp_path, text, mcp_server_name="two")] == ["two"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tools: []", "expected a list `tools`"),
        ("- a", "expected a list `tools`"),
        ("tools: [", "not valid YAML"),
        ("tools: [x]", "tool 1: expected a mapping"),
        ("tools: [{config: {}}]", "tool 1: config: command"),
        (
            "tools: [{config: {command: a, excution_timeout: 1}}]",
            "'excution_timeout', did you mean 'execution_timeout'",
        ),
        ("tools: [{class_name: C, config: {command: a}, tool_schema: {type: function}}]", "tool of another trainer"),
        ("tools: [{config: {command: a, server_name: x}}, {config: {command: b, server_name: x}}]", "already taken"),
        ("tools: [{config: {command: a, env: {KEY: value}}}]", "tool 1: config: env"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_the_place(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path, text)
    assert "mcp_tool_config.yaml" in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot be read"):
        load_server_configs(ToolsConfig(tool_config_path=tmp_path / "absent.yaml"))
