"""`agentrl eval RUN_NAME`: the first and the newest policy of a run on its held-out tasks, side by side.

Each version gets an inference engine of its own, so a run that is training is not disturbed. Records are kept under the
split `eval-v<version>...`: evaluating again only does what is missing, and `agentrl inspect` shows them. With
`--reflection_turns` or `--parallel` the same is done for test-time scaling (evaluate_scaling.py).
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from rich.console import Console
from rich.table import Table

from agentrl.chat import ChatFormat
from agentrl.cli.agents import browser_of, open_agents
from agentrl.cli.calls import open_calls
from agentrl.cli.connect import connection_string, open_run_store, prepared_store
from agentrl.cli.console import UnwindingConsole
from agentrl.cli.evaluate_scaling import add_scaling_arguments, scaling_request, show_reports
from agentrl.cli.invocation import Invocation, positive_int
from agentrl.cli.launch.processes import Processes, write_config
from agentrl.cli.launch.supervisor import Guard, Supervisor
from agentrl.cli.progress import recent_services
from agentrl.cli.prune import drop_database
from agentrl.cli.service import run_interruptible
from agentrl.cli.tasks import read_task_file
from agentrl.config import RunConfig
from agentrl.config.inference_section import SAMPLING_BOUNDS
from agentrl.errors import ConfigError, UnavailableError
from agentrl.evaluate import EvaluationReport, evaluate
from agentrl.evaluate.measure import measure_scaling
from agentrl.inference import RoutedClient
from agentrl.inspector.plain import plain
from agentrl.protocols import Store
from agentrl.rollout.custom import sampler_of
from agentrl.rollout.parts import RunParts
from agentrl.types import PolicyVersion, ServiceStatus

ENGINE_START_S = 180.0
POLL_S = 0.2
HEARTBEAT_AGE = timedelta(seconds=30)
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


class Work(Protocol[Result_co]):
    """What is measured of one policy version."""

    async def __call__(self, parts: RunParts, *, policy_version: int) -> Result_co:
        """Measure the version that the parts' client serves."""
        ...


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, and what of it."""
    parser.add_argument("run_name", metavar="RUN_NAME", nargs="?")
    parser.add_argument("--versions", default="0,latest", help="policy versions, comma separated (default: 0,latest)")
    parser.add_argument("--generations", type=positive_int, default=1, help="records per held-out task (default: 1)")
    parser.add_argument(
        "--temperature", type=_temperature, help="of every completion; 0 is greedy (default: the run's)"
    )
    add_scaling_arguments(parser)


def run(invocation: Invocation) -> int:
    """Evaluate and print the comparison."""
    arguments = invocation.arguments
    console = UnwindingConsole(highlight=False)
    config = _with_temperature(invocation.config, temperature=arguments.temperature)
    versions = arguments.versions.split(",")
    request = scaling_request(arguments)
    rows = read_task_file(config, "eval_file")
    if request is None:
        work = partial(evaluate, rows=rows, num_generations=arguments.generations, variant=_variant(arguments))
        console.print(_table(run_interruptible(_measure_each(config, versions=versions, work=work, console=console))))
        return 0
    request.plan.check(config, rows=rows)
    measure = partial(measure_scaling, rows=rows, plan=request.plan)
    reports = run_interruptible(_measure_each(config, versions=versions, work=measure, console=console))
    show_reports(reports, request=request, config=config, console=console)
    return 0


def _temperature(text: str) -> float:
    low, high = SAMPLING_BOUNDS["temperature"]
    try:
        temperature = float(text)
    except ValueError:
        temperature = math.nan
    if not low <= temperature <= high:
        raise argparse.ArgumentTypeError(f"{text!r}: needs a number from {low} to {high}; 0 is greedy")
    return temperature


def _with_temperature(config: RunConfig, *, temperature: float | None) -> RunConfig:
    if temperature is None:
        return config
    preferred = {**config.inference.preferred_sampling_params, "temperature": temperature}
    inference = config.inference.model_copy(update={"preferred_sampling_params": preferred})
    return config.model_copy(update={"inference": inference})


def _variant(arguments: argparse.Namespace) -> str:
    """Keeps the Records of another temperature or number of generations apart."""
    temperature = "" if arguments.temperature is None else f"-t{arguments.temperature:g}"
    return temperature + (f"-g{arguments.generations}" if arguments.generations > 1 else "")


async def _measure_each(
    config: RunConfig, *, versions: Sequence[str], work: Work[Result], console: Console
) -> list[Result]:
    results = []
    async with open_run_store(config, may_start=True, must_exist=True) as store:
        if config.inference.inference_url is not None and await recent_services(store, younger_than=HEARTBEAT_AGE):
            raise UnavailableError(
                f"inference_url = {config.inference.inference_url}: run {config.run.run_name} is using these servers; "
                "evaluation would change their weights, so wait for the run or stop it"
            )
        named = [await _policy(config, store=store, name=name.strip()) for name in versions]
        for version in {policy.version: policy for policy in named}.values():
            with console.status(f"policy v{version.version} on {config.run.eval_file}"):
                async with _open_parts(config, version=version, store=store) as parts:
                    results.append(await work(parts, policy_version=version.version))
    return results


async def _policy(config: RunConfig, *, store: Store, name: str) -> PolicyVersion:
    """The published policy a user names: a number or `latest`."""
    latest = await store.latest_policy()
    if latest is None:
        raise UnavailableError(f"run {config.run.run_name} has published no policy yet; see agentrl status")
    if name == "latest" or name == str(latest.version):
        return latest
    path = Path(latest.path).parent / f"v{name}"
    if not name.isdigit() or not path.is_dir():
        kept = ", ".join(sorted(found.name for found in path.parent.glob("v*")))
        raise ConfigError(f"--versions {name}: no such policy on disk; there are {kept}, and latest")
    return PolicyVersion(version=int(name), path=str(path))


@asynccontextmanager
async def _open_parts(config: RunConfig, *, version: PolicyVersion, store: Store) -> AsyncIterator[RunParts]:
    chat = ChatFormat.load(
        Path(version.path),
        chat_template=config.model.chat_template,
        tool_call_parser=config.rollout.tool_call_parser,
    )
    async with (
        open_calls(config, store=store) as calls,
        open_agents(config, store) as agents,
        _serving(config, version=version) as client,
    ):
        yield RunParts(
            config=config, store=store, toolbox=calls.toolbox, client=calls.paying(client), chat=chat,
            scoring=agents.scoring, sampler_class=sampler_of(config), caller=calls.caller,
            browser=browser_of(agents, chat=chat),
        )  # fmt: skip


@asynccontextmanager
async def _serving(config: RunConfig, *, version: PolicyVersion) -> AsyncIterator[RoutedClient]:
    """An inference service pinned to one version, known only to a small database of its own, dropped at the end."""
    name = f"{config.run.run_name[:48]}-eval-v{version.version}"
    run = config.run.model_copy(update={"run_name": name, "output_dir": config.run.run_dir / "eval"})
    pinned = config.model_copy(
        update={"run": run, "model": config.model.model_copy(update={"model_name_or_path": Path(version.path)})}
    )
    uri = connection_string(config)
    write_config(pinned)
    fleet = await prepared_store(pinned)
    client = RoutedClient(fleet)
    try:
        await fleet.publish_policy(version)
        with closing(Guard(lock_descriptors=())) as guard:
            async with Supervisor(guard=guard) as supervisor:
                supervisor.start(Processes(config=pinned, uri=uri, environ=os.environ).engine())
                await _until_served(fleet, version=version, supervisor=supervisor)
                yield client
    finally:
        await client.close()
        await fleet.close()
        await drop_database(config, name)


async def _until_served(fleet: Store, *, version: PolicyVersion, supervisor: Supervisor) -> None:
    deadline = asyncio.get_running_loop().time() + ENGINE_START_S
    while True:
        supervisor.check()
        services = await recent_services(fleet, younger_than=HEARTBEAT_AGE)
        if any(s.status is ServiceStatus.UP and s.policy_version == version.version for s in services):
            return
        if asyncio.get_running_loop().time() > deadline:
            raise UnavailableError(
                f"no engine serves policy v{version.version} after {ENGINE_START_S:.0f} s; its log tells why"
            )
        await asyncio.sleep(POLL_S)


def _table(reports: Sequence[EvaluationReport]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for report in reports:
        table.add_column(f"policy v{report.policy_version}", justify="right")
    rows: list[tuple[str, list[str]]] = [
        ("score", [f"{r.score:.3f} ± {r.standard_error:.3f}" for r in reports]),
        ("tasks", [str(r.num_tasks) for r in reports]),
        ("failed records", [str(r.num_failed) for r in reports]),
        ("tool calls", [f"{r.mean_tool_calls:.2f}" for r in reports]),
        ("sampled tokens", [f"{r.mean_completion_tokens:.0f}" for r in reports]),
    ]
    kinds = sorted({kind for report in reports for kind in report.score_by_kind})
    rows += [(f"score: {kind}", [_number(report.score_by_kind.get(kind)) for report in reports]) for kind in kinds]
    reasons = sorted({reason for report in reports for reason in report.stop_reasons})
    rows += [(f"stopped: {reason}", [str(r.stop_reasons.get(reason, 0)) for r in reports]) for reason in reasons]
    for label, values in rows:
        table.add_row(plain(label), *values, style="bold" if label == "score" else "")
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
