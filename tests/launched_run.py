"""A whole run as real processes on a tiny random model, for the tests that kill, stop and continue it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.chat import ChatFormat
from tiny_chat import write_tiny_chat

DEADLINE_S = 150.0


def write_run(folder: Path, **overrides: object) -> Path:
    """A working directory with a model, tasks and a tool server, and the flags in run.yaml; returns it."""
    model = write_tiny_chat(folder / "model")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=ChatFormat.load(model).vocab_size, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, intermediate_size=64, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(model)
    rows = [{"id": f"q{i}", "question": f"What is {i}+1?", "answer": str(i + 1), "scorer": "em"} for i in range(8)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    server = {"command": "python", "args": ["-m", "agentrl.tools.servers.calculator"]}
    (folder / "mcp.json").write_text(json.dumps({"mcpServers": {"calculator": server}}))
    settings = {
        "model_name_or_path": "model", "train_file": "tasks.jsonl", "eval_file": "tasks.jsonl",
        "mcp_config": "mcp.json", "max_steps": 8, "tasks_per_step": 2, "num_generations": 2, "max_new_tokens": 12,
        "max_turns": 2, "save_steps": 1, "advantage": "none", "drop_zero_advantage": False, "report_to": "none",
        "heartbeat_s": 1, **overrides,
    }  # fmt: skip
    (folder / "run.yaml").write_text(json.dumps(settings))
    return folder


@contextmanager
def agentrl(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "agentrl.cli.main", *arguments],
        cwd=folder,
        env={**os.environ, "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(timeout=DEADLINE_S)


def launch(folder: Path):
    return agentrl(folder, "launch", "tiny", "--config", "run.yaml")


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Output up to and including the line with `text`; the test's time limit bounds the wait."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"{text!r} did not appear in\n{seen}")


def output_of(folder: Path, *arguments: str) -> str:
    """Output of a command that succeeds."""
    with agentrl(folder, *arguments) as process:
        shown, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, shown
    return shown


def left_over(folder: Path) -> list[str]:
    """Command lines of processes that work in the folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.cwd() == str(folder):
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def process_ids(folder: Path, mark: str) -> list[int]:
    """Ids of the run's processes whose command line contains `mark`, found by their working directory."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder) and mark in " ".join(process.cmdline()):
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return sorted(found)


def wait_until_replaced(folder: Path, mark: str, *, gone: list[int]) -> None:
    """Until processes of this kind run, and none of those that should be gone."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := process_ids(folder, mark)) or not set(found).isdisjoint(gone):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def wait_until_nothing_is_left(folder: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while left := left_over(folder):
        assert time.monotonic() < deadline, left
