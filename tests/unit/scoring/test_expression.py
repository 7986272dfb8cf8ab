"""Weighted sums, gates and cascades of scorers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from agentrl.scoring.expression import parse_expression


async def evaluate(text: str, **scores: float) -> tuple[float, list[str]]:
    asked: list[str] = []

    async def score(name: str) -> float:
        asked.append(name)
        return scores[name]

    return await parse_expression(text).evaluate(score), asked


ACCURACY = (1, 1, 0, 0, 0, 1, 0, 0)
FORMAT = (1, 1, 1, 0, 1, 0, 1, 1)


async def test_the_published_example_of_accuracy_and_format_comes_out():
    sums = [(await evaluate("0.9*acc + 0.1*fmt", acc=a, fmt=f))[0] for a, f in zip(ACCURACY, FORMAT, strict=True)]
    assert sums == pytest.approx([1, 1, 0.1, 0, 0.1, 0.9, 0.1, 0.1])
    gated = "0.9*acc + 0.1*fmt if acc"
    sums = [(await evaluate(gated, acc=a, fmt=f))[0] for a, f in zip(ACCURACY, FORMAT, strict=True)]
    assert sums == pytest.approx([1, 1, 0, 0, 0, 0.9, 0, 0])


async def test_a_gate_needs_the_full_score():
    assert (await evaluate("f + x if f", f=0.99, x=1.0))[0] == 0.99


async def test_the_judge_is_not_asked_where_the_rule_says_yes():
    assert await evaluate("(rule or judge)", rule=1.0, judge=0.0) == (1.0, ["rule"])
    assert await evaluate("(rule or judge)", rule=0.0, judge=1.0) == (1.0, ["rule", "judge"])
    assert await evaluate("(rule or judge)", rule=0.4, judge=0.0) == (0.4, ["rule", "judge"])


async def test_each_name_is_scored_once():
    value, asked = await evaluate("0.9*(rule or judge) + 0.1*fmt if (rule or judge)", rule=0.0, judge=1.0, fmt=1.0)
    assert (value, asked) == (1.0, ["rule", "judge", "fmt"])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "its end"), ("0.9", "a weight is followed by"), ("0*em", "above 0"),
        ("em +", "its end"), ("em f1", "too early"),
        ("em or f1", "too early"), ("(em or f1", "is missing"),
        ("em - f1", "no part of one"), ("-1*em", "no part of one"),
        ("if", "stands where"), ("em if", "its end"),
        ("0.5**em", "stands where"), ("1e3*em", "a weight is followed by"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_with_the_reason(text, reason):
    with pytest.raises(ConfigError, match=reason):
        parse_expression(text)


@given(st.text(alphabet="emf1 0.9*+()ifor-", max_size=40))
def test_any_text_is_read_or_refused(text):
    try:
        names = parse_expression(text).names
    except ConfigError:
        return
    assert names
