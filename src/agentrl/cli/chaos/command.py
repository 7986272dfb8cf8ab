"""`agentrl chaos RUN_NAME`: launch a run, hurt it in every way the seed says, and check that nothing was lost.

launch ─► first step ─► faults, one after the other ─► calm until the run is complete ─► audit ─► table, verdict
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from contextlib import ExitStack, closing
from itertools import islice

from rich.console import Console
from rich.text import Text

from agentrl.cli.chaos.campaign import Campaign, Journal, Outcome
from agentrl.cli.chaos.faults import Injector
from agentrl.cli.chaos.launched import LaunchedRun
from agentrl.cli.chaos.proxy import Proxy
from agentrl.cli.chaos.report import show_outcome, show_verdict
from agentrl.cli.chaos.schedule import Kind, PlannedFault, available_kinds, choose_kinds, num_processes, schedule
from agentrl.cli.connect import database_port, open_run_store
from agentrl.cli.invocation import Invocation, positive_int, stored_config_path
from agentrl.cli.launch.supervisor import LOCK_WAIT_S, Guard
from agentrl.cli.locks import hold_lock
from agentrl.cli.service import run_interruptible
from agentrl.config import RunConfig
from agentrl.config.load import load_config
from agentrl.inspector.audit import audit_run
from agentrl.inspector.audit_report import render_audit

DEFAULT_MINUTES = 10.0
EXIT_FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, and how much chaos."""
    parser.add_argument("run_name", metavar="RUN_NAME", nargs="?")
    parser.add_argument(
        "--minutes",
        type=positive_minutes,
        default=DEFAULT_MINUTES,
        help=f"minutes of faults, from the first step on (default: {DEFAULT_MINUTES:g})",
    )
    parser.add_argument("--faults", type=positive_int, help="at most so many faults (default: until the time is over)")
    parser.add_argument(
        "--kinds", help="only these faults, comma separated: kinds (kill-engine), actions (kill), targets (engine)"
    )


def positive_minutes(text: str) -> float:
    """Argument type of a duration."""
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text}: needs a number of minutes above 0")
    return value


def run(invocation: Invocation) -> int:
    """Torture, audit, report. Exit code 0 if the run finished and its audit is clean."""
    config, arguments = invocation.config, invocation.arguments
    kinds = choose_kinds(arguments.kinds, available=available_kinds(config))
    console = Console(highlight=False)
    farewell = "stopping every process of the run"
    problems = run_interruptible(
        chaos(config, kinds=kinds, minutes=arguments.minutes, most_faults=arguments.faults, console=console),
        announce_stop=lambda: console.print(farewell, soft_wrap=True),
    )
    return EXIT_FAILED if problems else 0


async def chaos(
    config: RunConfig, *, kinds: tuple[Kind, ...], minutes: float, most_faults: int | None, console: Console
) -> list[str]:
    """The whole of it; what is wrong with the run afterwards."""

    def tell(text: str) -> None:
        console.print(Text(text), soft_wrap=True)

    names = ", ".join(kind.name for kind in kinds)
    tell(f"agentrl chaos {config.run.run_name}: seed {config.run.seed}, {minutes:g} minutes of {names}")
    with ExitStack() as stack:
        lock_path = config.run.run_dir / "chaos.lock"
        lock = stack.enter_context(hold_lock(lock_path, what=f"chaos on {config.run.run_name}", wait_s=LOCK_WAIT_S))
        guard = stack.enter_context(closing(Guard(lock_descriptors=[lock])))
        journal = Journal(path=config.run.run_dir / "chaos.jsonl", tell=tell)
        planned = schedule(
            config.run.seed, kinds=kinds, num_processes=num_processes(config), lease_s=config.store.lease_s
        )
        faults = islice(planned, most_faults)
        outcome = await _campaign(config, faults=faults, minutes=minutes, guard=guard, journal=journal)
        show_outcome(console, outcome=outcome)
        problems = [*_problems(outcome), *await _audit(config, console=console, journal=journal)]
    show_verdict(console, outcome=outcome, problems=problems)
    return problems


async def _campaign(
    config: RunConfig, *, faults: Iterator[PlannedFault], minutes: float, guard: Guard, journal: Journal
) -> Outcome:
    proxy = None
    if config.store.db_connection_string is None:
        proxy = Proxy(upstream=lambda: ("127.0.0.1", database_port(config)))
    proxy_port = None if proxy is None else await proxy.start()
    launched = LaunchedRun(config=config, guard=guard, proxy_port=proxy_port)
    campaign = Campaign(run=launched, injector=Injector(run=launched, proxy=proxy), journal=journal)
    try:
        return await campaign.carry_out(faults, minutes=minutes)
    finally:
        if proxy is not None:
            await proxy.close()


def _problems(outcome: Outcome) -> list[str]:
    if outcome.exit_code == 0:
        return outcome.violations
    how = "made no more progress" if outcome.exit_code is None else f"ended with exit code {outcome.exit_code}"
    return [*outcome.violations, f"the launch {how} after step {outcome.last_step}"]


async def _audit(config: RunConfig, *, console: Console, journal: Journal) -> list[str]:
    """Have the finished run audited; the failures."""
    stored = load_config(profile=None, config_file=stored_config_path(config), environ={}, argv_flags=[])
    async with open_run_store(config, may_start=True, must_exist=True) as store:
        report = await audit_run(store, config=stored, run_dir=config.run.run_dir)
    console.print(render_audit(report))
    failures = [
        f"audit, {finding.check} {finding.subject}: {finding.message}"
        for result in report.results
        for finding in result.findings
    ]
    journal.note("audit", text=f"{len(failures)} failures" if failures else "clean", details={"failures": failures})
    return failures
