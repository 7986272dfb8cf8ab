"""How a run is going, as one value, and how that looks: a few lines for the live view, tables for `agentrl status`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import pairwise
from statistics import median

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from agentrl.inspector.curves import sparkline
from agentrl.inspector.plain import plain
from agentrl.types import Alarm, InferenceService, ServiceStatus, StepStatus, TaskStatus, TrainStep, Worker

RECENT_STEPS = 40
SHOWN_ALARMS = 3
RATE_STEPS = 5  # steps whose duration speaks for the present


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """One look at a run. `steps` is the committed ledger, in order."""

    run_name: str
    max_steps: int
    steps: tuple[TrainStep, ...]
    tasks: Mapping[TaskStatus, int]
    workers: tuple[Worker, ...]
    services: tuple[InferenceService, ...]
    num_restarts: int = 0
    sampling_stopped: str | None = None  # why nothing more is sampled

    @property
    def step(self) -> int:
        """The newest committed step."""
        return self.steps[-1].step if self.steps else 0

    def up_to(self, count: int) -> RunProgress:
        """The same run as it was after its first `count` committed steps."""
        return replace(self, steps=self.steps[:count])

    @property
    def rewards(self) -> tuple[float, ...]:
        """Mean reward of each committed step that sampled."""
        return tuple(step.metrics["reward"] for step in self.steps if "reward" in step.metrics)

    @property
    def num_in_flight(self) -> int:
        """Trajectories being sampled now."""
        return sum(worker.num_running for worker in self.workers if worker.kind != "trainer")

    @property
    def seconds_per_step(self) -> float | None:
        """Median of the last few steps: a pause between two launches does not count."""
        times = [step.committed_at for step in self.steps[-RATE_STEPS - 1 :] if step.committed_at is not None]
        if len(times) < 2:
            return None
        return median((later - earlier).total_seconds() for earlier, later in pairwise(times))

    @property
    def remaining(self) -> timedelta | None:
        """Estimated time to the last step; max_steps may have been lowered below the step that is reached."""
        pace = self.seconds_per_step
        return None if pace is None else timedelta(seconds=round(pace * max(self.max_steps - self.step, 0)))

    @property
    def tokens_per_s(self) -> float | None:
        """Sampled tokens per second of wall time over the last step's trajectories."""
        pace = self.seconds_per_step
        if not pace or not self.steps:
            return None
        metrics = self.steps[-1].metrics
        return metrics.get("completion_tokens_mean", 0.0) * metrics.get("num_scored", 0.0) / pace


def committed(steps: Sequence[TrainStep]) -> tuple[TrainStep, ...]:
    """The committed part of a ledger, in order."""
    return tuple(sorted((s for s in steps if s.status is StepStatus.COMMITTED), key=lambda s: s.step))


def describe_step(progress: RunProgress) -> str:
    """The newest step as one plain line, for logs and pipes, and one more for each of its alarms."""
    metrics = progress.steps[-1].metrics
    parts = [f"step {progress.step}/{progress.max_steps}"]
    parts += [f"{label} {metrics[name]:.3f}" for name, label in _STEP_NUMBERS if name in metrics]
    parts += [f"by episode {scores}" for scores in [_episode_scores(metrics)] if scores]
    parts += [text for text in (_rate(progress), _remaining(progress)) if text]
    alarms = [f"    alarm {describe_alarm(alarm)}" for alarm in progress.steps[-1].alarms]
    return "\n".join(["  ".join(parts), *alarms])


def describe_alarm(alarm: Alarm) -> str:
    """An alarm with the Records that look like its cause, in one line."""
    return f"{alarm.name}: {alarm.message}" + (f"; see {', '.join(alarm.subjects)}" if alarm.subjects else "")


def render_progress(progress: RunProgress) -> RenderableType:
    """The live view: four lines, and one for each of the newest alarms."""
    bar = Table.grid(padding=(0, 1))
    head = Text(progress.run_name, style="bold")
    bar.add_row(
        head, Text(f"step {progress.step}/{progress.max_steps}"),
        ProgressBar(total=progress.max_steps, completed=progress.step, width=30),
        Text(_remaining(progress), style="dim"),
    )  # fmt: skip
    lines = (_reward_line(progress), _flow_line(progress), _task_line(progress))
    return Group(bar, *lines, *_alarm_lines(progress))


def _alarm_lines(progress: RunProgress) -> list[Text]:
    """The newest alarms, by step."""
    alarms = [(step.step, alarm) for step in progress.steps for alarm in step.alarms][-SHOWN_ALARMS:]
    lines = [(f"alarm       step {step}, {describe_alarm(alarm)}") for step, alarm in alarms]
    return [plain(line, style="yellow") for line in lines]


def render_status(progress: RunProgress, *, now: datetime) -> RenderableType:
    """The live view and who takes part. `now` is the database server's clock."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("process", "where", "doing", "running", "waiting", "seen"):
        table.add_column(column, overflow="fold")
    for service in progress.services:
        doing = f"{service.status.value}, policy v{service.policy_version}"
        table.add_row(
            plain(f"engine ({service.engine})"), plain(service.base_url), doing,
            str(service.num_running), str(service.num_waiting),
            _ago(service.heartbeat_at, now=now),
        )  # fmt: skip
    for worker in sorted(progress.workers, key=lambda worker: (worker.kind, worker.id)):
        where = f"{worker.host}, pid {worker.pid}"
        seen = _ago(worker.heartbeat_at, now=now)
        table.add_row(worker.kind, plain(where), plain(worker.phase), str(worker.num_running), "", seen)
    return Group(render_progress(progress), *_quarantine_line(progress), Text(), table)


_STEP_NUMBERS = (("reward", "reward"), ("loss", "loss"), ("entropy", "entropy"), ("staleness_mean", "staleness"))


def _reward_line(progress: RunProgress) -> Text:
    rewards = progress.rewards
    if not rewards:
        return Text("reward      (no step yet)", style="dim")
    recent = rewards[-RECENT_STEPS:]
    line = Text("reward      ")
    line.append(f"{rewards[-1]:.3f} ", style="bold green")
    line.append(sparkline(recent, low=min(0.0, *recent), high=max(1.0, *recent)), style="green")
    if scores := _episode_scores(progress.steps[-1].metrics):
        line.append(f"  by episode {scores}")
    return line


def _episode_scores(metrics: Mapping[str, float]) -> str:
    """The mean score of each episode of the step's meta-episodes, the first one first."""
    scores: list[str] = []
    while (name := f"score_episode_{len(scores) + 1}") in metrics:
        scores.append(f"{metrics[name]:.3f}")
    return " > ".join(scores)


def _flow_line(progress: RunProgress) -> Text:
    versions = [service.policy_version for service in progress.services]
    parts = [f"{progress.num_in_flight} trajectories in flight"]
    parts.append(f"policy v{max(versions)}" if versions else "no engine yet")
    metrics = progress.steps[-1].metrics if progress.steps else {}
    if "staleness_mean" in metrics:
        parts.append(f"staleness {metrics['staleness_mean']:.2f} (max {metrics.get('staleness_max', 0.0):.0f})")
    if rate := _rate(progress):
        parts.append(rate)
    if progress.sampling_stopped:
        parts.append(f"stopped: {progress.sampling_stopped}")
    if progress.num_restarts:
        parts.append(f"{progress.num_restarts} restarts")
    return Text("sampling    " + " · ".join(parts))


def _task_line(progress: RunProgress) -> Text:
    counts = [f"{progress.tasks.get(s, 0)} {s.value}" for s in TaskStatus if s is not TaskStatus.CONSUMED]
    phases = [worker.phase for worker in progress.workers if worker.kind == "trainer" and worker.phase]
    trainer = f" · trainer: {phases[-1]}" if phases else ""
    return Text("tasks       " + " · ".join(counts) + trainer)


def _quarantine_line(progress: RunProgress) -> list[Text]:
    """What deviating engines cost so far; nothing where there never was one."""
    num_now = sum(service.status is ServiceStatus.QUARANTINED for service in progress.services)
    num_lost = sum(step.metrics.get("num_dropped_quarantined_engine", 0.0) for step in progress.steps)
    if not num_now and not num_lost:
        return []
    engines = "1 engine" if num_now == 1 else f"{num_now} engines"
    return [Text(f"quarantine  {engines} quarantined · {num_lost:.0f} groups not trained", style="bold red")]


def _rate(progress: RunProgress) -> str:
    rate = progress.tokens_per_s
    return f"{rate:,.0f} tokens/s" if rate else ""


def _remaining(progress: RunProgress) -> str:
    remaining = progress.remaining
    return f"{remaining} left" if remaining else ""


def _ago(moment: datetime | None, *, now: datetime) -> str:
    return "never" if moment is None else f"{max(0.0, (now - moment).total_seconds()):.0f} s ago"
