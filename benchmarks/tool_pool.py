"""What the pool costs: calls per second against one raw SDK session at the same concurrency, stdio and HTTP.

    python benchmarks/tool_pool.py [--calls 1500] [--concurrency 64] [--rounds 3]

`raw`       `mcp.Client.call_tool`, no more: no deadline, no argument check, dead for good when its server dies
`pool`      agentrl's toolbox with one session: argument check, deadline, limits, retries, breaker, restart
`pool x 2`  the same with two sessions (stdio: two processes)

One server process per session, the bundled calculator. The three take turns within each round; the median round counts.
Client CPU is this process's.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from mcp import Client, StdioServerParameters

from agentrl.tools import McpToolbox, ServerConfig
from agentrl.tools.server_config import TransportKind
from agentrl.types import Recovery, ToolRequest, ToolStatus

MODULE = "agentrl.tools.servers.calculator"
ARGUMENTS = {"expression": "6*7"}
Call = Callable[[], Awaitable[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    calls_per_s: float
    cpu_ms: float  # of this process, per call


async def measure(call: Call, *, num_calls: int, concurrency: int) -> Speed:
    left = iter(range(num_calls))

    async def work() -> None:
        for _ in left:
            assert await call() == "42"

    began, cpu_began = time.perf_counter(), time.process_time()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    took_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    return Speed(calls_per_s=num_calls / took_s, cpu_ms=1000 * cpu_s / num_calls)


@asynccontextmanager
async def raw(url: str | None) -> AsyncIterator[Call]:
    target = url or StdioServerParameters(command=sys.executable, args=["-m", MODULE])
    async with Client(target) as client:

        async def call() -> str:
            return (await client.call_tool("calculator", ARGUMENTS)).content[0].text

        await call()
        yield call


@asynccontextmanager
async def pool(url: str | None, *, sessions: int, concurrency: int) -> AsyncIterator[Call]:
    server = ServerConfig(
        name="calculator",
        kind=TransportKind.STDIO if url is None else TransportKind.HTTP,
        command=sys.executable,
        args=("-m", MODULE),
        url=url or "",
        recovery=Recovery.STATELESS,
        timeout_s=60,
        max_in_flight=concurrency,
        sessions=sessions,
        description="calculator",
    )
    box = await McpToolbox.open([server], connect_timeout_s=60, max_result_chars=20_000, rng=random.Random(0))
    request = ToolRequest(call_id="call", name="calculator", arguments=ARGUMENTS)

    async def call() -> str:
        result = await box.call(request, deadline_s=60)
        assert result.status is ToolStatus.OK, result
        return result.content

    try:
        await call()
        yield call
    finally:
        await box.close()


async def compare(url: str | None, *, num_calls: int, concurrency: int, rounds: int) -> dict[str, list[Speed]]:
    async with AsyncExitStack() as stack:
        calls = {
            "raw": await stack.enter_async_context(raw(url)),
            "pool": await stack.enter_async_context(pool(url, sessions=1, concurrency=concurrency)),
            "pool x 2": await stack.enter_async_context(pool(url, sessions=2, concurrency=concurrency)),
        }
        speeds: dict[str, list[Speed]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                speeds[name].append(await measure(call, num_calls=num_calls, concurrency=concurrency))
        return speeds


def report(transport: str, speeds: dict[str, list[Speed]]) -> None:
    ratios = {
        name: statistics.median(
            own.calls_per_s / base.calls_per_s for own, base in zip(rounds, speeds["raw"], strict=True)
        )
        for name, rounds in speeds.items()
    }
    for name, rounds in speeds.items():
        rate = statistics.median(speed.calls_per_s for speed in rounds)
        cpu_ms = statistics.median(speed.cpu_ms for speed in rounds)
        print(f"| {transport} | {name} | {rate:.0f} | {ratios[name]:.2f} | {cpu_ms:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1500)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    flags = parser.parse_args()
    settings = {"num_calls": flags.calls, "concurrency": flags.concurrency, "rounds": flags.rounds}
    print("| transport | client | calls/s | against raw | client CPU ms per call |\n|---|---|---|---|---|")
    report("stdio", asyncio.run(compare(None, **settings)))
    command = [sys.executable, "-m", MODULE, "--http", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            url = server.stderr.readline().removeprefix("listening on ").strip()
            report("HTTP", asyncio.run(compare(url, **settings)))
        finally:
            server.kill()


if __name__ == "__main__":
    main()
