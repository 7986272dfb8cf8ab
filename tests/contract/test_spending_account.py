"""The account on every store: no two calls take the same last money, and every step may be repeated."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from uuid import uuid4

from agentrl.protocols import CallCosts, Store
from agentrl.types import DispatchKind
from factories import make_task, make_turn


async def test_a_new_account_is_empty(store: Store) -> None:
    assert await store.spent() == 0


async def test_what_is_reserved_counts_as_spent_until_the_call_has_its_price(store: Store) -> None:
    assert await store.reserve("a", amount=10, limit=None)
    assert await store.spent() == 10
    await store.settle("a", amount=4)
    assert await store.spent() == 4


async def test_a_call_that_would_exceed_the_limit_is_refused_and_takes_nothing(store: Store) -> None:
    assert await store.reserve("a", amount=7, limit=10)
    assert not await store.reserve("b", amount=4, limit=10)
    assert await store.reserve("c", amount=3, limit=10)
    assert await store.spent() == 10


async def test_reserving_and_settling_again_after_a_lost_reply_changes_nothing(store: Store) -> None:
    assert await store.reserve("a", amount=7, limit=10)
    assert await store.reserve("a", amount=7, limit=10)
    await store.settle("a", amount=2)
    await store.settle("a", amount=2)
    assert await store.spent() == 2


async def test_concurrent_calls_never_exceed_the_limit_and_use_all_of_it(store: Store) -> None:
    ids = [uuid4().hex for _ in range(40)]
    admitted = await asyncio.gather(*(store.reserve(each, amount=3, limit=30) for each in ids))
    assert sum(admitted) == 10
    assert await store.spent() == 30


async def test_calls_are_added_up_by_kind_and_target(store: Store) -> None:
    task = make_task()
    await store.insert_tasks([task])
    [claim] = await store.claim_tasks(split="train", owner="w", lease_s=60, limit=1)
    record = (await store.open_records(claim))[0]
    turn = make_turn(record, tool_results=["1", "2"])
    turn = replace(
        turn,
        model=replace(turn.model, cost_nano_usd=5),
        tools=tuple(replace(call, cost_nano_usd=100 + call.index) for call in turn.tools),
    )
    extended = await store.commit_turn(record, turn)
    assert extended.cost_nano_usd == 208
    stored = await store.get_record(record.id)
    assert stored is not None
    assert stored.cost_nano_usd == 208
    assert (await store.load_turns(stored))[0] == turn
    assert await store.sum_calls() == [
        CallCosts(kind=DispatchKind.TOOL, target="calculator.calculate", num_calls=2, seconds=0.2, cost_nano_usd=203),
        CallCosts(kind=DispatchKind.MODEL, target="service-0", num_calls=1, seconds=0.25, cost_nano_usd=5),
    ]
