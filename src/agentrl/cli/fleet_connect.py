"""Opening a fleet's documents, and the configuration of a run in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pydantic import ValidationError

from agentrl.cli.connect import connection_string, open_database_server
from agentrl.config import RunConfig
from agentrl.config.secrets import MASK, SETTINGS_WITH_SECRETS
from agentrl.errors import ConfigError
from agentrl.fleets import FleetRun
from agentrl.store import MongoFleetRuns, open_fleet_runs


@asynccontextmanager
async def open_fleet(
    config: RunConfig,
    *,
    may_start: bool = False,
    may_create: bool = False,
    outlasts_until: asyncio.Event | None = None,
) -> AsyncIterator[MongoFleetRuns]:
    """The documents of the fleet `fleet_name`. The embedded database is started as for `open_run_store`.

    `outlasts_until`: see `prepared_store`.
    """
    fleet_name = config.run.fleet_name
    if fleet_name is None:
        raise ConfigError("fleet_name is not set: give the name of a fleet")
    with open_database_server(config, may_start=may_start, may_create=may_create):
        fleet = open_fleet_runs(connection_string(config), fleet_name=fleet_name, timeout_s=config.store.db_timeout_s)
        try:
            await fleet.prepare()
            if outlasts_until is not None:
                fleet.outlast_outages(outlasts_until)
            yield fleet
        finally:
            await fleet.close()


def with_run_name(config: RunConfig, run_name: str) -> RunConfig:
    """The configuration of a process, for the database of one run of its fleet."""
    return config.model_copy(update={"run": config.run.model_copy(update={"run_name": run_name})})


def member_config(run: FleetRun, *, process: RunConfig) -> RunConfig:
    """The settings a run was added to the fleet with; database, files and secrets are those of this process.

    Raises ConfigError if they are not valid, or if a secret is missing.
    """
    sections = {name: dict(fields) for name, fields in run.config.items()}
    of_process = process.model_dump(mode="json")
    for name, fields in sections.items():
        for setting in fields.keys() & SETTINGS_WITH_SECRETS:
            if MASK in (fields[setting] or ""):
                fields[setting] = of_process[name][setting]
    sections |= {"store": of_process["store"], "run": {**of_process["run"], "run_name": run.name}}
    try:
        return RunConfig.model_validate(sections)
    except ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(f"run {run.name}: its settings in the fleet cannot be used: {message}") from None
