"""Loops of registrars end when they are to."""

import asyncio

import pytest

from agentrl.inference import service_loops
from agentrl.inference.service_loops import run_until


async def deaf(cancellations: list[int], *, times: int) -> None:
    """Loses so many cancellations, as a library does that takes them for its own time-out."""
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancellations.append(1)
            if len(cancellations) > times:
                raise


async def test_a_loop_that_loses_a_cancellation_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_loops, "CANCEL_AGAIN_S", 0.01)
    stop, cancellations = asyncio.Event(), list[int]()
    running = asyncio.create_task(run_until(stop, loops={"deaf": deaf(cancellations, times=2)}))
    await asyncio.sleep(0)
    stop.set()
    await asyncio.wait_for(running, timeout=5)
    assert len(cancellations) == 3


async def test_the_first_loop_that_fails_ends_the_others() -> None:
    async def failing() -> None:
        raise RuntimeError("gone")

    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(
            run_until(asyncio.Event(), loops={"bad": failing(), "deaf": deaf([], times=0)}), timeout=5
        )
    assert [str(error) for error in caught.value.exceptions] == ["gone"]
