"""The tool journal on every store: a result is kept under its call's key, and the first one written is the one used."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from agentrl.protocols import Store
from agentrl.types import ToolCall, ToolResult, ToolStatus

CALL = ToolCall(
    record_id="train:0:q1/g0", turn=2, index=1, server="bank", tool="transfer", arguments={"to": "b", "amount": 3}
)
DONE = ToolResult(status=ToolStatus.OK, content="transferred")


async def test_a_call_that_was_never_made_has_no_result(store: Store) -> None:
    assert await store.find_result(CALL) is None


@pytest.mark.parametrize(
    "result",
    [
        DONE,
        ToolResult(status=ToolStatus.TOOL_ERROR, content="no funds", error="no funds"),
        ToolResult(status=ToolStatus.OK, content=""),
        ToolResult(status=ToolStatus.OK, content="odd \udcff surrogate, ü"),
    ],
    ids=["ok", "error", "empty", "surrogate"],
)
async def test_a_kept_result_comes_back_as_it_was(store: Store, result: ToolResult) -> None:
    assert await store.put_result(CALL, result) == result
    assert await store.find_result(CALL) == result


async def test_the_order_of_the_arguments_does_not_make_another_call(store: Store) -> None:
    await store.put_result(CALL, DONE)
    assert await store.find_result(replace(CALL, arguments={"amount": 3, "to": "b"})) == DONE


@pytest.mark.parametrize(
    "changes",
    [
        {"record_id": "train:0:q1/g1"},
        {"turn": 3},
        {"index": 2},
        {"server": "other"},
        {"tool": "pay"},
        {"arguments": {"to": "b", "amount": 4}},
    ],
    ids=lambda changes: next(iter(changes)),
)
async def test_another_record_turn_position_server_tool_or_argument_is_another_call(
    store: Store, changes: dict[str, object]
) -> None:
    await store.put_result(CALL, DONE)
    assert await store.find_result(replace(CALL, **changes)) is None


async def test_of_two_executions_of_one_call_everybody_uses_the_first_result_written(store: Store) -> None:
    outcomes = [replace(DONE, content=f"receipt {number}") for number in range(8)]
    used = await asyncio.gather(*(store.put_result(CALL, outcome) for outcome in outcomes))
    kept = await store.find_result(CALL)
    assert set(used) == {kept}
    assert kept in outcomes


async def test_results_beyond_the_size_of_a_document_are_kept_and_two_of_them_do_not_mix(store: Store) -> None:
    rng = random.Random(0)
    first, second = (replace(DONE, content=rng.randbytes(18_000_000).hex()) for _ in range(2))
    assert await store.put_result(CALL, first) == first
    assert await store.put_result(CALL, second) == first
    assert await store.find_result(CALL) == first


async def test_an_equal_call_of_another_record_finds_the_result_while_it_is_young(store: Store) -> None:
    other = replace(CALL, record_id="train:1:q7/g3", turn=0, index=2)
    assert await store.find_equal(other, max_age_s=60) is None
    assert await store.put_equal(CALL, DONE, max_age_s=60) == DONE
    assert await store.find_equal(other, max_age_s=60) == DONE
    assert await store.find_equal(other, max_age_s=-1) is None
    assert await store.find_equal(replace(other, arguments={"to": "c", "amount": 3}), max_age_s=60) is None
    assert await store.find_result(CALL) is None


async def test_of_two_processes_that_make_equal_calls_both_use_the_first_result_while_it_is_young(store: Store) -> None:
    later = replace(DONE, content="later")
    assert await store.put_equal(CALL, DONE, max_age_s=60) == DONE
    assert await store.put_equal(CALL, later, max_age_s=60) == DONE
    assert await store.put_equal(CALL, later, max_age_s=-1) == later
    assert await store.find_equal(CALL, max_age_s=60) == later


async def test_concurrent_writers_of_an_equal_call_agree(store: Store) -> None:
    outcomes = [replace(DONE, content=f"page {number}") for number in range(8)]
    used = await asyncio.gather(*(store.put_equal(CALL, outcome, max_age_s=60) for outcome in outcomes))
    assert set(used) == {await store.find_equal(CALL, max_age_s=60)}
