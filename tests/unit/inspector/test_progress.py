from dataclasses import replace
from datetime import UTC, datetime, timedelta

from rich.console import Console

from agentrl.inspector import RunProgress, render_progress, render_status
from agentrl.inspector.progress import describe_step
from agentrl.types import Alarm, InferenceService, ServiceStatus, StepStatus, TaskStatus, TrainStep, Worker

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)


def make_step(step: int, *, at_s: float, reward: float = 0.5) -> TrainStep:
    metrics = {"reward": reward, "completion_tokens_mean": 30.0, "num_scored": 10.0, "staleness_mean": 0.5}
    return TrainStep(
        step=step, status=StepStatus.COMMITTED, policy_version=step - 1, task_ids=(), sequence_ids=(), metrics=metrics,
        committed_at=NOW + timedelta(seconds=at_s),
    )  # fmt: skip


def with_alarm(step: TrainStep, name: str = "zero_signal") -> TrainStep:
    alarm = Alarm(name=name, message="0.0% of the groups had a signal", steps=(step.step,), subjects=("t/g1", "t/g2"))
    return replace(step, alarms=(alarm,))


def make_progress(*steps: TrainStep, num_restarts: int = 0) -> RunProgress:
    return RunProgress(
        run_name="demo",
        max_steps=10,
        steps=steps,
        tasks={TaskStatus.PENDING: 7, TaskStatus.RUNNING: 3},
        workers=(
            Worker(id="s", kind="sampler", host="h", pid=1, num_running=12, phase="sampling", heartbeat_at=NOW),
            Worker(id="t", kind="trainer", host="h", pid=2, num_running=1, phase="step 4, wait", heartbeat_at=NOW),
        ),
        services=(
            InferenceService(
                id="e", base_url="http://e:1", status=ServiceStatus.UP, policy_version=3, heartbeat_at=NOW
            ),
        ),
        num_restarts=num_restarts,
    )


def text_of(renderable: object) -> str:
    console = Console(width=160, record=True, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_pace_and_rest_follow_the_last_steps():
    progress = make_progress(make_step(1, at_s=0), make_step(2, at_s=2), make_step(3, at_s=4))
    assert progress.step == 3
    assert progress.seconds_per_step == 2
    assert progress.remaining == timedelta(seconds=14)
    assert progress.tokens_per_s == 150
    assert progress.num_in_flight == 12


def test_a_pause_between_two_launches_does_not_slow_the_estimate():
    steps = [make_step(i, at_s=2 * i + (3600 if i > 2 else 0)) for i in range(1, 6)]
    assert make_progress(*steps).seconds_per_step == 2


def test_without_steps_nothing_is_estimated():
    progress = make_progress()
    assert (progress.step, progress.seconds_per_step, progress.remaining, progress.tokens_per_s) == (
        0,
        None,
        None,
        None,
    )
    assert "no step yet" in text_of(render_progress(progress))


def test_the_live_view_shows_reward_sampling_and_tasks():
    steps = (make_step(1, at_s=0, reward=0.0), make_step(2, at_s=2, reward=1.0))
    shown = text_of(render_progress(make_progress(*steps, num_restarts=2)))
    for expected in ("demo step 2/10", "0:00:16 left", "1.000 ▁█", "12 trajectories in flight", "policy v3",
                     "staleness 0.50", "150 tokens/s", "2 restarts", "7 pending · 3 running · 0 settled",
                     "trainer: step 4, wait"):  # fmt: skip
        assert expected in shown


def test_the_status_names_every_process():
    shown = text_of(render_status(make_progress(make_step(1, at_s=0)), now=NOW + timedelta(seconds=4)))
    for expected in ("http://e:1", "UP, policy v3", "h, pid 1", "sampling", "h, pid 2", "4 s ago"):
        assert expected in shown


def test_a_step_is_one_plain_line():
    line = describe_step(make_progress(make_step(1, at_s=0), make_step(2, at_s=2)))
    assert line == "step 2/10  reward 0.500  staleness 0.500  150 tokens/s  0:00:16 left"


def test_a_run_can_be_seen_as_it_was():
    progress = make_progress(make_step(1, at_s=0), make_step(2, at_s=2))
    assert progress.up_to(1).step == 1


def test_a_quarantined_engine_and_what_it_cost_are_shown():
    step = replace(make_step(1, at_s=0), metrics={"reward": 0.5, "num_dropped_quarantined_engine": 3.0})
    progress = make_progress(step)
    assert "0 engines quarantined · 3 groups not trained" in text_of(render_status(progress, now=NOW))
    assert "quarantined" not in text_of(render_status(make_progress(make_step(1, at_s=0)), now=NOW))
    service = replace(progress.services[0], status=ServiceStatus.QUARANTINED)
    shown = text_of(render_status(replace(progress, services=(service,)), now=NOW))
    assert "QUARANTINED, policy v3" in shown
    assert "1 engine quarantined" in shown
    assert "3 groups not trained" in shown


def test_alarms_are_lines_of_the_live_view_and_of_the_log():
    progress = make_progress(with_alarm(make_step(1, at_s=0)), make_step(2, at_s=2))
    assert "alarm       step 1, zero_signal: 0.0% of the groups had a signal; see t/g1, t/g2" in text_of(
        render_progress(progress)
    )
    assert describe_step(progress.up_to(1)).splitlines()[1].strip().startswith("alarm zero_signal: ")
    assert len(describe_step(progress).splitlines()) == 1


def test_only_the_newest_alarms_are_shown():
    steps = [with_alarm(make_step(number, at_s=number), name=f"alarm_{number}") for number in range(1, 7)]
    shown = text_of(render_progress(make_progress(*steps)))
    assert [f"alarm_{number}" in shown for number in range(1, 7)] == [False] * 3 + [True] * 3


def test_a_run_whose_sampling_was_stopped_says_why() -> None:
    progress = replace(make_progress(), sampling_stopped="budget_tasks = 5 is used up")
    assert "stopped: budget_tasks = 5 is used up" in text_of(render_progress(progress))


def test_the_mean_score_of_each_episode_is_shown_where_there_are_several():
    step = make_step(1, at_s=0)
    step = replace(step, metrics={**step.metrics, "score_episode_1": 0.25, "score_episode_2": 0.5})
    progress = make_progress(step)
    assert "by episode 0.250 > 0.500" in text_of(render_progress(progress))
    assert "by episode 0.250 > 0.500" in describe_step(progress)
    assert "by episode" not in describe_step(make_progress(make_step(1, at_s=0)))
