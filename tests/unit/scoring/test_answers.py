import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from agentrl.scoring import ANSWER_SCHEMAS, extract_answer

FRAGMENTS = st.lists(
    st.sampled_from(["<answer>", "</answer>", "\\boxed{", "\\fbox{", "{", "}", "\\{", "\\}", "\\", "7", " ", "text"]),
    max_size=30,
).map("".join)


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        ("<answer>42</answer>", "42"),
        ("so <answer>\n 42 \n</answer> it is", "42"),
        ("<answer>1</answer> or <answer>2</answer>", "2"),
        ("<answer>1</answer> or <answer></answer>", "1"),
        ("<answer>1</answer> or <answer>  </answer>", "1"),
        ("<answer>1</answer> or <answer>2", "1"),
        ("<answer>1</answer> junk </answer>", "1"),
        ("<answer>draft <answer>final</answer>", "final"),
        ("<answer>a < b and {x}</answer>", "a < b and {x}"),
        ("<answer>0</answer>", "0"),
        ("<answer>42", None),
        ("</answer>42<answer>", None),
        ("<ANSWER>42</ANSWER>", None),
        ("42", None),
        ("", None),
    ],
)
def test_the_last_complete_pair_that_is_not_empty_is_the_answer(content, answer):
    assert extract_answer(content, schema="answer") == answer


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        ("\\boxed{42}", "42"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{1} and \\boxed{2}", "2"),
        ("\\boxed{1} and \\boxed{}", "1"),
        ("\\boxed{1} and \\boxed{2", "1"),
        ("\\boxed{1} and \\fbox{2}", "2"),
        ("\\boxed {7}", "7"),
        ("\\boxed{\\boxed{3}}", "3"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{\\left\\{ x \\right.}", "\\left\\{ x \\right."),
        ("} \\boxed{5} {", "5"),
        ("\\\\boxed{5}", None),
        ("boxed{5}", None),
        ("\\boxed{5", None),
    ],
)
def test_the_last_complete_box_that_is_not_empty_is_the_answer(content, answer):
    assert extract_answer(content, schema="boxed") == answer


def test_any_tag_name_is_a_schema():
    assert extract_answer("<final.result>7</final.result>", schema="final.result") == "7"
    assert extract_answer("<finalXresult>7</finalXresult>", schema="final.result") is None


@pytest.mark.parametrize("schema", ["", "<answer>", "two words", "1st", "a|b"])
def test_a_schema_that_is_no_tag_name_is_refused(schema):
    with pytest.raises(ConfigError, match="answer_schema"):
        extract_answer("x", schema=schema)


@given(content=st.one_of(st.text(), FRAGMENTS), schema=st.sampled_from([*ANSWER_SCHEMAS, "result"]))
def test_no_text_breaks_it_and_an_answer_is_a_stripped_part_of_the_text(content, schema):
    answer = extract_answer(content, schema=schema)
    assert answer is None or (answer and answer == answer.strip() and answer in content)


@given(
    before=FRAGMENTS,
    answer=st.text(alphabet="abc123 +-", min_size=1).filter(str.strip),
    after=st.text(alphabet="abc {}"),
)
def test_a_complete_answer_is_found_whatever_stands_before_it(before, answer, after):
    assert extract_answer(f"{before}<answer>{answer}</answer>{after}", schema="answer") == answer.strip()


@given(
    answer=st.text(alphabet="abc123 +-", min_size=1).filter(str.strip),
    tail=st.sampled_from(["<answer>", "<answer>cut", "<answer> </answer>"]),
)
def test_what_is_cut_off_or_empty_never_hides_the_answer_before(answer, tail):
    assert extract_answer(f"<answer>{answer}</answer>{tail}", schema="answer") == answer.strip()


@pytest.mark.parametrize("schema", ["answer", "boxed"])
def test_a_hundred_thousand_opened_answers_take_no_time(schema):
    content = ("<answer>" + "\\boxed{") * 100_000
    assert extract_answer(content, schema=schema) is None
