"""SIGSTOP of sampler, engine, trainer and database, never SIGCONT: the launch restarts them and the run ends well."""

import os
import signal
from pathlib import Path

import pytest

from launched_run import (
    DEADLINE_S,
    launch,
    process_ids,
    read_until,
    wait_until_nothing_is_left,
    wait_until_replaced,
    write_run,
)

pytestmark = pytest.mark.timeout(400)

MARKS = (" sample ", " serve ", " train ", "secantusd")
"""What the command line of each kind of child contains."""


def test_a_run_whose_every_process_hangs_for_good_is_completed(tmp_path: Path) -> None:
    folder = write_run(tmp_path, max_steps=5, lease_s=3, hang_timeout_s=8)
    with launch(folder) as run:
        read_until(run, "step 2/5")
        stopped = [process_ids(folder, mark) for mark in MARKS]
        assert all(stopped)
        for process_id in (process_id for found in stopped for process_id in found):
            os.kill(process_id, signal.SIGSTOP)
        shown = read_until(run, "agentrl eval tiny")
        assert run.wait(timeout=DEADLINE_S) == 0
    assert "step 5/5" in shown
    wait_until_nothing_is_left(folder)


def test_a_database_that_hangs_is_restarted_and_nothing_else(tmp_path: Path) -> None:
    folder = write_run(tmp_path, max_steps=12, hang_timeout_s=8, db_timeout_s=60)
    *clients, database = MARKS
    with launch(folder) as run:
        read_until(run, "step 2/12")
        before = [process_ids(folder, mark) for mark in clients]
        stopped = process_ids(folder, database)
        for process_id in stopped:
            os.kill(process_id, signal.SIGSTOP)
        wait_until_replaced(folder, database, gone=stopped)
        assert [process_ids(folder, mark) for mark in clients] == before
        read_until(run, "agentrl eval tiny")
        assert run.wait(timeout=DEADLINE_S) == 0
    wait_until_nothing_is_left(folder)
