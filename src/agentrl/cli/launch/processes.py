"""The processes of a run as child specifications: what is started, with which arguments, environment and log file.

Children get the resolved configuration through OUTPUT_DIR/RUN_NAME/config.json, and secrets through the environment.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from agentrl.cli.connect import database_dir
from agentrl.cli.invocation import stored_config_path
from agentrl.cli.launch.supervisor import ChildSpec, child_environment
from agentrl.config import RunConfig
from agentrl.config.load import ASSETS_DIR, ENVIRONMENT_PREFIX, PLAIN_VARIABLES
from agentrl.config.secrets import masked, secret_settings
from agentrl.store.embedded import embedded_command, embedded_uri, wake_listener

SAMPLERS_STOP, ENGINE_STOPS, DATABASE_STOPS = 0, 1, 2
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
SHARDED_CONFIG = ASSETS_DIR / "fsdp2_dst.yml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """Makes the specifications of one run's processes. `environ` is the launcher's."""

    config: RunConfig
    uri: str
    environ: Mapping[str, str]

    def engine(self) -> ChildSpec:
        """The inference service, or the registrar of given ones."""
        threads = self.config.inference.engine_threads
        return self._agentrl("serve", process="engine", index=0, threads=threads, stage=ENGINE_STOPS)

    def sampler(self, index: int) -> ChildSpec:
        """Sampler process number `index`."""
        spec = self._agentrl("sample", process="sampler", index=index, threads=1, stage=SAMPLERS_STOP)
        return replace(spec, spends=True)

    def trainer(self) -> ChildSpec:
        """The trainer. One process without an Accelerate config needs no `accelerate launch`, which costs seconds."""
        train = self.config.train
        command = self._command("train")
        if train.num_processes > 1 or train.accelerate_config is not None:
            config_file = train.accelerate_config or SHARDED_CONFIG
            command = (  # never with --cpu: that starts one process, whatever the file and --num_processes say
                *(sys.executable, "-m", "agentrl.train.launcher", "--config_file", str(config_file)),
                *("--num_processes", str(train.num_processes), "--main_process_port", str(_free_port())),
                *("--num_cpu_threads_per_process", str(train.train_threads)),
                *command[1:],
            )
        return ChildSpec(
            name="trainer",
            argv=command,
            environ=self._environment(threads=train.train_threads),
            log_path=log_path(self.config, "train", 0),
            stop_stage=SAMPLERS_STOP,
            ends_run=True,
            has_pulse=True,
        )

    def _agentrl(self, name: str, *, process: str, index: int, threads: int, stage: int) -> ChildSpec:
        return ChildSpec(
            name=f"{process} {index}",
            argv=self._command(name),
            environ={**self._environment(threads=threads), "RANK": str(index)},  # numbers its log file
            log_path=log_path(self.config, process, index),
            stop_stage=stage,
            has_pulse=True,
        )

    def _command(self, name: str) -> tuple[str, ...]:
        config_path = str(stored_config_path(self.config))
        return (sys.executable, "-m", "agentrl.cli.main", name, self.config.run.run_name, "--config", config_path)

    def _environment(self, *, threads: int) -> dict[str, str]:
        environ = child_environment(
            self.environ, threads=threads, drop_prefixes=(ENVIRONMENT_PREFIX, *PLAIN_VARIABLES, *RANK_VARIABLES)
        )
        secrets = {**secret_settings(self.config), "db_connection_string": self.uri}
        return {**environ, **{f"{ENVIRONMENT_PREFIX}{name.upper()}": value for name, value in secrets.items()}}


def database(config: RunConfig, *, port: int, environ: Mapping[str, str]) -> tuple[ChildSpec, str]:
    """The embedded database and its URI. Raises UnavailableError if no server is installed."""
    folder = database_dir(config)
    folder.mkdir(parents=True, exist_ok=True)
    spec = ChildSpec(
        name="database",
        argv=tuple(embedded_command(folder, port=port)),
        environ=child_environment(environ, threads=1, drop_prefixes=(ENVIRONMENT_PREFIX,)),
        log_path=log_path(config, "database", 0),
        stop_stage=DATABASE_STOPS,
        while_stopping=partial(wake_listener, port),
    )
    return spec, embedded_uri(config.store.db_proxy_port or port)


def log_path(config: RunConfig, process: str, index: int) -> Path:
    """LOG_DIR/<run>_<process>_<n>.log."""
    return config.run.log_dir / f"{config.run.run_name}_{process}_{index}.log"


def write_config(config: RunConfig, *, path: Path | None = None) -> None:
    """Store the resolved configuration, secrets masked; replaced in one go. Default path: where children look.

    A proxy to the database is left out: it ends with the launch that was started through it.
    """
    sections = masked(config)
    for name in {"db_connection_string", "db_port"} - config.store.model_fields_set:
        sections["store"].pop(name, None)
    del sections["store"]["db_proxy_port"]
    path = path or stored_config_path(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(sections, indent=2) + "\n", encoding="utf-8")
    beside.replace(path)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
