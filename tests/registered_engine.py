"""A registrar beside an engine under test, and waiting for what it tells the fleet."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import tiny_lm
from agentrl.algo.canary import canary_prompts
from agentrl.inference import EngineClient
from agentrl.inference.canary import CanarySettings
from agentrl.inference.registrar import run_registrar
from agentrl.store import MemoryStore
from agentrl.types import CanaryReference, InferenceService, ServiceStatus
from engine_targets import EngineTarget

WAIT_S = 20.0
QUICK_CANARIES = CanarySettings(tolerance=1e-4, interval_s=0.1, timeout_s=0.5)


def reference_of(engine: EngineTarget, index: int) -> CanaryReference:
    """What the trainer would publish for `model_dirs[index]`, computed by Hugging Face's model."""
    prompts = canary_prompts(tiny_lm.VOCAB_SIZE)
    model = engine.reference(index)
    logprobs = [tiny_lm.expected_logprobs(model, prompt[:1], prompt[1:]).tolist() for prompt in prompts]
    return CanaryReference(prompts=prompts, logprobs=tuple(value for values in logprobs for value in values))


@asynccontextmanager
async def registered(
    base_url: str,
    fleet: MemoryStore,
    *,
    service_id: str = "s",
    heartbeat_s: float = 0.1,
    canary: CanarySettings = QUICK_CANARIES,
) -> AsyncIterator[None]:
    stop = asyncio.Event()
    async with EngineClient(base_url, timeout_s=2.0) as client:
        registrar = asyncio.create_task(
            run_registrar(
                client,
                fleet,
                service_id=service_id,
                engine="embedded",
                poll_s=0.02,
                heartbeat_s=heartbeat_s,
                canary=canary,
                stop=stop,
            )
        )
        try:
            yield
        finally:
            stop.set()
            async with asyncio.timeout(WAIT_S):
                await registrar


async def service_when(fleet: MemoryStore, is_right: Callable[[InferenceService], bool]) -> InferenceService:
    async with asyncio.timeout(WAIT_S):
        while True:
            for service in await fleet.list_services():
                if is_right(service):
                    return service
            await asyncio.sleep(0.01)


def up_at(version: int) -> Callable[[InferenceService], bool]:
    return lambda service: service.status is ServiceStatus.UP and service.policy_version == version


def is_down(service: InferenceService) -> bool:
    return service.status is ServiceStatus.DOWN
