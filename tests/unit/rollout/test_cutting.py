"""Long texts cut by tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agentrl.rollout.cutting import cut_text, fitting_start, split_text


def encode(text: str) -> list[int]:
    """Two tokens per character that is not ASCII, one per other."""
    return [0] * sum(1 if character.isascii() else 2 for character in text)


@given(text=st.text(max_size=400), max_tokens=st.integers(2, 100))
def test_the_pieces_fit_and_add_up_to_the_text(text: str, max_tokens: int) -> None:
    pieces = split_text(text, max_tokens=max_tokens, encode=encode)
    assert "".join(pieces) == text
    assert all(0 < len(encode(piece)) <= max_tokens for piece in pieces)


@given(text=st.text(max_size=400), max_tokens=st.integers(2, 100))
def test_a_text_that_fits_is_left_alone_and_another_one_begins_as_it_did(text: str, max_tokens: int) -> None:
    start = fitting_start(text, max_tokens=max_tokens, encode=encode)
    assert text.startswith(start)
    assert (cut_text(text, max_tokens=max_tokens, encode=encode) == text) is (len(encode(text)) <= max_tokens)


def test_the_cut_is_at_the_last_sentence_end_and_says_how_much_is_gone() -> None:
    text = "One is here. Two is 3.14 long. Three is never finished"
    cut = cut_text(text, max_tokens=45, encode=encode)
    assert cut == "One is here. Two is 3.14 long.\n[Cut here: the first 30 of 54 characters.]"


def test_a_flood_is_not_encoded_as_a_whole() -> None:
    seen: list[int] = []

    def counting(text: str) -> list[int]:
        seen.append(len(text))
        return encode(text)

    cut_text("x" * 10_000_000, max_tokens=100, encode=counting)
    assert sum(seen) < 10_000
