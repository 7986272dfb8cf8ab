"""Test-time scaling in numbers: what more turns, or more samples, of a policy buy. Pure functions of what it answered.

    turn      1  the first answer   2  the answer after one reflection   ...      one trajectory per Record
    sample    independent answers to one question, put together by a vote

A Record of K turns gives the points 1 to K, and so do K samples: nothing is rolled out twice. Correct means a score
above 0.5, as everywhere.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import combinations, pairwise

from agentrl.scoring.ground_truth import as_number
from agentrl.scoring.scorers import normalise

MAX_SAMPLES = 12
"""Votes are averaged over all subsets of a question's samples; their number doubles with every sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One answer of a policy and what it took: an episode of a meta-episode, or a whole Record."""

    answer: str | None  # None: it gave none, and all grades are 0
    score: float = 0.0  # of the Task's own scorer
    em: float = 0.0
    f1: float = 0.0
    sub_em: float = 0.0
    num_tool_calls: int = 0
    num_model_calls: int = 0
    num_invalid_actions: int = 0  # model calls with neither an answer nor a call a tool could be asked

    @property
    def is_correct(self) -> bool:
        """Whether its score is above 0.5."""
        return self.score > 0.5


LOST = Attempt(answer=None)
"""Stands for an episode that was not sampled, for want of context: it is there, and worth nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnPoint:
    """What a policy achieves at one turn, as means over all trajectories."""

    turn: int  # from 1
    num_trajectories: int
    accuracy: float  # share of correct answers
    accuracy_error: float  # standard error of that mean
    score: float
    em: float
    f1: float
    sub_em: float
    success: float  # success@turn: a correct answer at this or an earlier turn
    wrong_to_right: float  # share of all trajectories; accuracy grows by wrong_to_right - right_to_wrong
    right_to_wrong: float
    repeated_answers: float  # share that gives an answer it had given before
    invalid_actions: float  # share of the turn's model calls
    unanswered: float  # share without an answer at this turn
    lost: float  # share for which there was no room for this turn; they are unanswered too
    tool_calls: float  # of this turn alone
    total_tool_calls: float  # of this and all earlier turns: the price of the point


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePoint:
    """What a vote over `samples` answers achieves, as means over all questions that have so many."""

    samples: int  # from 1
    num_questions: int
    accuracy: float  # share of correct votes
    accuracy_error: float
    score: float
    em: float
    f1: float
    sub_em: float
    pass_at: float  # pass@samples: one of them is correct
    pass_at_error: float
    total_tool_calls: float


def turn_points(questions: Sequence[Sequence[Sequence[Attempt]]], *, num_turns: int) -> list[TurnPoint]:
    """One point per turn, 1 to `num_turns`, of the trajectories of each question.

    A trajectory that ended earlier counts as wrong from there on. Raises ValueError without trajectories, or if one has
    more turns.
    """
    full = [[_padded(trajectory, length=num_turns) for trajectory in question] for question in questions if question]
    if not full:
        raise ValueError("no trajectories: nothing to average")
    return [
        _turn_point([[trajectory[:turn] for trajectory in question] for question in full])
        for turn in range(1, num_turns + 1)
    ]


def sample_points(questions: Sequence[Sequence[Attempt]], *, num_samples: int) -> list[SamplePoint]:
    """One point per number of samples, 1 to `num_samples`, unbiased where a question has more samples than that.

    A question with fewer samples is left out of a point, and a point without questions out of the list.
    Raises ValueError if a question has more than MAX_SAMPLES samples.
    """
    if any(len(samples) > MAX_SAMPLES for samples in questions):
        raise ValueError(f"more than {MAX_SAMPLES} samples of a question: too many subsets to vote")
    points = []
    for size in range(1, num_samples + 1):
        enough = [samples for samples in questions if len(samples) >= size]
        if enough:
            points.append(_sample_point(enough, size=size))
    return points


def pass_at(num_samples: int, *, num_correct: int, size: int) -> float:
    """Probability that `size` of the samples, drawn without replacement, hold a correct one.

    Chen et al. 2021, "Evaluating large language models trained on code", equation 1: unbiased, unlike
    1 - (1 - c/n)^k. Raises ValueError unless 1 <= size <= num_samples and 0 <= num_correct <= num_samples.
    """
    if not (1 <= size <= num_samples and 0 <= num_correct <= num_samples):
        raise ValueError(f"pass@{size} of {num_samples} samples with {num_correct} correct ones: impossible")
    return 1.0 - math.comb(num_samples - num_correct, size) / math.comb(num_samples, size)


def majority_vote(samples: Sequence[Attempt]) -> Attempt | None:
    """The first sample that gives the most frequent answer; of equally frequent ones, that given first wins.

    Answers are counted as `em` compares them. Samples without an answer do not vote; None if there are no others.
    """
    keys = [_answer_key(sample) for sample in samples]
    votes = Counter(key for key in keys if key is not None)  # in the order of first votes, in which max() looks
    if not votes:
        return None
    return samples[keys.index(max(votes, key=votes.__getitem__))]


def _turn_point(questions: Sequence[Sequence[Sequence[Attempt]]]) -> TurnPoint:
    """The point of the last turn of trajectories of equal length."""
    starts = [start for question in questions for start in question]
    last = [start[-1] for start in starts]
    changes = [(before.is_correct, after.is_correct) for start in starts for before, after in pairwise(start[-2:])]
    correct = [float(attempt.is_correct) for attempt in last]
    return TurnPoint(
        turn=len(starts[0]),
        num_trajectories=len(starts),
        accuracy=_mean(correct),
        accuracy_error=standard_error([[float(start[-1].is_correct) for start in question] for question in questions]),
        score=_mean([attempt.score for attempt in last]),
        em=_mean([attempt.em for attempt in last]),
        f1=_mean([attempt.f1 for attempt in last]),
        sub_em=_mean([attempt.sub_em for attempt in last]),
        success=_mean([any(attempt.is_correct for attempt in start) for start in starts]),
        wrong_to_right=changes.count((False, True)) / len(starts),
        right_to_wrong=changes.count((True, False)) / len(starts),
        repeated_answers=_mean([_repeats(start) for start in starts]),
        invalid_actions=sum(a.num_invalid_actions for a in last) / max(1, sum(a.num_model_calls for a in last)),
        unanswered=_mean([attempt.answer is None for attempt in last]),
        lost=_mean([attempt.num_model_calls == 0 for attempt in last]),
        tool_calls=_mean([attempt.num_tool_calls for attempt in last]),
        total_tool_calls=_mean([sum(attempt.num_tool_calls for attempt in start) for start in starts]),
    )


def _sample_point(questions: Sequence[Sequence[Attempt]], *, size: int) -> SamplePoint:
    votes = [[majority_vote(subset) or LOST for subset in combinations(samples, size)] for samples in questions]
    accuracies = [_mean([vote.is_correct for vote in of_question]) for of_question in votes]
    passes = [
        pass_at(len(samples), num_correct=sum(sample.is_correct for sample in samples), size=size)
        for samples in questions
    ]
    return SamplePoint(
        samples=size,
        num_questions=len(questions),
        accuracy=_mean(accuracies),
        accuracy_error=standard_error([[accuracy] for accuracy in accuracies]),
        score=_mean([_mean([vote.score for vote in of_question]) for of_question in votes]),
        em=_mean([_mean([vote.em for vote in of_question]) for of_question in votes]),
        f1=_mean([_mean([vote.f1 for vote in of_question]) for of_question in votes]),
        sub_em=_mean([_mean([vote.sub_em for vote in of_question]) for of_question in votes]),
        pass_at=_mean(passes),
        pass_at_error=standard_error([[of_question] for of_question in passes]),
        total_tool_calls=size * _mean([_mean([s.num_tool_calls for s in samples]) for samples in questions]),
    )


def _padded(trajectory: Sequence[Attempt], *, length: int) -> list[Attempt]:
    if len(trajectory) > length:
        raise ValueError(f"a trajectory of {len(trajectory)} turns where {length} were asked for")
    return [*trajectory, *[LOST] * (length - len(trajectory))]


def _repeats(start: Sequence[Attempt]) -> bool:
    *earlier, last = [_answer_key(attempt) for attempt in start]
    return last is not None and last in earlier


def _answer_key(attempt: Attempt) -> Decimal | str | None:
    """What makes two answers the same one to `em`."""
    if attempt.answer is None:
        return None
    number = as_number(attempt.answer)
    return number if number is not None else normalise(attempt.answer) or attempt.answer.strip().casefold()


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def standard_error(values: Sequence[Sequence[float]]) -> float:
    """Of the mean of all values, one list per question: those of one question are no independent ones.

    With c questions, sqrt(c / (c - 1) * sum over questions of (sum of its deviations from the mean)^2) / n; with one
    value each, the usual standard error (cluster-robust variance, Liang and Zeger 1986). One question says nothing: 0.
    """
    mean = _mean([value for of_question in values for value in of_question])
    deviations = [math.fsum(value - mean for value in of_question) for of_question in values]
    spread = math.fsum(deviation**2 for deviation in deviations) * len(values) / max(1, len(values) - 1)
    return math.sqrt(spread) / sum(map(len, values))
