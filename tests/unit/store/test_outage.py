from __future__ import annotations

import asyncio
import logging

import pytest

from agentrl.store.outage import Outage

REFUSED = ConnectionError("h:1: connection refused (configured timeouts: 5 s), Topology Description: <...>")


class Clock:
    """Seconds that a test moves on."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def outage(clock: Clock) -> Outage:
    outage = Outage("the database at h:1", clock=clock)
    outage.outlast(asyncio.Event())
    return outage


def test_many_waiting_operations_give_one_line_every_ten_seconds(
    outage: Outage, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for clock.now_s in [*range(25)]:
        for _ in range(30):
            outage.note(REFUSED)
    clock.now_s = 31.0
    outage.end()
    outage.end()
    assert [entry.getMessage() for entry in caplog.records] == [
        "the database at h:1 does not answer: waiting for it (h:1: connection refused)",
        "the database at h:1 has not answered for 10 s: waiting for it (h:1: connection refused)",
        "the database at h:1 has not answered for 20 s: waiting for it (h:1: connection refused)",
        "the database at h:1 answers again after 31 s",
    ]


def test_a_second_outage_is_told_at_once(outage: Outage, caplog: pytest.LogCaptureFixture) -> None:
    outage.note(REFUSED)
    outage.end()
    outage.note(REFUSED)
    assert len(caplog.records) == 3


def test_nothing_is_said_or_outlasted_before_the_process_has_connected(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    outage = Outage("the database at h:1")
    outage.note(REFUSED)
    outage.end()
    assert (outage.is_outlasted, outage.is_given_up, caplog.records) == (False, False, [])


def test_a_process_that_is_to_stop_waits_no_longer() -> None:
    stop = asyncio.Event()
    outage = Outage("the database at h:1")
    outage.outlast(stop)
    assert (outage.is_outlasted, outage.is_given_up) == (True, False)
    stop.set()
    assert (outage.is_outlasted, outage.is_given_up) == (False, True)
