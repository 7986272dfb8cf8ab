"""Deliveries that must change nothing: a turn a second time, and the work of a worker that lost its claim."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import replace
from datetime import UTC, datetime

from agentrl.errors import AgentRLError, StaleClaimError, StoreError
from agentrl.protocols import Store
from agentrl.store.turns import extend_record
from agentrl.types import (
    DispatchedSamplingTask,
    DispatchKind,
    GroupOutcome,
    GroupSettlement,
    Record,
    RecordStatus,
    TaskClaim,
    Turn,
    TurnTokens,
    VersionSpan,
)

TRAIN_SPLIT = "train"
OWNER = "chaos"
LEASE_S = 0.5
CLAIM_WITHIN_S = 15.0
TAKE_OVER_WITHIN_S = 60.0
POLL_S = 0.1


class AcceptedError(AgentRLError):
    """The store took what it had to refuse, or changed what was final."""


async def repeat_turn(store: Store) -> str:
    """Deliver the last turn of a finished Record again, as a worker does that never saw the reply. What happened.

    Raises AcceptedError if the Record is another one afterwards.
    """
    finished = [record for record in await store.list_records(split=TRAIN_SPLIT, limit=50) if record.is_final]
    record = next((record for record in finished if record.turn_ids), None)
    if record is None:
        return "no finished record yet"
    turns = await store.load_turns(record)
    before = _header_before(record, turns)
    try:
        await store.commit_turn(before, turns[-1])
        reaction = "taken as the delivery it repeats"
    except StaleClaimError:
        reaction = "refused as stale"
    except StoreError as error:
        reaction = f"refused: {error}"
    after = await store.get_record(record.id)
    if after != record:
        raise AcceptedError(f"turn {turns[-1].model.id} delivered twice changed {record} to {after}")
    return f"{record.id}: {reaction}"


async def deliver_late(store: Store) -> str:
    """Claim a Task, fall silent until another worker has it, then deliver a turn and a settlement. What happened.

    Raises AcceptedError if either is taken.
    """
    claim = await _claim_one(store)
    if claim is None:
        return "no pending task to claim"
    records = await store.open_records(claim)
    if not await _taken_over(store, claim):
        return f"{claim.task.id}: nobody took it over within {TAKE_OVER_WITHIN_S:.0f} s"
    open_record = next((record for record in records if not record.is_final), None)
    if open_record is not None:
        await _must_be_stale(
            store.commit_turn(open_record, _invented_turn(open_record)), what=f"turn of {open_record.id}"
        )
    settlement = GroupSettlement(
        task_id=claim.task.id, outcome=GroupOutcome.DROPPED, drop_reason="chaos", rewards={}, advantages={}
    )
    await _must_be_stale(store.settle_task(claim, settlement, []), what=f"settlement of {claim.task.id}")
    return f"{claim.task.id}: late turn and settlement at fence {claim.fence} refused"


def _header_before(record: Record, turns: list[Turn]) -> Record:
    """The Record's header as it was before its last turn was committed."""
    header = replace(
        record,
        status=RecordStatus.RUNNING,
        turn_ids=(),
        turn_prompt_tokens=(),
        num_prompt_tokens=0,
        num_completion_tokens=0,
        num_tool_calls=0,
    )
    for turn in turns[:-1]:
        header = extend_record(header, turn)
    return header


async def _claim_one(store: Store) -> TaskClaim | None:
    deadline = asyncio.get_running_loop().time() + CLAIM_WITHIN_S
    while True:
        claims = await store.claim_tasks(split=TRAIN_SPLIT, owner=OWNER, lease_s=LEASE_S, limit=1)
        if claims or asyncio.get_running_loop().time() > deadline:
            return claims[0] if claims else None
        await asyncio.sleep(POLL_S)


async def _taken_over(store: Store, claim: TaskClaim) -> bool:
    """Wait until the Records show the fence of a newer claim; whether they did."""
    deadline = asyncio.get_running_loop().time() + TAKE_OVER_WITHIN_S
    while asyncio.get_running_loop().time() < deadline:
        records = await store.list_records(task_id=claim.task.id)
        if any(record.fence > claim.fence for record in records):
            return True
        await asyncio.sleep(POLL_S)
    return False


async def _must_be_stale(delivery: Awaitable[object], *, what: str) -> None:
    try:
        await delivery
    except StaleClaimError:
        return
    raise AcceptedError(f"{what} was accepted under a lost claim")


def _invented_turn(record: Record) -> Turn:
    """A turn of this Record that nobody sampled."""
    index = len(record.turn_ids)
    now = datetime.now(UTC)
    return Turn(
        model=DispatchedSamplingTask(
            id=f"{record.id}/{index}.{record.fence}",
            record_id=record.id,
            task_id=record.task_id,
            turn=index,
            index=0,
            kind=DispatchKind.MODEL,
            target=OWNER,
            status="ok",
            request={},
            response={"text": ""},
            started_at=now,
            finished_at=now,
            tokens=TurnTokens(
                parent_turn=index - 1,
                prompt_ids=(1,),
                completion_ids=(1,),
                logprobs=(0.0,),
                version_spans=(VersionSpan(version=0, start=0, end=1),),
                finish_reason="stop",
            ),
        )
    )
