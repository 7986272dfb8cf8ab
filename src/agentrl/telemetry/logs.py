"""Log files of every process: LOG_DIR/<run>_<process>_<rank>.log, UTC times, secrets masked."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from pathlib import Path

FORMAT = "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s"
DATE_FORMAT = "%Y-%m-%dT%H:%M:%S"
MASK = "***"

_SECRET_PATTERNS = (
    # user:password@host in a URI, up to the last @ of the word: it may hold characters that should have been escaped
    re.compile(r"(?P<keep>\w+://[^\s:'\"]*:)(?P<secret>[^\s'\"]*)(?=@)"),
    re.compile(r"(?P<keep>\bBearer\s+)(?P<secret>[^\s'\",}]+)", re.IGNORECASE),
    re.compile(
        r"(?P<keep>[\w-]*(?:api[_-]?key|auth[_-]?token|access[_-]?token|password|secret)[\w-]*['\"]?\s*[=:]\s*['\"]?)"
        r"(?P<secret>[^\s'\",}&]+)",
        re.IGNORECASE,
    ),
    re.compile(r"(?P<keep>\bsk-)(?P<secret>[A-Za-z0-9_-]{8,})"),
)


def mask_secrets(text: str) -> str:
    """The text with passwords, tokens and keys replaced: in URIs, bearer headers and `name=value` pairs."""
    for pattern in _SECRET_PATTERNS:
        text = pattern.sub(rf"\g<keep>{MASK}", text)
    return text


class _MaskingFormatter(logging.Formatter):
    converter = staticmethod(time.gmtime)

    def format(self, record: logging.LogRecord) -> str:
        return mask_secrets(super().format(record))


def setup_logging(process_name: str, *, log_dir: Path, run_name: str, is_verbose: bool = False) -> Path:
    """Send all log records of this process to its own file, and to stderr if verbose. Returns the file.

    The rank comes from RANK (set by `accelerate launch`), 0 without it. Calling it again replaces what it set before.
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    path = log_dir / f"{run_name}_{process_name}_{os.environ.get('RANK', '0')}.log"
    handlers: list[logging.Handler] = [logging.FileHandler(path, encoding="utf-8")]
    if is_verbose:
        handlers.append(logging.StreamHandler(sys.stderr))
    for handler in handlers:
        handler.setFormatter(_MaskingFormatter(FORMAT, DATE_FORMAT))
    logging.basicConfig(level=logging.INFO, handlers=handlers, force=True)
    return path
