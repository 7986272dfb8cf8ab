"""The settings of the tool journal and of the cost ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from agentrl.config.section import Section

WEEK_S = 604_800.0
LONGEST_TTL_S = 1e9  # thirty years; a date has to be that long ago
MAX_BUDGET_USD = 1e9  # counted in nano-dollars, in 64 bits
FaultKind = Literal["timeout", "crashed", "rate_limited", "tool_error", "slow"]


class JournalConfig(Section):
    """Where results of tool calls come from (docs/tool_journal.md)."""

    tool_journal: Literal["live", "cache", "replay", "fault"] = Field(
        "live",
        description="`live` calls the tools, `cache` reuses results of equal calls, `replay` takes them all from "
        "`tool_journal_file` and starts no tool server, `fault` makes calls fail at the rates of `tool_faults`.",
    )
    tool_journal_file: Path | None = Field(
        None, description="Journal written by `agentrl journal`: what `replay` replays, and `cache` knows beforehand."
    )
    tool_cache_ttl_s: dict[str, float] = Field(
        {"*": WEEK_S},
        description="Seconds a result may be reused in `cache`, by tool (`server.tool`, `tool`, `server.*` or `*`); "
        "0: never. Only `stateless` tools are cached.",
    )
    tool_faults: dict[str, dict[FaultKind, float]] = Field(
        {},
        description="Share of calls that fail in `fault`, by tool and kind (timeout, crashed, rate_limited, "
        'tool_error, slow), for example {"search": {"timeout": 0.1}}.',
    )
    tool_fault_slow_s: float = Field(2.0, gt=0, description="Seconds a call waits that `fault` makes `slow`.")

    @field_validator("tool_cache_ttl_s")
    @classmethod
    def _check_times(cls, times: dict[str, float]) -> dict[str, float]:
        for tool, seconds in times.items():
            if not 0 <= seconds <= LONGEST_TTL_S:
                raise ValueError(
                    f"tool_cache_ttl_s of {tool} = {seconds:g}: give 0 for never, or seconds up to {LONGEST_TTL_S:g}"
                )
        return times

    @field_validator("tool_faults")
    @classmethod
    def _check_rates(cls, faults: dict[str, dict[FaultKind, float]]) -> dict[str, dict[FaultKind, float]]:
        for tool, rates in faults.items():
            if min(rates.values(), default=0.0) < 0 or sum(rates.values()) > 1:
                raise ValueError(f"tool_faults of {tool} = {rates}: shares of calls are at least 0 and 1 in all")
        return faults

    @model_validator(mode="after")
    def _check_mode_has_what_it_needs(self) -> JournalConfig:
        if self.tool_journal == "replay" and self.tool_journal_file is None:
            raise ValueError("tool_journal = replay needs tool_journal_file: write one with `agentrl journal RUN FILE`")
        if self.tool_journal_file is not None and self.tool_journal not in {"replay", "cache"}:
            raise ValueError(f"tool_journal_file has no effect with tool_journal = {self.tool_journal}; unset it")
        if bool(self.tool_faults) != (self.tool_journal == "fault"):
            raise ValueError("tool_faults and tool_journal = fault go together: set both, or neither")
        return self


class CostConfig(Section):
    """What calls cost (docs/costs.md)."""

    price_file: Path | None = Field(
        None, description="YAML with the prices of tools and models, e.g. assets/prices.yml; empty: nothing is priced."
    )
    budget_usd: float | None = Field(
        None,
        gt=0,
        le=MAX_BUDGET_USD,
        description="US dollars the run may spend; the sampler stops before the call that would exceed it.",
    )

    @model_validator(mode="after")
    def _check_budget_has_prices(self) -> CostConfig:
        if self.budget_usd is not None and self.price_file is None:
            raise ValueError(f"budget_usd = {self.budget_usd:g}: without a price_file nothing costs anything; set one")
        return self
