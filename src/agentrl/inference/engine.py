"""The embedded engine: continuous batching of one Hugging Face model in one thread, with SGLang's control semantics.

    submit ──> waiting ──place──> running ──finish──> on_event
                  ^                  │
                  └──── retract ─────┘        pause(retract) -> update weights -> resume: re-prefill, then continue

Every iteration: take commands, admit what fits, prefill it, decode one token for everything that runs. All state
belongs to the engine thread; other threads call the methods below, which queue a command and return a Future.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from agentrl.inference.runner import EngineSettings, ModelRunner, reuse_limit
from agentrl.inference.sequence import DecodeText, Phase, Sequence
from agentrl.inference.weights import WeightsError

logger = logging.getLogger(__name__)
T = TypeVar("T")

_SHARE_MIN_TOKENS = 16  # a prompt waits one round for a prefix that is at least so much longer than the best one there
_ADMIT_EVERY = 3  # decode steps between prefills while few requests wait: small prefills cost as much as a step
PAUSE_MODES = ("abort", "retract", "in_place")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """Outcome of a weight update. `success` false with changed weights is possible: the message says so."""

    success: bool
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A consistent look at the engine between two steps."""

    num_running: int
    num_waiting: int
    num_used_tokens: int
    is_paused: bool
    num_generated_tokens: int
    num_prefilled_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Update:
    path: str
    version: str
    flush_cache: bool
    result: Future[UpdateResult]


class EngineStoppedError(RuntimeError):
    """The engine thread has ended: stopped, or failed with the cause."""


class Engine:
    """Generates for many callers at once. Start it once; `on_failure` is called from its thread if it breaks."""

    def __init__(self, settings: EngineSettings, *, decode: DecodeText, extra_eos_ids: Iterable[int] = ()) -> None:
        self.settings = settings
        self.runner = ModelRunner(settings, extra_eos_ids=extra_eos_ids)
        self.vocab_size = self.runner.vocab_size
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], object] | None = None
        # What /model_info reports. After an update that could not flush they stay old, as in SGLang.
        self.reported_version = settings.weight_version
        self.reported_path = str(settings.model_path)
        self._decode = decode
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._held: list[Sequence] = []  # arrived while an update waits for the running ones
        self._update: _Update | None = None
        self.is_loading = False  # weights: as long as the disk takes
        self._paused: str | None = None
        self._steps_since_admission = 0
        self._num_generated = 0
        self._num_prefilled = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self, *, timeout_s: float = 10.0) -> None:
        """End the thread after its current step; live generations end as aborted."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def fail(self, error: BaseException) -> None:
        """Give the engine up: its thread is stuck, and not waited for."""
        self.failure, self._stopping = error, True
        if self.on_failure is not None:
            self.on_failure()

    @property
    def has_stopped(self) -> bool:
        """Whether it is over: stopped or failed."""
        return self._stopping

    def submit(self, sequence: Sequence) -> None:
        """Queue a generation; its `on_event` is called from the engine thread. Raises EngineStoppedError."""
        self._post(lambda: self._accept(sequence))

    def abort(self, rid: str | None, *, message: str | None = None, exact: bool = False) -> Future[None]:
        """End the generation `rid` and, unless `exact`, every one whose id starts with it. None: all of them.

        SGLang aborts by prefix, but only when `rid` itself is live; so does this.
        """
        return self._call(lambda: self._abort(rid, message=message, exact=exact))

    def pause(self, mode: str) -> Future[None]:
        """Stop decoding; what running generations become depends on the mode, one of PAUSE_MODES."""
        return self._call(lambda: self._pause(mode))

    def resume(self) -> Future[None]:
        """Continue after a pause."""
        return self._call(self._resume)

    def update_weights(
        self, path: str, *, version: str | None, flush_cache: bool, abort_running: bool
    ) -> Future[UpdateResult]:
        """Replace the weights: at once when paused, else when every generation accepted so far has ended."""
        result: Future[UpdateResult] = Future()

        def begin() -> None:
            if not result.set_running_or_notify_cancel():
                return
            if self._update is not None:
                result.set_result(UpdateResult(success=False, message="Another weight update is waiting."))
                return
            if abort_running:
                self._abort(None)
            label = version if version is not None else self.runner.version
            self._update = _Update(path=path, version=label, flush_cache=flush_cache, result=result)

        self._post(begin)
        return result

    def relabel(self, version: str, *, abort_running: bool) -> Future[None]:
        """Change only the name of the served weights."""

        def relabel() -> None:
            if abort_running:
                self._abort(None)
            self.runner.version = self.reported_version = version

        return self._call(relabel)

    def flush_cache(self) -> Future[bool]:
        """Forget reusable prefixes. False while anything runs."""
        return self._call(self._flush)

    def checksums(self) -> Future[dict[str, str]]:
        """Fingerprint of every parameter."""
        return self._call(self.runner.checksums)

    def stats(self) -> Future[EngineStats]:
        """Load and counters."""
        return self._call(self._stats)

    def _post(self, command: Callable[[], None]) -> None:
        with self._wake:
            if self.failure is not None or self._stopping:
                raise EngineStoppedError("the engine has stopped") from self.failure
            self._commands.append(command)
            self._wake.notify()

    def _call(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():  # else the caller has left: a result would raise
                future.set_result(function())

        self._post(run)
        return future

    def _run(self) -> None:
        try:
            while self._take_commands():
                self._try_update()
                if self._paused is None:
                    self._step()
        except Exception as error:  # thread boundary: fail every caller instead of letting it hang
            logger.exception("the engine failed")
            self.failure = error
        finally:
            self._end_all()

    def _take_commands(self) -> bool:
        """Run queued commands; sleep while there is nothing to do. False: stop."""
        with self._wake:
            while not (self._commands or self._stopping or self._has_work()):
                self._wake.wait()
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()
        return not self._stopping

    def _has_work(self) -> bool:
        if self._update is not None and self._may_update():
            return True
        return self._paused is None and bool(self._waiting or self._running)

    def _step(self) -> None:
        pending = [sequence for sequence in self._running if sequence.needs_prefill] + self._admit()
        if pending:
            before = sum(sequence.num_in_cache for sequence in pending)
            self.runner.prefill(pending)
            self._num_prefilled += sum(sequence.num_in_cache for sequence in pending) - before
            self._settle(sequence for sequence in pending if not sequence.needs_prefill)
        ready = [sequence for sequence in self._running if not sequence.needs_prefill]
        if ready:
            self.runner.compact(self._running)
            ready.sort(key=lambda sequence: sequence.lane)
            self.runner.decode(ready)
            self._settle(ready)
        self._steps_since_admission += 1

    def _admit(self) -> list[Sequence]:
        """Move waiting sequences into free lanes; small trickles are collected for a few steps first."""
        few = len(self._waiting) * 8 < len(self._running)
        if not self._waiting or (few and self._steps_since_admission < _ADMIT_EVERY):
            return []
        lanes = self.runner.lanes
        admitted: list[Sequence] = []
        deferred: list[Sequence] = []
        while self._waiting and lanes.num_free:
            sequence = self._waiting.popleft()
            token_ids, limit, key = sequence.token_ids, reuse_limit(sequence), self.runner.cache_key(sequence)
            coming = lanes.num_coming(token_ids, key=key, limit=limit) if admitted else 0
            if coming >= _SHARE_MIN_TOKENS:
                coming -= lanes.num_reusable(token_ids, key=key, limit=limit)
            if coming >= _SHARE_MIN_TOKENS:
                deferred.append(sequence)
                continue
            self.runner.place(sequence)
            sequence.phase = Phase.RUNNING
            admitted.append(sequence)
        self._waiting.extendleft(reversed(deferred))
        self._running.extend(admitted)
        self._steps_since_admission = 0
        return admitted

    def _settle(self, sequences: Iterable[Sequence]) -> None:
        """After a token: finish what ended, tell who streams."""
        ended = False
        for sequence in sequences:
            self._num_generated += sequence.sampling.max_new_tokens > 0
            if sequence.finish_reason is not None:
                self.runner.discard(sequence)
            elif sequence.sampling.max_new_tokens == 0:
                sequence.finish_reason = {"type": "length", "length": 0}
                self.runner.release(sequence)
            elif sequence.check_finish(eos_ids=self.runner.eos_ids, decode=self._decode):
                self.runner.release(sequence)
            else:
                if sequence.stream:
                    sequence.on_event(sequence)
                continue
            ended = True
            sequence.phase = Phase.FINISHED
            sequence.on_event(sequence)
        if ended:
            self._running = [sequence for sequence in self._running if sequence.phase is Phase.RUNNING]

    def _accept(self, sequence: Sequence) -> None:
        if self._update is not None:
            self._held.append(sequence)
        else:
            self._waiting.append(sequence)

    def _live(self) -> list[Sequence]:
        return [*self._running, *self._waiting, *self._held]

    def _abort(self, rid: str | None, *, message: str | None = None, exact: bool = False) -> None:
        live = self._live()
        if rid is not None and not any(sequence.rid == rid for sequence in live):
            return
        for sequence in live:
            if rid is None or sequence.rid == rid or (not exact and sequence.rid.startswith(rid)):
                sequence.abort_message = message or ""
        if self._paused != "in_place":
            self._end_aborted()

    def _end_aborted(self) -> None:
        """Finish every sequence that was told to abort, with what it has."""
        aborted = [sequence for sequence in self._live() if sequence.abort_message is not None]
        for sequence in aborted:
            sequence.was_queued_only = sequence.phase is Phase.WAITING
            default = "Abort in waiting queue" if sequence.was_queued_only else "Aborted"
            reason: dict[str, Any] = {"type": "abort", "message": sequence.abort_message or default}
            if not sequence.was_queued_only:
                reason |= {"status_code": None, "err_type": None}
                self.runner.release(sequence)
            sequence.finish_reason = reason
            sequence.phase = Phase.FINISHED
            sequence.on_event(sequence)
        if aborted:
            self._running = [sequence for sequence in self._running if sequence.phase is Phase.RUNNING]
            self._waiting = deque(sequence for sequence in self._waiting if sequence.phase is Phase.WAITING)
            self._held = [sequence for sequence in self._held if sequence.phase is Phase.WAITING]

    def _pause(self, mode: str) -> None:
        if mode == "abort":
            self._abort(None)
        if mode == "retract":
            for sequence in self._running:
                self.runner.release(sequence)
                sequence.retract()
            self._waiting.extendleft(reversed(self._running))
            self._running = []
        self._paused = mode

    def _resume(self) -> None:
        self._paused = None
        self._end_aborted()

    def _may_update(self) -> bool:
        return self._paused is not None or not (self._running or self._waiting)

    def _try_update(self) -> None:
        update = self._update
        if update is None or not self._may_update():
            return
        self._update = None
        self.is_loading = True
        try:
            self.runner.replace_weights(Path(update.path), forget=update.flush_cache)
        except WeightsError as error:
            logger.warning("weight update refused: %s", error)
            update.result.set_result(UpdateResult(success=False, message=str(error)))
        else:
            self.runner.version = update.version
            update.result.set_result(self._after_update(update))
        finally:
            self.is_loading = False
        self._waiting.extend(self._held)
        self._held = []

    def _after_update(self, update: _Update) -> UpdateResult:
        if update.flush_cache and not self._flush():
            message = "Weights were updated, but the cache was not flushed: generations are still running."
            return UpdateResult(success=False, message=message)
        self.reported_version = update.version
        self.reported_path = update.path
        return UpdateResult(success=True, message="Succeeded to update model weights.")

    def _flush(self) -> bool:
        if self._running:
            return False
        self.runner.lanes.clear()
        return True

    def _stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting) + len(self._held),
            num_used_tokens=sum(sequence.num_in_cache for sequence in self._running),
            is_paused=self._paused is not None,
            num_generated_tokens=self._num_generated,
            num_prefilled_tokens=self._num_prefilled,
        )

    def _end_all(self) -> None:
        """The thread ends: nobody may wait for it any longer."""
        with self._wake:
            self._stopping = True
            commands, self._commands = self._commands, deque()
        for command in commands:
            command()
        if self._update is not None:
            self._update.result.set_result(UpdateResult(success=False, message="the engine has stopped"))
        for sequence in self._live():
            sequence.finish_reason = {
                "type": "abort",
                "message": "the engine has stopped",
                "status_code": 500,
                "err_type": "InternalServerError",
            }
            sequence.phase = Phase.FINISHED
            sequence.on_event(sequence)
        if self.failure is not None and self.on_failure is not None:
            self.on_failure()
