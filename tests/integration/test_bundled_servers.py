"""The bundled servers as an agent starts them: child processes over stdio, through the toolbox."""

import contextlib
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import agentrl
from agentrl.config import ToolsConfig
from agentrl.tools import open_toolbox
from agentrl.types import Recovery, ToolRequest, ToolStatus

MODULE = "agentrl.tools.servers."
SOURCE = str(Path(agentrl.__file__).parents[1])


@contextlib.asynccontextmanager
async def toolbox(tmp_path, **servers):
    path = tmp_path / "servers.json"
    path.write_text(json.dumps({"mcpServers": servers}), encoding="utf-8")
    box = await open_toolbox(ToolsConfig(mcp_config=path))
    try:
        yield box
    finally:
        await box.close()


def bundled(name, *flags, env=None):
    return {"command": "python", "args": ["-m", MODULE + name, *flags], "env": {"PYTHONPATH": SOURCE, **(env or {})}}


async def call(box, tool, /, **arguments):
    return await box.call(ToolRequest(call_id="1", name=tool, arguments=arguments), deadline_s=30)


async def test_python_and_corpus_serve_one_agent(tmp_path):
    corpus = tmp_path / "notes"
    corpus.mkdir()
    (corpus / "emba.md").write_text("# Emba\nEmba has 42 bridges.", encoding="utf-8")
    servers = {"py": bundled("python"), "notes": bundled("corpus", "--corpus", str(corpus))}
    async with toolbox(tmp_path, **servers) as box:
        assert [spec.name for spec in box.list_tools()] == ["python", "search", "fetch"]
        assert all(spec.recovery is Recovery.STATELESS for spec in box.list_tools())
        assert (await call(box, "python", code="print(6 * 7)")).content == "42"
        failed = await call(box, "python", code="print('a'); 1 / 0")
        assert failed.status is ToolStatus.TOOL_ERROR
        assert "[stdout]\na\n[stderr]\nTraceback" in failed.content
        assert (await call(box, "search", query="bridges")).content.startswith("id: emba.md\ntitle: Emba\n")
        assert "42 bridges" in (await call(box, "fetch", id="emba.md")).content
        assert (await call(box, "fetch", id="../servers.json")).status is ToolStatus.TOOL_ERROR


class _Refusing(BaseHTTPRequestHandler):
    def do_POST(self):
        self.send_response(int(self.path.strip("/")))
        self.end_headers()

    def log_message(self, *_arguments):
        pass


@pytest.fixture
def refusing_service():
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


async def test_a_connector_reads_its_key_from_the_environment_and_types_a_refusal(tmp_path, refusing_service):
    env = {"SERPER_API_KEY": "secret-key"}
    servers = {
        "search": bundled("web_search", "--url", f"{refusing_service}/401", env=env),
        "pages": bundled("web_page", "--url", f"{refusing_service}/402"),
    }
    async with toolbox(tmp_path, **servers) as box:
        refused = await call(box, "web_search", query="x")
        unpaid = await call(box, "read_page", url="https://example.org")
        bad = await call(box, "read_page", url="file:///etc/passwd")
    assert "HTTP 401" in refused.content
    assert "secret-key" not in refused.content
    assert "HTTP 402" in unpaid.content
    assert bad.status is ToolStatus.BAD_ARGUMENTS


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("web_search", [], "SERPER_API_KEY is not set"),
        ("corpus", ["--corpus", "nothing/here"], "no such file"),
        ("python", ["--cpu-s", "0"], "above 0"),
    ],
)
def test_a_server_that_cannot_work_says_why_and_ends(name, flags, message):
    command = [sys.executable, "-m", MODULE + name, *flags]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(path for path in sys.path if path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert message in done.stderr


def test_the_python_server_reports_what_is_isolated():
    command = [sys.executable, "-m", f"{MODULE}python", "--report"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == [
        "kernel", "network", "processes", "files", "not hidden",
    ]  # fmt: skip
