"""Task files: every row is right or nothing is loaded, and the report says where to look."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentrl.errors import DatasetError
from agentrl.rollout.dataset import MAX_LINE_BYTES, TaskRow, build_tasks, load_task_rows

SCORERS = ("em", "f1", "math")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tasks")


def load(content: bytes | str, folder: Path, *, name: str = "tasks.jsonl") -> list[TaskRow]:
    path = folder / name
    path.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    return load_task_rows(path, known_scorers=SCORERS)


def load_one(row: dict[str, Any], folder: Path) -> TaskRow:
    (loaded,) = load(json.dumps(row), folder)
    return loaded


def problems(content: bytes | str, folder: Path) -> list[str]:
    with pytest.raises(DatasetError) as caught:
        load(content, folder)
    return str(caught.value).splitlines()[1:]


def test_reads_every_field_of_a_row(folder: Path) -> None:
    row = {
        "id": 7, "question": "What is 6 * 7?", "answer": 42, "scorer": "math", "answer_schema": "boxed", "level": 3,
        "system_prompt": "Be brief.", "query_prompt": "Q: {query}", "tools": ["add", "search.web"],
        "metadata": {"src": "x"},
    }  # fmt: skip
    assert load_one(row, folder) == TaskRow(
        item_id="7",
        query="What is 6 * 7?",
        answer=42,
        scorer="math",
        answer_schema="boxed",
        system_prompt="Be brief.",
        query_prompt="Q: {query}",
        tools=("add", "search.web"),
        metadata={"level": 3, "src": "x"},
    )


@pytest.mark.parametrize("key", ["q", "Question", "question", "query", "content", "instruction", "traj_question"])
def test_accepts_every_name_of_the_question(key: str, folder: Path) -> None:
    row = load_one({key: " Why? ", "answer": "a"}, folder)
    assert (row.query, row.metadata) == (" Why? ", {})


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "Why?"}], "answer": "a"},
        {"raw": {"messages": [{"role": "user", "content": "Why?"}], "answer": "a"}},
        {"raw": {"messages": [{"role": "user", "content": "Why?"}], "expected_answer": "a", "answer": "b"}},
    ],
)
def test_accepts_conversations_and_keeps_them(row: dict[str, Any], folder: Path) -> None:
    loaded = load_one(row, folder)
    assert (loaded.query, loaded.answer) == ("Why?", "a")
    assert loaded.metadata == {key: value for key, value in row.items() if key != "answer"}


@pytest.mark.parametrize(
    "key", ["a", "Final answer", "Final Answer", "Final sample answer", "answer", "expected_answer"]
)
def test_accepts_every_name_of_the_answer(key: str, folder: Path) -> None:
    assert load_one({"q": "Why?", key: " x "}, folder).answer == "x"


@pytest.mark.parametrize("answer", [0, False, "", 0.0, [], {}, ["a", 1], {"x": None}, -(2**63), True, 1.5])
def test_a_present_answer_counts_whatever_its_truth_value(answer: Any, folder: Path) -> None:
    loaded = load_one({"q": "Why?", "answer": answer, "expected_answer": "other"}, folder)
    assert (loaded.answer, type(loaded.answer)) == (answer, type(answer))
    assert loaded.metadata == {"expected_answer": "other"}


def test_null_is_absent(folder: Path) -> None:
    row = {"q": None, "query": "Why?", "a": None, "answer": "x", "scorer": None, "tools": None, "id": None}
    loaded = load_one({**row, "task_id": "t"}, folder)
    assert (loaded.query, loaded.answer, loaded.scorer, loaded.item_id) == ("Why?", "x", "em", "t")
    assert loaded.tools is None


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"answer": "a"}, "no query"),
        ({"q": "Why?"}, "no answer"),
        ({"q": "Why?", "answer": None}, "no answer"),
        ({"q": "", "query": "Why?", "answer": "a"}, "q is empty"),
        ({"q": " \n", "answer": "a"}, "q is empty"),
        ({"q": 5, "answer": "a"}, "q must be a string, not a number"),
        ({"messages": [{"role": "assistant", "content": "x"}], "answer": "a"}, "messages has no user message"),
        ({"messages": "Why?", "answer": "a"}, "messages must be a list"),
        ({"messages": [{"role": "user", "content": ["x"]}], "answer": "a"}, "must be a string, not a list"),
        ({"messages": [{"role": "user"}], "answer": "a"}, "must be a string, not null"),
        ({"q": "Why?", "answer": "a", "scorer": "vibes"}, 'scorer "vibes" is not registered; known: em, f1, math'),
        ({"q": "Why?", "answer": "a", "scorer": 1}, "scorer must be a non-empty string"),
        ({"q": "Why?", "answer": "a", "answer_schema": "<answer>"}, "answer_schema"),
        ({"q": "Why?", "answer": "a", "answer_schema": ""}, "answer_schema must be a non-empty string"),
        ({"q": "Why?", "answer": "a", "system_prompt": ["x"]}, "system_prompt must be a non-empty string, not a list"),
        ({"q": "Why?", "answer": "a", "query_prompt": " "}, "query_prompt must be a non-empty string"),
        ({"q": "Why?", "answer": "a", "tools": "search"}, "tools must be a list of tool names"),
        ({"q": "Why?", "answer": "a", "tools": ["a", 1]}, "tools must be a list of tool names"),
        ({"q": "Why?", "answer": "a", "tools": ["a", "a"]}, "tools names a tool twice"),
        ({"q": "Why?", "answer": "a", "metadata": []}, "metadata must be an object, not a list"),
        ({"q": "Why?", "answer": "a", "x": 1, "metadata": {"x": 2}}, 'the key "x" occurs both'),
        ({"q": "Why?", "answer": "a", "id": True}, "id must be a string or an integer, not a boolean"),
        ({"q": "Why?", "answer": "a", "id": ""}, "id must be 1 to 256 printable characters"),
        ({"q": "Why?", "answer": "a", "id": "a\nb"}, "id must be 1 to 256 printable characters"),
        ({"q": "Why?", "answer": "a", "task_id": 1.5}, "task_id must be a string or an integer, not a number"),
        ({"q": "Why?", "answer": 2**63}, "does not fit 64 bits; write it as a string"),
        ({"q": "Why?", "answer": 10**30}, "does not fit 64 bits"),
        ({"q": "Why?\0", "answer": "a"}, "NUL character"),
        ({"q": "Why?", "answer": "\ud800"}, "half of a surrogate pair"),
        ({"q": "Why?", "answer": {"\ud800": 1}}, "half of a surrogate pair"),
        ([{"q": "Why?", "answer": "a"}], "must be a JSON object, not list"),
    ],
)  # fmt: skip
def test_explains_what_is_wrong_with_a_row(row: Any, reason: str, folder: Path) -> None:
    good = json.dumps({"q": "fine", "answer": "a"})
    (problem,) = problems(f"{good}\n{json.dumps(row)}\n", folder)
    assert problem.startswith("line 2: ")
    assert reason in problem


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"q": "Why?", "answer": "a"', "not valid JSON: Expecting ',' delimiter (column 28)"),
        (b'{"q": "Why?", "answer": "a"} x', "not valid JSON: Extra data"),
        (b"not json", "not valid JSON"),
        (b'"text"', "must be a JSON object, not str"),
        (b'{"q": "Why?", "answer": NaN}', "NaN is not JSON"),
        (b'{"q": "Why?", "answer": -Infinity}', "-Infinity is not JSON"),
        (b'{"q": "Why?", "answer": 1e999}', "1e999 is out of range"),
        (b'{"q": "Why?", "answer": ' + b"9" * 5000 + b"}", "does not fit 64 bits"),
        (b'{"q": "Why?", "answer": 1, "answer": 2}', 'the key "answer" occurs twice'),
        (b'{"q": "Why?", "answer": {"x": 1, "x": 1}}', 'the key "x" occurs twice'),
        (b'{"q": "Why\xff?", "answer": "a"}', "byte 11 is not valid UTF-8"),
        (b'{"q": "Why\x00?", "answer": "a"}', "NUL byte"),
        (b'{"q": "Why\n?", "answer": "a"}', "not valid JSON"),
        (b'{"q": "Why?", "answer": ' + b"[" * 70 + b"]" * 70 + b"}", "nested deeper than 64 levels"),
        (b'{"q": "Why?", "answer": ' + b"[" * 200_000, "nested too deeply"),
        (codecs.BOM_UTF8 + b'{"q": "Why?", "answer": "a"}', "not valid JSON"),
    ],
)
def test_explains_what_is_wrong_with_the_bytes_of_a_line(line: bytes, reason: str, folder: Path) -> None:
    found = problems(b'\r\n{"q": "fine", "answer": "a"}\n' + line, folder)
    assert found[0].startswith("line 3: ")
    assert reason in found[0]


def test_accepts_a_byte_order_mark_windows_line_ends_and_blank_lines(folder: Path) -> None:
    content = codecs.BOM_UTF8 + b'\r\n{"q": "a", "answer": "1"}\r\n\r\n  \t\r\n{"q": "b", "answer": "2"}'
    assert [row.query for row in load(content, folder)] == ["a", "b"]


def test_reads_one_json_list(folder: Path) -> None:
    content = json.dumps([{"q": "a", "answer": "1"}, {"q": "b", "answer": "2"}], indent=2)
    assert [row.query for row in load("\ufeff\n" + content, folder, name="tasks.json")] == ["a", "b"]
    with pytest.raises(DatasetError, match=r"item 2: no answer"):
        load(json.dumps([{"q": "a", "answer": "1"}, {"q": "b"}]), folder)
    with pytest.raises(DatasetError, match=r"starts like a JSON list: not valid JSON.*line 3"):
        load('[\n{"q": "a"},\n]', folder)


def test_accepts_a_long_line_up_to_the_limit_and_refuses_a_longer_one(folder: Path) -> None:
    frame = len(json.dumps({"q": "", "answer": "a"}).encode()) + 1
    longest = json.dumps({"q": "x" * (MAX_LINE_BYTES - frame), "answer": "a"}) + "\n"
    assert len(longest) == MAX_LINE_BYTES
    assert len(load(longest + '{"q": "b", "answer": "c"}', folder)) == 2
    found = problems(f"x{longest}" + '{"q": "b"}\n', folder)
    assert found[0] == f"line 1: the line has {MAX_LINE_BYTES + 1} bytes, above the limit of {MAX_LINE_BYTES}"
    assert found[1].startswith("line 2: no answer")


def test_lists_the_first_twenty_problems_and_counts_the_rest(folder: Path) -> None:
    with pytest.raises(DatasetError) as caught:
        load('{"q": "fine", "answer": "a"}\n' + "{}\n" * 33, folder)
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("33 bad rows, nothing was loaded")
    assert [line.split(":")[0] for line in lines[1:21]] == [f"line {number}" for number in range(2, 22)]
    assert lines[21:] == ["... and 13 more"]


def test_refuses_an_id_that_is_used_twice_and_says_where(folder: Path) -> None:
    content = (
        '{"id": 1, "q": "a", "answer": "x"}\n{"id": 2, "q": "a", "answer": "x"}\n{"id": "1", "q": "b", "answer": "y"}'
    )
    assert problems(content, folder) == ['line 3: id "1" is already used by line 1']


def test_rows_without_an_id_get_one_from_their_content(folder: Path) -> None:
    first, second = load('{"q": "a", "answer": "x"}\n{"q": "b", "answer": "x"}', folder)
    assert first.item_id != second.item_id
    (again,) = load('{ "answer": "x",  "q": "a" }\r\n', folder)
    assert again.item_id == first.item_id == "972e07bb987f566b"
    assert "already used by line 1" in problems('{"q": "a", "answer": "x"}\n' * 2, folder)[0]


def test_names_a_file_that_cannot_be_used(folder: Path) -> None:
    for content in (b"", b"\n\r\n", codecs.BOM_UTF8, b"[]"):
        with pytest.raises(DatasetError, match="has no rows"):
            load(content, folder)
    with pytest.raises(DatasetError, match="is a directory"):
        load_task_rows(folder, known_scorers=SCORERS)
    with pytest.raises(DatasetError, match=r"absent\.jsonl cannot be read: No such file"):
        load_task_rows(folder / "absent.jsonl", known_scorers=SCORERS)
    with pytest.raises(DatasetError, match='scorer "nope" is not registered'):
        load_task_rows(folder / "absent.jsonl", known_scorers=SCORERS, default_scorer="nope")


ROWS = st.fixed_dictionaries(
    {"q": st.text(min_size=1), "answer": st.text() | st.integers() | st.booleans() | st.none()},
    optional={
        "id": st.integers() | st.text(max_size=4),
        "scorer": st.sampled_from([*SCORERS, "x"]),
        "tools": st.lists(st.text(max_size=3), max_size=2),
        "metadata": st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
        "extra": st.recursive(st.none() | st.floats(), st.lists, max_leaves=4),
    },
)


@given(
    st.binary(max_size=60)
    | st.lists(ROWS, max_size=4).map(lambda rows: "\n".join(map(json.dumps, rows)).encode())
    | st.lists(st.sampled_from([b"{", b"}", b'"q"', b":", b'"a"', b",", b"[", b"]", b"\n", b"\xef\xbb\xbf"])).map(
        b"".join
    )
)
@example(b"[")
@example(b"[1]")
@example(b"\xff\xfe{\x00}\x00")
@settings(deadline=None, max_examples=300)
def test_any_bytes_give_rows_or_a_dataset_error(folder: Path, content: bytes) -> None:
    try:
        rows = load(content, folder)
    except DatasetError:
        return
    assert rows
    assert len({row.item_id for row in rows}) == len(rows)
    for row in rows:
        assert row.query.strip()
        assert row.answer is not None
        assert row.scorer in SCORERS


def test_builds_one_task_per_row_with_ids_of_split_and_epoch(folder: Path) -> None:
    rows = load(
        '{"id": "x", "q": "a", "answer": 0, "scorer": "f1", "k": 1}\n{"id": "y", "q": "b", "answer": "2"}', folder
    )
    first, second = build_tasks(rows, split="train", epoch=3, num_generations=4)
    assert (first.id, second.id) == ("train:3:x", "train:3:y")
    assert (first.item_id, first.split, first.epoch, first.num_generations) == ("x", "train", 3, 4)
    assert (first.query, first.answer, first.scorer, first.metadata) == ("a", 0, "f1", {"k": 1})


@pytest.mark.parametrize(
    "arguments",
    [
        {"split": "a:b", "epoch": 0, "num_generations": 1},
        {"split": "", "epoch": 0, "num_generations": 1},
        {"split": "train", "epoch": -1, "num_generations": 1},
        {"split": "train", "epoch": 0, "num_generations": 0},
    ],
)
def test_refuses_impossible_tasks(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"needed|needs"):
        build_tasks([], **arguments)
