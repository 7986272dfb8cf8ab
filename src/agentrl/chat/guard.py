r"""Keeps text from becoming control tokens: a tool result that spells `<|im_end|>` must not end a turn. Pure.

    content          "a <|im_end|> b"
    marked           "a <§|im_end|> b"              § is a private-use character found nowhere in the conversation
    rendered         "<|im_start|>tool\na <§|im_end|> b<|im_end|>\n"
    encoded pieces   ["<|im_start|>tool\na "] [plain "<|im_end|>"] [" b<|im_end|>\n"]

Marking happens before the template is rendered, so it survives whatever the template does with content (trimming,
JSON), and the control tokens the template writes itself stay control tokens. Text without look-alikes is not
touched: its tokens are the ordinary ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any

from tokenizers import Tokenizer

_PRIVATE_USE = (range(0xF8EF, 0xDFFF, -1), range(0xF0000, 0xFFFFE))
_MIN_REMEMBERED_CHARACTERS = 256
_MAX_REMEMBERED = 128


class SentinelClashError(ValueError):
    """The text to mark contains the sentinel itself; another one is needed."""


class Guard:
    """Marks the look-alikes of control tokens in untrusted text, for one sentinel character."""

    def __init__(self, control_tokens: Iterable[str], *, special_tokens: Iterable[str], sentinel: str) -> None:
        """`special_tokens` is the subset that is never meant as text, not even in an assistant's own words."""
        tokens = _longest_first(control_tokens)
        self.sentinel = sentinel
        self.escaped_sentinel = f"\\u{ord(sentinel):04x}"  # how JSON and repr() may write it
        self.marker = sentinel * 3  # marking never puts two sentinels side by side
        self._look_alike = _alternatives(map(re.escape, tokens))
        self._special_look_alike = _alternatives(map(re.escape, _longest_first(special_tokens)))
        self._prefixes = frozenset(token[:end] for token in tokens for end in range(1, len(token)))
        self._longest = max(map(len, tokens), default=0)
        self.marked = _alternatives(re.escape(token[0]) + sentinel + re.escape(token[1:]) for token in tokens)
        self.genuine = re.compile(f"(?:{self._look_alike.pattern})(?!{sentinel})")

    def mark(self, text: str, *, keep_markup: bool = False) -> str:
        """Break every look-alike in `text`; with `keep_markup` only those of special tokens.

        A text that ends like the beginning of a control token is marked too: what the template or the next
        message appends may complete it.

        Raises:
            SentinelClashError: `text` contains the sentinel.
        """
        if self.sentinel in text or self.escaped_sentinel in text:
            raise SentinelClashError(f"U+{ord(self.sentinel):04X} occurs in the text")
        pattern = self._special_look_alike if keep_markup else self._look_alike
        return self._break_open_end(pattern.sub(self._break, text))

    def mark_all(self, value: Any) -> Any:
        """A copy of a JSON value with every string marked, keys included."""
        if isinstance(value, str):
            return self.mark(value)
        if isinstance(value, Mapping):
            return {self.mark_all(key): self.mark_all(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark_all(entry) for entry in value]
        return value

    def _break(self, match: re.Match[str]) -> str:
        token = match[0]
        return token[0] + self.sentinel + token[1:]

    def _break_open_end(self, text: str) -> str:
        end = len(text.rstrip())
        for start in range(max(0, end - self._longest + 1), end):
            if text[start:end] in self._prefixes:
                return text[: start + 1] + self.sentinel + text[start + 1 :]
        return text


class GuardedEncoder:
    """Encodes text with marks: marked look-alikes as plain text, everything else as the tokenizer always does."""

    def __init__(self, tokenizer: Tokenizer, *, template_text: str) -> None:
        """`template_text`: what templates write themselves; the sentinel is chosen to be absent from it."""
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        control = {token_id: token for token_id, token in added.items() if not token.content.isspace()}
        self.control_ids = frozenset(control)
        self._control = sorted(token.content for token in control.values())
        self._special = sorted(token.content for token in control.values() if token.special)
        self._template_text = template_text
        self._may_normalize_into_control = tokenizer.normalizer is not None and any(
            token.normalized for token in control.values()
        )
        newline, letter = self._full("\n"), self._full("a")
        self._anchor = None if self._full("\na") == newline + letter else newline
        self._borders = self._find_borders()
        self._remembered = lru_cache(maxsize=_MAX_REMEMBERED)(lambda text: tuple(self._full(text)))
        self.guard = self.guard_for("")

    def guard_for(self, text: str) -> Guard:
        """A guard whose sentinel occurs neither in `text` nor in the templates."""
        present = text + self._template_text + "".join(self._control)
        for code in (code for block in _PRIVATE_USE for code in block):
            if chr(code) not in present and f"\\u{code:04x}" not in present:
                return Guard(self._control, special_tokens=self._special, sentinel=chr(code))
        raise ValueError("the text uses every private-use character of Unicode: none is left to mark it with")

    def encode(self, rendered: str, *, guard: Guard) -> list[int]:
        """Token ids of a rendered text that `guard` marked."""
        text = rendered if rendered.isascii() else _without_lone_surrogates(rendered)
        sentinel = guard.sentinel
        if guard.escaped_sentinel in text:
            text = text.replace(guard.escaped_sentinel, sentinel)
        if sentinel not in text:
            return self._template_piece(text, guard=guard, first=True)
        ids: list[int] = []
        position = 0
        for match in guard.marked.finditer(text):
            ids += self._unmarked_piece(text[position : match.start()], guard=guard, first=position == 0)
            ids += self._plain(match[0].replace(sentinel, "", 1), first=match.start() == 0)
            position = match.end()
        return ids + self._unmarked_piece(text[position:], guard=guard, first=position == 0)

    def encode_prompt(self, rendered: str, *, guard: Guard) -> list[int]:
        """As `encode`, for the start of a conversation: long pieces that many prompts share are encoded once."""
        if self._borders is None or guard.sentinel in rendered or guard.escaped_sentinel in rendered:
            return self.encode(rendered, guard=guard)
        text = rendered if rendered.isascii() else _without_lone_surrogates(rendered)
        ids: list[int] = []
        done = 0
        for start, end in pairwise([0, *(match.start() for match in self._borders.finditer(text)), len(text)]):
            if end - start >= _MIN_REMEMBERED_CHARACTERS:
                ids += self._full(text[done:start])
                ids += self._remembered(text[start:end])
                done = end
        return ids + self._full(text[done:])

    def _find_borders(self) -> re.Pattern[str] | None:
        """Tokens at which a text may be cut without changing its ids; None where the tokenizer looks across them."""
        added = self._tokenizer.get_added_tokens_decoder().values()
        if self._anchor is not None or self._may_normalize_into_control:
            return None
        if any(token.lstrip or token.single_word for token in added):
            return None
        borders = [text for text in self._special if text in self._template_text]
        if any(border in token.content and border != token.content for border in borders for token in added):
            return None
        return _alternatives(map(re.escape, _longest_first(borders)))

    def _unmarked_piece(self, text: str, *, guard: Guard, first: bool) -> list[int]:
        """A piece without whole look-alikes. A leftover sentinel stays a border only where one would form without."""
        joined = text.replace(guard.sentinel, "")
        if _count(guard.genuine, joined) == _count(guard.genuine, text):
            return self._template_piece(joined, guard=guard, first=first)
        parts = text.split(guard.sentinel)
        return [
            token
            for index, part in enumerate(parts)
            for token in self._template_piece(part, guard=guard, first=first and index == 0)
        ]

    def _template_piece(self, text: str, *, guard: Guard, first: bool) -> list[int]:
        ids = self._full(text) if first else self._after_anchor(text, encode=self._full)
        if not self._may_normalize_into_control:
            return ids
        if sum(token in self.control_ids for token in ids) <= _count(guard.genuine, text):
            return ids
        return self._template_piece_by_parts(text, guard=guard)

    def _template_piece_by_parts(self, text: str, *, guard: Guard) -> list[int]:
        """For tokenizers that find added tokens in normalised text: only literally written tokens count."""
        ids: list[int] = []
        position = 0
        for match in guard.genuine.finditer(text):
            ids += self._plain(text[position : match.start()], first=position == 0)
            ids += self._full(match[0])
            position = match.end()
        return ids + self._plain(text[position:], first=position == 0)

    def _plain(self, text: str, *, first: bool) -> list[int]:
        """Encode without any added token."""
        if not text:
            return []
        ids = self._without_added(text) if first else self._after_anchor(text, encode=self._without_added)
        if self.control_ids.isdisjoint(ids):
            return ids
        by_character = [token for character in text for token in self._without_added(character)]
        if not self.control_ids.isdisjoint(by_character):
            raise ValueError(f"the tokenizer has no ordinary tokens for the text {text!r}")
        return by_character

    def _after_anchor(self, text: str, *, encode: Any) -> list[int]:
        """Encode a piece from the middle of a text for tokenizers that put a space before the first word."""
        if not text or self._anchor is None:
            ids: list[int] = encode(text) if text else []
            return ids
        anchored: list[int] = encode("\n" + text)
        if anchored[: len(self._anchor)] == self._anchor:
            return anchored[len(self._anchor) :]
        unanchored: list[int] = encode(text)
        return unanchored

    def _full(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _without_added(self, text: str) -> list[int]:
        tokenizer = self._tokenizer
        if tokenizer.normalizer is not None:
            text = tokenizer.normalizer.normalize_str(text)
        words = [text]
        if tokenizer.pre_tokenizer is not None:
            words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        return [token.id for word in words for token in tokenizer.model.tokenize(word)]


def _longest_first(tokens: Iterable[str]) -> list[str]:
    return sorted(set(tokens), key=lambda token: (-len(token), token))


def _alternatives(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(patterns) or "(?!)")


def _count(pattern: re.Pattern[str], text: str) -> int:
    return sum(1 for _ in pattern.finditer(text))


def _without_lone_surrogates(text: str) -> str:
    """Half characters, which JSON escapes can smuggle in, become U+FFFD: no tokenizer accepts them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
