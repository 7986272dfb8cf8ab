"""Prices, budget and journal settings are checked before work starts."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl.config import CostConfig, JournalConfig
from agentrl.config.prices import Price, PriceTable, load_price_table, usd
from agentrl.errors import ConfigError, UnavailableError
from agentrl.types import DispatchKind, ToolSpec

EXAMPLE = Path(__file__).parents[3] / "assets" / "prices.yml"


def spec(name: str, *, server: str = "web") -> ToolSpec:
    return ToolSpec(name=name, description="", parameters={}, server=server)


def test_the_example_file_is_a_price_table() -> None:
    table = load_price_table(EXAMPLE)
    assert usd(table.of_tool(spec("search")).nano_usd()) == 0.001
    assert table.of_tool(spec("calculate", server="calculator")).nano_usd() == 0
    judge = table.of_model(DispatchKind.JUDGE, "any")
    assert judge.nano_usd(tokens_in=1_000_000, tokens_out=1_000_000) == 2_000_000_000


def test_the_closest_name_of_a_tool_decides() -> None:
    prices = {"web.search": 4, "search": 3, "web.*": 2, "*": 1}
    table = PriceTable(tool={name: Price(per_call=price) for name, price in prices.items()})
    asked = [spec("search"), spec("web.search"), spec("search", server="x"), spec("fetch"), spec("fetch", server="x")]
    assert [table.of_tool(each).per_call for each in asked] == [4, 4, 3, 2, 1]


def test_what_has_no_price_is_free() -> None:
    assert PriceTable().of_tool(spec("search")).nano_usd() == 0
    assert PriceTable().of_model(DispatchKind.MODEL, "m").nano_usd(tokens_in=10**9) == 0


@given(
    per_token=st.floats(0, 1000, allow_subnormal=False), counts=st.lists(st.integers(0, 10**6), min_size=1, max_size=20)
)
def test_a_cost_is_never_below_the_exact_price_and_at_most_a_nano_dollar_above(
    per_token: float, counts: list[int]
) -> None:
    price = Price(per_million_tokens_out=per_token)
    for count in counts:
        exact = Fraction(str(per_token)) * count * 1000
        assert 0 <= price.nano_usd(tokens_out=count) - exact < 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tool: {search: {per_cal: 1}}", "tool.search.per_cal"),
        ("tool: {search: {per_call: -1}}", "tool.search.per_call"),
        ("tool: {search: 3}", "tool.search"),
        ("tool: {search: {per_call: .nan}}", "tool.search.per_call"),
        ("tool: {search: {per_call: .inf}}", "tool.search.per_call"),
        ("tool: {search: {per_call: yes}}", "tool.search.per_call"),
        ("tool: {search: {per_call: 1.0e+30}}", "less than or equal to 10000"),
        ("judge: {'*': {per_million_tokens_in: 1.0e+30}}", "less than or equal to 10000"),
        ("tool: {search: {per_million_tokens_out: 1}}", "search: nobody counts the tokens of a tool"),
        ("gpu: {}", "gpu"),
        ("- 1", "the file"),
        ("tool: {", "not valid YAML"),
    ],
)
def test_a_bad_price_file_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "prices.yml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        load_price_table(path)


def test_a_missing_price_file_names_the_example(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"assets/prices\.yml"):
        load_price_table(tmp_path / "none.yml")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tool_journal": "replay"}, "agentrl journal"),
        ({"tool_journal_file": "j.jsonl"}, "no effect"),
        ({"tool_journal": "fault"}, "go together"),
        ({"tool_faults": {"*": {"crashed": 0.1}}}, "go together"),
        ({"tool_journal": "fault", "tool_faults": {"*": {"crashed": 0.6, "slow": 0.6}}}, "1 in all"),
        ({"tool_journal": "fault", "tool_faults": {"*": {"explodes": 0.6}}}, "explodes"),
        ({"tool_cache_ttl_s": {"*": -1}}, "0 for never"),
        ({"tool_cache_ttl_s": {"*": 1e15}}, "seconds up to 1e\\+09"),
    ],
)
def test_journal_settings_that_contradict_each_other_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        JournalConfig(**settings)


def test_a_budget_needs_prices() -> None:
    with pytest.raises(ValidationError, match="price_file"):
        CostConfig(budget_usd=1.0)


def test_a_budget_that_no_account_can_count_is_refused() -> None:
    with pytest.raises(ValidationError, match="less than or equal to"):
        CostConfig(budget_usd=1e30, price_file=EXAMPLE)
