"""`agentrl launch` with every real process on a tiny random model: killed, stopped, continued, completed."""

import json
from pathlib import Path

import pytest

from launched_run import (
    DEADLINE_S,
    agentrl,
    launch,
    left_over,
    output_of,
    read_until,
    wait_until_nothing_is_left,
    write_run,
)

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of one run."""
    return write_run(tmp_path_factory.mktemp("launch"))


def test_a_launch_survives_kill_9_and_sigterm_and_is_continued_to_the_end(folder):
    with launch(folder) as first:
        read_until(first, "training to step")
        with launch(folder) as second:
            assert f"run tiny is in use by process {first.pid}" in read_until(second, "in use")
            assert second.wait(timeout=DEADLINE_S) == 2
        read_until(first, "step 1/8")
        first.kill()
    with launch(folder) as stopped:  # at once: it takes over when the children of the first are down
        read_until(stopped, "continuing after step")
        stopped.terminate()
        read_until(stopped, "launching again continues it")
        assert stopped.wait(timeout=DEADLINE_S) == 130
    wait_until_nothing_is_left(folder)
    with launch(folder) as last:
        out = read_until(last, "agentrl eval tiny")
        assert last.wait(timeout=DEADLINE_S) == 0
    assert "step 8/8" in out
    assert "step 1/8" not in out
    wait_until_nothing_is_left(folder)
    run_dir = folder / "output" / "tiny"
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == [*range(1, 9)]
    assert (run_dir / "reward.png").is_file()
    assert (run_dir / "final" / "config.json").is_file()


def test_a_complete_run_says_so_and_can_be_read_and_evaluated(folder):
    with launch(folder) as again:
        assert "run tiny is complete: 8 of 8 steps" in read_until(again, "agentrl eval tiny")
        assert again.wait(timeout=DEADLINE_S) == 0
    assert "step 8/8" in output_of(folder, "status", "tiny", "--once")
    record = output_of(folder, "inspect", "tiny", "--limit", "1").split("agentrl inspect tiny ")[1].split()[0]
    shown = output_of(folder, "inspect", "tiny", record)
    assert "What is" in shown
    assert "turn 0" in shown
    shown = output_of(folder, "eval", "tiny", "--versions", "0", "--max_turns", "1")
    assert "v0" in shown
    assert "0 databases" in output_of(folder, "db", "prune"), "the evaluation's own database went with it"
    wait_until_nothing_is_left(folder)


def test_an_alarm_stops_or_pauses_a_launch_which_then_goes_on(folder):
    launch_on = ("launch", "tiny", "--config", "run.yaml", "--enable_sampling", "false", "--max_steps", "10")
    with agentrl(folder, *launch_on, "--adv_scaling", "1e6", "--on_alarm", "stop") as stopped:  # the gradient jumps
        shown, _ = stopped.communicate(timeout=DEADLINE_S)
    assert stopped.returncode == 3, shown
    assert "agentrl: the stability watch ended run tiny after step 9 of 10: gradient_spike: gradient norm" in shown
    assert shown.endswith("Launching again continues from its checkpoint; with --on_alarm warn alarms are told only\n")

    with agentrl(folder, *launch_on, "--on_alarm", "pause") as paused:  # nobody has seen the alarm of step 9 yet
        read_until(paused, "continuing after step 9")
        while "paused by gradient_spike" not in output_of(folder, "status", "tiny", "--once"):
            pass
        assert "step 9" in output_of(folder, "resume", "tiny")
        out = read_until(paused, "agentrl eval tiny")
        assert paused.wait(timeout=DEADLINE_S) == 0
    assert "step 10/10" in out


def test_a_command_that_is_killed_leaves_no_database_behind(folder):
    with agentrl(folder, "db") as database:
        read_until(database, "mongosh")
        assert len(left_over(folder)) >= 3  # the command, the server, the guard
        database.kill()
        database.wait(timeout=DEADLINE_S)
        wait_until_nothing_is_left(folder)
