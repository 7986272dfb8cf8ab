from dataclasses import replace
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algo.suspects import FINISHED, STARTED, engine_use, engines_of, spoiled_by
from agentrl.types import EngineQuarantine, EngineUse, Turn
from factories import EPOCH_START, make_turn

TIMES = st.tuples(st.integers(0, 100), st.integers(0, 100)).map(sorted)


def quarantine(since_s: float, until_s: float | None = None, *, service_id: str = "e") -> EngineQuarantine:
    return EngineQuarantine(
        id="q", service_id=service_id, policy_version=0, deviation=1.0, since_s=since_s, until_s=until_s
    )


def use(first_s: float, last_s: float, *, service_id: str = "e") -> EngineUse:
    return EngineUse(service_id=service_id, first_s=first_s, last_s=last_s)


def turn_of(service_id: str, first_s: float, last_s: float) -> Turn:
    turn = make_turn()
    response = {**turn.model.response, STARTED: first_s, FINISHED: last_s}
    return replace(turn, model=replace(turn.model, target=service_id, response=response))


@pytest.mark.parametrize(
    ("first_s", "last_s", "expected"),
    [(1, 9, False), (9, 11, True), (12, 15, True), (19, 21, True), (20, 25, False), (5, 30, True)],
)
def test_tokens_are_spoiled_between_the_last_right_canary_and_the_next(
    first_s: float, last_s: float, expected: bool
) -> None:
    assert (spoiled_by([use(first_s, last_s)], [quarantine(10, 20)]) is not None) is expected
    assert spoiled_by([use(first_s, last_s, service_id="f")], [quarantine(10, 20)]) is None


def test_an_open_quarantine_has_no_end_and_one_without_a_right_canary_no_beginning() -> None:
    assert spoiled_by([use(1e9, 2e9)], [quarantine(10)]) is not None
    assert spoiled_by([use(0.0, 1.0)], [quarantine(0.0)]) is not None


@given(spans=st.lists(TIMES, min_size=1, max_size=6), since_until=TIMES)
def test_what_is_kept_of_a_group_never_hides_a_spoiled_turn(spans: list[list[int]], since_until: list[int]) -> None:
    found = [quarantine(*since_until)]
    turns = [turn_of("e", *span) for span in spans]
    if any(spoiled_by([engine_use(turn.model)], found) for turn in turns):
        assert spoiled_by(engines_of(turns), found) is not None


def test_engines_that_tell_no_times_are_timed_by_the_sampler_as_the_store_keeps_it() -> None:
    turn = make_turn()
    model = replace(turn.model, started_at=EPOCH_START + timedelta(microseconds=1999), finished_at=EPOCH_START)
    assert engine_use(model) == EngineUse(
        service_id="service-0",
        first_s=(EPOCH_START + timedelta(milliseconds=1)).timestamp(),
        last_s=EPOCH_START.timestamp(),
    )
