"""Journal files that are none are refused with the file and the line, before any rollout."""

from pathlib import Path

import pytest

from agentrl.errors import ArchiveError
from agentrl.rollout.recorded_calls import load_recorded_calls

HEADER = b'{"agentrl_tool_journal": 1, "run": "demo"}\n'
CALL = (
    b'{"call": {"record_id": "r", "turn": 0, "index": 1, "server": "s", "tool": "t", "arguments": {}, '
    b'"status": "ok", "content": "c", "error": null, "at": "2026-01-01T00:00:00"}}\n'
)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "an empty tool journal"),
        (b"\xff\xfe\x00", "no text in UTF-8"),
        (b"[" * 100_000, "line 1: no JSON"),
        (HEADER + CALL, "line 2: .*no time zone"),
        (HEADER + CALL.replace(b'"ok"', b'"fine"'), "line 2"),
        (HEADER + b"[]\n", "line 2"),
    ],
)
def test_a_file_that_is_no_journal_is_refused_with_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "calls.jsonl"
    path.write_bytes(content)
    with pytest.raises(ArchiveError, match=message):
        load_recorded_calls(path)
