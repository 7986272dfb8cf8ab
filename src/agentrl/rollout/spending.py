"""Pays for calls: a price before, a reservation while the call runs, its cost afterwards (docs/costs.md).

    price of the call at most ──► reserve ──► refused: BudgetSpentError, the call is not made
                                     │
                                   call ──► settle what it did cost ──► the cost goes on the stored call

What is not settled (a cancelled call, a killed sampler) stays reserved and counts as spent: it may have been billed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from uuid import uuid4

from agentrl.config.prices import NANO_PER_USD, PriceTable, usd
from agentrl.errors import BudgetSpentError, ChatError, ChatErrorKind, EngineError, EngineErrorKind
from agentrl.protocols import ChatModel, GenerationClient, SpendingAccount
from agentrl.rollout.deadlines import stopped_clock
from agentrl.types import ChatReply, DispatchKind, GenerateReply, GenerateRequest

_BILLED_CHAT = frozenset({ChatErrorKind.TIMEOUT, ChatErrorKind.INVALID_REPLY})
_NOT_BILLED = frozenset({EngineErrorKind.UNREACHABLE, EngineErrorKind.REJECTED, EngineErrorKind.OVERLOADED})


@dataclass(slots=True, kw_only=True)
class Bill:
    """What one call costs: the most it may, until the caller knows better. In nano-dollars."""

    cost_nano_usd: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """Prices, and what may be spent. Without an `account` nothing is reserved: for runs without prices."""

    prices: PriceTable = field(default_factory=PriceTable)
    account: SpendingAccount | None = None
    budget_usd: float | None = None

    @property
    def limit(self) -> int | None:
        """The budget in nano-dollars."""
        return None if self.budget_usd is None else int(self.budget_usd * NANO_PER_USD)

    @asynccontextmanager
    async def paid(self, what: str, *, at_most: int) -> AsyncIterator[Bill]:
        """Around one call. Raises BudgetSpentError before it where `at_most` would exceed the budget."""
        bill = Bill(cost_nano_usd=at_most)
        if self.account is None or not at_most:
            yield bill
            return
        reservation = uuid4().hex
        with stopped_clock():
            if not await self.account.reserve(reservation, amount=at_most, limit=self.limit):
                raise self.refusal(what, at_most=at_most, spent=await self.account.spent())
        yield bill
        with stopped_clock():
            await self.account.settle(reservation, amount=bill.cost_nano_usd)

    async def check_not_spent(self) -> None:
        """Raise BudgetSpentError if nothing is left, before any work is claimed."""
        if self.account is None or self.limit is None:
            return
        spent = await self.account.spent()
        if spent >= self.limit:
            raise self.refusal("anything", at_most=0, spent=spent)

    def refusal(self, what: str, *, at_most: int, spent: int) -> BudgetSpentError:
        """The error that ends a sampler."""
        return BudgetSpentError(
            f"budget_usd = {self.budget_usd:g} is spent: {usd(spent):.6g} used or reserved, and {what} may cost "
            f"{usd(at_most):.6g} more; nothing is lost, launching again with a larger --budget_usd goes on"
        )


def first_refusal(errors: BaseExceptionGroup[BaseException]) -> BudgetSpentError | None:
    """The refusal among the errors of concurrent calls, if there is one."""
    match errors.subgroup(BudgetSpentError):
        case BaseExceptionGroup(exceptions=(BudgetSpentError() as refusal, *_)):
            return refusal
    return None


class PaidClient:
    """agentrl.protocols.GenerationClient that pays for the tokens of the policy."""

    def __init__(self, client: GenerationClient, *, spending: Spending) -> None:
        self._client = client
        self._spending = spending

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """See GenerationClient.generate. Raises BudgetSpentError too."""
        price = self._spending.prices.of_model(DispatchKind.MODEL, "*")
        tokens_in = len(request.input_ids)
        at_most = price.nano_usd(tokens_in=tokens_in, tokens_out=request.params.max_new_tokens)
        failure: EngineError | None = None
        async with self._spending.paid("a completion", at_most=at_most) as bill:
            try:
                reply = await self._client.generate(request)
                bill.cost_nano_usd = price.nano_usd(tokens_in=tokens_in, tokens_out=len(reply.output_ids))
            except EngineError as error:
                failure = error
                if error.kind in _NOT_BILLED:
                    bill.cost_nano_usd = 0
        if failure is not None:
            raise failure
        return replace(reply, cost_nano_usd=bill.cost_nano_usd)

    async def close(self) -> None:
        """See GenerationClient.close."""
        await self._client.close()


class PaidChat:
    """agentrl.protocols.ChatModel that pays for a judge's or a browse agent's tokens.

    How long the reply will be is not known before: the budget may be exceeded by the replies under way.
    """

    def __init__(self, chat: ChatModel, *, kind: DispatchKind, spending: Spending) -> None:
        self._chat = chat
        self._kind = kind
        self._spending = spending

    @property
    def models(self) -> Sequence[str]:
        """See ChatModel.models."""
        return self._chat.models

    async def complete(self, messages: Sequence[Mapping[str, str]], *, deadline_s: float) -> ChatReply:
        """See ChatModel.complete. Raises BudgetSpentError too."""
        num_bytes = sum(len(text.encode("utf-8", "replace")) for message in messages for text in message.values())
        # One token out, so that nothing is reserved only where the call is free, whatever its reply.
        at_most = max((self._cost(model, tokens_in=num_bytes, tokens_out=1) for model in self.models), default=0)
        failure: ChatError | None = None
        async with self._spending.paid(f"a {self._kind.value} call", at_most=at_most) as bill:
            try:
                reply = await self._chat.complete(messages, deadline_s=deadline_s)
                if reply.prompt_tokens:  # else the server does not say what it counted
                    bill.cost_nano_usd = self._cost(
                        reply.model, tokens_in=reply.prompt_tokens, tokens_out=reply.completion_tokens
                    )
            except ChatError as error:
                failure = error
                if error.kind not in _BILLED_CHAT:
                    bill.cost_nano_usd = 0
        if failure is not None:
            raise ChatError(str(failure), kind=failure.kind, cost_nano_usd=bill.cost_nano_usd) from failure
        return replace(reply, cost_nano_usd=bill.cost_nano_usd)

    async def close(self) -> None:
        """See ChatModel.close."""
        await self._chat.close()

    def _cost(self, model: str, *, tokens_in: int, tokens_out: int) -> int:
        price = self._spending.prices.of_model(self._kind, model)
        return price.nano_usd(tokens_in=tokens_in, tokens_out=tokens_out)
