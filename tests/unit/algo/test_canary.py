import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algo.canary import NUM_PROMPTS, PROMPT_TOKENS, canary_prompts, deviation, judged_deviation
from agentrl.types import CanaryReference

LOGPROBS = st.lists(st.floats(-20, 0), min_size=3, max_size=3)


def reference(*logprobs: float) -> CanaryReference:
    return CanaryReference(prompts=((1, 2, 3, 4),), logprobs=logprobs)


@given(vocab_size=st.integers(2, 300_000))
def test_prompts_are_the_same_everywhere_and_inside_the_vocabulary(vocab_size: int) -> None:
    prompts = canary_prompts(vocab_size)
    assert prompts == canary_prompts(vocab_size)
    assert [len(prompt) for prompt in prompts] == [PROMPT_TOKENS] * NUM_PROMPTS
    assert all(0 <= token < vocab_size for prompt in prompts for token in prompt)


def test_prompts_differ_from_each_other_and_keep_away_from_special_tokens() -> None:
    prompts = canary_prompts(32_000)
    assert len(set(prompts)) == NUM_PROMPTS
    assert min(min(prompt) for prompt in prompts) >= 2000
    assert max(max(prompt) for prompt in prompts) < 24_000


@given(logprobs=LOGPROBS, shift=st.floats(0, 5))
def test_deviation_is_the_mean_distance(logprobs: list[float], shift: float) -> None:
    assert deviation(logprobs, logprobs) == 0
    assert deviation([value - shift for value in logprobs], logprobs) == pytest.approx(shift, abs=1e-9)


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_a_number_that_is_none_is_infinitely_far(bad: float) -> None:
    assert deviation([-1.0, bad], [-1.0, -1.0]) == math.inf


def test_one_rounded_unlikely_token_does_not_decide() -> None:
    right = [-1.0] * 69
    assert deviation([*right[:-1], -1.5], right) < 0.01


def test_with_a_reference_peers_do_not_matter() -> None:
    wrong_majority = [(-9.0, -9.0)] * 5
    assert judged_deviation((-1.0, -2.0), reference=reference(-1.0, -2.0), peers=wrong_majority) == 0
    assert judged_deviation((-9.0, -9.0), reference=reference(-1.0, -2.0), peers=wrong_majority) == pytest.approx(7.5)


@pytest.mark.parametrize("num_peers", [0, 1])
def test_without_reference_or_majority_nothing_is_known(num_peers: int) -> None:
    assert judged_deviation((-1.0, -2.0), reference=None, peers=[(-9.0, -9.0)] * num_peers) is None


@given(right=LOGPROBS, noise=st.floats(0, 0.01), num_right=st.integers(2, 6))
def test_the_one_far_from_the_median_is_the_one_that_deviates(right: list[float], noise: float, num_right: int) -> None:
    services = [[value - noise * index / num_right for value in right] for index in range(num_right)]
    wrong = [value - 3.0 for value in right]
    distances = [
        judged_deviation(one, reference=None, peers=[*(o for o in services if o is not one), wrong]) for one in services
    ]
    assert max(distance for distance in distances if distance is not None) <= 0.011
    found = judged_deviation(wrong, reference=None, peers=services)
    assert found is not None
    assert found > 2.9
