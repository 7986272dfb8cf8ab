"""`agentrl db stats | compact | export | import | prune`: a run's database as a whole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import uvloop
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from agentrl.cli.connect import open_run_database
from agentrl.cli.invocation import Invocation
from agentrl.cli.prune import prune
from agentrl.config import RunConfig
from agentrl.errors import ArchiveError
from agentrl.store.archive import check_file, export_run, import_run
from agentrl.store.compaction import find_orphans, remove
from agentrl.store.scan import Progress
from agentrl.store.sizes import RunSize, measure

_SHOW_EVERY_S: Final = 0.2


def run_action(invocation: Invocation) -> int:
    """Do what `agentrl db ACTION` says."""
    console = Console(highlight=False, soft_wrap=True)
    uvloop.run(_ACTIONS[invocation.arguments.action](invocation, console))
    return 0


@contextmanager
def shown_progress(console: Console, what: str) -> Iterator[Progress]:
    """A line that follows how far it is; yields the callback for it."""
    shown_at = 0.0
    with console.status(what) as status:

        def show(collection: str, num_documents: int, num_bytes: int) -> None:
            nonlocal shown_at
            if time.monotonic() - shown_at >= _SHOW_EVERY_S:
                shown_at = time.monotonic()
                size = f", {decimal(num_bytes)}" if num_bytes else ""
                status.update(f"{what}  {collection}: {num_documents}{size}")

        yield show


async def _stats(invocation: Invocation, console: Console) -> None:
    async with open_run_database(invocation.config) as database:
        with shown_progress(console, "measuring") as progress:
            size = await measure(database, progress=progress)
    console.print(_size_table(size))
    if size.num_trajectories:
        each = size.trajectory_bytes // size.num_trajectories
        console.print(
            f"{decimal(each)} per trajectory ({size.num_trajectories} of them); "
            f"shared prompts save {size.share_saved:.1%} of what they would take"
        )


def _size_table(size: RunSize) -> Table:
    table = Table(box=None, header_style="dim")
    table.add_column("collection")
    for header in ("documents", "bytes", "parts", "bytes in parts"):
        table.add_column(header, justify="right")
    for each in size.collections.values():
        table.add_row(
            *(each.name, f"{each.num_documents:,}", f"{each.num_bytes:,}"),
            *(f"{each.num_parts:,}", f"{each.part_bytes:,}"),
        )
    table.add_row("all", "", f"{size.num_bytes:,}", style="bold")
    return table


async def _compact(invocation: Invocation, console: Console) -> None:
    async with open_run_database(invocation.config) as database:
        with shown_progress(console, "looking for what nothing refers to") as progress:
            orphans = await find_orphans(database, progress=progress)
        found = (
            f"{len(orphans.dispatch_ids)} late dispatches and {len(orphans.part_ids)} orphan parts, "
            f"{decimal(orphans.num_bytes)}"
        )
        if not invocation.arguments.yes:
            console.print(f"{found}; nothing was removed, --yes removes them")
            return
        num_removed = await remove(database, orphans)
    console.print(f"{found}; removed {num_removed} documents")


async def _export(invocation: Invocation, console: Console) -> None:
    path: Path = invocation.arguments.file
    async with open_run_database(invocation.config) as database:
        with shown_progress(console, "exporting") as progress:
            contents = await export_run(database, path, progress=progress)
    num_documents = sum(contents.counts.values())
    console.print(
        f"{num_documents} documents ({decimal(contents.num_bytes)}) of run {contents.run} in {escape(str(path))}"
    )


async def _import(invocation: Invocation, console: Console) -> None:
    path: Path = invocation.arguments.file
    with console.status("checking the file"):
        contents = await asyncio.to_thread(check_file, path)
    config = invocation.config
    if "run_name" not in config.run.model_fields_set:
        config = _with_run_name(config, contents.run, path=path)
    async with open_run_database(config, may_create=True) as database:
        with shown_progress(console, "importing") as progress:
            await import_run(database, path, contents, progress=progress)
    console.print(f"{sum(contents.counts.values())} documents of {escape(str(path))} in run {config.run.run_name}")


def _with_run_name(config: RunConfig, name: str, *, path: Path) -> RunConfig:
    section = type(config.run)
    try:
        checked = section.model_validate({**config.run.model_dump(), "run_name": name})
    except ValueError as error:
        raise ArchiveError(f"{path}: names its run {name!r}, which no run can be called; choose --as RUN") from error
    return config.model_copy(update={"run": checked})


_ACTIONS: Final[Mapping[str, Callable[[Invocation, Console], Coroutine[Any, Any, None]]]] = {
    "stats": _stats,
    "compact": _compact,
    "export": _export,
    "import": _import,
    "prune": prune,
}
