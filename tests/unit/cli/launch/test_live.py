import io
from contextlib import closing
from dataclasses import replace
from datetime import timedelta

import pytest
from rich.console import Console

from agentrl.cli.launch import live as module
from agentrl.cli.launch.live import LiveView, PlainView, open_view, watch
from agentrl.cli.launch.summary import compare_ends, show_summary
from agentrl.cli.launch.supervisor import ChildFailedError, Guard, Supervisor
from agentrl.cli.progress import ProgressReader
from agentrl.config import RunConfig, RunSection, StoreConfig
from agentrl.errors import StoreError
from agentrl.inspector import RunProgress
from agentrl.store import MemoryStore
from agentrl.types import StepStatus, TrainStep


def make_progress(*rewards: float) -> RunProgress:
    steps = tuple(
        TrainStep(
            step=number, status=StepStatus.COMMITTED, policy_version=number - 1, task_ids=(), sequence_ids=(),
            metrics={"reward": reward},
        )
        for number, reward in enumerate(rewards, start=1)
    )  # fmt: skip
    return RunProgress(run_name="demo", max_steps=4, steps=steps, tasks={}, workers=(), services=())


def make_console(*, is_terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=100, force_terminal=is_terminal)


def output_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_plain_view_prints_each_step_once_and_none_from_before_the_launch():
    console = make_console()
    view = PlainView(console)
    for rewards in [(0.1,), (0.1,), (0.1, 0.2, 0.3), (0.1, 0.2, 0.3, 0.4)]:
        view.show(make_progress(*rewards))
    lines = output_of(console).splitlines()
    assert lines == ["step 2/4  reward 0.200", "step 3/4  reward 0.300", "step 4/4  reward 0.400"]


def test_a_terminal_gets_the_live_view_and_a_pipe_the_plain_one():
    with open_view(make_console(is_terminal=True)) as view:
        assert isinstance(view, LiveView)
        view.show(make_progress(0.5))
        view.trouble("the database is away")
    with open_view(make_console()) as view:
        assert isinstance(view, PlainView)


class ScriptedSupervisor(Supervisor):
    """A supervisor whose children are said to end after a number of looks."""

    def __init__(self, *, looks: int, failure: ChildFailedError | None = None) -> None:
        super().__init__(guard=Guard(lock_descriptors=()))
        self.looks = looks
        self.failure = failure
        self.noted = 0

    def check(self) -> bool:
        self.looks -= 1
        if self.looks < 0 and self.failure is not None:
            raise self.failure
        return self.looks < 0

    def note_progress(self) -> None:
        self.noted += 1


async def test_watching_notes_progress_only_when_the_run_moves(monkeypatch):
    monkeypatch.setattr(module, "REFRESH_S", 0.001)
    store = MemoryStore()
    await store.prepare()
    supervisor = ScriptedSupervisor(looks=5)
    reader = ProgressReader(store=store, config=RunConfig(), forget_after=timedelta(minutes=1))
    step = make_progress(0.5).steps[0]

    class CommittingView(PlainView):
        shown = 0

        def show(self, progress: RunProgress) -> None:
            self.shown += 1

    view = CommittingView(make_console())
    await watch(supervisor, reader=reader, view=view)
    assert (supervisor.noted, view.shown) == (1, 6)
    planned = await store.plan_step(replace(step, status=StepStatus.PLANNED))
    await store.commit_step(replace(planned, status=StepStatus.COMMITTED))
    supervisor = ScriptedSupervisor(looks=2)
    last = await watch(supervisor, reader=reader, view=view)
    assert last.step == 1


async def test_watching_raises_when_a_process_is_given_up_and_outlasts_a_database_that_is_away(monkeypatch):
    monkeypatch.setattr(module, "REFRESH_S", 0.001)

    class AwayStore(MemoryStore):
        async def get_step(self, step: int) -> TrainStep | None:
            raise StoreError("the database is away")

    console = make_console()
    supervisor = ScriptedSupervisor(looks=3, failure=ChildFailedError("sampler 0 ended"))
    reader = ProgressReader(store=AwayStore(), config=RunConfig(), forget_after=timedelta(minutes=1))
    with pytest.raises(ChildFailedError, match="sampler 0 ended"):
        await watch(supervisor, reader=reader, view=PlainView(console))
    assert output_of(console).count("the database is away") == 3


def test_the_ends_of_a_run_are_compared_without_overlap():
    assert compare_ends([0, 1]) == (0, 1)
    assert compare_ends([0.5]) == (0.5, 0.5)
    assert compare_ends([0] * 5 + [9] + [1] * 5) == (0, 1)


def test_the_summary_shows_the_curve_the_places_and_what_to_do_next(tmp_path):
    run = RunSection(run_name="demo", output_dir=tmp_path, eval_file=tmp_path / "e.jsonl")
    config = RunConfig(run=run, store=StoreConfig(db_connection_string="mongodb://u:s3cret@h/"))
    run.run_dir.mkdir(parents=True)
    console = make_console()
    with closing(console.file):
        show_summary(console, config=config, progress=make_progress(0.1, 0.2, 0.8, 0.9), uri="mongodb://u:s3cret@h/")
        shown = output_of(console)
    assert "first 2 steps 0.150  last 2 steps 0.850  over 4 steps" in shown
    for expected in ("reward.png", "metrics.jsonl", "final", "demo_*.log", "demo at mongodb://u:***@h/",
                     'mongosh "mongodb://u:***@h/"', "agentrl inspect demo", "agentrl eval demo"):  # fmt: skip
        assert expected in shown
    assert "s3cret" not in shown
    assert (run.run_dir / "reward.png").is_file()


def test_a_supervised_run_has_a_summary_without_a_curve(tmp_path):
    config = RunConfig(run=RunSection(run_name="demo", output_dir=tmp_path))
    console = make_console()
    show_summary(console, config=config, progress=make_progress(), uri="mongodb://h/")
    assert "reward" not in output_of(console)
    assert not (tmp_path / "demo" / "reward.png").exists()
