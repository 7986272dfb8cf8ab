"""An embedded engine in a process of its own, to be killed: engine_process.py MODEL_DIR PORT. Prints its port."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.sections import InferenceConfig


async def _serve(model_dir: Path, port: int) -> None:
    from agentrl.inference.runner import EngineSettings
    from agentrl.inference.serve import build_engine, listen, running_server

    engine, tokenizer = build_engine(EngineSettings(model_path=model_dir, context_length=512, device="cpu"))
    listener = listen(InferenceConfig(serve_port=port))
    async with running_server(engine, tokenizer, listener):
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


@dataclass(kw_only=True)
class EngineProcess:
    """A running engine process."""

    process: subprocess.Popen[str]
    base_url: str
    model_dir: Path

    def restart(self) -> None:
        """Start it again at the same address, with the weights it was first started with. Returns when it listens."""
        self.process.wait(10)
        self.process = _start(self.model_dir, port=int(self.base_url.rpartition(":")[2]))
        _read_port(self.process)

    def send(self, number: signal.Signals) -> None:
        """Signal it; SIGKILL also waits for its end."""
        self.process.send_signal(number)
        if number is signal.SIGKILL:
            self.process.wait(10)


@contextmanager
def engine_processes(model_dir: Path, *, count: int) -> Iterator[list[EngineProcess]]:
    """Start engines side by side; killed on the way out."""
    starting = [_start(model_dir, port=0) for _ in range(count)]
    engines: list[EngineProcess] = []
    try:
        for process in starting:
            url = f"http://127.0.0.1:{_read_port(process)}"
            engines.append(EngineProcess(process=process, base_url=url, model_dir=model_dir))
        yield engines
    finally:
        for process in {*starting, *(engine.process for engine in engines)}:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait(10)


def _start(model_dir: Path, *, port: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, __file__, str(model_dir), str(port)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)


def _read_port(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), int(sys.argv[2])))
