"""`agentrl launch` with every real process on a tiny random model: killed, stopped by hand or alarm, continued."""

import json
import re
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

LAUNCH = ("launch", "tiny", "--config", "run.yaml")

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of one run."""
    return write_run(tmp_path_factory.mktemp("launch"), max_steps=99)


def test_a_launch_survives_kill_9_and_sigterm(folder):
    with launch(folder) as first:
        read_until(first, "training to step")
        with launch(folder) as second:
            assert f"run tiny is in use by process {first.pid}" in read_until(second, "in use")
            assert second.wait(timeout=DEADLINE_S) == 2
        read_until(first, "step 1/99")
        first.kill()
    with launch(folder) as stopped:  # at once: it takes over when the children of the first are down
        read_until(stopped, "continuing after step")
        assert "step 1/99" not in read_until(stopped, "step 8/99")
        stopped.terminate()
        read_until(stopped, "launching again continues it")
        assert stopped.wait(timeout=DEADLINE_S) == 130
    wait_until_nothing_is_left(folder)


def test_an_alarm_stops_a_launch_and_the_next_one_waits_for_a_resume_and_goes_on(folder):
    on_known_rows = (*LAUNCH, "--enable_sampling", "false")  # a trainer alone
    with agentrl(folder, *on_known_rows, "--adv_scaling", "1e6", "--on_alarm", "stop") as stopped:  # the gradient jumps
        shown, _ = stopped.communicate(timeout=DEADLINE_S)
    assert stopped.returncode == 3, shown
    message = r"agentrl: the stability watch ended run tiny after step (\d+) of 99: gradient_spike: gradient norm .* "
    ended = re.search(message + "Launching again continues from its checkpoint; with --on_alarm warn", shown)
    assert ended, shown
    step = int(ended.group(1))

    with agentrl(folder, *on_known_rows, "--on_alarm", "pause", "--max_steps", str(step + 2)) as last:
        read_until(last, f"continuing after step {step}")
        assert f"training goes on after step {step}, in spite of" in output_of(folder, "resume", "tiny")
        out = read_until(last, "agentrl eval tiny")
        assert last.wait(timeout=DEADLINE_S) == 0
    assert f"step {step + 2}/{step + 2}" in out
    wait_until_nothing_is_left(folder)
    run_dir = folder / "output" / "tiny"
    steps = [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert steps == [*range(1, step + 3)]
    assert (run_dir / "reward.png").is_file()
    assert (run_dir / "final" / "config.json").is_file()


def test_a_complete_run_says_so_and_can_be_read_and_evaluated(folder):
    count = len((folder / "output" / "tiny" / "metrics.jsonl").read_text().splitlines())
    with agentrl(folder, *LAUNCH, "--max_steps", str(count)) as again:
        assert f"run tiny is complete: {count} of {count} steps" in read_until(again, "agentrl eval tiny")
        assert again.wait(timeout=DEADLINE_S) == 0
    assert f"step {count}/{count}" in output_of(folder, "status", "tiny", "--once")
    record = output_of(folder, "inspect", "tiny", "--limit", "1").split("agentrl inspect tiny ")[1].split()[0]
    shown = output_of(folder, "inspect", "tiny", record)
    assert "What is" in shown
    assert "turn 0" in shown
    shown = output_of(folder, "eval", "tiny", "--versions", "0", "--max_turns", "1")
    assert "v0" in shown
    scaling = ("--versions", "0", "--max_turns", "1", "--reflection_turns", "1..2", "--temperature", "0")
    shown = output_of(folder, "eval", "tiny", *scaling)
    assert "tiny v0 greedy: turn by turn" in shown
    report = json.loads((folder / "output/tiny/eval/v0-turns2-t0.json").read_text())
    assert [(point["turn"], point["num_trajectories"]) for point in report["turns"]] == [(1, 8), (2, 8)]
    assert (folder / "output/tiny/eval/scaling.png").is_file()
    assert "0 databases" in output_of(folder, "db", "prune"), "the evaluation's own database went with it"
    wait_until_nothing_is_left(folder)


def test_a_command_that_is_killed_leaves_no_database_behind(folder):
    with agentrl(folder, "db") as database:
        read_until(database, "mongosh")
        assert len(left_over(folder)) >= 3  # the command, the server, the guard
        database.kill()
        database.wait(timeout=DEADLINE_S)
        wait_until_nothing_is_left(folder)
