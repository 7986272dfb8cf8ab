from dataclasses import replace
from datetime import timedelta

from agentrl.cli.progress import ProgressReader, recent_services
from agentrl.config import RunConfig
from agentrl.store import MemoryStore
from agentrl.types import InferenceService, ServiceStatus, StepStatus, TaskStatus, TrainStep, Worker
from factories import make_task


def make_step(step: int) -> TrainStep:
    return TrainStep(
        step=step,
        status=StepStatus.PLANNED,
        policy_version=step - 1,
        task_ids=(),
        sequence_ids=(),
        metrics={"reward": 0.5},
    )


async def commit(store: MemoryStore, step: int) -> None:
    await store.commit_step(replace(await store.plan_step(make_step(step)), status=StepStatus.COMMITTED))


async def test_a_look_holds_committed_steps_fresh_processes_and_task_counts():
    store = MemoryStore()
    await store.prepare()
    await store.insert_tasks([make_task("a"), make_task("b")])
    await store.put_worker(Worker(id="w", kind="sampler", host="h", pid=1, num_running=5))
    await store.put_service(InferenceService(id="e", base_url="http://e", status=ServiceStatus.UP, policy_version=2))
    await commit(store, 1)
    await store.plan_step(make_step(2))
    reader = ProgressReader(store=store, config=RunConfig(), forget_after=timedelta(minutes=1))
    look = await reader.read(num_restarts=3)
    assert [step.step for step in look.steps] == [1]
    assert look.tasks[TaskStatus.PENDING] == 2
    assert (look.num_in_flight, look.num_restarts, look.services[0].policy_version) == (5, 3, 2)
    await commit(store, 2)
    await commit(store, 3)
    assert [step.step for step in (await reader.read()).steps] == [1, 2, 3]


async def test_processes_without_a_fresh_heartbeat_are_forgotten():
    store = MemoryStore()
    await store.prepare()
    await store.put_worker(Worker(id="w", kind="sampler", host="h", pid=1))
    await store.put_service(InferenceService(id="e", base_url="http://e", status=ServiceStatus.UP, policy_version=2))
    reader = ProgressReader(store=store, config=RunConfig(), forget_after=timedelta(0))
    look = await reader.read()
    assert look.workers == ()
    assert look.services == ()
    assert len(await recent_services(store, younger_than=timedelta(minutes=1))) == 1
