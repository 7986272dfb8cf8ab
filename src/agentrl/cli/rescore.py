"""`agentrl rescore RUN_NAME`: score what was sampled again, under a new version of a scorer, beside the old scores."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

import uvloop
from rich.console import Console
from rich.progress import Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from agentrl.cli.agents import check_judge_is_there, open_agents
from agentrl.cli.connect import open_run_store
from agentrl.cli.invocation import Invocation, positive_int
from agentrl.config import RunConfig
from agentrl.errors import ConfigError
from agentrl.evaluate.rescore import RescorePlan, RescoreReport, rescore
from agentrl.inspector.plain import plain
from agentrl.protocols import Store
from agentrl.rollout.spending import first_refusal
from agentrl.scoring import FORMAT_SCORER, MCPScorerFactory, load_scorers, parse_expression
from agentrl.scoring.agreement import Agreement, agreement
from agentrl.telemetry import setup_logging
from agentrl.tools import open_toolbox
from agentrl.types import ToolSpec

_SHOWN_DISAGREEMENTS = 20
_CHUNK = 500


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The run, the scorer, and what of the run."""
    parser.add_argument("run_name", metavar="RUN_NAME", nargs="?")
    parser.add_argument("--scorer", help="scorer or expression; without it, each task's own")
    parser.add_argument("--only", choices=("judge_error",), help="only records whose judge failed")
    parser.add_argument("--split", help="only records of this split, e.g. train")
    parser.add_argument("--parallel", type=positive_int, default=16, help="records scored at once (default: 16)")
    parser.add_argument("--versions", action="store_true", help="list the versions there are, and score nothing")
    parser.add_argument(
        "--agreement", nargs=2, metavar="VERSION", help="compare two versions (or ends of their names), score nothing"
    )


def run(invocation: Invocation) -> int:
    """Score, list or compare; 1 if some Records could not be scored."""
    config, arguments = invocation.config, invocation.arguments
    console = Console(highlight=False)
    if config.rollout.scorer_module is not None:
        load_scorers(config.rollout.scorer_module)
    if arguments.versions:
        uvloop.run(_list_versions(config, console=console))
        return 0
    if arguments.agreement:
        uvloop.run(_compare(config, names=arguments.agreement, console=console))
        return 0
    if arguments.scorer is not None:
        for name in parse_expression(arguments.scorer).names:
            MCPScorerFactory.check_name(name)
        check_judge_is_there(config, [arguments.scorer])
    setup_logging("rescore", log_dir=config.run.log_dir, run_name=config.run.run_name)
    plan = RescorePlan(
        scorer=arguments.scorer,
        split=arguments.split,
        only_judge_errors=arguments.only == "judge_error",
        max_in_flight=arguments.parallel,
    )
    try:
        report = uvloop.run(_rescore(config, plan=plan))
    except BaseExceptionGroup as errors:  # of Records scored at the same time
        raise first_refusal(errors) or errors from errors
    _show(report, console=console)
    return 1 if report.num_failed else 0


async def _rescore(config: RunConfig, *, plan: RescorePlan) -> RescoreReport:
    columns = (TextColumn("{task.description}"), TaskProgressColumn("{task.completed}/{task.total} records"))
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(open_run_store(config, may_start=True, must_exist=True))
        agents = await stack.enter_async_context(open_agents(config, store))
        tools = await _tools(config, plan=plan, stack=stack)
        shown = stack.enter_context(Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)))
        bar = shown.add_task("scoring", total=None)
        return await rescore(
            store,
            plan=plan,
            scoring=agents.scoring,
            tools=tools,
            progress=lambda done, total: shown.update(bar, completed=done, total=total),
        )


async def _tools(config: RunConfig, *, plan: RescorePlan, stack: AsyncExitStack) -> Sequence[ToolSpec]:
    """The tools' schemas, where a scorer compares calls with them. A Task's own scorer may, so they are read then."""
    if plan.scorer is not None and FORMAT_SCORER not in parse_expression(plan.scorer).names:
        return ()
    toolbox = await open_toolbox(config.tools)
    stack.push_async_callback(toolbox.close)
    return toolbox.list_tools()


def _show(report: RescoreReport, *, console: Console) -> None:
    console.print(f"{report.num_scored} records scored, {report.num_known} were scored before")
    for version, count in (report.versions or {}).items():
        console.print(plain(f"{version}: {count} records"), soft_wrap=True)
    if report.num_failed:
        failed = f"{report.num_failed} could not be scored, the last one {report.last_error}"
        console.print(plain(f"{failed}; run the same command again", style="red"), soft_wrap=True)


async def _list_versions(config: RunConfig, *, console: Console) -> None:
    async with open_run_store(config, may_start=True, must_exist=True) as store:
        counts = await store.count_scores()
    table = Table(box=None, header_style="dim")
    table.add_column("version")
    table.add_column("records", justify="right")
    for version, count in counts.items():
        table.add_row(plain(version), str(count))
    console.print(table if counts else "no version but the scores the records were finished with")


async def _compare(config: RunConfig, *, names: Sequence[str], console: Console) -> None:
    async with open_run_store(config, may_start=True, must_exist=True) as store:
        versions = [find_version(name, known=await store.count_scores()) for name in names]
        first, second = [await _values(store, version=version) for version in versions]
    console.print(_table(agreement(first, second), versions=versions))


def find_version(name: str, *, known: Mapping[str, int]) -> str:
    """The version a user means by its name, its scorer or the end of its fingerprint. Raises ConfigError."""
    if name in known:
        return name
    found = [version for version in known if version.endswith(name) or version.rpartition(" @")[0] == name]
    if len(found) == 1:
        return found[0]
    if found:
        end = found[0].rpartition("@")[2]
        raise ConfigError(f"version {name!r} fits several of: {', '.join(found)}; name one by its end, such as {end}")
    raise ConfigError(f"version {name!r} fits none of: {', '.join(known) or 'none yet'}; see --versions")


async def _values(store: Store, *, version: str) -> dict[str, float]:
    ids = await store.list_record_ids()
    values: dict[str, float] = {}
    for start in range(0, len(ids), _CHUNK):
        records = await store.find_records(ids[start : start + _CHUNK])
        scores = await store.find_scores(records, version=version)
        values |= {record_id: score.value for record_id, score in scores.items()}
    return values


def _table(result: Agreement, *, versions: Sequence[str]) -> Table:
    table = Table(box=None, show_header=False)
    rows = [
        ("first", versions[0]),
        ("second", versions[1]),
        ("records scored by both", str(result.num_records)),
        ("agreement", f"{result.rate:.3f}"),
        ("Cohen's kappa", f"{result.kappa:.3f}"),
        ("both right", str(result.num_both_right)),
        ("both wrong", str(result.num_both_wrong)),
        ("only first right", str(len(result.first_only))),
        ("only second right", str(len(result.second_only))),
    ]
    for record_ids, label in ((result.first_only, "only first"), (result.second_only, "only second")):
        rows += [(label, record_id) for record_id in record_ids[:_SHOWN_DISAGREEMENTS]]
    for label, value in rows:
        table.add_row(Text(label, style="dim"), plain(value))
    return table
