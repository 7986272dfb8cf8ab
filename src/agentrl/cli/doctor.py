"""`agentrl doctor`: what this machine has, what is missing, and what to do about it."""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.cli.examples import is_made_by_profile
from agentrl.cli.invocation import Invocation
from agentrl.config import RunConfig
from agentrl.config.secrets import masked_uri
from agentrl.errors import AgentRLError
from agentrl.store import open_store

LIBRARIES = ("torch", "transformers", "accelerate", "pymongo", "mcp")
MIN_MEMORY_GB = 6
DATABASE_WAIT_S = 5.0
MIN_DISK_GB = 3
MODEL_FILES = ("config.json", "tokenizer.json")
EXIT_NOT_READY = 1


class Verdict(StrEnum):
    """How a finding bears on running AgentRL here."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was looked at. `advice` says what to do, if anything."""

    subject: str
    verdict: Verdict
    found: str
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A run may be named, to check its settings."""
    parser.add_argument("run_name", metavar="RUN_NAME", nargs="?")


def run(invocation: Invocation) -> int:
    """Print the findings; exit code 1 if something keeps AgentRL from running."""
    findings = [*examine(invocation.config)]
    table = Table(box=None, pad_edge=False, show_header=False)
    styles = {Verdict.OK: "green", Verdict.NOTE: "yellow", Verdict.PROBLEM: "bold red"}
    for finding in findings:
        table.add_row(
            Text(finding.verdict.value, style=styles[finding.verdict]),
            *(Text(text) for text in (finding.subject, finding.found, finding.advice)),
        )
    Console().print(table)
    return EXIT_NOT_READY if any(finding.verdict is Verdict.PROBLEM for finding in findings) else 0


def examine(config: RunConfig) -> Iterator[Finding]:
    """Look at everything, without importing torch and without changing anything."""
    yield _python()
    yield from (_library(name) for name in LIBRARIES)
    yield from _hardware(config)
    yield _gpu()
    yield _database(config)
    yield _model(config)
    yield from _files(config)


def _python() -> Finding:
    version = platform.python_version()
    is_supported = (3, 11) <= tuple(int(part) for part in version.split(".")[:2]) < (3, 14)
    advice = "" if is_supported else "create .venv with Python 3.11, 3.12 or 3.13"
    return Finding(
        subject="python", verdict=Verdict.OK if is_supported else Verdict.PROBLEM, found=version, advice=advice
    )


def _library(name: str) -> Finding:
    if importlib.util.find_spec(name) is None:
        return Finding(subject=name, verdict=Verdict.PROBLEM, found="missing", advice="pip install -r requirements.txt")
    return Finding(subject=name, verdict=Verdict.OK, found=importlib.metadata.version(name))


def _hardware(config: RunConfig) -> Iterator[Finding]:
    cores = psutil.cpu_count() or 1
    few = "one core: the laptop example takes about twice as long" if cores < 2 else ""
    yield Finding(subject="cores", verdict=Verdict.NOTE if few else Verdict.OK, found=str(cores), advice=few)
    memory = psutil.virtual_memory().available / 1e9
    low = f"the laptop example needs about {MIN_MEMORY_GB} GB; close other programs" if memory < MIN_MEMORY_GB else ""
    yield Finding(
        subject="memory", verdict=Verdict.NOTE if low else Verdict.OK, found=f"{memory:.1f} GB free", advice=low
    )
    folder = _existing_parent(config.run.data_dir)
    disk = shutil.disk_usage(folder).free / 1e9
    full = f"free at least {MIN_DISK_GB} GB, or set --data_dir and --output_dir elsewhere" if disk < MIN_DISK_GB else ""
    yield Finding(
        subject="disk", verdict=Verdict.PROBLEM if full else Verdict.OK, found=f"{disk:.0f} GB free", advice=full
    )


def _gpu() -> Finding:
    """NVIDIA devices by their device files: asking torch would load it."""
    devices = sorted(Path("/dev").glob("nvidia[0-9]*"))
    if devices:
        advice = "use SGLang for sampling (deploy/README.md) and --bf16 true"
        return Finding(subject="GPU", verdict=Verdict.OK, found=f"{len(devices)} NVIDIA", advice=advice)
    return Finding(subject="GPU", verdict=Verdict.OK, found="none", advice="the laptop profile needs none")


def _database(config: RunConfig) -> Finding:
    if config.store.db_connection_string is not None:
        return _server(config, uri=config.store.db_connection_string)
    if shutil.which("mongod"):
        found = f"mongod at {shutil.which('mongod')}"
    elif importlib.util.find_spec("secantus") is not None:
        found = f"embedded server, SecantusDB {importlib.metadata.version('secantusdb')}"
    else:
        advice = "pip install 'agentrl[embedded]', install mongod, or set --db_connection_string"
        return Finding(subject="database", verdict=Verdict.PROBLEM, found="none", advice=advice)
    if _is_port_taken(config.store.db_port):
        found += f"; port {config.store.db_port} answers already"
    return Finding(subject="database", verdict=Verdict.OK, found=found)


def _server(config: RunConfig, *, uri: str) -> Finding:
    """Whether a given database answers."""
    try:
        runs = asyncio.run(_runs_at(uri, timeout_s=min(DATABASE_WAIT_S, config.store.db_timeout_s)))
    except AgentRLError as error:
        found, advice = str(error).partition(": start one")[0], "correct --db_connection_string, or start the server"
        return Finding(subject="database", verdict=Verdict.PROBLEM, found=found, advice=advice)
    return Finding(subject="database", verdict=Verdict.OK, found=f"{masked_uri(uri)} answers; runs: {len(runs)}")


async def _runs_at(uri: str, *, timeout_s: float) -> list[str]:
    store = open_store(uri, database="doctor", timeout_s=timeout_s)
    try:
        return await store.list_runs()
    finally:
        await store.close()


def _model(config: RunConfig) -> Finding:
    folder = config.model.model_name_or_path
    if folder is None:
        advice = "--profile laptop makes one; else give --model_name_or_path"
        return Finding(subject="model", verdict=Verdict.NOTE, found="not set", advice=advice)
    missing = [name for name in MODEL_FILES if not (folder / name).is_file()]
    if missing:
        advice = "give a folder in Hugging Face format, with tokenizer"
        found = f"{folder} lacks {', '.join(missing)}"
        return Finding(subject="model", verdict=Verdict.PROBLEM, found=found, advice=advice)
    return Finding(subject="model", verdict=Verdict.OK, found=str(folder))


def _files(config: RunConfig) -> Iterator[Finding]:
    paths = {
        "train_file": config.run.train_file,
        "eval_file": config.run.eval_file,
        "mcp_config": config.tools.mcp_config,
        "tool_config_path": config.tools.tool_config_path,
        "chat_template": config.model.chat_template,
        "accelerate_config": config.train.accelerate_config,
    }
    for name, path in paths.items():
        if path is not None and not is_made_by_profile(config, name) and not path.is_file():
            yield Finding(
                subject=name, verdict=Verdict.PROBLEM, found=f"{path} is not there", advice=f"correct --{name}"
            )
    folder = _existing_parent(config.run.output_dir)
    if not os.access(folder, os.W_OK):
        yield Finding(
            subject="output_dir", verdict=Verdict.PROBLEM, found=f"{folder} is not writable", advice="set --output_dir"
        )


def _existing_parent(folder: Path) -> Path:
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder


def _is_port_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0
