"""Sampling parameters of one request as the embedded engine understands them, parsed from SGLang's JSON. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

GREEDY_BELOW = 1e-6
_MAX_STOP_STRINGS = 32
_UNSUPPORTED = ("stop_regex", "json_schema", "regex", "ebnf", "structural_tag", "custom_params", "beam_width")
_IGNORED = ("stream_interval",)
_MAX_SEED = 2**63 - 1
_DEFAULTS: dict[str, Any] = {
    "max_new_tokens": 128,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "stop": (),
    "stop_token_ids": (),
    "min_new_tokens": 0,
    "n": 1,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "no_stop_trim": False,
    "logit_bias": {},
    "sampling_seed": None,
}


class ErrorShape(StrEnum):
    """The three bodies SGLang answers errors with; see `wire.error_body`."""

    SCHEMA = "schema"
    ENGINE = "engine"
    VALIDATION = "validation"


class RequestRefusedError(ValueError):
    """A request the server answers with `status` and a body of `shape`; the server itself keeps running."""

    def __init__(self, message: str, *, shape: ErrorShape = ErrorShape.ENGINE, status: int = 400) -> None:
        super().__init__(message)
        self.shape = shape
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSampling:
    """Checked sampling parameters. Greedy requests have temperature 1 and top_k 1, as in SGLang."""

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int  # 0: no limit
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    min_new_tokens: int
    n: int
    ignore_eos: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    no_stop_trim: bool
    logit_bias: Mapping[int, float]
    sampling_seed: int | None  # decides every draw of the request, whatever else is in the batch

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.top_k == 1

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p may exclude tokens."""
        return not self.is_greedy and (self.top_k > 1 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def edits_logits(self) -> bool:
        """Whether logits change by more than the temperature: penalties, biases, a minimum length."""
        return (
            self.frequency_penalty != 0.0
            or self.presence_penalty != 0.0
            or self.repetition_penalty != 1.0
            or self.min_new_tokens > 0
            or bool(self.logit_bias)
        )


def parse_sampling(raw: Mapping[str, Any] | None, *, vocab_size: int) -> EngineSampling:
    """Check `sampling_params`. Unknown names and impossible values are refused, null means the default."""
    given = {name: value for name, value in (raw or {}).items() if value is not None}
    _refuse_unknown(given)
    values = {**_DEFAULTS, **{name: value for name, value in given.items() if name in _DEFAULTS}}
    temperature = _number(values, "temperature", low=0.0)
    top_k = _integer(values, "top_k", low=-1)
    if temperature < GREEDY_BELOW:
        temperature, top_k = 1.0, 1
    max_new_tokens = _integer(values, "max_new_tokens", low=0)
    stop_ids = _ids(values["stop_token_ids"], name="stop_token_ids")
    return EngineSampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=_number(values, "top_p", low=0.0, high=1.0, low_excluded=True),
        top_k=0 if top_k < 1 or top_k >= vocab_size else top_k,
        min_p=_number(values, "min_p", low=0.0, high=1.0),
        frequency_penalty=_number(values, "frequency_penalty", low=-2.0, high=2.0),
        presence_penalty=_number(values, "presence_penalty", low=-2.0, high=2.0),
        repetition_penalty=_number(values, "repetition_penalty", low=0.0, high=2.0, low_excluded=True),
        stop=_stop_strings(values["stop"]),
        stop_token_ids=frozenset(stop_ids),
        min_new_tokens=_integer(values, "min_new_tokens", low=0, high=max_new_tokens),
        n=_integer(values, "n", low=1),
        ignore_eos=_flag(values, "ignore_eos"),
        skip_special_tokens=_flag(values, "skip_special_tokens"),
        spaces_between_special_tokens=_flag(values, "spaces_between_special_tokens"),
        no_stop_trim=_flag(values, "no_stop_trim"),
        logit_bias=_logit_bias(values["logit_bias"], vocab_size=vocab_size),
        sampling_seed=None
        if values["sampling_seed"] is None
        else _integer(values, "sampling_seed", low=0, high=_MAX_SEED),
    )


def _refuse_unknown(given: Mapping[str, Any]) -> None:
    known = (*_DEFAULTS, *_UNSUPPORTED, *_IGNORED)
    for name in given:
        if name not in known:
            expected = ", ".join(f"`{item}`" for item in known)
            raise RequestRefusedError(f"unknown field `{name}`, expected one of {expected}", shape=ErrorShape.SCHEMA)
        if name in _UNSUPPORTED:
            raise RequestRefusedError(f"{name} is not supported by the embedded engine; use an SGLang server")


def _number(
    values: Mapping[str, Any], name: str, *, low: float, high: float = math.inf, low_excluded: bool = False
) -> float:
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestRefusedError(f"{name} must be a number, got {value!r}", shape=ErrorShape.SCHEMA)
    if not math.isfinite(value) or value > high or value < low or (low_excluded and value == low):
        bracket = "(" if low_excluded else "["
        raise RequestRefusedError(f"{name} must be in {bracket}{low}, {high}], got {value}.")
    return float(value)


def _integer(values: Mapping[str, Any], name: str, *, low: int, high: int | None = None) -> int:
    value = values[name]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestRefusedError(f"{name} must be an integer, got {value!r}", shape=ErrorShape.SCHEMA)
    if value < low or (high is not None and value > high):
        limit = f"in [{low}, {high}]" if high is not None else f"at least {low}"
        raise RequestRefusedError(f"{name} must be {limit}, got {value}.")
    return value


def _flag(values: Mapping[str, Any], name: str) -> bool:
    value = values[name]
    if not isinstance(value, bool):
        raise RequestRefusedError(f"{name} must be a boolean, got {value!r}", shape=ErrorShape.SCHEMA)
    return value


def _ids(value: Any, *, name: str) -> tuple[int, ...]:
    items = [value] if isinstance(value, int) else value
    if not isinstance(items, Sequence) or any(isinstance(item, bool) or not isinstance(item, int) for item in items):
        raise RequestRefusedError(f"{name} must be a list of integers, got {value!r}", shape=ErrorShape.SCHEMA)
    return tuple(items)


def _stop_strings(value: Any) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, Sequence) or any(not isinstance(item, str) for item in items):
        raise RequestRefusedError(f"stop must be a string or a list of strings, got {value!r}", shape=ErrorShape.SCHEMA)
    if len(items) > _MAX_STOP_STRINGS:
        raise RequestRefusedError(f"stop has {len(items)} strings, at most {_MAX_STOP_STRINGS} are allowed.")
    return tuple(item for item in items if item)


def _logit_bias(value: Any, *, vocab_size: int) -> Mapping[int, float]:
    if not isinstance(value, Mapping):
        raise RequestRefusedError(f"logit_bias must be an object, got {value!r}", shape=ErrorShape.SCHEMA)
    try:
        biases = {int(token_id): float(bias) for token_id, bias in value.items()}
    except (TypeError, ValueError) as error:
        message = f"logit_bias must map token ids to numbers: {error}"
        raise RequestRefusedError(message, shape=ErrorShape.SCHEMA) from error
    for token_id in biases:
        if not 0 <= token_id < vocab_size:
            raise RequestRefusedError(f"logit_bias must have keys in [0, {vocab_size - 1}], got {token_id}.")
    return biases
