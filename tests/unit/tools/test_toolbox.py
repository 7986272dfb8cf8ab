"""How the tools of several servers are named."""

import random

from agentrl.tools.pool import ListedTool, SharedServer
from agentrl.tools.server_config import ServerConfig, TransportKind
from agentrl.tools.toolbox import _name_tools
from agentrl.types import Recovery


def offered(server, *names):
    config = ServerConfig(
        name=server, kind=TransportKind.STDIO, command="x", recovery=Recovery.STATELESS, timeout_s=1, max_in_flight=1,
        sessions=1, description="x",
    )  # fmt: skip
    tools = [
        ListedTool(server=server, name=name, remote_name=name, description="", parameters={"type": "object"})
        for name in names
    ]
    return SharedServer(config, connect_timeout_s=1, rng=random.Random(0)), tools


def test_every_name_leads_back_to_the_tool_as_its_server_names_it():
    specs = [tool.spec for tool in _name_tools([offered("a", "b", "a.b", "only"), offered("c", "b")])]
    assert [spec.name for spec in specs] == ["a.b", "a.a.b", "only", "c.b"]
    assert [spec.own_name for spec in specs] == ["b", "a.b", "only", "b"]


def test_names_that_no_model_can_write_are_left_out(caplog):
    specs = [tool.spec for tool in _name_tools([offered("a", "", "line\nbreak", "x" * 1000, "zero\0", "suche \u00e4")])]
    assert [spec.name for spec in specs] == ["suche \u00e4"]
    assert "no name a model can call" in caplog.text
