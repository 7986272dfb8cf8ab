"""The price table: a YAML file that says what one call to each tool and model costs.

    tool:   {search.query: {per_call: 0.001}, "*": {per_call: 0}}
    judge:  {gpt-large: {per_million_tokens_in: 2.5, per_million_tokens_out: 10}}
    browse: {...}
    model:  {"*": {...}}                       the policy, for instance what its GPUs cost per token

Money is counted in whole nano-dollars (1e-9 US dollars), rounded up per call, so that sums are exact in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import ROUND_CEILING, Decimal
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from agentrl.config.documents import DocumentError, read_document
from agentrl.errors import ConfigError, UnavailableError
from agentrl.types import DispatchKind, ToolSpec

NANO_PER_USD = 10**9
MAX_PER_CALL_USD = 10_000.0
MAX_PER_MILLION_TOKENS_USD = 10_000.0
"""Far above any price. The account adds up nano-dollars in 64 bits: nine billion dollars."""
_TOKENS = Decimal(10**6)


class Price(BaseModel):
    """What calls of one target cost, in US dollars."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)  # `yes` is no price

    per_call: float = Field(0.0, ge=0, le=MAX_PER_CALL_USD)
    per_million_tokens_in: float = Field(0.0, ge=0, le=MAX_PER_MILLION_TOKENS_USD)
    per_million_tokens_out: float = Field(0.0, ge=0, le=MAX_PER_MILLION_TOKENS_USD)

    def nano_usd(self, *, tokens_in: int = 0, tokens_out: int = 0) -> int:
        """One call, in nano-dollars, rounded up."""
        tokens = _exact(self.per_million_tokens_in) * tokens_in + _exact(self.per_million_tokens_out) * tokens_out
        usd = _exact(self.per_call) + tokens / _TOKENS
        return int((usd * NANO_PER_USD).to_integral_value(ROUND_CEILING))


FREE = Price()


class PriceTable(BaseModel):
    """Prices by kind of call and target; `*` stands for every other target."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tool: Mapping[str, Price] = Field(default_factory=dict)
    judge: Mapping[str, Price] = Field(default_factory=dict)
    browse: Mapping[str, Price] = Field(default_factory=dict)
    model: Mapping[str, Price] = Field(default_factory=dict)

    @field_validator("tool")
    @classmethod
    def _tools_have_no_tokens(cls, prices: Mapping[str, Price]) -> Mapping[str, Price]:
        for name, price in prices.items():
            if price.per_million_tokens_in or price.per_million_tokens_out:
                raise ValueError(f"{name}: nobody counts the tokens of a tool; give it a price per_call")
        return prices

    def of_tool(self, spec: ToolSpec) -> Price:
        """Of one call of a tool: by `server.tool`, its name, `server.*` or `*`, whichever is there first."""
        return _first(self.tool, spec.setting_keys)

    def of_model(self, kind: DispatchKind, target: str) -> Price:
        """Of one call to a judge, a browse agent or the policy."""
        tables = {DispatchKind.JUDGE: self.judge, DispatchKind.BROWSE: self.browse, DispatchKind.MODEL: self.model}
        return _first(tables[kind], (target, "*"))


def load_price_table(path: Path) -> PriceTable:
    """Read and check a price file. Raises UnavailableError, or ConfigError naming what is wrong."""
    try:
        content = read_document(path)
    except OSError as error:
        raise UnavailableError(
            f"price_file = {path}: {error.strerror}; see assets/prices.yml for an example"
        ) from error
    except DocumentError as error:
        raise ConfigError(f"price_file = {path}: {error}") from None
    try:
        return PriceTable.model_validate({} if content is None else content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        message = f"price_file = {path}: {where}: {first['msg']}; prices are US dollars, see assets/prices.yml"
        raise ConfigError(message) from error


def usd(nano_usd: int) -> float:
    """Dollars, for people."""
    return nano_usd / NANO_PER_USD


def _first(table: Mapping[str, Price], keys: Iterable[str]) -> Price:
    return next((table[key] for key in keys if key in table), FREE)


def _exact(number: float) -> Decimal:
    """The decimal number that was written in the file, not its nearest binary neighbour."""
    return Decimal(str(number))
