import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.tools.servers.calculator import evaluate
from agentrl.tools.servers.serving import OperationError

OPERATIONS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("37*24", "888"),
        (" 7 + 5 ", "12"),
        ("3--4", "7"),
        ("-7//2", "-4"),
        ("84/2", "42"),
        ("+1*-1", "-1"),
        ("0*9", "0"),
    ],
)
def test_one_operation_on_two_integers_is_exact(expression, value):
    assert evaluate(expression) == value


@given(a=st.integers(-(10**60), 10**60), b=st.integers(-(10**60), 10**60), operator=st.sampled_from(list(OPERATIONS)))
def test_it_agrees_with_python_for_large_numbers(a, b, operator):
    assert evaluate(f"{a}{operator}{b}") == str(OPERATIONS[operator](a, b))


@pytest.mark.parametrize(
    "expression",
    ["", "5", "1+2+3", "2**3", "1.5+1", "a+b", "__import__('os')", "1+", "(1+2)", "٣+٤", "1 + 2\n3", "9" * 101 + "+1"],
)
def test_anything_else_is_refused(expression):
    with pytest.raises(OperationError):
        evaluate(expression)


@pytest.mark.parametrize(
    ("expression", "message"), [("1/0", "zero"), ("1//0", "zero"), ("7/2", "7/2 is not an integer")]
)
def test_divisions_without_an_integer_result_say_so(expression, message):
    with pytest.raises(OperationError, match=message):
        evaluate(expression)


@given(st.text(max_size=500).filter(lambda text: not any(character in "0123456789" for character in text)))
def test_text_without_digits_is_refused_shortly(text):
    with pytest.raises(OperationError) as caught:
        evaluate(text)
    assert len(str(caught.value)) < 100
