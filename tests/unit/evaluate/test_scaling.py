"""The numbers of test-time scaling against enumeration by hand, and the identities they must keep."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.evaluate.scaling import (
    LOST,
    MAX_SAMPLES,
    Attempt,
    majority_vote,
    pass_at,
    sample_points,
    standard_error,
    turn_points,
)

NAMES = ("Kaunas", "the kaunas!", "Vilnius", "Riga")  # the first two are the same answer


def attempt(answer: str | None, *, right: bool = False, calls: int = 0) -> Attempt:
    grade = float(right and answer is not None)
    return Attempt(answer=answer, score=grade, em=grade, f1=grade, sub_em=grade, num_tool_calls=calls)


answers = st.sampled_from([None, *NAMES])
attempts = st.builds(
    lambda answer, calls: attempt(answer, right=answer in NAMES[:2], calls=calls), answers, st.integers(0, 3)
)
trajectories = st.lists(st.lists(attempts, min_size=1, max_size=4), min_size=1, max_size=6)


@given(trajectories)
def test_every_number_of_a_turn_is_that_of_a_count_by_hand(rows):
    points = turn_points([[row] for row in rows], num_turns=4)
    for n, point in enumerate(points):
        right = [[a.is_correct for a in row] + [False] * (4 - len(row)) for row in rows]
        assert point.turn == n + 1
        assert point.accuracy == pytest.approx(sum(row[n] for row in right) / len(rows))
        assert point.success == pytest.approx(sum(any(row[: n + 1]) for row in right) / len(rows))
        gained = sum(not row[n - 1] and row[n] for row in right) if n else 0
        lost = sum(row[n - 1] and not row[n] for row in right) if n else 0
        assert (point.wrong_to_right, point.right_to_wrong) == (gained / len(rows), lost / len(rows))
        assert point.unanswered == sum(n >= len(row) or row[n].answer is None for row in rows) / len(rows)
        num_calls = sum(a.num_tool_calls for row in rows for a in row[: n + 1])
        assert point.total_tool_calls == pytest.approx(num_calls / len(rows))


@given(trajectories)
def test_accuracy_changes_by_what_was_put_right_less_what_was_spoilt(rows):
    points = turn_points([[row] for row in rows], num_turns=4)
    for before, after in itertools.pairwise(points):
        assert after.accuracy - before.accuracy == pytest.approx(after.wrong_to_right - after.right_to_wrong)
        assert before.success <= after.success
        assert after.accuracy <= after.success
        assert after.total_tool_calls == pytest.approx(before.total_tool_calls + after.tool_calls)


@given(trajectories)
def test_longer_trajectories_do_not_change_the_points_of_earlier_turns(rows):
    shorter = [row[:2] for row in rows]
    assert turn_points([[row] for row in rows], num_turns=4)[:2] == turn_points([[row] for row in shorter], num_turns=2)


def test_an_answer_counts_as_repeated_however_it_is_written():
    row = [attempt("Riga"), attempt("The Riga."), attempt("888"), attempt("888.0"), attempt(None), attempt(None)]
    assert [point.repeated_answers for point in turn_points([[row]], num_turns=6)] == [0, 1, 0, 1, 0, 0]


def test_invalid_actions_are_a_share_of_the_model_calls_of_their_turn():
    rows = [
        [Attempt(answer="a", num_model_calls=3, num_invalid_actions=1), Attempt(answer="a", num_model_calls=1)],
        [Attempt(answer=None, num_model_calls=1, num_invalid_actions=1)],
    ]
    assert [point.invalid_actions for point in turn_points([[row] for row in rows], num_turns=2)] == [0.5, 0.0]


def test_turns_that_cannot_be_counted_are_refused():
    with pytest.raises(ValueError, match="no trajectories"):
        turn_points([], num_turns=1)
    with pytest.raises(ValueError, match="2 turns where 1 were asked for"):
        turn_points([[[LOST, LOST]]], num_turns=1)


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_one(is_correct, data):
    size = data.draw(st.integers(1, len(is_correct)))
    subsets = list(itertools.combinations(is_correct, size))
    expected = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at(len(is_correct), num_correct=sum(is_correct), size=size) == pytest.approx(expected)


@pytest.mark.parametrize(("num_samples", "num_correct", "size"), [(3, 1, 4), (3, 1, 0), (3, 4, 1), (3, -1, 1)])
def test_an_impossible_pass_at_k_is_refused(num_samples, num_correct, size):
    with pytest.raises(ValueError, match="impossible"):
        pass_at(num_samples, num_correct=num_correct, size=size)


@given(st.lists(answers, max_size=7))
def test_the_vote_is_the_most_frequent_answer_and_of_equals_the_first(given_answers):
    samples = [attempt(answer) for answer in given_answers]
    town = {None: None, "Kaunas": "K", "the kaunas!": "K", "Vilnius": "V", "Riga": "R"}
    towns = [town[answer] for answer in given_answers if answer is not None]
    most = max(map(towns.count, towns), default=0)
    winner = next((name for name in towns if towns.count(name) == most), None)
    vote = majority_vote(samples)
    assert (None if vote is None else town[vote.answer]) == winner
    if vote is not None:
        assert vote is next(sample for sample in samples if town[sample.answer] == winner)


@given(st.lists(st.lists(attempts, min_size=1, max_size=5), min_size=1, max_size=4))
def test_points_of_parallel_samples_are_means_over_all_subsets_of_every_question(questions):
    points = sample_points(questions, num_samples=5)
    assert [point.samples for point in points] == list(range(1, max(map(len, questions)) + 1))
    for point in points:
        enough = [samples for samples in questions if len(samples) >= point.samples]
        assert point.num_questions == len(enough)
        votes, passes = [], []
        for samples in enough:
            subsets = list(itertools.combinations(samples, point.samples))
            won = [majority_vote(subset) for subset in subsets]
            votes.append(sum(vote is not None and vote.is_correct for vote in won) / len(subsets))
            passes.append(sum(any(a.is_correct for a in subset) for subset in subsets) / len(subsets))
        assert point.accuracy == pytest.approx(sum(votes) / len(enough))
        assert point.pass_at == pytest.approx(sum(passes) / len(enough))
        assert point.accuracy <= point.pass_at + 1e-12
    assert points[0].accuracy == pytest.approx(points[0].pass_at)


def test_a_vote_and_its_price_are_taken_from_all_samples_that_exceed_k():
    samples = [attempt("Riga", right=True, calls=1), attempt("Riga", right=True, calls=2), attempt("Vilnius", calls=6)]
    one, two, three = sample_points([samples], num_samples=3)
    assert (one.accuracy, one.total_tool_calls) == (pytest.approx(2 / 3), pytest.approx(3.0))
    assert (two.accuracy, two.pass_at, two.total_tool_calls) == (1.0, 1.0, pytest.approx(6.0))
    assert (three.accuracy, three.f1, three.total_tool_calls) == (1.0, 1.0, pytest.approx(9.0))


def test_the_spread_of_a_mean_is_its_standard_error():
    rows = [[attempt("Riga", right=right)] for right in (True, True, False, False)]
    assert turn_points([[row] for row in rows], num_turns=1)[0].accuracy_error == pytest.approx(math.sqrt(1 / 3 / 4))


def test_trajectories_of_one_question_are_not_taken_for_independent_ones():
    rows = [[[attempt("Riga", right=right)]] for right in (True, True, False, False)]
    tripled = [question * 3 for question in rows]
    once, thrice = turn_points(rows, num_turns=1)[0], turn_points(tripled, num_turns=1)[0]
    assert (once.accuracy, once.accuracy_error) == (thrice.accuracy, pytest.approx(thrice.accuracy_error))
    by_hand = math.sqrt(2 / 1 * ((0 + 1 - 2 * 0.75) ** 2 + (1 + 1 - 2 * 0.75) ** 2)) / 4
    assert standard_error([[0.0, 1.0], [1.0, 1.0]]) == pytest.approx(by_hand)


def test_more_samples_than_can_be_enumerated_are_refused():
    with pytest.raises(ValueError, match="too many subsets"):
        sample_points([[LOST] * (MAX_SAMPLES + 1)], num_samples=2)
