import json
import sys
from pathlib import Path

import pytest

from agentrl.config import ToolsConfig
from agentrl.errors import ConfigError
from agentrl.tools.config_file import load_server_configs
from agentrl.tools.server_config import SessionScope, TransportKind
from agentrl.types import Recovery

CALCULATOR = {"command": "python", "args": ["-m", "agentrl.tools.servers.calculator"]}


def load(tmp_path, servers, *, environment=None, **settings):
    path = tmp_path / "servers.json"
    path.write_text(json.dumps({"mcpServers": servers}), encoding="utf-8")
    return load_server_configs(ToolsConfig(mcp_config=path, **settings), environment=environment or {})


def test_an_entry_takes_the_settings_as_defaults_and_its_own_keys_first(tmp_path):
    own = {**CALCULATOR, "timeout_s": 2, "max_in_flight": 3, "sessions": 4, "recovery": "journalled"}
    plain, special = load(
        tmp_path,
        {"plain": CALCULATOR, "special": own},
        tool_timeout_s=9,
        tool_max_in_flight=8,
        tool_sessions_per_server=7,
    )
    assert (plain.timeout_s, plain.max_in_flight, plain.sessions, plain.recovery) == (9, 8, 7, Recovery.STATELESS)
    assert (special.timeout_s, special.max_in_flight, special.sessions, special.recovery) == (
        2,
        3,
        4,
        Recovery.JOURNALLED,
    )


def test_the_command_python_is_the_running_interpreter_and_others_stay(tmp_path):
    ours, other = load(tmp_path, {"a": CALCULATOR, "b": {"command": "uvx", "args": ["x"]}})
    assert ours.command == sys.executable
    assert other.command == "uvx"


def test_only_bundled_servers_are_stateless_unless_declared(tmp_path):
    servers = {
        "bundled": CALCULATOR,
        "other": {"command": "uvx"},
        "declared": {"command": "uvx", "recovery": "stateless"},
        "web": {"url": "https://example.org/mcp"},
    }
    recovery = [server.recovery.value for server in load(tmp_path, servers)]
    assert recovery == ["stateless", "stateful", "stateless", "stateful"]


def test_variables_are_read_from_the_environment_with_defaults(tmp_path):
    entry = {
        "command": "run",
        "args": ["--key=${KEY}", "${MODE:-fast}", "${EMPTY:-}"],
        "env": {"TOKEN": "${KEY}"},
        "cwd": "${HOME_DIR}",
    }
    (server,) = load(tmp_path, {"a": entry}, environment={"KEY": "k1", "HOME_DIR": "home"})
    assert server.args == ("--key=k1", "fast", "")
    assert server.env == {"TOKEN": "k1"}
    assert server.cwd == Path("home")


def test_secrets_never_show_in_the_description_or_the_repr(tmp_path):
    servers = {
        "a": {"command": "run", "args": ["${KEY}"], "env": {"TOKEN": "${KEY}"}},
        "b": {"url": "https://user:${KEY}@example.org/mcp?key=${KEY}", "headers": {"X-Key": "${KEY}"}},
    }
    command, web = load(tmp_path, servers, environment={"KEY": "hunter2"})
    assert command.description == "run ${KEY}"
    assert web.description == "https://example.org/mcp"
    assert "hunter2" in web.url
    assert "hunter2" not in repr(web)
    assert "hunter2" not in web.description


def test_keys_among_the_arguments_show_neither_in_the_description_nor_in_what_the_server_says(tmp_path):
    args = ["--api-key", "hunter2", "--url=db://me:${DB_PASSWORD}@h", "${SEARCH_TOKEN}", "${PLACE}"]
    environment = {"DB_PASSWORD": "swordfish", "SEARCH_TOKEN": "opensesame", "PLACE": "somewhere"}
    (server,) = load(tmp_path, {"a": {"command": "run", "args": args}}, environment=environment)
    assert server.description == "run --api-key *** --url=db://me:***@h ${SEARCH_TOKEN} ${PLACE}"
    assert not any(secret in repr(server) for secret in ("hunter2", "swordfish", "opensesame"))
    said = {"hunter2": ["swordfish", 1, None, ({"text": "opensesame somewhere"},)]}
    assert server.json_without_secrets(said) == {"***": ["***", 1, None, ({"text": "*** somewhere"},)]}


def test_the_bearer_token_goes_to_urls_that_have_no_authorization_of_their_own(tmp_path):
    servers = {
        "plain": {"url": "http://h/mcp"},
        "own": {"url": "http://h/mcp", "headers": {"authorization": "Basic x"}},
        "stdio": CALCULATOR,
    }
    plain, own, stdio = load(tmp_path, servers, mcp_auth_token="t")
    assert plain.headers == {"Authorization": "Bearer t"}
    assert own.headers == {"authorization": "Basic x"}
    assert stdio.headers == {}


@pytest.mark.parametrize(
    ("extra", "kind"),
    [
        ({}, TransportKind.AUTO),
        ({"type": "http"}, TransportKind.HTTP),
        ({"type": "streamable-http"}, TransportKind.HTTP),
        ({"transport": "sse"}, TransportKind.SSE),
    ],
)
def test_a_url_is_spoken_to_as_its_type_says(tmp_path, extra, kind):
    (server,) = load(tmp_path, {"a": {"url": "http://h/mcp", **extra}})
    assert server.kind is kind


def test_disabled_servers_and_keys_of_editors_are_passed_over(tmp_path):
    servers = {"a": {**CALCULATOR, "autoApprove": ["x"]}, "b": {"command": "x", "disabled": True}}
    assert [server.name for server in load(tmp_path, servers)] == ["a"]


def test_mcp_server_name_chooses_one_server_and_an_unknown_one_lists_the_known(tmp_path):
    servers = {"a": CALCULATOR, "b": CALCULATOR}
    assert [server.name for server in load(tmp_path, servers, mcp_server_name="b")] == ["b"]
    with pytest.raises(ConfigError, match=r"'c' is not in .*a, b"):
        load(tmp_path, servers, mcp_server_name="c")


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({}, "either `command` .* or `url`"),
        ({"command": "x", "url": "http://h"}, "either `command` .* or `url`"),
        ({"command": "x", "recovry": "stateless"}, "unknown key 'recovry', did you mean 'recovery'"),
        ({"command": "x", "recovery": "sometimes"}, "recovery: .*'stateless', 'journalled' or 'stateful'"),
        ({"command": "x", "stateless": True}, 'write "recovery": "stateless"'),
        ({"command": "x", "args": "-m"}, "args: "),
        ({"command": "x", "timeout_s": 0}, "timeout_s: "),
        ({"command": "x", "type": "sse"}, "needs a `url`"),
        ({"url": "http://h", "type": "stdio"}, "needs a `command`"),
        ({"url": "http://h", "type": "carrier-pigeon"}, "carrier-pigeon"),
        ({"url": "ftp://h"}, "url: "),
        ({"command": "x", "args": ["${MISSING}"]}, r"\$\{MISSING\} is not in the environment"),
        ("x", "expected an object"),
        ({"command": "x", "timeout_s": float("inf")}, "timeout_s: .*finite"),
        ({"command": "x", "sessions": 10**9}, "sessions: "),
        ({"command": " "}, "command: is empty"),
        ({"command": "x", "args": ["a", "\0"]}, "args.1: has a character"),
        ({"command": "x", "env": {"A=B": "1"}}, "'A=B' is no name of an environment variable"),
        ({"command": "x", "env": {"A": "\ud800"}}, "env.A: has a character"),
        ({"command": "x", "cwd": "\0"}, "cwd: has a character"),
        ({"url": "http://[bad"}, "url: is no address"),
        ({"url": "http://h:99999/mcp"}, "url: is no address"),
        ({"url": "http://h:port/mcp"}, "url: is no address"),
        ({"url": "http:///mcp"}, "url: is no address"),
        ({"url": "${A_WORD}"}, "url: is no address"),
        ({"url": "http://h", "headers": {"X": "a\nb"}}, "'X': HTTP has no such header"),
        ({"url": "http://h", "headers": {"X Y": "a"}}, "'X Y': HTTP has no such header"),
        ({"url": "http://h", "auth_token": "gehéim"}, "'Authorization': HTTP has no such header"),
    ],
)
def test_a_bad_entry_is_refused_with_its_name_and_fault(tmp_path, entry, message):
    with pytest.raises(ConfigError, match=rf"server 'bad': .*{message}|server 'bad': {message}"):
        load(tmp_path, {"bad": entry}, environment={"A_WORD": "word"})


def test_what_is_wrong_with_a_value_is_said_without_the_value(tmp_path):
    for entry in ({"url": "http://key-1234:port/"}, {"url": "http://h", "auth_token": "key-1234\n"}):
        with pytest.raises(ConfigError) as refusal:
            load(tmp_path, {"bad": entry})
        assert "key-1234" not in str(refusal.value)


@pytest.mark.parametrize("name", ["", "a\nb", "\ud800", "a\0"])
def test_a_server_has_a_name_that_can_be_shown(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot be the name of a server"):
        load(tmp_path, {name: CALCULATOR})


def test_a_gateway_is_known_by_its_url_also_where_a_variable_holds_it(tmp_path):
    (server,) = load(tmp_path, {"all": {"url": "${URL}"}}, environment={"URL": "http://h/mcpapi"})
    assert server.kind is TransportKind.GATEWAY


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"mcpServers": {}}', '{"mcpServers": []}', "{"])
def test_a_file_that_is_no_server_list_is_refused_by_name(tmp_path, content):
    path = tmp_path / "broken.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"broken\.json"):
        load_server_configs(ToolsConfig(mcp_config=path))


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.json: cannot be read"):
        load_server_configs(ToolsConfig(mcp_config=tmp_path / "absent.json"))


def test_a_manager_url_is_one_server_over_http_or_sse():
    (server,) = load_server_configs(ToolsConfig(mcp_manager_url="http://h:1/mcp", mcp_auth_token="t"))
    assert (server.kind, server.url, server.recovery) == (TransportKind.AUTO, "http://h:1/mcp", Recovery.STATEFUL)
    assert server.headers == {"Authorization": "Bearer t"}


@pytest.mark.parametrize("url", ["http://h/mcpapi", "http://h/x/mcpapi/", "http://h/mcpapi?a=b"])
def test_a_url_that_ends_in_mcpapi_is_a_gateway_in_both_places(tmp_path, url):
    (server,) = load_server_configs(ToolsConfig(mcp_manager_url=url, mcp_auth_token="t"))
    assert (server.kind, server.only_server) == (TransportKind.GATEWAY, None)
    assert server.headers == {"Authorization": "Bearer t"}
    (listed,) = load(tmp_path, {"dock": {"url": url}})
    assert (listed.name, listed.kind) == ("dock", TransportKind.GATEWAY)


def test_a_name_that_no_file_has_is_looked_for_behind_the_gateway(tmp_path):
    chosen = load(tmp_path, {"a": CALCULATOR}, mcp_manager_url="http://h/mcpapi", mcp_server_name="search")
    assert [(server.name, server.only_server) for server in chosen] == [("manager", "search")]
    chosen = load(tmp_path, {"a": CALCULATOR}, mcp_manager_url="http://h/mcpapi", mcp_server_name="a")
    assert [(server.name, server.only_server) for server in chosen] == [("a", None)]


def test_a_gateway_has_no_session_for_a_record(tmp_path):
    with pytest.raises(ConfigError, match="per_rollout: the /mcpapi protocol has no sessions"):
        load(tmp_path, {"a": {"url": "http://h/mcpapi", "scope": "per_rollout"}})


def test_there_is_nothing_to_choose_behind_one_plain_endpoint():
    with pytest.raises(ConfigError, match="nothing to choose"):
        load_server_configs(ToolsConfig(mcp_manager_url="http://h/mcp", mcp_server_name="search"))


def test_all_three_sources_may_be_used_together(tmp_path):
    yaml_file = tmp_path / "tools.yaml"
    yaml_file.write_text("tools: [{config: {command: uvx, args: [b]}}]", encoding="utf-8")
    servers = load(tmp_path, {"a": CALCULATOR}, tool_config_path=yaml_file, mcp_manager_url="http://h/mcp")
    assert [(server.name, server.kind.value) for server in servers] == [
        ("a", "stdio"),
        ("b", "stdio"),
        ("manager", "auto"),
    ]


def test_one_name_in_two_sources_is_refused_with_both(tmp_path):
    yaml_file = tmp_path / "tools.yaml"
    yaml_file.write_text("tools: [{config: {command: uvx, server_name: a}}]", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"server 'a' is in .*servers\.json and in .*tools\.yaml"):
        load(tmp_path, {"a": CALCULATOR}, tool_config_path=yaml_file)


def test_the_limits_of_a_server_are_taken_from_its_entry(tmp_path):
    entry = {
        **CALCULATOR,
        "connect_timeout_s": 3,
        "rate_limit_per_s": 2.5,
        "max_retries": 0,
        "retry_pause_s": 1,
        "breaker_failures": 9,
        "breaker_pause_s": 7,
        "blacklist": ["shell"],
        "scope": "per_rollout",
    }
    (server,) = load(tmp_path, {"a": entry})
    assert (server.connect_timeout_s, server.rate_limit_per_s, server.max_retries) == (3, 2.5, 0)
    assert (server.retry_pause_s, server.breaker_failures, server.breaker_pause_s) == (1, 9, 7)
    assert (server.blacklist, server.scope, server.sessions) == ({"shell"}, SessionScope.PER_ROLLOUT, 96)


def test_a_servers_own_token_comes_before_that_of_the_run(tmp_path):
    servers = {"own": {"url": "http://h/mcp", "auth_token": "${KEY}"}, "run": {"url": "http://h/mcp"}}
    own, run = load(tmp_path, servers, environment={"KEY": "k"}, mcp_auth_token="t")
    assert own.headers == {"Authorization": "Bearer k"}
    assert run.headers == {"Authorization": "Bearer t"}
    assert "Bearer" not in repr(own)


def test_nothing_configured_is_no_server():
    assert load_server_configs(ToolsConfig()) == []


def test_a_long_command_of_many_lines_is_described_in_one_short_line(tmp_path):
    (server,) = load(tmp_path, {"a": {"command": "run", "args": ["-c", "first\nsecond", "x" * 500]}})
    assert server.description == "run -c first second ..."
