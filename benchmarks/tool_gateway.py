"""What the gateway costs per call: the bundled calculator directly, behind /mcp and behind /mcpapi.

python benchmarks/tool_gateway.py [--calls 400] [--concurrency 32]
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import httpx2

from agentrl.config import ToolsConfig
from agentrl.tools import open_toolbox
from agentrl.types import ToolRequest, ToolStatus

CALCULATOR = {"command": "python", "args": ["-m", "agentrl.tools.servers.calculator"]}
REQUEST = ToolRequest(call_id="1", name="calculator", arguments={"expression": "6*7"})


async def rate(call, *, calls, concurrency):
    """Calls per second, and the median duration in milliseconds."""
    slots, durations = asyncio.Semaphore(concurrency), []

    async def one():
        async with slots:
            began = time.perf_counter()
            await call()
            durations.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(calls)))
    return calls / (time.perf_counter() - began), sorted(durations)[calls // 2] * 1000


async def toolbox_rate(config, *, calls, concurrency):
    box = await open_toolbox(config)

    async def call():
        assert (await box.call(REQUEST, deadline_s=60)).status is ToolStatus.OK

    try:
        return await rate(call, calls=calls, concurrency=concurrency)
    finally:
        await box.close()


async def api_rate(base, *, calls, concurrency):
    async with httpx2.AsyncClient(base_url=base, timeout=60) as http:

        async def call():
            reply = await http.post("/mcpapi/tool/calculator", json=dict(REQUEST.arguments))
            assert reply.json() == {"content": 42}

        return await rate(call, calls=calls, concurrency=concurrency)


async def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=400)
    parser.add_argument("--concurrency", type=int, default=32)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "servers.json"
        path.write_text(json.dumps({"mcpServers": {"math": CALCULATOR}}), encoding="utf-8")
        command = [sys.executable, "-m", "agentrl.cli.main", "tools", "serve", str(path), "--port", "0"]
        environment = {name: value for name, value in os.environ.items() if name != "MCP_GATEWAY_TOKEN"}
        gateway = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, env=environment)
        try:
            base = (await gateway.stderr.readline()).decode().split()[1].removesuffix("/mcp")
            for concurrency in (1, flags.concurrency):
                size = {"calls": flags.calls, "concurrency": concurrency}
                results = {
                    "stdio, no gateway": await toolbox_rate(ToolsConfig(mcp_config=path), **size),
                    "gateway /mcp": await toolbox_rate(ToolsConfig(mcp_manager_url=f"{base}/mcp"), **size),
                    "gateway /mcpapi": await api_rate(base, **size),
                }
                for name, (per_second, median_ms) in results.items():
                    print(f"{concurrency:4} at a time  {name:20} {per_second:7.0f} calls/s  median {median_ms:6.1f} ms")
        finally:
            gateway.terminate()
            await asyncio.wait_for(gateway.wait(), 20)


if __name__ == "__main__":
    asyncio.run(main())
