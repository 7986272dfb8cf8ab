"""`agentrl serve`: one embedded engine with its registrar, or registrars alone for SGLang servers elsewhere."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import threading
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from aiohttp import web

from agentrl.config.sections import InferenceConfig, RunConfig
from agentrl.errors import EngineError, EngineErrorKind, UnavailableError
from agentrl.fleets import FleetRunStore
from agentrl.inference.canary import CanarySettings
from agentrl.inference.client import EngineClient
from agentrl.inference.fleet_registrar import run_fleet_registrar
from agentrl.inference.fleet_view import FleetReader, OpenRunStore
from agentrl.inference.registrar import run_registrar
from agentrl.pacing import longest_silence_s
from agentrl.protocols import FleetStore

if TYPE_CHECKING:
    from agentrl.inference.engine import Engine
    from agentrl.inference.runner import EngineSettings
    from agentrl.inference.wire import Tokenizer

logger = logging.getLogger(__name__)

UNREGISTERED = "default"
_SHUTDOWN_S = 5.0
_CONTROL_TIMEOUT_S = 30.0
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
_ANY_ADDRESS = {"0.0.0.0", "::", ""}


class Register(Protocol):
    """Runs the registrar of one service until `stop` is set."""

    async def __call__(self, client: EngineClient, *, service_id: str, engine: str, stop: asyncio.Event) -> None:
        """Mark the service UP and DOWN as is true, and load what is published."""
        ...


async def serve(config: RunConfig, fleet: FleetStore) -> None:
    """Serve one run until SIGTERM, SIGINT or cancellation; services are marked DOWN on the way out.

    Raises UnavailableError for a port in use or a model directory that cannot be served, EngineError if the embedded
    engine breaks (the process should then be started again).
    """

    async def register(client: EngineClient, *, service_id: str, engine: str, stop: asyncio.Event) -> None:
        await run_registrar(
            client,
            fleet,
            service_id=service_id,
            engine=engine,
            poll_s=config.inference.policy_poll_s,
            heartbeat_s=config.store.heartbeat_s,
            canary=_canary_settings(config.inference),
            stop=stop,
            num_registrars=max(1, len(_urls(config))),
        )

    await _serve(config, register)


async def serve_fleet(config: RunConfig, fleet: FleetRunStore, *, open_run_store: OpenRunStore) -> None:
    """Serve the runs of a fleet, otherwise as `serve`. `open_run_store` gives the store of a run, by name."""

    async def register(client: EngineClient, *, service_id: str, engine: str, stop: asyncio.Event) -> None:
        timeout_s = longest_silence_s(config.store.heartbeat_s)
        await run_fleet_registrar(
            client,
            FleetReader(fleet, open_run_store=open_run_store, heartbeat_timeout_s=timeout_s),
            service_id=service_id,
            engine=engine,
            poll_s=config.inference.policy_poll_s,
            heartbeat_s=config.store.heartbeat_s,
            dwell_s=config.inference.fleet_dwell_s,
            canary=_canary_settings(config.inference),
            stop=stop,
        )

    await _serve(config, register)


def _canary_settings(inference: InferenceConfig) -> CanarySettings:
    return CanarySettings(
        tolerance=inference.canary_tolerance,
        interval_s=inference.canary_interval_s,
        timeout_s=inference.canary_timeout_s,
    )


async def _serve(config: RunConfig, register: Register) -> None:
    stop = asyncio.Event()
    with _stop_on_signals(stop):
        if config.inference.inference_url:
            await _attach(config, register, stop=stop)
        else:
            await _serve_embedded(config, register, stop=stop)


async def _attach(config: RunConfig, register: Register, *, stop: asyncio.Event) -> None:
    async with asyncio.TaskGroup() as group:
        for url in _urls(config):
            group.create_task(_connected(register, url, service_id=url, engine="sglang", stop=stop))


def _urls(config: RunConfig) -> list[str]:
    return [url.strip() for url in (config.inference.inference_url or "").split(",") if url.strip()]


async def _connected(register: Register, url: str, *, service_id: str, engine: str, stop: asyncio.Event) -> None:
    async with EngineClient(url, timeout_s=_CONTROL_TIMEOUT_S) as client:
        await register(client, service_id=service_id, engine=engine, stop=stop)


async def _serve_embedded(config: RunConfig, register: Register, *, stop: asyncio.Event) -> None:
    listener = listen(config.inference)
    port = listener.getsockname()[1]
    host = config.inference.serve_host
    url = f"http://{socket.gethostname() if host in _ANY_ADDRESS else host}:{port}"
    service_id = f"embedded-{socket.gethostname()}-{os.getpid()}-{port}"
    try:
        engine, tokenizer = await asyncio.to_thread(_build_engine, config, service_id)
    except BaseException:
        listener.close()
        raise
    from agentrl.inference.watchdog import fail_when_stuck

    loop = asyncio.get_running_loop()
    engine.on_failure = lambda: loop.call_soon_threadsafe(stop.set)
    async with running_server(engine, tokenizer, listener):
        logger.info("embedded engine serves %s at %s", config.model.model_name_or_path, url)
        watching = asyncio.create_task(fail_when_stuck(engine))
        try:
            await _connected(register, url, service_id=service_id, engine="embedded", stop=stop)
        finally:
            watching.cancel()
    if engine.failure is not None:
        message = f"the embedded engine at {url} failed: {engine.failure!r}"
        raise EngineError(message, kind=EngineErrorKind.UNREACHABLE) from engine.failure


@asynccontextmanager
async def running_server(engine: Engine, tokenizer: Tokenizer, listener: socket.socket) -> AsyncIterator[None]:
    """Start a built engine and answer on `listener` while inside; both are stopped on the way out."""
    from agentrl.inference.server import EngineServer

    application = EngineServer(engine, tokenizer=tokenizer).application()
    runner = web.AppRunner(application, handler_cancellation=True, access_log=None, shutdown_timeout=_SHUTDOWN_S)
    await runner.setup()
    engine.start()
    try:
        await web.SockSite(runner, listener).start()
        yield
    finally:
        await asyncio.to_thread(engine.stop)  # first: it answers whoever still waits
        await runner.cleanup()


def listen(inference: InferenceConfig) -> socket.socket:
    """Take the port before the model is loaded, so that a conflict shows at once."""
    try:
        return socket.create_server((inference.serve_host, inference.serve_port), backlog=1024)
    except OSError as error:
        what = "is already in use" if error.errno == errno.EADDRINUSE else f"cannot be opened ({error.strerror})"
        message = f"serve_port = {inference.serve_port} on {inference.serve_host} {what}; set another one, or 0 for any"
        raise UnavailableError(message) from error


def _build_engine(config: RunConfig, service_id: str) -> tuple[Engine, Tokenizer]:
    """Load model and tokenizer. torch is imported here: its thread pool reads the environment at import."""
    threads = config.inference.engine_threads
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from agentrl.inference.runner import EngineSettings

    if config.model.model_name_or_path is None:
        raise UnavailableError("model_name_or_path is not set: give a model directory, or inference_url")
    settings = EngineSettings(
        model_path=config.model.model_name_or_path,
        max_running_requests=config.inference.max_running_requests,
        context_length=config.inference.context_length,
        num_threads=threads,
        # Until its registrar says whose weights these are, no run of a fleet may count tokens as its own.
        weight_version="0" if config.run.fleet_name is None else UNREGISTERED,
        # Services of one run must not draw the same random numbers.
        seed=zlib.crc32(f"{config.run.seed}/{service_id}".encode()),
    )
    return build_engine(settings)


def build_engine(settings: EngineSettings) -> tuple[Engine, Tokenizer]:
    """An engine (not started) and its tokenizer. Raises UnavailableError naming what the model directory lacks."""
    from agentrl.inference.engine import Engine

    tokenizer = load_tokenizer(settings.model_path)
    eos_ids = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return Engine(settings, decode=tokenizer.decode, extra_eos_ids=eos_ids), tokenizer


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a model directory. Raises UnavailableError."""
    from transformers import AutoTokenizer

    if not (directory / "config.json").is_file():
        raise UnavailableError(f"model_name_or_path = {directory}: there is no config.json; give a model directory")
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        # Without one of these AutoTokenizer makes up an empty tokenizer instead of failing.
        raise UnavailableError(f"model_name_or_path = {directory}: it has no tokenizer ({', '.join(_TOKENIZER_FILES)})")
    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UnavailableError(f"model_name_or_path = {directory}: cannot load its tokenizer: {error}") from error
    return tokenizer


@contextmanager
def _stop_on_signals(stop: asyncio.Event) -> Iterator[None]:
    """SIGTERM and SIGINT set `stop` while inside. Signals belong to the main thread; elsewhere cancellation remains."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
