"""What the trainer does about an alarm: nothing, wait for `agentrl resume`, or end. Runs on every rank alike.

warn     the alarm is in the ledger and the log
pause    the step gets a checkpoint; then the trainer waits until the Run document says that somebody resumed this
step, at most `alarm_pause_s`, else it stops. A trainer that is killed meanwhile waits again when started.
stop     the step gets a checkpoint; then the trainer ends. Starting it again goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from accelerate.utils import broadcast_object_list

from agentrl.algo.watch import resumed_steps
from agentrl.train.session import Session
from agentrl.types import Alarm

log = logging.getLogger(__name__)

POLL_S = 1.0


def is_waited_for(session: Session, alarms: Sequence[Alarm]) -> bool:
    """Whether a step with these alarms needs a checkpoint, because the trainer does not simply go on."""
    return bool(alarms) and session.config.train.on_alarm != "warn"


def may_go_on(
    session: Session, *, step: int, alarms: Sequence[Alarm], sleep: Callable[[float], None] = time.sleep
) -> bool:
    """Whether training goes on after a step; waits for a person where it is to pause."""
    if not is_waited_for(session, alarms):
        return True
    if session.config.train.on_alarm == "stop":
        return False
    return _wait_until_resumed(session, step=step, alarms=alarms, sleep=sleep)


def _wait_until_resumed(
    session: Session, *, step: int, alarms: Sequence[Alarm], sleep: Callable[[float], None]
) -> bool:
    names = ", ".join(alarm.name for alarm in alarms)
    run_name = session.config.run.run_name
    deadline = time.monotonic() + session.config.train.alarm_pause_s
    while True:
        state = [_is_resumed(session, step=step), time.monotonic() > deadline]
        broadcast_object_list(state)  # rank 0 decides; the others never wait longer than a poll
        is_resumed, is_late = state
        if is_resumed:
            log.info("step %d: resumed after %s", step, names)
            return True
        if is_late:
            log.warning("step %d: nobody resumed after %s within alarm_pause_s: the trainer ends", step, names)
            return False
        session.report(f"paused by {names}: agentrl resume {run_name}", step)
        sleep(POLL_S)


def _is_resumed(session: Session, *, step: int) -> bool:
    if session.rank_zero is None:
        return False
    return step in resumed_steps(session.feed.call(lambda store: store.get_run()))
