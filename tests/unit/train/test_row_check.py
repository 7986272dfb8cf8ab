from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from agentrl.errors import TrainingError
from agentrl.train.row_check import faults_for_model, first_faults, refuse
from agentrl.types import DBRecordData
from tiny_model import VOCABULARY_SIZE, random_row


def a_row(*, version: int | None = 3) -> DBRecordData:
    return random_row("q/g0/s0", rng=np.random.default_rng(0), length=20, version=version)


def faults(row: DBRecordData, *, is_supervised: bool = False) -> list[str]:
    find = partial(faults_for_model, is_supervised=is_supervised, vocabulary_size=VOCABULARY_SIZE, policy_version=3)
    return first_faults([row], find=find)


def with_value(name: str, *, at: int, value: float) -> DBRecordData:
    row = a_row()
    array = getattr(row, name).copy()
    array[at] = value
    return replace(row, **{name: array})


TRAINED, CONTEXT = 4, 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: with_value("token_ids", at=CONTEXT, value=VOCABULARY_SIZE), "its token id 48 is not in the model's"),
        (
            lambda: with_value("token_ids", at=TRAINED, value=-1),
            "its token id -1 is not in the model's",
        ),
        (lambda: with_value("advantages", at=TRAINED, value=np.nan), "an advantage is not finite"),
        (lambda: with_value("behaviour_logprobs", at=TRAINED, value=-np.inf), "1 of 14 trained tokens have no finite"),
        (lambda: with_value("policy_versions", at=TRAINED, value=4), "v3 is trained, and it has tokens of v4"),
        (lambda: with_value("policy_versions", at=TRAINED, value=-2), "1 of 14 trained tokens have no policy version"),
        (lambda: with_value("loss_mask", at=0, value=True), "its first token is trained, which nothing predicts"),
        (lambda: replace(a_row(), advantages=a_row().advantages[:-1]), r"its arrays have lengths \[20, 19, 20, 20\]"),
        (lambda: replace(a_row(), behaviour_logprobs=None), "it was sampled, but has no log-probs"),
        (
            lambda: replace(
                a_row(version=None),
                **dict.fromkeys(("token_ids", "policy_versions"), np.zeros(0, np.int32)),
                advantages=np.zeros(0, np.float32),
                loss_mask=np.zeros(0, np.bool_),
                behaviour_logprobs=np.zeros(0, np.float32),
            ),
            "it has no tokens",
        ),
    ],
)
def test_a_row_that_could_not_be_trained_right_is_named_with_its_fault(
    make: Callable[[], DBRecordData], message: str
) -> None:
    found = faults(make())
    assert len(found) == 1
    with pytest.raises(TrainingError, match=f"^row q/g0/s0: {message}.*weights are unchanged"):
        refuse(found)


def test_sound_rows_sampled_or_supervised_pass() -> None:
    assert faults(a_row()) == []
    assert faults(a_row(version=None), is_supervised=True) == []
    assert faults(with_value("advantages", at=CONTEXT, value=np.nan)) == []  # nobody reads it
    refuse([])


def test_of_many_broken_rows_the_first_are_told_and_the_rest_counted() -> None:
    with pytest.raises(TrainingError, match=r"^row 0: x; row 1: x; row 2: x; row 3: x; and 5 more\."):
        refuse([f"row {index}: x" for index in range(9)])
