"""The rules of question-answering benchmarks."""

import pytest

from agentrl.scoring import score_answer


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        ("17", "17", 1), ("17.0", 17, 1), ("$1,700.50", "1700.5", 1), ("42 %", "42", 1), ("about 17", "17", 0),
        ("17", "17000", 0), ("-5", "5", 0), ("1,000", "1,000", 1), ("a, b", "a,b", 1), ("b, a", "a, b", 0),
        ("3; Paris", "3, paris", 1), ("a", "a, b", 0), ("St. Petersburg", "st petersburg", 1),
        ("sea gull", "seagull", 1),
        ("Paris", "Rome", 0), ("not Paris nor Rome", "Paris, Rome", 0), ("yes", True, 1), ("5 of 7", "5", 0),
        ("Rome", ["Roma", "Rome"], 1), ("", "Rome", 0), ("?", "!", 0), ("!", "!", 1),
    ],
)  # fmt: skip
async def test_the_truth_decides_how_it_is_compared(answer, truth, score):
    assert await score_answer("gaia", answer, {"query": "q", "answer": truth}, {}) == score


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        ("It was the Eiffel Tower.", "Eiffel tower", 1), ("north", "no", 0), ("no, north", "no", 1),
        ("Tower of Eiffel", "Eiffel Tower", 0), ("12", "1", 0), ("", "x", 0), ("in 1969 or so", 1969, 1),
    ],
)  # fmt: skip
async def test_sub_em_finds_whole_words_in_a_row(answer, truth, score):
    assert await score_answer("sub_em", answer, {"query": "q", "answer": truth}, {}) == score
