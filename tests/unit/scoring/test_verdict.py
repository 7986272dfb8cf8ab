"""A judge's reply is exactly what it says, or nothing."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.scoring.verdict import Verdict, parse_verdict

CORRECT, INCORRECT, NOT_ATTEMPTED = Verdict.CORRECT, Verdict.INCORRECT, Verdict.NOT_ATTEMPTED


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("A", CORRECT), ("B", INCORRECT), ("C", NOT_ATTEMPTED), ("(B)", INCORRECT), ("**A**", CORRECT), ("A.", CORRECT),
        ("B. The year differs.", INCORRECT), ("A: they agree", CORRECT), ("A clear mismatch: B", INCORRECT),
        ("The names differ.\nGrade: B", INCORRECT), ("CORRECT", CORRECT), ("INCORRECT", INCORRECT),
        ("NOT_ATTEMPTED", NOT_ATTEMPTED), ("NOT ATTEMPTED", NOT_ATTEMPTED), ("A good question", None),
        ("I choose A", None), ("A or B", None), ("A. Lincoln is not the gold: B", None), ("a", None), ("D", None),
        ("<think>A</think>B", INCORRECT), ("<think>A", None), ('{"grade": "C"}', NOT_ATTEMPTED),
    ],
)  # fmt: skip
def test_letters_count_where_a_letter_was_asked_for(reply, verdict):
    assert parse_verdict(reply, letters=True) is verdict


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("Correct", CORRECT), ("correct.", CORRECT), ("**Incorrect**", INCORRECT), ("Not correct", INCORRECT),
        ("not correct.", INCORRECT), ("The answer is incorrect.", INCORRECT), ("Verdict: correct", CORRECT),
        ("Incorrect. The label says Paris.", INCORRECT), ("Paris is right.\nFinal verdict: Correct", CORRECT),
        ("correct, not incorrect", None), ("not incorrect", None), ("The correct answer is Rome", None),
        ("Correct\nIncorrect", None), ("", None), ("   ", None), ("maybe", None), ("A", None),
        ("A clear mismatch: B", None), ('{"verdict": "correct", "reason": "incorrect spelling"}', CORRECT),
        ('{"verdict": "Incorrect"}', INCORRECT),
        ('```json\n{"reason": "x", "verdict": "incorrect"}\n```', INCORRECT), ('{"correct": true}', CORRECT),
        ('{"verdict": "maybe"}', None), ('{"verdict": "correct"', None), ('{"reason": "correct"}', None),
        ('{"verdict": "correct", "grade": "incorrect"}', None), ("[1]", None),
        ("extracted_final_answer: 5\nreasoning: the same\ncorrect: yes\nconfidence: 90", CORRECT),
        ("extracted_final_answer: None\nreasoning: it differs\n**correct:** no\nconfidence: 100", INCORRECT),
        ("correct: yes\ncorrect: no", None), ("correct:\n no", None),
        ('{"verdict": "correct", "verdict": "incorrect"}', None),
    ],
)  # fmt: skip
def test_words_fields_and_json_are_what_they_say(reply, verdict):
    assert parse_verdict(reply, letters=False) is verdict


@given(st.text(), st.booleans())
def test_no_reply_makes_the_parser_raise(reply, letters):
    assert parse_verdict(reply, letters=letters) in {None, *Verdict}


@given(st.text(alphabet='{}[]":,ABC \ncorectinyesthwr_*.()', max_size=200), st.booleans())
def test_replies_that_look_like_verdicts_do_not_make_it_raise_either(reply, letters):
    assert parse_verdict(reply, letters=letters) in {None, *Verdict}


def test_a_reply_made_to_take_long_does_not():
    assert parse_verdict("the answer is " * 50_000 + "?", letters=True) is None
    assert parse_verdict("[" * 100_000, letters=False) is None
    assert parse_verdict("{" * 100_000, letters=False) is None
    began = time.process_time()
    for unit in (": ", ":\n", "correct:", "correct\n", "A:", "*", "(A)"):
        parse_verdict(unit * 50_000 + "x", letters=True)
    assert time.process_time() - began < 1.0
