"""Tells the trainer of a run that nothing more will be sampled, because the run's `budget_usd` is spent.

The reason stands in the Run document, as for a run that a fleet has stopped (`fleet.py`); the trainer ends with it once
no group is running and no full step is left. A sampler that has money takes it back when it starts.
"""

from __future__ import annotations

from datetime import timedelta

from agentrl.errors import BudgetSpentError
from agentrl.pacing import longest_silence_s
from agentrl.protocols import Store

SAMPLER = "sampler"
STOPPED = "stopped"  # phase of a worker that claims nothing more


async def tell_budget_spent(store: Store, refusal: BudgetSpentError, *, heartbeat_s: float) -> None:
    """Keep the reason, unless another sampler is at work: it may have calls that still fit, and tells when it ends."""
    since = await store.server_time() - timedelta(seconds=longest_silence_s(heartbeat_s))
    at_work = [
        worker
        for worker in await store.list_workers()
        if worker.kind == SAMPLER and worker.phase != STOPPED and worker.heartbeat_at and worker.heartbeat_at > since
    ]
    if not at_work:
        await tell_sampling_stopped(store, str(refusal))


async def tell_sampling_stopped(store: Store, reason: str | None) -> None:
    """Keep why nothing more is sampled; None: something is."""
    if await store.sampling_stop() != reason:
        await store.put_run({"sampling_stopped": reason})
