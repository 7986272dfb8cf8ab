"""Keeps addresses that publish benchmark answers away from the model, in both directions. Pure.

    arguments   a call that names such an address is answered instead of sent
    results     JSON: the list entries that name one are left out; text: the paragraphs, or else the lines

Both are counted in the stored call, so that a run says how often a search engine offered the answer sheet.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from html import unescape
from typing import Any
from urllib.parse import unquote

_MAX_ENCODINGS = 4  # of one in another
_INVISIBLE = re.compile("[\u00ad\u034f\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufe00-\ufe0f\ufeff]")
_DOTS = re.compile("[\u3002\uff0e\uff61]")
_SLASHES = re.compile(r"[/\\]+(?:\.[/\\]+)*")
_STEPS_BACK = re.compile(r"/(?!\.\./)[^/\s]+/\.\./")
_PARAGRAPH_BREAK = re.compile(r"(\n[ \t]*\n)")


@dataclass(frozen=True, slots=True)
class LeakFilter:
    """Looks for `addresses` (host and start of path, e.g. "huggingface.co/datasets"), however they are spelt."""

    addresses: Sequence[str]

    @classmethod
    def from_setting(cls, blocked_addresses: str) -> LeakFilter:
        """The filter of a comma-separated list; an empty one blocks nothing."""
        return cls([address.strip() for address in blocked_addresses.split(",") if address.strip()])

    def find(self, value: Any) -> str | None:
        """The first blocked address in any string of a JSON value."""
        if isinstance(value, str):
            text = _plain(value)
            return next((address for address in self.addresses if _names(text, address.lower())), None)
        entries = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else []
        return next((found for entry in entries if (found := self.find(entry)) is not None), None)

    def clean(self, content: str) -> tuple[str, int]:
        """A tool result without what names a blocked address, and how many pieces that were."""
        if self.find(content) is None:
            return content, 0
        try:
            value = json.loads(content)
            if isinstance(value, str):
                return self._clean_text(content)
            cleaned, count = self._clean_value(value)
            return json.dumps(cleaned, ensure_ascii=False), count
        except (ValueError, RecursionError):  # no JSON, or none that anybody nests so deep
            return self._clean_text(content)

    def _clean_value(self, value: Any) -> tuple[Any, int]:
        if isinstance(value, str):
            return self.clean(value)
        if isinstance(value, dict):
            pairs = {key: self._clean_value(entry) for key, entry in value.items()}
            return {key: entry for key, (entry, _) in pairs.items()}, sum(count for _, count in pairs.values())
        if not isinstance(value, list):
            return value, 0
        kept: list[Any] = []
        total = 0
        for entry in value:
            if self._is_leak(entry):
                total += 1
                continue
            cleaned, count = self._clean_value(entry)
            kept.append(cleaned)
            total += count
        return kept, total

    def _is_leak(self, entry: Any) -> bool:
        """Whether an entry of a list goes as a whole: it names an address itself, not in a list within it."""
        words = entry.values() if isinstance(entry, dict) else [entry]
        return any(isinstance(word, str) and self.find(word) is not None for word in words)

    def _clean_text(self, text: str) -> tuple[str, int]:
        pieces = _PARAGRAPH_BREAK.split(text)
        if len(pieces) == 1:
            pieces = text.splitlines(keepends=True)
        kept = [piece for piece in pieces if self.find(piece) is None]
        return "".join(kept), len(pieces) - len(kept)


def _plain(text: str) -> str:
    """The text as a browser would understand the addresses in it: every way to write a character is that character."""
    for _ in range(_MAX_ENCODINGS):
        decoded = unescape(unquote(text))
        if decoded == text:
            break
        text = decoded
    text = unicodedata.normalize("NFKC", _INVISIBLE.sub("", text)).lower()
    text = _SLASHES.sub("/", _DOTS.sub(".", text))
    for _ in range(_MAX_ENCODINGS):
        text = _STEPS_BACK.sub("/", text)
    return text


def _names(text: str, address: str) -> bool:
    """Whether the address stands there as one: the host not as the end of another host's name, with any port."""
    host, slash, path = address.partition("/")
    if host not in text:  # of a long list of short entries, nearly always, and much faster
        return False
    pattern = rf"(?<![\w-]){re.escape(host)}\.?(?::\d*)?{re.escape(slash + path)}(?![\w-])"
    return re.search(pattern, text) is not None
