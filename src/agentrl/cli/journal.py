"""`agentrl journal RUN_NAME FILE`: the tool calls of a run in one file, for `--tool_journal replay` and `cache`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import uvloop
from rich.console import Console

from agentrl.cli.connect import open_run_store
from agentrl.cli.invocation import Invocation
from agentrl.config import RunConfig
from agentrl.errors import UnavailableError
from agentrl.protocols import Store
from agentrl.rollout.recorded_calls import recorded_call, spec_from_json, write_call, write_header
from agentrl.types import ToolSpec

_BLOCK = 64  # Records at a time


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run and the file."""
    parser.add_argument("run_name", metavar="RUN_NAME")
    parser.add_argument("file", metavar="FILE", type=Path)


def run(invocation: Invocation) -> int:
    """Write the file and say what is in it."""
    path: Path = invocation.arguments.file
    count = uvloop.run(_export(invocation.config, path=path))
    Console(highlight=False).print(f"{count} tool calls in {path}", soft_wrap=True)
    return 0


async def _export(config: RunConfig, *, path: Path) -> int:
    async with open_run_store(config, may_start=True, must_exist=True) as store:
        return await export_journal(store, path=path, run_name=config.run.run_name)


async def export_journal(store: Store, *, path: Path, run_name: str) -> int:
    """Write the tools of a run and every tool call of its committed turns to `path`, in one go; returns how many.

    Raises UnavailableError for a run whose Run document names no tools.
    """
    run = await store.get_run() or {}
    specs = [spec_from_json(stored) for stored in run.get("tools", ())]
    if not specs:
        raise UnavailableError(f"run {run_name} has called no tools with this release: there is no journal to write")
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("w", encoding="utf-8") as file:
            write_header(file, run_name=run_name, specs=specs)
            count = await _write_calls(store, file, specs=specs)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        with suppress(FileNotFoundError):
            beside.unlink()
    return count


async def _write_calls(store: Store, file: IO[str], *, specs: Sequence[ToolSpec]) -> int:
    by_name = {spec.name: spec for spec in specs}
    record_ids = await store.list_record_ids()
    count = 0
    for start in range(0, len(record_ids), _BLOCK):
        records = await store.find_records(record_ids[start : start + _BLOCK])
        calls = await store.find_dispatches([turn_id for record in records for turn_id in record.turn_ids])
        for turn_calls in calls.values():
            for call in turn_calls:
                if (recorded := recorded_call(call, specs=by_name)) is not None:
                    write_call(file, recorded)
                    count += 1
    return count
