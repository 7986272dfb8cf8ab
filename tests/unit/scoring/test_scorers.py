import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ScoringError
from agentrl.scoring import score_answer
from agentrl.scoring.scorers import choice_letter


async def score(scorer, answer, truth):
    return await score_answer(scorer, answer, {"query": "q", "answer": truth}, {})


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        ("Gina", "gina", 1),
        ("The  Gina.", "Gina", 1),
        ("Gina Smith", "Gina", 0),
        ("", "Gina", 0),
        ("888", 888, 1),
        ("888.0", 888, 1),
        ("1,000", 1000, 1),
        ("$5", 5, 1),
        ("-5", 5, 0),
        ("\u22125", -5, 1),
        ("3.14", 314, 0),
        ("0", 0, 1),
        ("1", 0, 0),
        ("", 0, 0),
        ("no", False, 1),
        ("False", False, 1),
        ("0", False, 0),
        ("Yes.", True, 1),
        ("no", True, 0),
        ("Emba", ["Emba City", "Emba"], 1),
        ("Emba Town", ["Emba City", "Emba"], 0),
        ("7", [6, 7], 1),
        ("a", "The", 0),
        ("the", "The", 1),
        ("+", "-", 0),
    ],
)
async def test_em(answer, truth, expected):
    assert await score("em", answer, truth) == expected


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        ("the cat sat", "cat sat", 1),
        ("cat", "cat sat", pytest.approx(2 / 3)),
        ("a dog", "cat", 0),
        ("", "cat", 0),
        ("cat cat", "cat", pytest.approx(2 / 3)),
        ("cat", ["dog", "cat"], 1),
        ("-5", 5, 0),
        ("5.0", 5, 1),
        ("no", False, 1),
    ],
)
async def test_f1(answer, truth, expected):
    assert await score("f1", answer, truth) == expected


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        ("888.0", 888, 1),
        ("889", 888, 0),
        ("0.3333333", 0.33333334, 1),
        ("1,000", "1000", 1),
        ("0", 0, 1),
        ("", 0, 0),
        ("\\frac{1}{2}", "0.5", 1),
        ("1/2", "\\frac{2}{4}", 1),
        ("$x^2+1$", "1+x^2", 1),
        ("2\\sqrt{3}", "\\sqrt{12}", 1),
        ("\\sqrt{12}", "3", 0),
        ("x = 5", "5", 1),
        ("{2, 1}", "{1, 2}", 1),
        ("nonsense \\frac{", "5", 0),
        ("6/2", [4, "3"], 1),
    ],
)
async def test_math(answer, truth, expected):
    assert await score("math", answer, truth) == expected


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("b", "B"),
        ("(B)", "B"),
        ("(b).", "B"),
        ("**B**", "B"),
        ("\\text{B}", "B"),
        ("B. Paris", "B"),
        ("B) Paris", "B"),
        ("(B) Paris is a city", "B"),
        ("B: Paris", "B"),
        ("The answer is B", "B"),
        ("The answer is (B), not C.", "B"),
        ("the correct answer is: b.", "B"),
        ("Option C", "C"),
        ("First I thought the answer is A. The answer is D.", "D"),
        ("Berlin", None),
        ("The answer is a dog", None),
        ("A dog", None),
        ("I think so", None),
        ("", None),
    ],
)
def test_the_chosen_letter_is_read_or_left_open(text, letter):
    assert choice_letter(text) == letter


async def test_choice_compares_letters_and_accepts_several():
    assert await score("choice", "The answer is B", "(b)") == 1
    assert await score("choice", "C", "B. Paris") == 0
    assert await score("choice", "C", ["B", "C"]) == 1
    assert await score("choice", "no idea", "B") == 0


async def test_choice_without_a_letter_as_truth_is_a_failure_and_not_a_zero():
    with pytest.raises(ScoringError, match="Paris"):
        await score("choice", "B", "Paris")


@pytest.mark.parametrize("scorer", ["em", "f1", "math", "choice"])
@pytest.mark.parametrize("truth", [None, [], "", "  ", {"a": 1}, [None], float("nan")])
async def test_a_truth_that_says_nothing_is_a_failure_and_not_a_zero(scorer, truth):
    with pytest.raises(ScoringError, match="ground truth"):
        await score(scorer, "x", truth)


@pytest.mark.parametrize("scorer", ["em", "f1", "math", "choice"])
async def test_a_truth_that_is_missing_is_a_failure(scorer):
    with pytest.raises(ScoringError, match="no `answer`"):
        await score_answer(scorer, "x", {"query": "q"}, {})


@given(answer=st.text(), truth=st.one_of(st.text().filter(str.strip), st.integers(), st.booleans()))
async def test_scores_lie_between_zero_and_one_and_the_truth_itself_scores_one(answer, truth):
    for scorer in ("em", "f1"):
        assert 0 <= await score(scorer, answer, truth) <= 1
        if not isinstance(truth, bool):
            assert await score(scorer, str(truth), truth) == 1


async def test_waiting_for_other_answers_counts_for_no_deadline():
    truth = {"query": "q", "answer": "1/2"}
    assert await score_answer("math", "\\frac{2}{4}", truth, {}, deadline_s=0.001) == 1


@pytest.mark.parametrize("scorer", ["em", "f1"])
async def test_a_long_answer_is_read_once_however_many_answers_are_accepted(scorer):
    started = time.process_time()
    assert await score(scorer, "the cat " * 25_000, [f"dog {number}" for number in range(200)]) == 0
    assert time.process_time() - started < 0.5


def test_an_answer_full_of_spaces_is_read_in_linear_time():
    started = time.process_time()
    assert choice_letter("my answer" + " " * 100_000 + "!") is None
    assert time.process_time() - started < 0.5
