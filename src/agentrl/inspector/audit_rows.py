"""Checks on training rows: staleness, values, and that they equal what the engine saw. Pure; numpy, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta

import numpy as np

from agentrl.algo.row_faults import row_faults
from agentrl.algo.suspects import engine_use, spoiled_by
from agentrl.inspector.audit_facts import GroupFacts, LedgerFacts, StepTotals
from agentrl.inspector.audit_report import Check, Finding
from agentrl.types import DBRecordData, EngineQuarantine, SequenceSummary, TrainStep

# Plans carry the server's time as the trainer knows it: half a round trip and the drift of 30 s may be missing.
_CLOCK_ERROR = timedelta(seconds=1)


def check_staleness(row: DBRecordData, *, step: TrainStep, max_staleness: int) -> Iterator[Finding]:
    """L2: every token trained in a step is of one of the `max_staleness` + 1 versions up to the step's own."""
    versions = row.policy_versions[row.loss_mask]
    if not versions.size:
        return
    oldest, newest = int(versions.min()), int(versions.max())
    if oldest < step.policy_version - max_staleness:
        message = (
            f"step {step.step} trains v{step.policy_version} on tokens of v{oldest}: max_staleness = {max_staleness}"
        )
        yield Finding(check=Check.STALENESS, subject=row.id, message=message)
    if newest > step.policy_version:
        message = f"step {step.step} trains v{step.policy_version} on tokens of v{newest}, sampled later"
        yield Finding(check=Check.STALENESS, subject=row.id, message=message)


def check_values(row: DBRecordData, *, is_supervised: bool) -> Iterator[Finding]:
    """Aligned arrays, and finite log-probs, advantages and real versions wherever the mask is on."""
    for message in row_faults(row, is_supervised=is_supervised):
        yield Finding(check=Check.TRAINED_TOKENS, subject=row.id, message=message)


def check_exactness(
    row: DBRecordData, expected: DBRecordData | None, *, committed: Sequence[str], why: str
) -> Iterator[Finding]:
    """T1: the row is what merging the stored turns gives. `why` says why there is no expectation."""
    uncommitted = [turn_id for turn_id in row.turn_ids if turn_id not in committed]
    if uncommitted:
        message = f"holds turn {uncommitted[0]}, which its Record did not commit"
        yield Finding(check=Check.TOKEN_EXACTNESS, subject=row.id, message=message)
    if expected is None:
        yield Finding(check=Check.TOKEN_EXACTNESS, subject=row.id, message=f"cannot be rebuilt from its turns: {why}")
        return
    for name in ("token_ids", "loss_mask", "behaviour_logprobs", "policy_versions"):
        difference = _difference(name, getattr(row, name), getattr(expected, name))
        if difference is not None:
            yield Finding(check=Check.TOKEN_EXACTNESS, subject=row.id, message=difference)
    if row.turn_ids != expected.turn_ids:
        message = f"says it holds turns {list(row.turn_ids)}, its tokens are those of {list(expected.turn_ids)}"
        yield Finding(check=Check.TOKEN_EXACTNESS, subject=row.id, message=message)


def _difference(name: str, stored: np.ndarray | None, expected: np.ndarray | None) -> str | None:
    if stored is None or expected is None:
        return None if stored is expected else f"{name} is missing"
    if stored.shape != expected.shape:
        return f"{name} has {stored.size} entries, its turns have {expected.size}"
    if np.array_equal(stored, expected, equal_nan=name == "behaviour_logprobs"):
        return None
    at = int(np.flatnonzero(stored != expected)[0])
    return f"{name} differs from its turns at token {at}: {stored[at]} instead of {expected[at]}"


def check_row_totals(
    row: DBRecordData, *, summary: SequenceSummary | None, reward: float | None, expected: DBRecordData | None
) -> Iterator[Finding]:
    """The row carries its Record's reward, is as long as was planned, and has the advantages its group leads to.

    `expected` is the row as settling the stored Records again gives it; None where that cannot be done.
    """
    for message in _total_faults(row, summary=summary, reward=reward, expected=expected):
        yield Finding(check=Check.STEP_TOTALS, subject=row.id, message=message)


def _total_faults(
    row: DBRecordData, *, summary: SequenceSummary | None, reward: float | None, expected: DBRecordData | None
) -> Iterator[str]:
    # What it shares is a fact of the group, and decides nothing but how fast the row is trained.
    if summary is not None and replace(summary, num_shared_tokens=0) != row.summary:
        yield f"the plan sees {_describe(summary)}, the row has {_describe(row.summary)}"
    if reward is not None and row.reward != reward:
        yield f"its reward is {row.reward:g}, its Record's {reward:g}"
    if row.advantages.size != row.loss_mask.size:
        return
    if row.advantages[~row.loss_mask].any():
        yield "tokens that are not trained have advantages"
    if expected is None or expected.advantages.shape != row.advantages.shape:
        return
    wrong = np.flatnonzero(row.loss_mask & ~np.isclose(row.advantages, expected.advantages, rtol=1e-6, atol=1e-9))
    if wrong.size:
        at = int(wrong[0])
        yield (
            f"{wrong.size} trained tokens do not have their advantage: token {at} has {row.advantages[at]:.6g}, "
            f"recomputed {expected.advantages[at]:.6g}"
        )


def _describe(summary: SequenceSummary) -> str:
    trained = f"{summary.num_trained_tokens} trained of {summary.num_tokens} tokens"
    return f"{trained}, oldest version {summary.min_policy_version}"


def add_row(totals: StepTotals, row: DBRecordData, *, step: TrainStep) -> None:
    """Count a row into the sums of its step."""
    staleness = step.policy_version - row.policy_versions[row.loss_mask].astype(np.int64)
    totals.num_rows += 1
    totals.num_tokens += int(row.token_ids.size)
    totals.num_trained_tokens += int(row.loss_mask.sum())
    if staleness.size:
        totals.staleness_sum += int(staleness.sum())
        totals.staleness_max = max(totals.staleness_max, int(staleness.max()))


def check_step_totals(ledger: LedgerFacts, totals: Mapping[int, StepTotals]) -> Iterator[Finding]:
    """What a committed step says it trained is what its rows contain."""
    for step in ledger.committed:
        found = totals.get(step.step, StepTotals())
        expected = {
            "num_trained_tokens": float(found.num_trained_tokens),
            "num_sequences": float(found.num_rows),
            "num_tokens": float(found.num_tokens),
        }
        if not ledger.is_supervised and found.num_trained_tokens:
            expected["staleness_max"] = float(found.staleness_max)
        if "num_trained_tokens" not in step.metrics:
            message = "its ledger entry does not say how many tokens it trained"
            yield Finding(check=Check.STEP_TOTALS, subject=f"step {step.step}", message=message)
        for name, value in expected.items():
            if name in step.metrics and step.metrics[name] != value:
                message = f"{name} = {step.metrics[name]:g} in the ledger, its rows have {value:g}"
                yield Finding(check=Check.STEP_TOTALS, subject=f"step {step.step}", message=message)


def check_engines(
    row: DBRecordData, *, step: TrainStep, facts: GroupFacts, quarantines: Sequence[EngineQuarantine]
) -> Iterator[Finding]:
    """No turn of a trained row was sampled in a span whose quarantine was known when its step was planned."""
    if step.planned_at is None:
        return
    surely_seen = step.planned_at - _CLOCK_ERROR
    known = [item for item in quarantines if item.raised_at is not None and item.raised_at < surely_seen]
    calls = [facts.calls[turn_id][0] for turn_id in row.turn_ids if facts.calls.get(turn_id)]
    for call in calls:
        quarantine = spoiled_by([engine_use(call)], known)
        if quarantine is not None:
            message = f"step {step.step} trains turn {call.id}, sampled in quarantine {quarantine.id}"
            yield Finding(check=Check.QUARANTINED_ENGINES, subject=row.id, message=message)
