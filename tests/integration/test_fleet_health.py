"""A service of a fleet that computes wrongly, hangs or stays paused is taken from its run, and returns right."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import tiny_lm
from agentrl.config.sections import InferenceConfig
from agentrl.fleets import FleetRunStatus
from agentrl.inference.runner import EngineSettings
from agentrl.inference.serve import build_engine, listen, running_server
from agentrl.types import InferenceService, PolicyVersion, ServiceStatus
from engine_targets import EngineTarget, embedded_target
from registered_engine import QUICK_CANARIES, is_down, reference_of, up_at
from registered_fleet import WAIT_S, Fleet, registered


@pytest.fixture(scope="module")
def running_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineTarget]:
    with embedded_target(tmp_path_factory.mktemp("engine"), kind="qwen3") as target:
        yield target


@pytest.fixture
async def engine(running_engine: EngineTarget) -> EngineTarget:
    await running_engine.reset()
    return running_engine


@pytest.fixture
async def fleet(engine: EngineTarget, tmp_path: Path) -> AsyncIterator[Fleet]:
    """Run a, behind its share, has a folder of its own, so that a test can spoil it; both have references."""
    folder = tmp_path / "a"
    shutil.copytree(engine.model_dirs[0], folder)
    references = {"a": reference_of(engine, 0), "b": reference_of(engine, 1)}
    made = Fleet({"a": folder, "b": engine.model_dirs[1]}, references=references)
    await made.prepare()
    await made.charge("b", 1.0)
    yield made
    await made.close()


def is_quarantined(service: InferenceService) -> bool:
    return service.status is ServiceStatus.QUARANTINED


def replace_folder(folder: Path, source: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(source, folder)


async def test_weights_that_go_bad_quarantine_the_service_for_their_run_until_a_reload_makes_them_right(
    fleet: Fleet, engine: EngineTarget
) -> None:
    folder = fleet.paths["a"]
    async with registered(fleet, engine.base_url, canary=QUICK_CANARIES):  # run b may have a turn meanwhile
        await fleet.service_when("a", up_at(3))
        replace_folder(folder, engine.model_dirs[1])
        await engine.update_folder(folder, "a=3")  # the right label, foreign weights
        await fleet.service_when("a", is_quarantined)
        (span,) = await fleet.stores["a"].list_engine_quarantines()
        assert (span.service_id, span.policy_version, span.until_s) == ("s", 3, None)
        assert span.since_s > 0
        await fleet.charge("b", 1000.0)
        await fleet.stores["a"].publish_policy(
            PolicyVersion(version=4, path=str(engine.model_dirs[0]), canary=fleet.references["a"])
        )
        await fleet.service_when("a", up_at(4))
        (lifted,) = await fleet.stores["a"].list_engine_quarantines()
    assert lifted.until_s is not None
    assert await fleet.stores["b"].list_engine_quarantines() == []


async def test_a_run_whose_weights_are_wrong_never_has_the_service_and_the_other_run_is_served(
    fleet: Fleet, engine: EngineTarget
) -> None:
    replace_folder(fleet.paths["a"], engine.model_dirs[1])
    seen: set[ServiceStatus] = set()
    async with registered(fleet, engine.base_url, canary=QUICK_CANARIES):
        async with asyncio.timeout(WAIT_S):
            while not any(up_at(3)(service) for service in await fleet.stores["b"].list_services()):
                seen |= {service.status for service in await fleet.stores["a"].list_services()}
                await asyncio.sleep(0.005)
        await fleet.service_when("a", is_quarantined)
        (span,) = await fleet.stores["a"].list_engine_quarantines()
        assert (span.since_s, span.until_s) == (0.0, None)
    assert ServiceStatus.UP not in seen
    assert await fleet.stores["b"].list_engine_quarantines() == []


async def test_a_quarantine_for_a_run_outlives_the_registrar(fleet: Fleet, engine: EngineTarget) -> None:
    """The second registrar finds the right labels in the engine, and does not take them for right weights."""
    replace_folder(fleet.paths["a"], engine.model_dirs[1])
    async with registered(fleet, engine.base_url, canary=QUICK_CANARIES):
        await fleet.service_when("a", is_quarantined)
    await fleet.charge("b", 1000.0)
    replace_folder(fleet.paths["a"], engine.model_dirs[0])
    async with registered(fleet, engine.base_url, canary=QUICK_CANARIES):
        await fleet.service_when("a", up_at(3))
    (span,) = await fleet.stores["a"].list_engine_quarantines()
    assert span.until_s is not None


async def test_an_engine_left_paused_with_nobody_loading_goes_on(fleet: Fleet, engine: EngineTarget) -> None:
    async with registered(fleet, engine.base_url, dwell_s=60.0, canary=QUICK_CANARIES):
        await fleet.service_when("a", up_at(3))
        await engine.call("POST", "/pause_generation", {"mode": "retract"})
        assert (await engine.generate([3, 4], max_new_tokens=2, timeout_s=WAIT_S)).status == 200
        await fleet.service_when("a", up_at(3))


async def test_an_engine_whose_thread_hangs_is_taken_from_its_run_and_comes_back(tmp_path: Path) -> None:
    directory = tiny_lm.write_lm(tmp_path / "model")
    settings = EngineSettings(model_path=directory, context_length=512, device="cpu", weight_version="default")
    engine, tokenizer = build_engine(settings)
    listener = listen(InferenceConfig())
    gate = threading.Event()
    fleet = Fleet({"a": directory})
    await fleet.prepare()
    async with running_server(engine, tokenizer, listener):
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with registered(fleet, url, canary=QUICK_CANARIES):
            await fleet.service_when("a", up_at(3))
            engine._call(lambda: gate.wait(WAIT_S))
            await fleet.service_when("a", is_down)
            gate.set()
            await fleet.service_when("a", up_at(3))
    await fleet.close()


async def test_no_run_is_served_from_weights_that_are_wrong_for_one_of_them(engine: EngineTarget) -> None:
    """Both publish the same folder; the trainer of run b meant other weights."""
    references = {"a": reference_of(engine, 0), "b": reference_of(engine, 1)}
    fleet = Fleet(dict.fromkeys("ab", engine.model_dirs[0]), references=references)
    await fleet.prepare()
    async with registered(fleet, engine.base_url, canary=QUICK_CANARIES):
        await fleet.service_when("b", is_quarantined)
        assert is_down((await fleet.stores["a"].list_services())[0])
    assert await fleet.stores["a"].list_engine_quarantines() == []
    await fleet.close()


async def test_a_run_that_joins_loaded_weights_is_up_with_canaries_of_its_own(engine: EngineTarget) -> None:
    fleet = Fleet(dict.fromkeys("ab", engine.model_dirs[0]), references=dict.fromkeys("ab", reference_of(engine, 0)))
    await fleet.prepare()
    (_, joining) = await fleet.runs.list_fleet_runs()
    await fleet.runs.put_fleet_run(replace(joining, status=FleetRunStatus.LEFT))
    async with registered(fleet, engine.base_url, canary=QUICK_CANARIES):
        await fleet.service_when("a", up_at(3))
        assert (await engine.model_info())["weight_version"] == "a=3"
        await fleet.runs.put_fleet_run(joining)
        await fleet.service_when("b", lambda service: up_at(3)(service) and service.last_good_s > 0)
        assert (await engine.model_info())["weight_version"] == "a=3,b=3"
    await fleet.close()
