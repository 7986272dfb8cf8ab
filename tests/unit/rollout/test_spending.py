"""The account and the journal when a sampler dies between any two steps of a call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from agentrl.config.prices import PriceTable
from agentrl.errors import BudgetSpentError
from agentrl.rollout.spending import Spending
from agentrl.rollout.tool_calls import LiveCaller, PendingCall
from agentrl.store import MemoryStore
from agentrl.tools import FunctionToolbox
from agentrl.types import Recovery, ToolCall, ToolRequest

PRICE = 10**7
PRICES = PriceTable.model_validate({"tool": {"*": {"per_call": 0.01}}})
STEPS = ("find_result", "reserve", "settle", "put_result")


class DiedError(BaseException):
    """The process is gone: nothing of it runs any more."""


class Mortal:
    """A store whose process dies at one of its operations, before it is done or before its reply is read."""

    def __init__(self, store: MemoryStore, *, dies_at: int, is_done: bool) -> None:
        self._store = store
        self._num_left = dies_at
        self._is_done = is_done

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def step(*arguments: Any, **settings: Any) -> Any:
            self._num_left -= 1
            if self._num_left < 0 and not self._is_done:
                raise DiedError
            result = await getattr(self._store, name)(*arguments, **settings)
            if self._num_left < 0:
                raise DiedError
            return result

        return step


class Orders:
    """A tool with an effect that must be known of."""

    def __init__(self, recovery: Recovery) -> None:
        self.num_placed = 0

        def order(number: int) -> str:
            """Order something."""
            self.num_placed += 1
            return f"order {number} placed as {self.num_placed}"

        self.toolbox = FunctionToolbox([order], recovery=recovery)

    async def place(self, store: Any, *, budget_usd: float | None = None) -> list[str]:
        """What a sampler does in one turn: two orders, one after the other."""
        caller = LiveCaller(journal=store, spending=Spending(prices=PRICES, account=store, budget_usd=budget_usd))
        return [(await caller.send(self._pending(number))).content for number in (1, 2)]

    def _pending(self, number: int) -> PendingCall:
        [spec] = self.toolbox.list_tools()
        arguments = {"number": number}
        return PendingCall(
            request=ToolRequest(call_id=str(number), name=spec.name, arguments=arguments),
            call=ToolCall(
                record_id="r", turn=0, index=number, server=spec.server, tool=spec.own_name, arguments=arguments
            ),
            spec=spec,
            toolbox=self.toolbox,
            deadline_s=5,
        )


@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("dies_at", range(2 * len(STEPS)))
async def test_a_sampler_that_dies_at_any_step_of_a_call_leaves_no_call_unpaid(dies_at: int, is_done: bool) -> None:
    store, orders = MemoryStore(), Orders(Recovery.JOURNALLED)
    with pytest.raises(DiedError):
        await orders.place(Mortal(store, dies_at=dies_at, is_done=is_done))
    placed_before = orders.num_placed
    results = await orders.place(store)
    assert [result.split(" placed")[0] for result in results] == ["order 1", "order 2"]
    assert await orders.place(store) == results  # all are in the journal by now
    # One that was under way may be made again, and one that was only reserved counts as made.
    assert orders.num_placed <= 3
    assert orders.num_placed * PRICE <= await store.spent() <= (orders.num_placed + (placed_before < 2)) * PRICE
    assert await store.spent() <= 3 * PRICE


async def test_a_budget_below_the_first_call_makes_none_and_reserves_nothing() -> None:
    store, orders = MemoryStore(), Orders(Recovery.STATELESS)
    with pytest.raises(BudgetSpentError, match=r"0 used or reserved, and a call of order may cost 0\.01 more"):
        await orders.place(store, budget_usd=0.009)
    assert (orders.num_placed, await store.spent()) == (0, 0)
