"""Runs one Python script in a restricted process of its own and says what came of it.

    server process                                  sandboxed process (jail.py)
    folder of its own, main.py  ------------------> limits, Landlock, seccomp, then main.py
    reads both pipes, watches time, output, folder
    SIGKILL at any limit, removes the folder

Limits hold per script: CPU and wall time, address space, threads, output, size, number and depth of files.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agentrl.tools.servers.jail import SCRIPT

SOURCE_ROOT = Path(__file__).parents[3]
FOLDER_PREFIX = "agentrl-python-"
_MIB = 1024 * 1024
_READ_BYTES = 64 * 1024
_WATCH_INTERVAL_S = 0.1
_KILL_WAIT_S = 5.0
_THREADS_FIELD = 17  # of /proc/PID/stat, behind the name in brackets
_START = (
    "import sys; sys.path.insert(0, {root!r}); from agentrl.tools.servers.jail import main; del sys.path[0]; main()"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """What one script may use."""

    wall_s: float = 20.0
    cpu_s: int = 10
    memory_mib: int = 1024  # of address space; a script cannot start other processes
    output_chars: int = 10_000  # kept of each of stdout and stderr
    output_bytes: int = 4 * _MIB  # written before the script is ended
    folder_mib: int = 64
    folder_files: int = 1000
    folder_depth: int = 20
    open_files: int = 64
    threads: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptOutcome:
    """What a script wrote, and how it ended. `stopped_by` names the limit that ended it."""

    stdout: str
    stderr: str
    exit_code: int  # negative: the signal
    stopped_by: str | None

    @property
    def is_ok(self) -> bool:
        """Whether the script ran to its end without an error. A warning on stderr is no error."""
        return self.exit_code == 0 and self.stopped_by is None

    def text(self) -> str:
        """Both outputs, for the model."""
        parts = [] if self.is_ok else [self._end()]
        if self.stdout:
            parts.append(self.stdout if self.is_ok else f"[stdout]\n{self.stdout}")
        if self.stderr:
            parts.append(f"[stderr]\n{self.stderr}")
        return "\n".join(part.rstrip("\n") for part in parts) or "[no output: print what you want to see]"

    def _end(self) -> str:
        if self.stopped_by is not None:
            return f"the script was stopped: {self.stopped_by}"
        if self.exit_code < 0:
            return f"the script was ended by {_signal_name(-self.exit_code)}"
        return f"exit code {self.exit_code}"


async def run_script(code: str, *, limits: SandboxLimits) -> ScriptOutcome:
    """Run `code` with the interpreter of this process. Cancelling ends the script. Raises OSError if none starts."""
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    try:
        (folder / SCRIPT).write_text(code, encoding="utf-8", errors="replace")
        return await _run_in(folder, limits=limits)
    finally:
        _remove(folder)


async def _run_in(folder: Path, *, limits: SandboxLimits) -> ScriptOutcome:
    process = await asyncio.create_subprocess_exec(
        *script_command(limits),
        cwd=folder,
        env=_environment(folder),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    if process.stdout is None or process.stderr is None:
        raise RuntimeError("a process was started without pipes")
    outputs = [_Output(process.stdout, limits=limits), _Output(process.stderr, limits=limits)]
    readers = [asyncio.create_task(output.read()) for output in outputs]
    try:
        stopped_by = await _watch(process, outputs, folder=folder, limits=limits)
    finally:
        _kill(process)
        for reader in readers:
            reader.add_done_callback(_forget)
        await asyncio.wait([asyncio.ensure_future(process.wait()), *readers], timeout=_KILL_WAIT_S)
        for reader in readers:
            reader.cancel()
    exit_code = process.returncode if process.returncode is not None else -signal.SIGKILL
    if stopped_by is None:
        stopped_by = _kernel_limit(exit_code, limits=limits)
    return ScriptOutcome(stdout=outputs[0].text(), stderr=outputs[1].text(), exit_code=exit_code, stopped_by=stopped_by)


async def _watch(
    process: asyncio.subprocess.Process, outputs: list[_Output], *, folder: Path, limits: SandboxLimits
) -> str | None:
    """Wait for the script's end, or for the limit it passed."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limits.wall_s
    ended = asyncio.ensure_future(process.wait())
    try:
        while not ended.done():
            await asyncio.wait([ended], timeout=min(_WATCH_INTERVAL_S, max(0.0, deadline - loop.time())))
            if sum(output.num_bytes for output in outputs) > limits.output_bytes:
                return f"it wrote more than {limits.output_bytes} bytes of output"
            if not ended.done() and loop.time() >= deadline:
                return f"it took longer than {limits.wall_s:g} s"
            problem = _folder_problem(folder, limits=limits) or _threads_problem(process.pid, limits=limits)
            if problem is not None:
                return problem
    finally:
        ended.cancel()
    return None


def _kernel_limit(exit_code: int, *, limits: SandboxLimits) -> str | None:
    if exit_code == -signal.SIGXCPU:
        return f"it used {limits.cpu_s} s of CPU time"
    if exit_code == -signal.SIGKILL:
        return f"it was killed: by itself, or for more than {limits.cpu_s} s of CPU time, or for want of memory"
    return None


def _folder_problem(folder: Path, *, limits: SandboxLimits) -> str | None:
    """What is wrong with what a script has written; a folder that cannot be looked into is wrong, too."""
    num_files = num_bytes = 0
    level = [os.fspath(folder)]
    for _ in range(limits.folder_depth):
        try:
            entries = [entry for path in level for entry in _entries(path)]
            num_bytes += sum(map(_num_bytes, entries))
            level = [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError:
            return "it made a folder that cannot be looked into"
        num_files += len(entries)
        if num_files > limits.folder_files:
            return f"it made more than {limits.folder_files} files"
        if num_bytes > limits.folder_mib * _MIB:
            return f"its files are larger than {limits.folder_mib} MiB"
    return f"it made folders more than {limits.folder_depth} levels deep" if level else None


def _entries(path: str) -> list[os.DirEntry[str]]:
    """What is in a folder; nothing where it has just been removed."""
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except FileNotFoundError:
        return []


def _num_bytes(entry: os.DirEntry[str]) -> int:
    """What a file takes on the disk; 0 for one that has just been removed."""
    try:
        return entry.stat(follow_symlinks=False).st_blocks * 512
    except FileNotFoundError:
        return 0


def _threads_problem(process_id: int, *, limits: SandboxLimits) -> str | None:
    try:
        text = Path(f"/proc/{process_id}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:  # the script has ended, or this is no Linux
        return None
    num_threads = int(text.rpartition(")")[2].split()[_THREADS_FIELD])
    return f"it started more than {limits.threads} threads" if num_threads > limits.threads else None


def _remove(folder: Path) -> None:
    """Folders within are moved out before they are emptied: neither depth nor modes nor long paths keep them."""
    pit = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
    waiting = [folder]
    num_moved = 0
    with suppress(OSError):  # a process that could not be killed may still write there
        while waiting:
            current = waiting.pop()
            for entry in _entries(os.fspath(current)):
                if not entry.is_dir(follow_symlinks=False):
                    Path(entry.path).unlink()
                    continue
                Path(entry.path).chmod(0o700)
                num_moved += 1
                waiting.append(Path(entry.path).rename(pit / str(num_moved)))
            current.rmdir()
    shutil.rmtree(pit, ignore_errors=True)


class _Output:
    """One pipe of the script: its start is kept, all of it is read."""

    def __init__(self, stream: asyncio.StreamReader, *, limits: SandboxLimits) -> None:
        self._stream = stream
        self._limits = limits
        self._kept = bytearray()
        self.num_bytes = 0

    async def read(self) -> None:
        """Read to the end; what is not kept is counted."""
        while chunk := await self._stream.read(_READ_BYTES):
            self.num_bytes += len(chunk)
            self._kept += chunk[: 4 * self._limits.output_chars - len(self._kept)]

    def text(self) -> str:
        """The start as text; what is missing is said at the end."""
        text = self._kept.decode("utf-8", "replace")
        if len(text) <= self._limits.output_chars and len(self._kept) == self.num_bytes:
            return text
        return f"{text[: self._limits.output_chars]}\n[cut: {self.num_bytes} bytes were written]"


def script_command(limits: SandboxLimits) -> list[str]:
    """The command line of the sandboxed process."""
    numbers = {
        "cpu_s": limits.cpu_s,
        "memory_bytes": limits.memory_mib * _MIB,
        "file_bytes": limits.folder_mib * _MIB // 4,  # a deleted file that is open counts nowhere else
        "open_files": limits.open_files,
    }
    return [sys.executable, "-I", "-u", "-X", "utf8", "-c", _START.format(root=str(SOURCE_ROOT)), json.dumps(numbers)]


def _environment(folder: Path) -> dict[str, str]:
    """Nothing of the server's own environment, which may hold keys."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {"HOME": str(folder), "TMPDIR": str(folder), "PATH": os.defpath, "LANG": "C.UTF-8", **threads}


def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _forget(reader: asyncio.Task[None]) -> None:
    if not reader.cancelled():
        reader.exception()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
