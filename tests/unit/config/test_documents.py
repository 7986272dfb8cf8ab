"""Files that users write: what is refused, in one line that quotes no value."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config.documents import DocumentError, read_document

SECRET = "sk-do-not-show"
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 10)
)


def written(folder: Path, content: bytes) -> Path:
    path = folder / "file"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (LAUGHS.encode(), "aliases unfold to more than"),
        (b"a: &a [1, *a]", "line 1 contains itself"),
        (b"a: 1\nb: 2\na: 3", "'a' is given twice, again in line 3"),
        (b"a: [{b: 1, b: 2}]", "'b' is given twice"),
        (b"[" * 5000, "nested too deeply"),
        (b"a: 2026-99-99", "impossible date, number or truth value"),
        (b"a: !!int x", "impossible date, number or truth value"),
        (b"a: !!bool x", "impossible date, number or truth value"),
        (b"a: !!timestamp x", "impossible date, number or truth value"),
        (b"a: !!python/object/apply:os.getcwd []", "not valid YAML in line 1"),
        (b"a: \xff", "no text in UTF-8"),
        (b"a: \x01", "not valid YAML"),
    ],
)
def test_yaml_that_cannot_be_meant_is_refused_with_the_reason(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        read_document(written(tmp_path, content))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON in line 1"),
        (b'{"a": {"b": 1, "b": 2}}', "'b' is given twice"),
        (b"[" * 100_000, "nested too deeply"),
        (b"9" * 5000, "too many digits"),
        (b"\xff{}", "no text in UTF-8"),
    ],
)
def test_json_that_cannot_be_meant_is_refused_with_the_reason(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        read_document(written(tmp_path, content), form="json")


@pytest.mark.parametrize(
    "content", [f"key: {SECRET}\n  x: [", f"key: !!int {SECRET}", f"key: !odd {SECRET}", f"'{SECRET}"]
)
def test_what_is_wrong_with_a_file_is_said_without_its_values(tmp_path: Path, content: str) -> None:
    with pytest.raises(DocumentError) as refusal:
        read_document(written(tmp_path, content.encode()))
    assert SECRET not in str(refusal.value)


def test_anchors_merges_and_a_byte_order_mark_are_fine(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbfbase: &base {a: 1, b: 2}\nmine: {<<: *base, b: 3}\n"
    assert read_document(written(tmp_path, content)) == {"base": {"a": 1, "b": 2}, "mine": {"a": 1, "b": 3}}
    assert read_document(written(tmp_path, b'\xef\xbb\xbf{"a": 1}'), form="json") == {"a": 1}
