"""The tools of a rollout process, how they are called, and what that costs: by `tool_journal`, `price_file`, budget."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from agentrl.config import RunConfig
from agentrl.config.prices import PriceTable, load_price_table
from agentrl.protocols import GenerationClient, Store, Toolbox
from agentrl.rollout.recorded_calls import RecordedToolbox, load_recorded_calls, spec_to_json
from agentrl.rollout.spending import PaidClient, Spending
from agentrl.rollout.tool_calls import ToolCaller, choose_caller
from agentrl.tools import open_toolbox


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """What a rollout process makes calls with."""

    toolbox: Toolbox
    caller: ToolCaller
    spending: Spending

    def paying(self, client: GenerationClient) -> GenerationClient:
        """The client, paying for tokens where the policy has a price."""
        return PaidClient(client, spending=self.spending) if self.spending.prices.model else client


@asynccontextmanager
async def open_calls(config: RunConfig, *, store: Store) -> AsyncIterator[Calls]:
    """Start the tool servers, or none of them for a strict replay; they end with the block.

    The Run document then names the tools, so that `agentrl journal` can write them down. Raises UserError for files
    that cannot be read, BudgetSpentError if the run has spent its budget already.
    """
    path = config.journal.tool_journal_file
    recorded = None if path is None else load_recorded_calls(path)
    spending = read_spending(config, store=store)
    await spending.check_not_spent()
    if config.journal.tool_journal == "replay" and recorded is not None:
        toolbox: Toolbox = RecordedToolbox(recorded.specs)
    else:
        toolbox = await open_toolbox(config.tools)
    try:
        await store.put_run({"tools": [spec_to_json(spec) for spec in toolbox.list_tools()]})
        caller = choose_caller(config.journal, seed=config.run.seed, store=store, spending=spending, recorded=recorded)
        yield Calls(toolbox=toolbox, caller=caller, spending=spending)
    finally:
        await toolbox.close()


def check_call_files(config: RunConfig) -> None:
    """Refuse a price or journal file that cannot be read. Raises UserError naming it."""
    if config.costs.price_file is not None:
        load_price_table(config.costs.price_file)
    if config.journal.tool_journal_file is not None:
        load_recorded_calls(config.journal.tool_journal_file)


def read_spending(config: RunConfig, *, store: Store) -> Spending:
    """Prices and budget of a run. Without a price file nothing is priced and nothing is written."""
    if config.costs.price_file is None:
        return Spending(prices=PriceTable())
    return Spending(prices=load_price_table(config.costs.price_file), account=store, budget_usd=config.costs.budget_usd)
