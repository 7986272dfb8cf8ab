"""What a run did cost, per target, Record and step, and what it will cost: for `agentrl cost`.

call  the price when it was made (DispatchedSamplingTask.cost_nano_usd)
Record  its committed calls                  step  the Records of the groups it was the first to train
run   all stored calls, and what the account holds beyond them: cancelled calls, turns that were never committed
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from agentrl.config import RunConfig
from agentrl.config.prices import usd
from agentrl.inspector.plain import plain
from agentrl.protocols import CallCosts, Store
from agentrl.types import Record, StepStatus

_BLOCK = 256
SHOWN_STEPS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What the groups of one optimizer step did cost."""

    step: int
    num_records: int
    cost_nano_usd: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a run will have cost at its last step, from the Records that are finished."""

    num_records: int  # it rests on
    num_expected: int  # Records in all
    total_usd: float
    standard_error_usd: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CostReport:
    """The cost ledger of a run."""

    run_name: str
    calls: tuple[CallCosts, ...]
    num_records: int
    records_nano_usd: int
    steps: tuple[StepCost, ...]
    account_nano_usd: int
    budget_usd: float | None
    estimate: Estimate | None

    @property
    def calls_nano_usd(self) -> int:
        """Of all stored calls."""
        return sum(call.cost_nano_usd for call in self.calls)

    @property
    def spent_nano_usd(self) -> int:
        """What the budget counts; runs from before they had prices have no account."""
        return max(self.account_nano_usd, self.calls_nano_usd)

    def as_json(self) -> dict[str, Any]:
        """The report as plain JSON values, amounts in US dollars."""
        estimate = self.estimate
        return {
            "run": self.run_name,
            "spent_usd": usd(self.spent_nano_usd),
            "calls_usd": usd(self.calls_nano_usd),
            "not_on_stored_calls_usd": usd(self.spent_nano_usd - self.calls_nano_usd),
            "records_usd": usd(self.records_nano_usd),
            "num_records": self.num_records,
            "budget_usd": self.budget_usd,
            "targets": [
                {
                    "kind": call.kind.value,
                    "target": call.target,
                    "calls": call.num_calls,
                    "seconds": round(call.seconds, 3),
                    "usd": usd(call.cost_nano_usd),
                }
                for call in self.calls
            ],
            "steps": [
                {"step": step.step, "records": step.num_records, "usd": usd(step.cost_nano_usd)} for step in self.steps
            ],
            "estimate": None
            if estimate is None
            else {
                "from_records": estimate.num_records,
                "expected_records": estimate.num_expected,
                "total_usd": estimate.total_usd,
                "standard_error_usd": estimate.standard_error_usd,
            },
        }


async def load_costs(store: Store, *, config: RunConfig) -> CostReport:
    """Add up what is stored of a run."""
    ids = await store.list_record_ids()
    records = [
        record
        for start in range(0, len(ids), _BLOCK)
        for record in await store.find_records(ids[start : start + _BLOCK])
    ]
    calls = tuple(await store.sum_calls())
    steps = await _step_costs(store, records)
    report = CostReport(
        run_name=config.run.run_name,
        calls=calls,
        num_records=len(records),
        records_nano_usd=sum(record.cost_nano_usd for record in records),
        steps=steps,
        account_nano_usd=await store.spent(),
        budget_usd=config.costs.budget_usd,
        estimate=None,
    )
    finished = [record for record in records if record.is_final and record.split == "train"]
    return replace(report, estimate=estimate_total(report, finished, config=config))


async def _step_costs(store: Store, records: Sequence[Record]) -> tuple[StepCost, ...]:
    of_task: dict[str, list[Record]] = {}
    for record in records:
        of_task.setdefault(record.task_id, []).append(record)
    costs = []
    for step in await store.list_steps():
        if step.status is not StepStatus.COMMITTED:
            continue
        trained = [record for task_id in step.task_ids for record in of_task.pop(task_id, ())]
        costs.append(
            StepCost(
                step=step.step,
                num_records=len(trained),
                cost_nano_usd=sum(record.cost_nano_usd for record in trained),
            )
        )
    return tuple(costs)


def estimate_total(report: CostReport, finished: Sequence[Record], *, config: RunConfig) -> Estimate | None:
    """What the run will have cost at `max_steps`; None before two Records are finished.

    A step takes `tasks_per_step` groups, or, once there are steps, as many Records as they took on average.
    """
    if len(finished) < 2:
        return None
    costs = [usd(record.cost_nano_usd) for record in finished]
    taken = len(finished) / len(report.steps) if report.steps else 0.0
    per_step = max(config.algo.tasks_per_step * config.rollout.num_generations, taken)
    num_expected = max(len(finished), math.ceil(per_step * config.train.max_steps))
    num_missing = num_expected - len(finished)
    mean = max(fmean(costs), usd(report.spent_nano_usd) / len(finished))
    spread = stdev(costs)
    return Estimate(
        num_records=len(finished),
        num_expected=num_expected,
        total_usd=usd(report.spent_nano_usd) + mean * num_missing,
        standard_error_usd=spread * math.sqrt(num_missing + num_missing**2 / len(finished)),
    )


def render_costs(report: CostReport) -> RenderableType:
    """Tables for a terminal."""
    parts: list[RenderableType] = [_target_table(report), Text()]
    if report.steps:
        parts += [_step_table(report.steps[-SHOWN_STEPS:]), Text()]
    return Group(*parts, *(plain(line) for line in _lines(report)))


def _lines(report: CostReport) -> list[str]:
    spent, records = usd(report.spent_nano_usd), usd(report.records_nano_usd)
    each = records / report.num_records if report.num_records else 0.0
    lines = [f"{report.num_records} Records, {_money(records)} in committed turns, {_money(each)} each"]
    beyond = report.spent_nano_usd - report.calls_nano_usd
    if beyond:
        lines.append(f"{_money(usd(beyond))} on no stored call: cancelled, not committed, or under way now")
    budget = "" if report.budget_usd is None else f" of a budget of {_money(report.budget_usd)}"
    lines.append(f"spent: {_money(spent)}{budget}")
    return lines


def render_estimate(report: CostReport) -> str:
    """One line for people; says so where there is too little to go by."""
    estimate = report.estimate
    if estimate is None:
        return "no estimate yet: at least two finished Records are needed"
    budget = ""
    if report.budget_usd is not None:
        share = report.budget_usd / estimate.total_usd if estimate.total_usd else math.inf
        budget = (
            f"; the budget of {_money(report.budget_usd)} is enough"
            if share >= 1
            else (f"; the budget of {_money(report.budget_usd)} covers about {share:.0%} of it")
        )
    return (
        f"estimate: {_money(estimate.total_usd)} ± {_money(estimate.standard_error_usd)} for "
        f"{estimate.num_expected} Records, from the first {estimate.num_records}{budget}"
    )


def _target_table(report: CostReport) -> Table:
    table = Table(box=None, header_style="dim")
    table.add_column("kind")
    table.add_column("target")
    for header in ("calls", "seconds", "USD"):
        table.add_column(header, justify="right")
    for call in report.calls:
        cells = (f"{call.num_calls:,}", f"{call.seconds:,.1f}", f"{usd(call.cost_nano_usd):,.6f}")
        table.add_row(call.kind.value, plain(call.target), *cells)
    num_calls, seconds = sum(call.num_calls for call in report.calls), sum(call.seconds for call in report.calls)
    total = f"{usd(report.calls_nano_usd):,.6f}"
    table.add_row("all", "", f"{num_calls:,}", f"{seconds:,.1f}", total, style="bold")
    return table


def _step_table(steps: Sequence[StepCost]) -> Table:
    table = Table(box=None, header_style="dim")
    for header in ("step", "Records", "USD"):
        table.add_column(header, justify="right")
    for step in steps:
        table.add_row(str(step.step), str(step.num_records), f"{usd(step.cost_nano_usd):,.6f}")
    return table


def _money(amount: float) -> str:
    return f"${amount:,.4f}" if amount < 100 else f"${amount:,.2f}"
