"""What an audit says: named checks, how often each was made, and what it found."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

KEPT_FINDINGS = 20  # of each check; all are counted
SHOWN_FINDINGS = 3


class Check(StrEnum):
    """What is proven, by name."""

    STALENESS = "staleness"
    TOKEN_EXACTNESS = "token_exactness"
    RECORD_IDENTITY = "record_identity"
    GROUP_COMPLETENESS = "group_completeness"
    SETTLEMENT = "settlement"
    SCORE_VERSIONS = "score_versions"
    STEP_TOTALS = "step_totals"
    TRAINED_TOKENS = "trained_tokens"
    CONSUMPTION = "consumption"
    LEDGER = "ledger"
    LEASES = "leases"
    TURN_CHAIN = "turn_chain"
    COUNTERS = "counters"
    OUTCOMES = "outcomes"
    EPISODES = "episodes"
    POLICY_VERSIONS = "policy_versions"
    LATE_WORK = "late_work"
    QUARANTINED_ENGINES = "quarantined_engines"


TITLES: Mapping[Check, tuple[str, str]] = {
    Check.STALENESS: ("rows", "no trained token is older than max_staleness, or newer than the policy it trains"),
    Check.TOKEN_EXACTNESS: ("rows", "rows equal the merge of the turns the engine saw; every sampled token once"),
    Check.RECORD_IDENTITY: ("records", "one Record per task and generation, under the id that says so"),
    Check.GROUP_COMPLETENESS: ("groups", "settled groups have all their Records, or say how many they lack"),
    Check.SETTLEMENT: ("groups", "rewards, advantages and drop reasons follow from the scores; no failure is a reward"),
    Check.SCORE_VERSIONS: ("groups", "settlement, rows and steps name the same version of the scores they come from"),
    Check.STEP_TOTALS: ("rows", "masks, advantages and the ledger's totals agree with the rows"),
    Check.TRAINED_TOKENS: ("rows", "every trained token has a finite log-prob, an advantage and a policy version"),
    Check.CONSUMPTION: (
        "groups",
        "each row trains max_trained_count times at most; each consumed group names its step or reason",
    ),
    Check.LEDGER: ("steps", "steps are contiguous and committed; versions and checkpoints match them"),
    Check.LEASES: ("tasks", "no claim outlives its lease, no Record runs on in a settled group"),
    Check.TURN_CHAIN: ("turns", "committed turns are there, in order, fenced, and their tokens are accounted for"),
    Check.COUNTERS: ("records", "token, tool-call and cost counters equal the sums over turns"),
    Check.OUTCOMES: ("records", "failed Records have a typed reason and no score, finished ones a score"),
    Check.EPISODES: ("records", "episodes add up to their Record: its turns, scores, answer and counters"),
    Check.POLICY_VERSIONS: ("versions", "every policy version that sampled a token was published"),
    Check.LATE_WORK: ("entries", "work that a fence refused was neither committed nor trained"),
    Check.QUARANTINED_ENGINES: ("rows", "no step planned after an engine's quarantine trains what it spoiled"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fact that contradicts another."""

    check: Check
    subject: str  # id of the Task, Record, turn, row, step or version
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """One check over the whole run."""

    check: Check
    num_checked: int
    num_findings: int
    findings: tuple[Finding, ...]  # the first ones


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """All checks of one run."""

    run_name: str
    results: tuple[CheckResult, ...]
    counts: Mapping[str, int]  # of what was read: tasks, records, turns, rows, tokens, steps
    seconds: float

    @property
    def num_findings(self) -> int:
        """Over all checks."""
        return sum(result.num_findings for result in self.results)

    @property
    def is_clean(self) -> bool:
        """Whether nothing was found."""
        return self.num_findings == 0

    @property
    def found(self) -> frozenset[str]:
        """Names of the checks that found something."""
        return frozenset(result.check.value for result in self.results if result.num_findings)

    def as_json(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {
            "run": self.run_name,
            "clean": self.is_clean,
            "seconds": round(self.seconds, 3),
            "counts": dict(self.counts),
            "checks": [
                {
                    "name": result.check.value,
                    "proves": TITLES[result.check][1],
                    "checked": result.num_checked,
                    "unit": TITLES[result.check][0],
                    "num_findings": result.num_findings,
                    "findings": [{"id": finding.subject, "message": finding.message} for finding in result.findings],
                }
                for result in self.results
            ],
        }


@dataclass(slots=True)
class Verdicts:
    """Collects findings; keeps the first ones of each check and counts the rest."""

    num_checked: dict[Check, int] = field(default_factory=lambda: dict.fromkeys(Check, 0))
    num_findings: dict[Check, int] = field(default_factory=lambda: dict.fromkeys(Check, 0))
    kept: dict[Check, list[Finding]] = field(default_factory=lambda: {check: [] for check in Check})

    def count(self, check: Check, number: int = 1) -> None:
        """So many more units went through a check."""
        self.num_checked[check] += number

    def add(self, findings: Iterable[Finding]) -> None:
        """Take findings of any check."""
        for finding in findings:
            self.num_findings[finding.check] += 1
            if len(self.kept[finding.check]) < KEPT_FINDINGS:
                self.kept[finding.check].append(finding)

    def results(self) -> tuple[CheckResult, ...]:
        """One per check, in order."""
        return tuple(
            CheckResult(
                check=check,
                num_checked=self.num_checked[check],
                num_findings=self.num_findings[check],
                findings=tuple(self.kept[check]),
            )
            for check in Check
        )


def render_audit(report: AuditReport) -> RenderableType:
    """The report on one page: a line per check, then the first findings."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("checked", justify="right", no_wrap=True)
    table.add_column("what holds")
    for result in report.results:
        unit, title = TITLES[result.check]
        mark = (
            Text("ok", style="green") if not result.num_findings else Text(f"{result.num_findings}", style="bold red")
        )
        table.add_row(mark, result.check.value, f"{result.num_checked:,} {unit}", Text(title, style="dim"))
    return Group(table, Text(), *_finding_lines(report), _verdict(report))


def _finding_lines(report: AuditReport) -> list[Text]:
    lines: list[Text] = []
    for result in report.results:
        for finding in result.findings[:SHOWN_FINDINGS]:
            head = (f"{result.check.value}  ", "bold red")
            lines.append(Text.assemble(head, (finding.subject, "bold"), f"  {finding.message}"))
        if result.num_findings > SHOWN_FINDINGS:
            lines.append(Text(f"{result.check.value}  ... {result.num_findings - SHOWN_FINDINGS} more", style="red"))
    return [*lines, Text()] if lines else []


def _verdict(report: AuditReport) -> Text:
    counts = ", ".join(f"{number:,} {name}" for name, number in report.counts.items())
    read = f"  read {counts} in {report.seconds:.1f} s"
    if report.is_clean:
        return Text.assemble((f"{report.run_name}: no findings.", "bold green"), (read, "dim"))
    return Text.assemble((f"{report.run_name}: {report.num_findings:,} findings.", "bold red"), (read, "dim"))
