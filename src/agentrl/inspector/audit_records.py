"""Checks on the Records of one group: identity, outcome, counters, and the chain of their turns. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta

from agentrl.inspector.audit_facts import GroupFacts
from agentrl.inspector.audit_report import Check, Finding
from agentrl.scores import is_score
from agentrl.types import BRANCH, DispatchedSamplingTask, DispatchKind, Record, RecordStatus, TaskStatus, TurnTokens

KEEPS_FIRST_PROMPT = frozenset({"last_k", "discard_all_tools"})
REAP_GRACE = timedelta(seconds=2)
_TURN_ID = re.compile(r"(?P<record>.+)/(?P<turn>\d+)\.(?P<fence>\d+)(?:\.(?P<attempt>\d+))?")


def check_identity(facts: GroupFacts) -> Iterator[Finding]:
    """Every Record says of itself what its id says."""
    task = facts.state.task
    if task.id != f"{task.split}:{task.epoch}:{task.item_id}":
        yield Finding(
            check=Check.RECORD_IDENTITY,
            subject=task.id,
            message=f"the Task is of {task.split} {task.epoch} {task.item_id}",
        )
    for record in facts.records:
        said = (record.task_id, f"{record.task_id}/g{record.generation}", record.split)
        if said != (task.id, record.id, task.split):
            message = f"its header is of task {record.task_id}, generation {record.generation}, split {record.split}"
            yield Finding(check=Check.RECORD_IDENTITY, subject=record.id, message=message)
        if facts.is_settled and not 1 <= record.fence <= facts.state.fence:
            message = f"fence {record.fence} was never given out: the Task's is {facts.state.fence}"
            yield Finding(check=Check.RECORD_IDENTITY, subject=record.id, message=message)


def check_outcomes(records: Sequence[Record]) -> Iterator[Finding]:
    """Failures are typed and unscored; what the policy ended is scored."""
    for record in records:
        for message in _outcome_faults(record):
            yield Finding(check=Check.OUTCOMES, subject=record.id, message=message)


def _outcome_faults(record: Record) -> Iterator[str]:
    reason = record.stop_reason
    if record.status is RecordStatus.RUNNING:
        if reason is not None or record.score is not None:
            yield f"running, but stop reason {reason} and score {record.score}"
        return
    if reason is None:
        yield f"{record.status.value} without a stop reason"
    if record.status is RecordStatus.FAILED:
        if record.score is not None:
            yield f"failed, but has score {record.score:g}: an error is never a score"
        if reason is not None and not reason.is_infrastructure:
            yield f"failed with stop reason {reason.value}, which the policy causes, not the system"
        return
    if not is_score(record.score):
        yield f"finished with score {record.score}"
    if reason is not None and reason.is_infrastructure:
        yield f"finished with stop reason {reason.value}, which is a failure"


def check_leases(facts: GroupFacts, *, now: datetime, lease_s: float) -> Iterator[Finding]:
    """No orphans: somebody works on what is running."""
    state = facts.state
    if state.status is TaskStatus.RUNNING:
        lease = state.lease_until
        if lease is None or lease + timedelta(seconds=lease_s) + REAP_GRACE < now:
            ended = "without a lease" if lease is None else f"its lease ended {(now - lease).total_seconds():.0f} s ago"
            message = f"running, but {ended}; a sampler of this run returns it to the queue"
            yield Finding(check=Check.LEASES, subject=state.task.id, message=message)
    if facts.is_settled:
        for record in facts.records:
            if record.status is RecordStatus.RUNNING:
                message = "still running, while its group is settled"
                yield Finding(check=Check.LEASES, subject=record.id, message=message)


def check_counters(facts: GroupFacts) -> Iterator[Finding]:
    """Header counters equal the sums over the committed turns. Records with missing calls are the chain's business."""
    for record in facts.records:
        turns = facts.turns_of(record)
        if turns is None:
            continue
        prompts: list[int] = []
        for turn in turns:
            parent = turn.tokens.parent_turn
            prompts.append((prompts[parent] if 0 <= parent < len(prompts) else 0) + len(turn.tokens.prompt_ids))
        counted = {
            "num_completion_tokens": sum(len(turn.tokens.completion_ids) for turn in turns),
            "num_tool_calls": sum(call.kind is DispatchKind.TOOL for turn in turns for call in turn.tools),
            "cost_nano_usd": sum(call.cost_nano_usd for turn in turns for call in (turn.model, *turn.tools)),
            "num_prompt_tokens": max(prompts, default=0),
            "turn_prompt_tokens": tuple(prompts),
        }
        for name, value in counted.items():
            if getattr(record, name) != value:
                message = f"{name} = {getattr(record, name)}, its turns add up to {value}"
                yield Finding(check=Check.COUNTERS, subject=record.id, message=message)


def check_chain(record: Record, facts: GroupFacts) -> Iterator[Finding]:
    """Each committed turn is there, follows the one before, and carries the fence of a claim."""
    earlier_fence = 1
    for position, turn_id in enumerate(record.turn_ids):
        for message in _id_faults(record, turn_id, position=position, earlier_fence=earlier_fence):
            yield Finding(check=Check.TURN_CHAIN, subject=turn_id, message=message)
        match = _TURN_ID.fullmatch(turn_id)
        earlier_fence = int(match["fence"]) if match else earlier_fence
        calls = facts.calls.get(turn_id, ())
        for message in _call_faults(record, turn_id, calls, position=position):
            yield Finding(check=Check.TURN_CHAIN, subject=turn_id, message=message)
        first = facts.calls.get(record.turn_ids[0], ())
        for message in _branch_faults(calls, first=first, position=position):
            yield Finding(check=Check.TURN_CHAIN, subject=turn_id, message=message)


def _id_faults(record: Record, turn_id: str, *, position: int, earlier_fence: int) -> Iterator[str]:
    match = _TURN_ID.fullmatch(turn_id)
    if match is None or match["record"] != record.id or int(match["turn"]) != position:
        yield f"committed as turn {position} of {record.id}, which its id does not say"
    elif int(match["attempt"] or 1) != record.attempt:
        yield f"of attempt {match['attempt'] or 1}, the Record is at attempt {record.attempt}"
    elif not earlier_fence <= int(match["fence"]) <= record.fence:
        yield f"written at fence {match['fence']}, between fence {earlier_fence} and the Record's {record.fence}"


def _call_faults(
    record: Record, turn_id: str, calls: Sequence[DispatchedSamplingTask], *, position: int
) -> Iterator[str]:
    if not calls or calls[0].id != turn_id:
        yield "committed, but its model call is not in the store"
        return
    for index, call in enumerate(calls):
        expected_id = f"{turn_id}/{index}" if index else turn_id
        if (call.id, call.index, call.turn) != (expected_id, index, position):
            yield f"call {call.id} has index {call.index} and turn {call.turn}; expected {expected_id}: one is missing"
        if (call.record_id, call.task_id) != (record.id, record.task_id):
            yield f"call {call.id} belongs to {call.record_id}"
        if (call.kind is DispatchKind.MODEL) is not (index == 0):
            yield f"call {call.id} is a {call.kind.value} call at index {index}"
        if call.finished_at < call.started_at:
            yield f"call {call.id} finished before it started"
    if calls[0].tokens is None:
        yield "its model call has no tokens"
        return
    yield from _token_faults(calls[0].tokens, position=position)


def _branch_faults(
    calls: Sequence[DispatchedSamplingTask], *, first: Sequence[DispatchedSamplingTask], position: int
) -> Iterator[str]:
    """A turn follows the one before it, or says that and why a new context starts with it."""
    if not calls or calls[0].tokens is None:
        return
    tokens, branch = calls[0].tokens, calls[0].request.get(BRANCH)
    follows = tokens.parent_turn == position - 1
    if branch is None:
        if not follows:
            yield f"its parent is turn {tokens.parent_turn}, but no branch is recorded: the context changed unexplained"
        return
    if follows or not isinstance(branch, Mapping):
        yield f"recorded as the start of a branch ({branch}), but its parent is turn {tokens.parent_turn}"
    elif branch.get("strategy") in KEEPS_FIRST_PROMPT and first and first[0].tokens is not None:
        head = first[0].tokens.prompt_ids
        if tokens.prompt_ids[: len(head)] != head:
            yield f"recorded as {branch['strategy']}, which keeps the first prompt, but it starts otherwise"


def _token_faults(tokens: TurnTokens, *, position: int) -> Iterator[str]:
    num_sampled = len(tokens.completion_ids)
    if not -1 <= tokens.parent_turn < position:
        yield f"its parent is turn {tokens.parent_turn}, which does not come before it"
    if len(tokens.logprobs) != num_sampled:
        yield f"{len(tokens.logprobs)} log-probs for {num_sampled} sampled tokens"
    covered = 0
    for span in tokens.version_spans:
        if span.start != covered or span.end < span.start:
            yield f"version span [{span.start}, {span.end}) does not continue at {covered}"
        covered = span.end
    if covered != num_sampled:
        yield f"version spans cover {covered} of {num_sampled} sampled tokens"
