"""Finds the keys in a server's command line and address, so that nothing shows them.

--api-key KEY    --token=KEY    API_KEY=KEY    "X-Api-Key: KEY"    "Authorization: Bearer KEY"
scheme://user:KEY@host/path?token=KEY
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from urllib.parse import unquote

# The last word of a flag: what stands behind --keyword or --author is no key.
_NAMES_KEY = re.compile(r"(?:^|[-_]|api|access|auth)(?:key|token|secret|password|passwd|credentials?)$", re.IGNORECASE)
_PASSWORD = re.compile(r"://[^/\s:@]*:([^/\s]+)@")
_BEARER = re.compile(r"\bBearer\s+(\S+)", re.IGNORECASE)
_SEPARATOR = re.compile(r"\s*[=:]\s*")
_PARAMETER = re.compile(r"[?&;]")


def secrets_of(*, args: Sequence[str], url: str) -> frozenset[str]:
    """The values of arguments and of parts of `url` that are named as keys, as written and decoded."""
    found = {secret for text in (*args, url) for secret in _within(text)}
    for flag, value in pairwise(args):
        if flag.startswith("-") and _NAMES_KEY.search(flag) and not value.startswith("-"):
            found.add(value)
    return frozenset({*found, *map(unquote, found)})


def _within(text: str) -> Iterator[str]:
    yield from _PASSWORD.findall(text)
    yield from _BEARER.findall(text)
    for pairs in (text, *_PARAMETER.split(text)[1:]):
        rest = pairs
        while match := _SEPARATOR.search(rest):  # more than once: --header=NAME: VALUE
            name, rest = rest[: match.start()], rest[match.end() :]
            if _NAMES_KEY.search(name):
                yield rest
