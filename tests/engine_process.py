"""An embedded engine in a process of its own, to be killed: engine_process.py MODEL_DIR. Prints its port."""

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


async def _serve(model_dir: Path) -> None:
    from agentrl.inference.runner import EngineSettings
    from agentrl.inference.serve import build_engine, listen, running_server

    engine, tokenizer = build_engine(EngineSettings(model_path=model_dir, context_length=512, device="cpu"))
    listener = listen(InferenceConfig())
    async with running_server(engine, tokenizer, listener):
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


@dataclass(kw_only=True)
class EngineProcess:
    """A running engine process."""

    process: subprocess.Popen[str]
    base_url: str

    def send(self, number: signal.Signals) -> None:
        """Signal it; SIGKILL also waits for its end."""
        self.process.send_signal(number)
        if number is signal.SIGKILL:
            self.process.wait(10)


@contextmanager
def engine_processes(model_dir: Path, *, count: int) -> Iterator[list[EngineProcess]]:
    """Start engines side by side; killed on the way out."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, __file__, str(model_dir)]
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
        for _ in range(count)
    ]
    try:
        engines = []
        for process in processes:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            engines.append(EngineProcess(process=process, base_url=f"http://127.0.0.1:{port}"))
        yield engines
    finally:
        for process in processes:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait(10)


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))
