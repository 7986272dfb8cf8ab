"""One engine, several runs: every token is sampled from the weights of its own run, whatever is switched when."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

import tiny_lm
from agentrl.errors import EngineError
from agentrl.fleets import FleetRun, FleetRunStatus
from agentrl.types import GenerateReply, GenerateRequest, InferenceService, PolicyVersion, SamplingParams, ServiceStatus
from engine_targets import EngineTarget, embedded_target
from registered_fleet import DWELL_S, WAIT_S, Fleet, registered

LONG = 120


@pytest.fixture(scope="module")
def running_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineTarget]:
    with embedded_target(tmp_path_factory.mktemp("engine"), kind="qwen3") as target:
        yield target


@pytest.fixture(scope="module")
def second_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineTarget]:
    with embedded_target(tmp_path_factory.mktemp("second"), kind="qwen3") as target:
        yield target


@pytest.fixture
async def engine(running_engine: EngineTarget) -> EngineTarget:
    await running_engine.reset()
    return running_engine


@pytest.fixture
async def fleet(engine: EngineTarget) -> AsyncIterator[Fleet]:
    made = Fleet({"a": engine.model_dirs[0], "b": engine.model_dirs[1]})
    await made.prepare()
    yield made
    await made.close()


def is_up(service: InferenceService) -> bool:
    return service.status is ServiceStatus.UP


def is_draining(service: InferenceService) -> bool:
    return service.status is ServiceStatus.DRAINING


def is_down(service: InferenceService) -> bool:
    return service.status is ServiceStatus.DOWN


def ask(
    rid: str, *, prompt: Sequence[int] = (3, 4, 5), max_new_tokens: int = LONG, session: str = ""
) -> GenerateRequest:
    params = SamplingParams(max_new_tokens=max_new_tokens)
    return GenerateRequest(rid=rid, input_ids=list(prompt), params=params, deadline_s=WAIT_S, session=session)


def assert_sampled_from(engine: EngineTarget, index: int, reply: GenerateReply, *, version: int) -> None:
    """Every token's version is the run's, and its log-prob that of the run's model."""
    assert [span.version for span in reply.version_spans] == [version]
    expected = tiny_lm.expected_logprobs(engine.reference(index), (3, 4, 5), reply.output_ids)
    assert expected.tolist() == pytest.approx(reply.logprobs, abs=1e-4)


async def test_two_runs_take_turns_on_one_engine_and_no_token_is_of_the_other_ones_weights(
    fleet: Fleet, engine: EngineTarget
) -> None:
    """Requests of both runs all the time; the registrar switches between them several times."""
    replies: dict[str, list[GenerateReply]] = {"a": [], "b": []}
    switches = 0

    async def keep_asking(name: str, lane: int) -> None:
        number = 0
        while switches < 4:
            number += 1
            replies[name].append(await fleet.routers[name].generate(ask(f"{name}-{lane}-{number}")))

    async def keep_switching() -> None:
        nonlocal switches
        for turn in range(1, 1000):
            name = "ab"[turn % 2]
            await fleet.charge(name, 10.0 * turn)  # the other one is behind now
            await fleet.service_when("ab"[1 - turn % 2], is_up)
            switches += 1

    async with registered(fleet, engine.base_url):
        switching = asyncio.create_task(keep_switching())
        await asyncio.gather(*(keep_asking(name, lane) for name in "ab" for lane in range(3)))
        switching.cancel()
    for index, name in enumerate("ab"):
        assert len(replies[name]) >= 6
        for reply in replies[name]:
            assert_sampled_from(engine, index, reply, version=3)


async def test_a_generation_that_runs_too_long_is_aborted_and_made_anew_under_its_own_weights(
    fleet: Fleet, engine: EngineTarget
) -> None:
    await fleet.charge("b", 1.0)
    async with registered(fleet, engine.base_url):
        await fleet.service_when("a", is_up)
        (claim,) = await fleet.stores["a"].claim_tasks(split="train", owner="w", lease_s=60, limit=1)
        prompt = [3, 4, 5]
        asked = ask("long", prompt=prompt, max_new_tokens=480, session=claim.task.id)
        await engine.call("POST", "/pause_generation", {"mode": "in_place"})  # so that it outlasts the dwell time
        running = asyncio.create_task(fleet.routers["a"].generate(asked))
        await fleet.charge("a", 100.0)
        await fleet.service_when("a", is_draining)
        await fleet.service_when("b", is_up)
        assert not running.done()
        await fleet.charge("b", 1000.0)
        await fleet.service_when("a", is_up)
        reply = await running
    assert [span.version for span in reply.version_spans] == [3]
    expected = tiny_lm.expected_logprobs(engine.reference(0), prompt, reply.output_ids)
    assert expected.tolist() == pytest.approx(reply.logprobs, abs=1e-4)


async def test_a_token_of_foreign_weights_is_refused_by_the_client(fleet: Fleet, engine: EngineTarget) -> None:
    """The service says it is up for run a, but its engine holds the weights of run b."""
    await engine.update(1, "b=3")
    service = InferenceService(id="s", base_url=engine.base_url, status=ServiceStatus.UP, policy_version=3)
    await fleet.stores["a"].put_service(service)
    request = GenerateRequest(rid="r", input_ids=[3], params=SamplingParams(max_new_tokens=4), deadline_s=1.5)
    with pytest.raises(EngineError, match="serves other runs"):
        await fleet.routers["a"].generate(request)


async def test_a_service_is_up_only_for_the_run_it_serves(fleet: Fleet, engine: EngineTarget) -> None:
    await fleet.charge("b", 1.0)
    async with registered(fleet, engine.base_url, dwell_s=60.0):
        await fleet.service_when("a", is_up)
        await fleet.service_when("b", is_down)
        assert (await engine.model_info())["weight_version"] == "a=3"
    assert is_down((await fleet.stores["a"].list_services())[0])


async def test_a_new_version_of_the_served_run_keeps_its_generations(fleet: Fleet, engine: EngineTarget) -> None:
    await fleet.charge("b", 1.0)
    async with registered(fleet, engine.base_url, dwell_s=60.0):
        await fleet.service_when("a", is_up)
        params = SamplingParams(max_new_tokens=450, temperature=0.0)
        prompt = _prompt_without_early_end(engine)
        request = GenerateRequest(rid="r", input_ids=prompt, params=params, deadline_s=WAIT_S)
        running = asyncio.create_task(fleet.routers["a"].generate(request))
        await engine.wait_until_running(1)
        await fleet.stores["a"].publish_policy(PolicyVersion(version=4, path=str(engine.model_dirs[1])))
        await fleet.service_when("a", lambda service: is_up(service) and service.policy_version == 4)
        reply = await running
    assert [span.version for span in reply.version_spans] == [3, 4]


def _prompt_without_early_end(engine: EngineTarget) -> list[int]:
    for first in range(2, tiny_lm.VOCAB_SIZE):
        if tiny_lm.EOS_ID not in tiny_lm.greedy_ids(engine.reference(0), [first, 4, 5], max_new_tokens=450):
            return [first, 4, 5]
    raise AssertionError("every greedy continuation ends early")


async def test_runs_whose_start_models_are_equal_files_are_served_together(
    engine: EngineTarget, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(engine.model_dirs[0], copy)
    fleet = Fleet({"a": engine.model_dirs[0], "b": copy}, version=0)
    await fleet.prepare()
    async with registered(fleet, engine.base_url):
        await fleet.service_when("a", is_up)
        await fleet.service_when("b", is_up)
        assert (await engine.model_info())["weight_version"] == "a=0,b=0"
        for name in "ab":
            assert_sampled_from(engine, 0, await fleet.routers[name].generate(ask(name)), version=0)
        await fleet.stores["b"].publish_policy(PolicyVersion(version=1, path=str(engine.model_dirs[1])))
        await fleet.service_when("b", lambda service: is_up(service) and service.policy_version == 1)
        assert_sampled_from(engine, 1, await fleet.routers["b"].generate(ask("b1")), version=1)
    await fleet.close()


async def test_with_two_services_each_run_gets_its_own(
    fleet: Fleet, engine: EngineTarget, second_engine: EngineTarget
) -> None:
    await second_engine.reset()
    async with (
        registered(fleet, engine.base_url, service_id="s1"),
        registered(fleet, second_engine.base_url, service_id="s2"),
    ):
        for _ in range(3):
            async with asyncio.timeout(WAIT_S):
                while {s.id for name in "ab" for s in await fleet.stores[name].list_services() if is_up(s)} != {
                    "s1",
                    "s2",
                }:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(2 * DWELL_S)
        up = {name: {s.id for s in await fleet.stores[name].list_services() if is_up(s)} for name in "ab"}
    assert up["a"] | up["b"] == {"s1", "s2"}
    assert not up["a"] & up["b"]


async def test_a_run_that_leaves_loses_its_service(fleet: Fleet, engine: EngineTarget) -> None:
    await fleet.charge("b", 1.0)
    async with registered(fleet, engine.base_url, dwell_s=60.0):
        await fleet.service_when("a", is_up)
        await fleet.runs.put_fleet_run(FleetRun(name="a", status=FleetRunStatus.LEFT))
        await fleet.service_when("a", is_down)
        await fleet.service_when("b", is_up)


async def test_weights_that_cannot_be_loaded_do_not_keep_another_run_from_its_service(
    fleet: Fleet, engine: EngineTarget, tmp_path: Path
) -> None:
    await fleet.charge("b", 1.0)
    await fleet.stores["a"].publish_policy(PolicyVersion(version=4, path=str(tmp_path / "gone")))
    async with registered(fleet, engine.base_url):
        await fleet.service_when("b", is_up)
        await fleet.service_when("a", is_down)
        await fleet.stores["a"].publish_policy(PolicyVersion(version=5, path=str(engine.model_dirs[0])))
        await fleet.service_when("a", lambda service: is_up(service) and service.policy_version == 5)
