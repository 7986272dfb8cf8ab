"""A sampler process for tests: `python sampler_process.py SPEC.json`. Its wall clock may be wrong by hours.

SPEC: {"uri", "database", "model_dir", "release_file", "skew_s", "lease_s", "renews"}. Every Record calls a tool; the
engine answers the turn after that only once `release_file` exists. A process that does not renew its claims believes
that they hold.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'


def set_wall_clock(skew_s: float) -> None:
    """Every wall clock of this process is `skew_s` ahead; monotonic clocks are right. Before agentrl is imported."""
    real_datetime, real_time = datetime.datetime, time.time

    class SkewedDatetime(real_datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return real_datetime.now(tz) + datetime.timedelta(seconds=skew_s)

        @classmethod
        def utcnow(cls) -> datetime.datetime:
            return real_datetime.now(datetime.UTC).replace(tzinfo=None) + datetime.timedelta(seconds=skew_s)

    datetime.datetime = SkewedDatetime  # type: ignore[misc]
    time.time = lambda: real_time() + skew_s


async def sample(spec: dict[str, Any]) -> None:
    """Sample until killed."""
    from agentrl.chat import ChatFormat
    from agentrl.config import AlgoConfig, InferenceConfig, RolloutConfig, RunConfig, StoreConfig
    from agentrl.rollout.worker import run_sampler
    from agentrl.store import open_store
    from agentrl.tools import FunctionToolbox
    from agentrl.types import GenerateReply, GenerateRequest, Recovery, TaskClaim
    from scripted_engine import ScriptedEngine

    def add(a: int, b: int) -> str:
        """Sum of two integers."""
        return str(a + b)

    class HeldEngine(ScriptedEngine):
        async def generate(self, request: GenerateRequest) -> GenerateReply:
            has_result = "<tool_response>" in self.tokenizer.decode(list(request.input_ids), skip_special_tokens=False)
            while has_result and not is_released():
                await asyncio.sleep(0.02)
            return await super().generate(request)

    def is_released() -> bool:
        return Path(spec["release_file"]).exists()

    async def believe(claims: Sequence[TaskClaim], *, lease_s: float) -> list[str]:
        return []

    def script(context: str, depth: int) -> str:
        return "<answer>5</answer>" if "<tool_response>" in context else CALL

    model_dir = Path(spec["model_dir"])
    store = open_store(spec["uri"], database=spec["database"])
    await store.prepare()
    if not spec["renews"]:
        store.renew_claims = believe  # type: ignore[method-assign]
    config = RunConfig(
        store=StoreConfig(heartbeat_s=0.2, lease_s=spec["lease_s"]),
        rollout=RolloutConfig(
            num_generations=1, max_new_tokens=200, max_prompt_tokens=2000, num_train_epochs=1,
            max_concurrent_samples_per_process=1,
        ),
        inference=InferenceConfig(context_length=4000),
        algo=AlgoConfig(tasks_per_step=100, advantage="none", drop_zero_advantage=False),
    )  # fmt: skip
    await run_sampler(
        config,
        store=store,
        toolbox=FunctionToolbox([add], recovery=Recovery.STATELESS),
        client=HeldEngine(model_dir, script),
        chat=ChatFormat.load(model_dir),
        stop=asyncio.Event(),
    )


if __name__ == "__main__":
    read = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    set_wall_clock(read["skew_s"])
    asyncio.run(sample(read))
