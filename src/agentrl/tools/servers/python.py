"""MCP server with one tool, `python(code)`: runs a script in a process of its own, without network or other files.

Every call is a new process in a new folder: nothing is kept between calls. What is isolated, and by what, is said by
`--report`. Where the kernel cannot isolate something, the server says so on stderr at start, or with `--strict` does
not start.
This holds model-written code that goes wrong. Against a determined attacker, run the server in a virtual machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping
from typing import Any

from agentrl.tools.servers.landlock import landlock_version
from agentrl.tools.servers.sandbox import SandboxLimits, run_script
from agentrl.tools.servers.seccomp import has_filter
from agentrl.tools.servers.serving import OperationError, ServedTool, add_transport_flags, make_server, serve

MAX_CODE_CHARS = 200_000
_PROBE = """
import os, socket
try:
    socket.socket().connect(("127.0.0.1", 9))
except PermissionError:
    print("network")
except OSError as error:
    print("network" if error.errno == 101 else "")
try:
    if os.fork() == 0:
        os._exit(0)
except PermissionError:
    print("processes")
try:
    open("/proc/self/status").close()
except PermissionError:
    print("files")
"""
_MEANS = {
    "network": "no sockets (seccomp) and no interface (network namespace)",
    "processes": "none can be started, signalled or traced (seccomp)",
    "files": "only its own folder is writable; readable are the interpreter and system libraries (Landlock)",
}


async def isolation() -> dict[str, bool]:
    """What a script on this machine cannot reach, found by trying."""
    outcome = await run_script(_PROBE, limits=SandboxLimits())
    found = outcome.stdout.split()
    return {name: name in found for name in _MEANS}


def python_tool(limits: SandboxLimits, *, max_running: int) -> ServedTool:
    """The tool. At most `max_running` scripts run at a time; waiting counts against the caller's deadline."""
    slots = asyncio.Semaphore(max_running)

    async def run(arguments: Mapping[str, Any]) -> str:
        async with slots:
            outcome = await run_script(arguments["code"], limits=limits)
        if not outcome.is_ok:
            raise OperationError(outcome.text())
        return outcome.text()

    return ServedTool(
        name="python",
        description=(
            "Run a Python script and return what it prints. Nothing is kept between calls. No network. "
            f"At most {limits.cpu_s} s of CPU time and {limits.memory_mib} MiB of memory."
        ),
        properties={"code": {"type": "string", "maxLength": MAX_CODE_CHARS}},
        required=("code",),
        run=run,
    )


def main() -> None:
    """Command line of the server."""
    defaults = SandboxLimits()
    parser = argparse.ArgumentParser(description="MCP server: runs Python scripts in a sandbox")
    parser.add_argument("--wall-s", type=float, default=defaults.wall_s, help="seconds per script (%(default)s)")
    parser.add_argument("--cpu-s", type=int, default=defaults.cpu_s, help="CPU seconds per script (%(default)s)")
    parser.add_argument("--memory-mib", type=int, default=defaults.memory_mib, help="address space (%(default)s)")
    parser.add_argument("--folder-mib", type=int, default=defaults.folder_mib, help="size of all files (%(default)s)")
    parser.add_argument("--max-running", type=int, default=os.cpu_count() or 1, help="scripts at a time (%(default)s)")
    parser.add_argument("--report", action="store_true", help="say what is isolated on this machine, and exit")
    parser.add_argument("--strict", action="store_true", help="refuse to start where something is not isolated")
    add_transport_flags(parser)
    flags = parser.parse_args()
    if min(flags.wall_s, flags.cpu_s, flags.memory_mib, flags.folder_mib, flags.max_running) <= 0:
        parser.error("every limit must be above 0")
    found = asyncio.run(isolation())
    if flags.report:
        sys.stdout.write(_report(found))
        return
    missing = [name for name, is_isolated in found.items() if not is_isolated]
    if missing and flags.strict:
        parser.error(f"not isolated on this machine: {', '.join(missing)} (see --report); use a Linux virtual machine")
    if missing:
        sys.stderr.write(f"warning: scripts are not kept from: {', '.join(missing)}; see --report\n")
    limits = SandboxLimits(
        wall_s=flags.wall_s, cpu_s=flags.cpu_s, memory_mib=flags.memory_mib, folder_mib=flags.folder_mib
    )
    serve(make_server("python", python_tool(limits, max_running=flags.max_running)), flags)


def _report(found: Mapping[str, bool]) -> str:
    kernel = f"Landlock version {landlock_version()}" if sys.platform == "linux" else "no Linux"
    lines = [f"kernel: {kernel}; system call filter: {'yes' if has_filter() else 'none for this machine'}"]
    lines += [f"{name}: {_MEANS[name] if isolated else 'NOT isolated'}" for name, isolated in found.items()]
    lines.append("not hidden: whether a file exists, its size and times; CPU model; the clock")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
