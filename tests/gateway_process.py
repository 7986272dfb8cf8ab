"""A gateway started by its command, for tests."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx2

TEST_SERVER = Path(__file__).parent / "data" / "tool_server.py"
TOKEN = "s3cret"


def write_servers(folder, servers):
    path = folder / "servers.json"
    path.write_text(json.dumps({"mcpServers": servers}), encoding="utf-8")
    return path


def tools_server(**options):
    return {"command": "python", "args": [str(TEST_SERVER)], **options}


@contextlib.contextmanager
def running_gateway(config, *flags, token=TOKEN):
    """The base URL of `agentrl tools serve config`; it ends in time and leaves no child."""
    command = [sys.executable, "-m", "agentrl.cli.main", "tools", "serve", str(config), "--port", "0", *flags]
    environment = {**os.environ, "MCP_GATEWAY_TOKEN": token}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith("serving "):
                break
        else:
            raise AssertionError(f"the gateway did not start: {''.join(lines)}")
        yield line.split()[1].removesuffix("/mcp")
        process.send_signal(signal.SIGTERM)
        _, rest = process.communicate(timeout=30)
        assert process.returncode == 0, rest
    finally:
        process.kill()
        process.communicate(timeout=10)


def client(base, *, token=TOKEN, **options):
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return httpx2.Client(base_url=base, headers=headers, timeout=20, **options)
