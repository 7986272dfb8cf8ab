"""`agentrl audit RUN_NAME [--json]`: recompute what a run guarantees from what it stored. Exit code 1 with findings."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

import uvloop
from pydantic import ValidationError
from rich.console import Console

from agentrl.cli.connect import open_run_store
from agentrl.cli.invocation import Invocation
from agentrl.config import RunConfig
from agentrl.config.settings import sections
from agentrl.errors import ConfigError, UnavailableError
from agentrl.inspector.audit import audit_run
from agentrl.inspector.audit_report import AuditReport, render_audit
from agentrl.protocols import ReadStore

EXIT_FINDINGS = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, and for whom the report is."""
    parser.add_argument("run_name", metavar="RUN_NAME", nargs="?")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def run(invocation: Invocation) -> int:
    """Audit, print, and say with the exit code whether anything was found."""
    report = uvloop.run(_audit(invocation.config))
    if invocation.arguments.json:
        sys.stdout.write(json.dumps(report.as_json(), indent=2) + "\n")
    else:
        Console().print(render_audit(report))
    return 0 if report.is_clean else EXIT_FINDINGS


async def _audit(config: RunConfig) -> AuditReport:
    run_dir = config.run.run_dir
    if not run_dir.is_dir():
        sys.stderr.write(f"{run_dir} is not on this machine: checkpoints are not compared with the ledger\n")
    async with open_run_store(config, may_start=True) as store:
        made_with = await stored_config(store, otherwise=config)
        report = await audit_run(store, config=made_with, run_dir=run_dir if run_dir.is_dir() else None)
    if not report.counts["tasks"] and not report.counts["steps"]:
        raise UnavailableError(
            f"run {config.run.run_name} has no tasks and no steps: nothing to audit; see agentrl status"
        )
    return report


async def stored_config(store: ReadStore, *, otherwise: RunConfig) -> RunConfig:
    """The configuration the run was made with: that of its Run document, if a launcher wrote one.

    Raises ConfigError if this version of AgentRL cannot read it.
    """
    document = await store.get_run()
    if document is None or "config" not in document:
        return otherwise
    try:
        return RunConfig.model_validate(_without_unset(document["config"]))
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"run {otherwise.run.run_name} was made with {name} = {first['input']!r}, which this version refuses "
            f"({first['msg']}); audit it with the version that made it"
        ) from error


def _without_unset(stored: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Without settings of another version that were not set: they had no effect."""
    known = sections()
    return {
        section: {
            name: value
            for name, value in fields.items()
            if value is not None or section not in known or name in known[section].model_fields
        }
        for section, fields in stored.items()
    }
