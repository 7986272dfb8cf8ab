"""Long texts cut to a number of tokens, at the end of a sentence where there is one near. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

Encode = Callable[[str], Sequence[int]]
"""Text to token ids, as `ChatFormat.encode_text`."""

_CHARACTERS_PER_TOKEN = 16  # more than any prose has: bounds what is encoded of a text of any length
_SENTENCE_END = re.compile(r"[.!?](?=\s)|[。！？]|\n")


def cut_text(text: str, *, max_tokens: int, encode: Encode) -> str:
    """The text, or its beginning of at most `max_tokens` tokens and a note of how much is left out."""
    kept = fitting_start(text, max_tokens=max_tokens, encode=encode)
    if len(kept) == len(text):
        return text
    return f"{kept.rstrip()}\n[Cut here: the first {len(kept)} of {len(text)} characters.]"


def split_text(text: str, *, max_tokens: int, encode: Encode) -> list[str]:
    """The text in pieces of at most `max_tokens` tokens each, which add up to it."""
    pieces: list[str] = []
    while text:
        piece = fitting_start(text, max_tokens=max_tokens, encode=encode) or text[0]
        pieces.append(piece)
        text = text[len(piece) :]
    return pieces


def fitting_start(text: str, *, max_tokens: int, encode: Encode) -> str:
    """The longest known beginning within `max_tokens`, cut back to a sentence end in its second half."""
    length = min(len(text), max_tokens * _CHARACTERS_PER_TOKEN)
    while length and (num_tokens := len(encode(text[:length]))) > max_tokens:
        length = min(length - 1, length * max_tokens // num_tokens)
    if length == len(text):
        return text
    ends = [match.end() for match in _SENTENCE_END.finditer(text, length // 2, length)]
    return text[: ends[-1] if ends else length]
