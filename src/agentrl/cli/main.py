"""The `agentrl` command: finds the command's module, resolves the configuration, turns errors into exit codes.

Exit codes: 0 done, 1 failed, 2 the user can fix it (one line on stderr), 3 stopped by an alarm, 4 budget spent,
130 interrupted.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import importlib.metadata
import json
import logging
import os
import sys
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from agentrl.cli.exit_codes import EXIT_BUDGET, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_STOPPED, EXIT_USER_ERROR
from agentrl.cli.invocation import UsageParser, parse_invocation
from agentrl.config.secrets import SETTINGS_WITH_SECRETS, masked, require_secrets
from agentrl.config.sections import RunSection
from agentrl.errors import (
    AgentRLError,
    BudgetSpentError,
    DatabaseUnavailableError,
    StoppedByAlarmError,
    ToolServerError,
    UserError,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One command: `module` has `add_arguments(parser)` and `run(invocation) -> exit code`."""

    module: str
    summary: str
    needs_run_name: bool = True
    serves_fleets: bool = False  # it works for fleet_name instead of a run
    uses_stored_config: bool = True
    default_profile: str | None = None  # of a new run that names no model
    secrets: Set[str] = frozenset({"db_connection_string"})  # settings that it uses in full
    own_flags: Set[str] = frozenset()  # names of settings that mean something else in this command


COMMANDS = {
    "launch": Command(
        module="agentrl.cli.launch.command",
        summary="Run everything on this machine, with a live view.",
        secrets=SETTINGS_WITH_SECRETS,
    ),
    "status": Command(module="agentrl.cli.status", summary="Show how a run is going."),
    "inspect": Command(module="agentrl.cli.inspect", summary="Read trajectories in the terminal."),
    "resume": Command(module="agentrl.cli.resume", summary="Let a trainer go on that an alarm paused."),
    "audit": Command(module="agentrl.cli.audit", summary="Prove from the stored facts that nothing went wrong."),
    "cost": Command(module="agentrl.cli.cost", summary="What the calls of a run did cost, and what it will cost."),
    "journal": Command(module="agentrl.cli.journal", summary="Write the tool calls of a run to a file, for replay."),
    "whatif": Command(
        module="agentrl.cli.whatif",
        summary="Replay a stored step under other losses.",
        own_flags=frozenset({"loss"}),
    ),
    "merge-report": Command(
        module="agentrl.cli.merge_report", summary="Count what each layout of the training rows costs in tokens."
    ),
    "eval": Command(
        module="agentrl.cli.evaluate", summary="Measure policies on the held-out tasks.", secrets=SETTINGS_WITH_SECRETS
    ),
    "rescore": Command(
        module="agentrl.cli.rescore", summary="Score what was sampled again.", secrets=SETTINGS_WITH_SECRETS
    ),
    "tasks": Command(
        module="agentrl.cli.tasks",
        summary="Load a task file into a run, or generate the laptop tasks.",
        needs_run_name=False,
    ),
    "tools": Command(
        module="agentrl.cli.tools",
        summary="Serve, list, call or check tool servers.",
        needs_run_name=False,
        uses_stored_config=False,
        secrets=frozenset({"mcp_auth_token"}),
    ),
    "train": Command(module="agentrl.cli.train", summary="The trainer process."),
    "sample": Command(
        module="agentrl.cli.sample", summary="A sampler process.", serves_fleets=True, secrets=SETTINGS_WITH_SECRETS
    ),
    "serve": Command(
        module="agentrl.cli.serve",
        summary="The inference service.",
        serves_fleets=True,
        secrets=frozenset({"db_connection_string", "inference_url"}),
    ),
    "fleet": Command(
        module="agentrl.cli.fleet", summary="Runs that share samplers and services.", needs_run_name=False
    ),
    "db": Command(module="agentrl.cli.database", summary="The embedded database.", needs_run_name=False),
    "chaos": Command(
        module="agentrl.cli.chaos.command",
        summary="Launch a run, inject faults, check that nothing was lost.",
        default_profile="laptop",
        secrets=SETTINGS_WITH_SECRETS,
    ),
    "doctor": Command(
        module="agentrl.cli.doctor", summary="Check this machine.", needs_run_name=False, secrets=frozenset()
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console command; returns the exit code."""
    tokens = list(sys.argv[1:] if argv is None else argv)
    try:
        return _with_one_error(tokens)
    except DatabaseUnavailableError as error:  # it may be restarting: whoever supervises this process tries again
        _say(str(error))
        return EXIT_FAILED
    except (UserError, ToolServerError) as error:  # a tool server that never started is a setting to correct
        _say(str(error))
        return EXIT_USER_ERROR
    except StoppedByAlarmError as error:
        _say(str(error))
        return EXIT_STOPPED
    except BudgetSpentError as error:
        _say(str(error))
        return EXIT_BUDGET
    except AgentRLError as error:
        logger.debug("failed", exc_info=error)
        _say(str(error))
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output left, e.g. `agentrl inspect RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except OSError as error:
        if error.filename is None:
            raise  # no trouble with a file of the user's
        logger.debug("failed", exc_info=error)
        _say(_file_trouble(error))
        return EXIT_USER_ERROR


def _with_one_error(tokens: list[str]) -> int:
    """Run the command. Of errors at the same time, the first of ours is the one to tell."""
    try:
        return _dispatch(tokens)
    except ExceptionGroup as errors:
        error: BaseException | None = errors.subgroup(AgentRLError)
        if error is None:
            raise
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from errors


def _say(message: str) -> None:
    """Write a message for a person to stderr; control characters in quoted input cannot reach the terminal."""
    from agentrl.inspector.plain import without_controls

    sys.stderr.write(f"agentrl: {without_controls(message)}\n")


def _file_trouble(error: OSError) -> str:
    """A file or folder that cannot be written or read, with the way out."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        way_out = "free some space, or set --output_dir, --data_dir and --log_dir to another disk"
    elif error.errno in {errno.ENOTDIR, errno.EEXIST}:
        way_out = "a file is where a folder should be; move it, or set --output_dir, --data_dir and --log_dir"
    else:
        way_out = "correct the path or its permissions, or set --output_dir, --data_dir and --log_dir"
    return f"{error.filename}: {(error.strerror or str(error)).lower()}; {way_out}"


def _dispatch(tokens: list[str]) -> int:
    top = UsageParser(prog="agentrl", description="Reinforcement learning for tool-using language agents.")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.summary, add_help=False)
    top.add_argument("--version", action="version", version=f"agentrl {importlib.metadata.version('agentrl')}")
    chosen, unknown = top.parse_known_args(tokens[:1])
    if unknown:
        top.error(f"{unknown[0]}: the command comes first, then its flags")
    if chosen.command is None:
        top.print_help()
        return EXIT_USER_ERROR
    command = COMMANDS[chosen.command]
    module = importlib.import_module(command.module)
    parser = _command_parser(chosen.command, command)
    module.add_arguments(parser)
    invocation = parse_invocation(
        parser,
        tokens[1:],
        environ=os.environ,
        uses_stored_config=command.uses_stored_config,
        default_profile=command.default_profile,
        own_flags=command.own_flags,
    )
    _check_names(invocation.config.run, command=command, parser=parser)
    if invocation.arguments.dry_run:
        sys.stdout.write(json.dumps(masked(invocation.config), indent=2) + "\n")
        return 0
    require_secrets(invocation.config, command.secrets)
    code: int = module.run(invocation)
    return code


def _check_names(run: RunSection, *, command: Command, parser: argparse.ArgumentParser) -> None:
    """Refuse a call that does not say which run, or which fleet, it is about, or says both."""
    has_run_name = "run_name" in run.model_fields_set
    if run.fleet_name is not None and not command.serves_fleets:
        parser.error("fleet_name is for sample and serve; this command is about one run")
    if run.fleet_name is not None and has_run_name:
        parser.error(f"run_name = {run.run_name} and fleet_name = {run.fleet_name} are both given; choose one")
    if command.needs_run_name and not has_run_name and run.fleet_name is None:
        parser.error("RUN_NAME is missing")


def _command_parser(name: str, command: Command) -> argparse.ArgumentParser:
    parser = UsageParser(
        prog=f"agentrl {name}",
        description=command.summary,
        epilog="Every setting is a flag as well, e.g. --learning_rate 1e-4: see docs/configuration.md.",
        allow_abbrev=False,
    )
    parser.set_defaults(run_name=None)  # for commands that take none
    parser.add_argument("--config", type=Path, metavar="FILE", help="YAML or JSON file with settings")
    parser.add_argument("--dry_run", "--dry-run", action="store_true", help="print the resolved configuration and exit")
    return parser


if __name__ == "__main__":
    sys.exit(main())
