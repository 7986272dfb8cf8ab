"""`agentrl fleet add|set|remove|status FLEET [RUN]`: which runs share samplers and services, and how.

add      with the run's settings, as given to its other commands; again: new settings, and back in the fleet
set      share, priority, budgets; --pause and --resume
remove   the run leaves; its Tasks go back to its queue
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import uvloop
from rich.console import Console
from rich.table import Table

from agentrl.cli.connect import prepared_store
from agentrl.cli.fleet_connect import open_fleet
from agentrl.cli.invocation import Invocation, positive_int
from agentrl.config import RunConfig
from agentrl.config.secrets import masked
from agentrl.config.settings import settings_index
from agentrl.errors import ConfigError, UnavailableError
from agentrl.fleets import FleetRun, FleetRunStatus
from agentrl.inspector.plain import plain

NO_BUDGET = 0
ACTIONS = ("add", "set", "remove", "status")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to do with which run of which fleet."""
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("fleet", metavar="FLEET", help="name of the fleet")
    parser.add_argument("run_name", metavar="RUN_NAME", nargs="?")
    parser.add_argument("--share", type=_positive_number, help="relative to the other runs of the same priority")
    parser.add_argument("--priority", type=int, help="runs with a higher one go first, always")
    parser.add_argument("--budget_tasks", type=_budget, metavar="N", help="Tasks to sample at most, or none")
    parser.add_argument("--budget_tokens", type=_budget, metavar="N", help="tokens to sample at most, or none")
    pausing = parser.add_mutually_exclusive_group()
    pausing.add_argument("--pause", action="store_true", help="claim nothing new")
    pausing.add_argument("--resume", action="store_true", help="the opposite")


def run(invocation: Invocation) -> int:
    """Change the fleet, then show it."""
    arguments = invocation.arguments
    if arguments.action != "status" and arguments.run_name is None:
        raise ConfigError(f"RUN_NAME is missing: agentrl fleet {arguments.action} {arguments.fleet} RUN_NAME")
    fleet_name = settings_index()["fleet_name"].parse(arguments.fleet, origin="FLEET")
    section = invocation.config.run.model_copy(update={"fleet_name": fleet_name})
    config = invocation.config.model_copy(update={"run": section})
    uvloop.run(_change_and_show(config, arguments, console=Console(highlight=False)))
    return 0


async def _change_and_show(config: RunConfig, arguments: argparse.Namespace, *, console: Console) -> None:
    async with open_fleet(config, may_start=True) as fleet:
        runs = {run.name: run for run in await fleet.list_fleet_runs()}
        if arguments.action == "add":
            await _check_run(config, fleet_name=arguments.fleet)
        if arguments.action != "status":
            await fleet.put_fleet_run(_changed(runs.get(arguments.run_name), config, arguments))
            runs = {run.name: run for run in await fleet.list_fleet_runs()}
    if not runs:
        raise UnavailableError(
            f"there is no fleet {arguments.fleet}: make it with agentrl fleet add {arguments.fleet} RUN_NAME"
        )
    console.print(render_fleet(list(runs.values())))


async def _check_run(config: RunConfig, *, fleet_name: str) -> None:
    """Refuse a run that is not there, or that has no model, before samplers stumble over it."""
    if config.model.model_name_or_path is None:
        raise ConfigError("model_name_or_path is not set: give the settings of the run, as to its other commands")
    if config.run.run_name == fleet_name:
        raise ConfigError(f"{fleet_name}: a fleet and a run need different names, each has a database")
    store = await prepared_store(config, must_exist=True)
    await store.close()


def _changed(known: FleetRun | None, config: RunConfig, arguments: argparse.Namespace) -> FleetRun:
    """The run's entry after what the user asked for. Raises UnavailableError if there must be one."""
    if known is None and arguments.action != "add":
        raise UnavailableError(
            f"run {arguments.run_name} is not in fleet {arguments.fleet}; "
            f"add it with agentrl fleet add {arguments.fleet} {arguments.run_name}"
        )
    entry = known or FleetRun(name=arguments.run_name)
    if arguments.action == "remove":
        return replace(entry, status=FleetRunStatus.LEFT, reason="removed by a user")
    if arguments.action == "add":
        entry = replace(entry, config=masked(config))
    if arguments.action == "add" or arguments.resume:
        entry = replace(entry, status=FleetRunStatus.ACTIVE, reason="")
    if arguments.pause:
        entry = replace(entry, status=FleetRunStatus.PAUSED, reason="paused by a user")
    return replace(
        entry,
        share=entry.share if arguments.share is None else arguments.share,
        priority=entry.priority if arguments.priority is None else arguments.priority,
        budget_tasks=_new_budget(entry.budget_tasks, arguments.budget_tasks),
        budget_tokens=_new_budget(entry.budget_tokens, arguments.budget_tokens),
    )


def _new_budget(known: int | None, given: int | None) -> int | None:
    if given is None:
        return known
    return None if given == NO_BUDGET else given


def render_fleet(runs: list[FleetRun]) -> Table:
    """The fleet as a table."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("run", "status", "priority", "share"):
        table.add_column(column)
    for column in ("tasks", "of budget", "tokens", "of budget"):
        table.add_column(column, justify="right")
    table.add_column("why", overflow="fold")
    for run in runs:
        table.add_row(
            plain(run.name), run.status.value, str(run.priority), f"{run.share:g}",
            f"{run.num_tasks:,}", _shown_budget(run.budget_tasks),
            f"{run.num_tokens:,}", _shown_budget(run.budget_tokens),
            plain(run.reason),
        )  # fmt: skip
    return table


def _shown_budget(budget: int | None) -> str:
    return "" if budget is None else f"{budget:,}"


def _budget(text: str) -> int:
    return NO_BUDGET if text == "none" else positive_int(text)


def _positive_number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: needs a number above 0")
    return value
