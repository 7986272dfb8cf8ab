"""A real tiny run that collapses, because its learning rate is absurd: told, paused and resumed, stopped, killed."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from agentrl.cli.launch.command import check_not_stopped
from agentrl.cli.resume import resume
from agentrl.config import RunConfig
from agentrl.errors import StoppedByAlarmError, UnavailableError
from agentrl.inspector import RunProgress
from agentrl.inspector.progress import committed, describe_step
from agentrl.protocols import TrainStore
from agentrl.store import MemoryStore
from agentrl.train.loop import train
from agentrl.types import Alarm, TrainStep
from tiny_model import write_tiny_model
from trained_run import ListSink, settle_groups, tiny_run

MAX_STEPS = 24


class Crash(BaseException):
    """Ends the trainer past every handler, as a kill would."""


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "start")


def collapsing(base: Path, start: Path, **train_settings: object) -> RunConfig:
    settings = {"max_steps": MAX_STEPS, "save_steps": 50, "learning_rate": 0.3, "warmup_steps": 0, **train_settings}
    return tiny_run(base, start, loss={"loss": "REINFORCE"}, train=settings)


def run_it(
    config: RunConfig, store: MemoryStore, *, at_pause: object = None
) -> tuple[tuple[Alarm, ...], ListSink, list[str]]:
    """Train; `at_pause` is called once, at the first sign of life of a pause."""
    sink = ListSink()
    phases: list[str] = []

    async def open_store() -> TrainStore:
        return store

    def report(phase: str, step: int) -> None:
        if phase.startswith("paused") and callable(at_pause) and not any(p.startswith("paused") for p in phases):
            at_pause()
        phases.append(phase)

    return train(config, open_store=open_store, sinks=lambda: [sink], report=report), sink, phases


def filled(start: Path) -> MemoryStore:
    store = MemoryStore()
    settle_groups(store, 2 * MAX_STEPS, start=start)
    return store


def steps_of(store: MemoryStore) -> list[TrainStep]:
    return asyncio.run(store.list_steps())


def progress_of(store: MemoryStore) -> RunProgress:
    return RunProgress(
        run_name="tiny", max_steps=MAX_STEPS, steps=committed(steps_of(store)), tasks={}, workers=(), services=()
    )


def test_a_collapse_is_told_with_its_steps_and_records_and_training_goes_on(tmp_path: Path, start: Path) -> None:
    store = filled(start)
    alarms, sink, _ = run_it(collapsing(tmp_path, start), store)
    assert alarms == ()
    alarmed = [step for step in steps_of(store) if step.alarms]
    assert alarmed
    first = alarmed[0].alarms[0]
    assert first.steps[-1] == alarmed[0].step
    assert set(first.subjects) <= {row_id.rpartition("/s")[0] for row_id in alarmed[0].sequence_ids}
    assert first.subjects
    assert sink.lines[alarmed[0].step - 1][1][f"alarm_{first.name}"] == 1.0
    assert len(steps_of(store)) == MAX_STEPS
    assert f"alarm {first.name}: " in describe_step(progress_of(store).up_to(alarmed[0].step))


def test_a_run_with_a_sane_learning_rate_raises_nothing(tmp_path: Path, start: Path) -> None:
    store = filled(start)
    run_it(collapsing(tmp_path, start, learning_rate=1e-4), store)
    assert [step.alarms for step in steps_of(store)] == [()] * MAX_STEPS


def test_stop_ends_the_run_after_a_checkpoint_and_starting_again_goes_on(tmp_path: Path, start: Path) -> None:
    store, config = filled(start), collapsing(tmp_path, start, on_alarm="stop")
    alarms, _, _ = run_it(config, store)
    assert alarms
    newest = steps_of(store)[-1]
    assert newest.alarms == alarms
    assert newest.step < MAX_STEPS
    assert newest.checkpoint is not None
    assert Path(newest.checkpoint).is_dir()
    assert not (config.run.run_dir / "final").exists()
    with pytest.raises(StoppedByAlarmError, match=rf"after step {newest.step} of {MAX_STEPS}: {alarms[0].name}: "):
        check_not_stopped(config, progress=progress_of(store))

    run_it(config, store)
    assert steps_of(store)[-1].step > newest.step


def test_pause_waits_for_a_resume_which_is_written_down(tmp_path: Path, start: Path) -> None:
    store, config = filled(start), collapsing(tmp_path, start, on_alarm="pause", max_steps=MAX_STEPS, alarm_pause_s=60)
    with pytest.raises(UnavailableError, match="no trainer waits for a resume: there is no step yet"):
        asyncio.run(resume(store, by="me"))

    resumed: list[int] = []

    def somebody_resumes() -> None:
        resumed.append(asyncio.run(resume(store, by="me")).step)
        raise Crash  # one pause is enough

    with pytest.raises(Crash):
        run_it(config, store, at_pause=somebody_resumes)
    (step,) = resumed
    run = asyncio.run(store.get_run()) or {}
    assert [(entry["step"], entry["by"]) for entry in run["resumed"]] == [(step, "me")]
    with pytest.raises(UnavailableError, match="without an alarm that nobody has seen"):
        asyncio.run(resume(store, by="me"))

    def next_pause() -> None:
        raise Crash

    with contextlib.suppress(Crash):
        run_it(config, store, at_pause=next_pause)
    assert steps_of(store)[-1].step > step, "the resumed trainer went on"


def test_a_trainer_killed_in_its_pause_waits_again_and_ends_when_nobody_comes(tmp_path: Path, start: Path) -> None:
    store, config = filled(start), collapsing(tmp_path, start, on_alarm="pause", alarm_pause_s=60)

    def kill() -> None:
        raise Crash

    with pytest.raises(Crash):
        run_it(config, store, at_pause=kill)
    paused_at = steps_of(store)[-1]
    assert paused_at.alarms

    short = config.model_copy(update={"train": config.train.model_copy(update={"alarm_pause_s": 0.01})})
    alarms, _, phases = run_it(short, store)
    assert alarms == paused_at.alarms
    assert any(phase.startswith("paused by ") for phase in phases)
    assert steps_of(store)[-1].step == paused_at.step, "no step was made meanwhile"


@pytest.mark.parametrize("crash_phase", ["publish", "commit"])
def test_a_kill_around_the_alarms_commit_raises_the_same_alarm_again(
    tmp_path: Path, start: Path, crash_phase: str
) -> None:
    expected_store = filled(start)
    expected, _, _ = run_it(collapsing(tmp_path / "a", start, on_alarm="stop"), expected_store)
    step = steps_of(expected_store)[-1].step

    store, config = filled(start), collapsing(tmp_path / "b", start, on_alarm="pause", alarm_pause_s=0.01)

    async def open_store() -> TrainStore:
        return store

    def report(phase: str, at: int) -> None:
        if (phase, at) == (crash_phase, step):
            raise Crash

    with pytest.raises(Crash):
        train(config, open_store=open_store, sinks=lambda: [ListSink()], report=report)
    alarms, _, _ = run_it(config, store)
    assert alarms == expected, "the Records that look like the cause included"
    assert steps_of(store)[-1].step == step
