"""Which service of a fleet holds which weights."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algo.placement import WeightSet, plan_services

SETS = st.lists(
    st.builds(
        WeightSet,
        key=st.sampled_from("abcdef"),
        priority=st.integers(0, 2),
        share=st.integers(1, 9).map(float),
        virtual_time=st.floats(0, 100),
    ),
    max_size=5,
    unique_by=lambda weights: weights.key,
)
HOLDING = st.dictionaries(st.integers(0, 9).map(str), st.none() | st.sampled_from("abcdefg"), min_size=1, max_size=6)


def weights(key: str, *, priority: int = 0, share: float = 1.0, virtual_time: float = 0.0) -> WeightSet:
    return WeightSet(key=key, priority=priority, share=share, virtual_time=virtual_time)


@settings(deadline=None)
@given(wanted=SETS, holding=HOLDING)
def test_every_service_gets_wanted_weights_and_a_second_look_changes_nothing(
    wanted: list[WeightSet], holding: dict[str, str | None]
) -> None:
    plan = plan_services(wanted, holding=holding)
    assert plan.keys() == holding.keys()
    if wanted:
        assert set(plan.values()) <= {item.key for item in wanted}
    assert plan_services(wanted, holding=plan) == plan


@settings(deadline=None)
@given(wanted=SETS, holding=HOLDING)
def test_no_weights_get_a_second_service_before_all_have_one(
    wanted: list[WeightSet], holding: dict[str, str | None]
) -> None:
    counts = Counter(plan_services(wanted, holding=holding).values())
    if wanted and len(holding) >= len(wanted):
        assert all(counts[item.key] >= 1 for item in wanted)
    elif wanted:
        assert max(counts.values()) == 1


def test_one_service_goes_to_who_is_furthest_behind_within_the_highest_priority() -> None:
    behind, ahead, first = weights("x"), weights("y", virtual_time=5), weights("z", priority=1, virtual_time=9)
    assert plan_services([behind, ahead], holding={"s": "y"}) == {"s": "x"}
    assert plan_services([behind, ahead, first], holding={"s": "y"}) == {"s": "z"}


def test_further_services_go_by_share() -> None:
    wanted = [weights("x", share=1), weights("y", share=3)]
    plan = plan_services(wanted, holding=dict.fromkeys("abcd"))
    assert Counter(plan.values()) == {"x": 1, "y": 3}


def test_a_service_keeps_what_it_holds_rather_than_exchange_it() -> None:
    wanted = [weights("x"), weights("y")]
    assert plan_services(wanted, holding={"1": "y", "2": "x"}) == {"1": "y", "2": "x"}
    assert plan_services(wanted, holding={"1": "y", "2": "y"}) == {"1": "y", "2": "x"}


def test_without_demand_everything_stays() -> None:
    assert plan_services([], holding={"1": "y", "2": None}) == {"1": "y", "2": None}
