"""From command-line tokens to what a command runs with: its own arguments and the resolved configuration."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from agentrl.config import RunConfig
from agentrl.config.load import load_config, split_flags, unknown_name
from agentrl.errors import ConfigError

MAX_DIGITS = 18


def positive_int(text: str) -> int:
    """Argument type of counts, which also go to the database: 64 bits."""
    if not (text.isascii() and text.isdigit()) or len(text) > MAX_DIGITS or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: needs a whole number from 1, of {MAX_DIGITS} digits at most")
    return int(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """One call of one command."""

    config: RunConfig
    arguments: argparse.Namespace


class UsageParser(argparse.ArgumentParser):
    """Reports misuse as ConfigError instead of leaving the process."""

    def error(self, message: str) -> None:  # type: ignore[override]  # argparse types it NoReturn; raising returns never
        """Raise ConfigError with the problem and where to look."""
        raise ConfigError(f"{message}; see {self.prog} --help")


def parse_invocation(
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
    *,
    environ: Mapping[str, str],
    uses_stored_config: bool,
    default_profile: str | None = None,
    own_flags: Set[str] = frozenset(),
) -> Invocation:
    """Parse the tokens after the command name.

    Flags of settings go to the configuration, the rest to `parser`. With `uses_stored_config` a run that was launched
    before is described by its OUTPUT_DIR/RUN_NAME/config.json unless --config or --profile says otherwise. A run that
    is described by nothing of these, and has no model, is one of `default_profile`. `own_flags` are names of settings
    that go to `parser` nevertheless.
    """
    own_tokens, flags = split_flags(argv, own=own_flags)
    arguments, unknown = parser.parse_known_args(own_tokens)
    if unknown:
        usage = [flag.lstrip("-") for flag in re.findall(r"--[a-z_]+", parser.format_usage())]
        if unknown[0].startswith("-"):
            flag = unknown[0].partition("=")[0]
            raise unknown_name(flag.lstrip("-").replace("-", "_"), origin=flag, known=usage)
        raise ConfigError(_too_many(unknown[0], argv=argv, prog=parser.prog))
    if arguments.run_name is not None:
        flags = [*flags, "--run_name", arguments.run_name]
    config_file: Path | None = arguments.config
    config = load_config(profile=None, config_file=config_file, environ=environ, argv_flags=flags)
    stored = stored_config_path(config)
    if config_file is None and config.run.profile is None:
        if uses_stored_config and stored.is_file():
            config = load_config(profile=None, config_file=stored, environ=environ, argv_flags=flags)
        elif default_profile is not None and config.model.model_name_or_path is None:
            config = load_config(profile=default_profile, config_file=None, environ=environ, argv_flags=flags)
    return Invocation(config=config, arguments=arguments)


def _too_many(argument: str, *, argv: Sequence[str], prog: str) -> str:
    """Why an argument is one too many: often it was meant as the value of the flag before it."""
    before = argv[argv.index(argument) - 1] if argument in argv[1:] else ""
    meant = f", and no value of {before} (true or false)" if before.startswith("--") else ""
    return f"{argument!r}: one argument too many{meant}; see {prog} --help"


def stored_config_path(config: RunConfig) -> Path:
    """Where `agentrl launch` keeps the resolved configuration of a run."""
    return config.run.run_dir / "config.json"
