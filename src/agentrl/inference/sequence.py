"""One generation in the life of the embedded engine: what was asked, what came out so far, and when it ends. Pure."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from agentrl.inference.parameters import EngineSampling

DecodeText = Callable[[list[int]], str]


class Phase(StrEnum):
    """Where a sequence is: in the queue, being prefilled or decoded, or over."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """Mutable state, owned by the engine thread from submission to its last event.

    `output_ids`, `logprobs` (and `top_logprobs`, if asked for) grow together; `spans` [version, start, end] cover them.
    """

    rid: str
    input_ids: list[int]
    sampling: EngineSampling
    on_event: Callable[[Sequence], None]  # engine thread: after each token when `stream`, and once when finished
    stream: bool = False
    logprob_start: int = -1  # -1: no log-probs of the prompt
    top_logprobs_num: int = 0
    extra_key: str = ""  # prefixes are shared only between equal keys
    arrived_at: float = field(default_factory=time.monotonic)

    phase: Phase = Phase.WAITING
    finish_reason: dict[str, Any] | None = None
    abort_message: str | None = None  # set: ends at the next step
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[float, int]]] = field(default_factory=list)
    input_logprobs: list[float | None] = field(default_factory=list)
    input_top_logprobs: list[list[tuple[float, int]] | None] = field(default_factory=list)
    spans: list[list[Any]] = field(default_factory=list)
    was_queued_only: bool = False  # aborted before it ever ran
    lane: int = -1
    num_in_cache: int = 0  # leading tokens whose keys and values are in the lane
    needs_prefill: bool = True  # since the last placement, no token was drawn yet
    num_cached_tokens: int = 0  # of the prompt, at first admission
    num_admissions: int = 0
    num_retractions: int = 0

    @property
    def token_ids(self) -> list[int]:
        """Prompt and completion."""
        return self.input_ids + self.output_ids

    @property
    def num_tokens(self) -> int:
        """Length of prompt and completion."""
        return len(self.input_ids) + len(self.output_ids)

    @property
    def wants_input_logprobs(self) -> bool:
        """Whether the next prefill must also score the prompt."""
        return self.logprob_start >= 0 and not self.input_logprobs

    def append(self, token_id: int, logprob: float, *, version: str) -> None:
        """Take one sampled token."""
        position = len(self.output_ids)
        self.output_ids.append(token_id)
        self.logprobs.append(logprob)
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1][2] = position + 1
        else:
            self.spans.append([version, position, position + 1])

    def check_finish(self, *, eos_ids: frozenset[int], decode: DecodeText) -> bool:
        """Whether the last token ends the sequence; sets `finish_reason`. Length is looked at first, as SGLang does."""
        sampling = self.sampling
        token_id = self.output_ids[-1]
        if len(self.output_ids) >= sampling.max_new_tokens:
            self.finish_reason = {"type": "length", "length": sampling.max_new_tokens}
        elif not sampling.ignore_eos and (token_id in sampling.stop_token_ids or token_id in eos_ids):
            self.finish_reason = {"type": "stop", "matched": token_id}
        elif sampling.stop and (matched := self._matched_stop(decode)) is not None:
            self.finish_reason = {"type": "stop", "matched": matched}
        return self.finish_reason is not None

    def _matched_stop(self, decode: DecodeText) -> str | None:
        window = max(len(stop) for stop in self.sampling.stop) + 1
        tail = decode(self.output_ids[-window:])
        return next((stop for stop in self.sampling.stop if stop in tail), None)

    def retract(self) -> None:
        """Back to the queue with everything sampled so far; its cache has to be built again."""
        self.phase = Phase.WAITING
        self.lane = -1
        self.num_in_cache = 0
        self.needs_prefill = True
        self.num_retractions += 1
