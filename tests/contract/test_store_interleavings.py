"""Random interleavings of workers, zombies and crashes of leases, checked against a model after every step."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from agentrl.errors import StaleClaimError, StoreError
from agentrl.protocols import Store
from agentrl.store import MemoryStore, open_store
from agentrl.types import Record, RecordStatus, StopReason, TaskClaim
from factories import make_sequence, make_settlement, make_task, make_turn

NUM_TASKS = 3
Opener = Callable[[], Awaitable[Store]]


class Workers(RuleBasedStateMachine):
    """Two or more workers per Task, each believing it owns it; `live` is who really does."""

    open_store: Opener

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.store: Store = self.runner.run(type(self).open_store())
        self.run(self.store.insert_tasks([make_task(str(i), num_generations=2) for i in range(NUM_TASKS)]))
        self.claims: list[TaskClaim] = []
        self.live: dict[str, TaskClaim] = {}
        self.opened: list[Record] = []  # headers as their workers remember them
        self.committed: dict[str, tuple[str, ...]] = {}  # record id -> acknowledged turns
        self.settled: set[str] = set()

    def run(self, awaitable: Awaitable[object]) -> object:
        async def bounded() -> object:
            async with asyncio.timeout(30):
                return await awaitable

        return self.runner.run(bounded())

    def pick(self, index: int) -> TaskClaim:
        return self.claims[index % len(self.claims)]

    def is_live(self, claim: TaskClaim) -> bool:
        return self.live.get(claim.task.id) == claim

    @rule(limit=st.integers(1, 3), expires=st.booleans())
    def claim(self, limit: int, expires: bool) -> None:
        lease_s = -1.0 if expires else 3600.0
        claims = self.run(self.store.claim_tasks(split="train", owner="w", lease_s=lease_s, limit=limit))
        assert isinstance(claims, list)
        free = NUM_TASKS - len(self.live) - len(self.settled)
        assert len(claims) == min(limit, free)
        for claim in claims:
            assert claim.task.id not in self.live
            assert claim.task.id not in self.settled
            assert all(claim.fence > old.fence for old in self.claims if old.task.id == claim.task.id)
            self.live[claim.task.id] = claim
        self.claims += claims

    @rule()
    def reap(self) -> None:
        reaped = self.run(self.store.reap_expired_claims(split="train"))
        expired = {key for key, claim in self.live.items() if claim.lease_until < self.now()}
        assert isinstance(reaped, list)
        assert set(reaped) == expired
        self.live = {key: claim for key, claim in self.live.items() if key not in expired}

    def now(self) -> object:
        return self.run(self.store.server_time())

    @precondition(lambda self: self.claims)
    @rule(index=st.integers(0, 20))
    def release(self, index: int) -> None:
        claim = self.pick(index)
        self.run(self.store.release_claim(claim))
        if self.is_live(claim):
            del self.live[claim.task.id]

    @precondition(lambda self: self.claims)
    @rule(index=st.integers(0, 20))
    def open_records(self, index: int) -> None:
        claim = self.pick(index)
        if not self.is_live(claim):
            with pytest.raises(StaleClaimError):
                self.run(self.store.open_records(claim))
            return
        records = self.run(self.store.open_records(claim))
        assert isinstance(records, list)
        for record in records:
            assert record.turn_ids == self.committed.get(record.id, ())
            assert record.is_final or record.fence == claim.fence
        self.opened += records

    @precondition(lambda self: self.opened)
    @rule(index=st.integers(0, 40))
    def commit_turn(self, index: int) -> None:
        index %= len(self.opened)
        record = self.opened[index]
        stored = self.run(self.store.get_record(record.id))
        assert isinstance(stored, Record)
        turn = make_turn(record)
        repeated = turn.model.id in stored.turn_ids
        if not repeated and (stored.fence != record.fence or stored.is_final or stored.turn_ids != record.turn_ids):
            refusal = StaleClaimError if stored.fence != record.fence else StoreError
            with pytest.raises(refusal):
                self.run(self.store.commit_turn(record, turn))
            return
        extended = self.run(self.store.commit_turn(record, turn))
        assert isinstance(extended, Record)
        self.opened[index] = extended
        if not repeated:
            self.committed[record.id] = (*self.committed.get(record.id, ()), turn.model.id)

    @precondition(lambda self: self.opened)
    @rule(index=st.integers(0, 40))
    def finish_record(self, index: int) -> None:
        record = self.opened[index % len(self.opened)]
        stored = self.run(self.store.get_record(record.id))
        assert isinstance(stored, Record)
        final = replace(record, status=RecordStatus.FINISHED, stop_reason=StopReason.ANSWER, score=1.0, scorer="em")
        if stored.fence != record.fence:
            with pytest.raises(StaleClaimError):
                self.run(self.store.finish_record(final))
            return
        self.run(self.store.finish_record(final))

    @precondition(lambda self: self.claims)
    @rule(index=st.integers(0, 20))
    def settle(self, index: int) -> None:
        claim = self.pick(index)
        rows = [make_sequence(record) for record in self.opened if record.task_id == claim.task.id][:1]
        settlement = make_settlement(claim.task)
        if claim.task.id in self.settled and self.is_last(claim):
            self.run(self.store.settle_task(claim, settlement, rows))
        elif not self.is_live(claim):
            with pytest.raises(StaleClaimError):
                self.run(self.store.settle_task(claim, settlement, rows))
        else:
            self.run(self.store.settle_task(claim, settlement, rows))
            self.settled.add(claim.task.id)
            del self.live[claim.task.id]

    def is_last(self, claim: TaskClaim) -> bool:
        return claim.fence == max(other.fence for other in self.claims if other.task.id == claim.task.id)

    @invariant()
    def acknowledged_turns_are_there(self) -> None:
        for record_id, turn_ids in self.committed.items():
            stored = self.run(self.store.get_record(record_id))
            assert isinstance(stored, Record)
            assert stored.turn_ids == turn_ids

    def teardown(self) -> None:
        for record_id in self.committed:
            stored = self.run(self.store.get_record(record_id))
            assert isinstance(stored, Record)
            self.run(self.store.load_turns(stored))
        self.run(self.store.close())
        self.runner.close()


def machine(opener: Opener) -> type[Workers]:
    return type("OpenedWorkers", (Workers,), {"open_store": staticmethod(opener)})


def options(*, examples: int, steps: int) -> settings:
    return settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck)
    )


def test_no_interleaving_of_workers_breaks_the_memory_store() -> None:
    async def opener() -> Store:
        return MemoryStore()

    run_state_machine_as_test(machine(opener), settings=options(examples=100, steps=30))


def test_no_interleaving_of_workers_breaks_the_embedded_store(mongo_uri: str) -> None:
    async def opener() -> Store:
        store = open_store(mongo_uri, database=f"test_{uuid.uuid4().hex[:12]}")
        await store.prepare()
        return store

    run_state_machine_as_test(machine(opener), settings=options(examples=12, steps=25))
