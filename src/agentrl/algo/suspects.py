"""Which tokens a quarantined engine spoiled. Pure.

    engine's own clock ──── right canary ────── turn ────── wrong canary ── reload ── right canary ────►
                              since_s         [first, last]                              until_s
                                └──────────────── spoils every turn that overlaps ──────────┘

Turns and canaries of one engine are compared by that engine's clock, which both were told in its replies: no two
machines' clocks meet. Engines that do not tell leave the sampler's clock to compare with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime

from agentrl.types import DispatchedSamplingTask, EngineQuarantine, EngineUse, Turn

QUARANTINED_ENGINE = "quarantined_engine"
STARTED, FINISHED = "engine_started_s", "engine_finished_s"  # in the response of a model call


def engine_use(call: DispatchedSamplingTask) -> EngineUse:
    """Who answered a model call, and when."""
    first = call.response.get(STARTED, _stored_seconds(call.started_at))
    last = call.response.get(FINISHED, _stored_seconds(call.finished_at))
    return EngineUse(service_id=call.target, first_s=float(first), last_s=float(last))


def _stored_seconds(moment: datetime) -> float:
    """Seconds since 1970 of a time as a store keeps it, in milliseconds: the same before and after writing."""
    return moment.replace(microsecond=moment.microsecond // 1000 * 1000).timestamp()


def engines_of(turns: Iterable[Turn]) -> tuple[EngineUse, ...]:
    """One use per service, from its first to its last token: never shorter than the truth."""
    uses: dict[str, EngineUse] = {}
    for use in (engine_use(turn.model) for turn in turns):
        known = uses.get(use.service_id, use)
        uses[use.service_id] = EngineUse(
            service_id=use.service_id,
            first_s=min(known.first_s, use.first_s),
            last_s=max(known.last_s, use.last_s),
        )
    return tuple(uses[service_id] for service_id in sorted(uses))


def spoiled_by(uses: Iterable[EngineUse], quarantines: Sequence[EngineQuarantine]) -> EngineQuarantine | None:
    """The first quarantine that overlaps one of the uses."""
    for use in uses:
        for quarantine in quarantines:
            is_before = use.last_s < quarantine.since_s
            is_after = quarantine.until_s is not None and use.first_s >= quarantine.until_s
            if quarantine.service_id == use.service_id and not is_before and not is_after:
                return quarantine
    return None
