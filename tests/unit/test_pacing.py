"""Pauses between looks at the database: quick while work flows, about one command a second when nothing does."""

from hypothesis import given
from hypothesis import strategies as st

from agentrl.pacing import IDLE_POLL_S, Pace


def pauses(pace: Pace, *, for_s: float) -> list[float]:
    given_out: list[float] = []
    while sum(given_out) < for_s:
        given_out.append(pace.pause())
    return given_out


@given(shortest=st.floats(0.01, 0.1), longest=st.floats(0.1, 0.5), quiet_s=st.floats(0.1, 500))
def test_a_wait_is_never_lengthened_by_more_than_a_thirtieth_beyond_the_working_pace(shortest, longest, quiet_s):
    given_out = pauses(Pace(shortest_s=shortest, longest_s=longest), for_s=quiet_s)
    waited = 0.0
    for pause in given_out:
        assert shortest <= pause <= max(longest, min(IDLE_POLL_S, waited / 30) * 1.001)
        waited += pause


def test_an_idle_loop_sends_less_than_one_command_a_second_however_many_a_look_takes():
    pace = Pace(shortest_s=0.02, longest_s=0.2)
    pauses(pace, for_s=200)
    assert [pace.pause(num_commands=count) for count in (1, 2, 3)] == [IDLE_POLL_S, 2 * IDLE_POLL_S, 3 * IDLE_POLL_S]
    assert IDLE_POLL_S > 1


def test_whatever_happens_makes_the_loop_quick_again():
    pace = Pace(shortest_s=0.02, longest_s=0.2)
    pauses(pace, for_s=60)
    pace.reset()
    assert pace.pause() == 0.02


def test_the_first_seconds_of_a_wait_keep_the_working_pace():
    assert max(pauses(Pace(shortest_s=0.02, longest_s=0.2), for_s=5)) == 0.2
