"""HTTP front of the embedded engine: SGLang's native API, close enough that one conformance suite passes on both.

Faithful where clients depend on it: three error shapes, cumulative SSE chunks, requests that hang while paused, aborts
by prefix answered with 200, weight updates that wait for running requests unless paused, partial success of an update
without a flush. Better where the original is dangerous: ids outside the vocabulary are refused, health says at once
that the server is paused.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from agentrl.inference.engine import PAUSE_MODES, Engine
from agentrl.inference.parameters import ErrorShape, RequestRefusedError, parse_sampling
from agentrl.inference.sequence import Sequence
from agentrl.inference.transport import (
    DetailError,
    end_stream,
    errors_as_json,
    json_body,
    json_object,
    send_event,
    start_stream,
    stream_error,
    string_field,
)
from agentrl.inference.weight_routes import WeightRoutes, reply_of
from agentrl.inference.wire import GenerateCall, ModelLimits, Prompt, Tokenizer, parse_generate, render

logger = logging.getLogger(__name__)

_HEALTH_TIMEOUT_S = 20.0
_MAX_BODY_BYTES = 64 * 2**20


@dataclass(slots=True, kw_only=True, eq=False)
class _Generation:
    """A sequence in the engine and the loop-side end of its events: (number of tokens, finished)."""

    prompt: Prompt
    sequence: Sequence
    events: asyncio.Queue[tuple[int, bool]]
    is_finished: bool = False


class EngineServer:
    """The routes. Lives in one event loop; the engine runs in its own thread."""

    def __init__(self, engine: Engine, *, tokenizer: Tokenizer) -> None:
        self._was_healthy = True
        self._engine = engine
        self._tokenizer = tokenizer
        self._limits = ModelLimits(vocab_size=engine.vocab_size, context_length=engine.settings.context_length)
        self._live: dict[str, _Generation] = {}
        self._started_at = time.time()

    def application(self) -> web.Application:
        """The aiohttp application with every route."""
        app = web.Application(middlewares=[errors_as_json], client_max_size=_MAX_BODY_BYTES)
        both: list[tuple[str, Callable[[web.Request], Awaitable[web.StreamResponse]]]] = [
            ("/flush_cache", self._flush_cache),
            ("/get_model_info", self._model_info),
            ("/model_info", self._model_info),
            ("/get_server_info", self._server_info),
            ("/server_info", self._server_info),
        ]
        for path, handler in both:
            app.router.add_route("GET", path, handler)
            app.router.add_route("POST", path, handler)
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.put("/generate", self._generate),
                web.post("/abort_request", self._abort),
                web.post("/pause_generation", self._pause),
                web.post("/continue_generation", self._continue),
                *WeightRoutes(self._engine).routes(),
                web.get("/health", self._health),
                web.get("/health_generate", self._health_generate),
                web.get("/ready", self._ready),
                web.get("/v1/loads", self._loads),
                web.get("/v1/models", self._models),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
            ]
        )
        return app

    # Generation

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await json_body(request)
        streams = isinstance(body, Mapping) and body.get("stream") is True
        try:
            call = parse_generate(body, tokenizer=self._tokenizer, limits=self._limits)
            generations = self._open(call)
        except RequestRefusedError as error:
            if not streams or error.shape is not ErrorShape.ENGINE:
                raise
            return await stream_error(request, error)
        async with self._submitted(generations):
            if call.stream:
                return await self._stream(request, call, generations)
            bodies = [await self._finished_body(call, generation) for generation in generations]
        return web.json_response(bodies if call.is_list else bodies[0])

    def _open(self, call: GenerateCall) -> list[_Generation]:
        rids = [prompt.rid for prompt in call.prompts]
        for rid in rids:
            if rid in self._live or rids.count(rid) > 1:
                raise RequestRefusedError(f"Duplicate request ID detected: {rid}")
        return [self._generation(prompt, stream=call.stream) for prompt in call.prompts]

    def _generation(self, prompt: Prompt, *, stream: bool) -> _Generation:
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[tuple[int, bool]] = asyncio.Queue()

        def on_event(sequence: Sequence) -> None:  # engine thread: only counts cross over, lists keep growing
            event = (len(sequence.output_ids), sequence.finish_reason is not None)
            try:
                loop.call_soon_threadsafe(events.put_nowait, event)
            except RuntimeError:
                logger.debug("%s ended after the server's loop", sequence.rid)

        sequence = Sequence(
            rid=prompt.rid,
            input_ids=prompt.input_ids,
            sampling=prompt.sampling,
            on_event=on_event,
            stream=stream,
            logprob_start=prompt.logprob_start,
            top_logprobs_num=prompt.top_logprobs_num,
            extra_key=prompt.extra_key,
        )
        return _Generation(prompt=prompt, sequence=sequence, events=events)

    @asynccontextmanager
    async def _submitted(self, generations: list[_Generation]) -> AsyncIterator[None]:
        """Hand over to the engine; whatever is unfinished at the end (client gone) is aborted."""
        try:
            for generation in generations:
                self._live[generation.sequence.rid] = generation
                self._engine.submit(generation.sequence)
            yield
        finally:
            for generation in generations:
                self._live.pop(generation.sequence.rid, None)
                if not generation.is_finished and not self._engine.has_stopped:
                    self._engine.abort(generation.sequence.rid, exact=True)

    async def _finished_body(self, call: GenerateCall, generation: _Generation) -> dict[str, Any]:
        while not generation.is_finished:
            _, generation.is_finished = await generation.events.get()
        sequence = generation.sequence
        reason = sequence.finish_reason or {}
        if reason.get("status_code"):
            raise DetailError(reason["message"], status=reason["status_code"])
        return self._render(call, generation, num_tokens=len(sequence.output_ids))

    def _render(self, call: GenerateCall, generation: _Generation, *, num_tokens: int) -> dict[str, Any]:
        return render(
            generation.sequence,
            generation.prompt,
            call=call,
            tokenizer=self._tokenizer,
            version=self._engine.reported_version,
            num_tokens=num_tokens,
        )

    async def _stream(
        self, request: web.Request, call: GenerateCall, generations: list[_Generation]
    ) -> web.StreamResponse:
        """Server-sent events; every chunk has everything since the start of its generation."""
        response = await start_stream(request)
        merged: asyncio.Queue[tuple[int, int, bool]] = asyncio.Queue()
        async with asyncio.TaskGroup() as group:
            for index, generation in enumerate(generations):
                group.create_task(_forward_events(generation, index=index, merged=merged))
            unfinished = len(generations)
            while unfinished:
                index, num_tokens, is_finished = await merged.get()
                unfinished -= is_finished
                chunk = self._render(call, generations[index], num_tokens=num_tokens)
                if call.is_list:
                    chunk["index"] = index
                await send_event(response, chunk)
        return await end_stream(response)

    async def _abort(self, request: web.Request) -> web.Response:
        body = await json_object(request)
        message = body.get("abort_message")
        if body.get("abort_all"):
            await reply_of(self._engine.abort(None, message=message))
        elif isinstance(body.get("rid"), str) and body["rid"]:
            await reply_of(self._engine.abort(body["rid"], message=message))
        return web.Response()

    async def _pause(self, request: web.Request) -> web.Response:
        mode = (await json_object(request)).get("mode", "abort")
        if mode not in PAUSE_MODES:
            message = f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}"
            raise RequestRefusedError(message, shape=ErrorShape.VALIDATION)
        await reply_of(self._engine.pause(mode))
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, request: web.Request) -> web.Response:
        await json_object(request)
        await reply_of(self._engine.resume())
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _flush_cache(self, request: web.Request) -> web.Response:
        timeout_s = float(request.query.get("timeout", "0"))
        deadline = time.monotonic() + timeout_s
        while not await reply_of(self._engine.flush_cache()):
            if time.monotonic() >= deadline:
                text = "Timed out waiting for idle state.\n" if timeout_s > 0 else "Flush cache failed.\n"
                return web.Response(status=400, text=text)
            await asyncio.sleep(0.02)
        return web.Response(text="Cache flushed.\n")

    # What is there

    async def _model_info(self, _request: web.Request) -> web.Response:
        config = self._engine.runner.model.config
        return web.json_response(
            {
                "model_path": self._engine.reported_path,
                "served_model_name": self._engine.reported_path,
                "tokenizer_path": str(self._engine.settings.model_path),
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": self._engine.reported_version,
                "load_format": "safetensors",
                "model_type": config.model_type,
                "architectures": config.architectures,
                "vocab_size": self._engine.vocab_size,
            }
        )

    async def _server_info(self, _request: web.Request) -> web.Response:
        settings = self._engine.settings
        return web.json_response(
            {
                "version": "agentrl-embedded",
                "model_path": self._engine.reported_path,
                "max_running_requests": settings.max_running_requests,
                "context_length": settings.context_length,
                "device": str(self._engine.runner.device),
                "weight_version": self._engine.reported_version,
                "startup_time": self._started_at,
                "internal_states": [await self._load_entry()],
            }
        )

    async def _load_entry(self) -> dict[str, Any]:
        stats = await reply_of(self._engine.stats())
        settings = self._engine.settings
        capacity = settings.max_running_requests * settings.context_length
        return {
            "dp_rank": 0,
            "num_running_reqs": stats.num_running,
            "num_waiting_reqs": stats.num_waiting,
            "num_used_tokens": stats.num_used_tokens,
            "max_total_num_tokens": capacity,
            "token_usage": stats.num_used_tokens / capacity,
            "num_generated_tokens": stats.num_generated_tokens,
            "num_prefilled_tokens": stats.num_prefilled_tokens,
        }

    async def _loads(self, _request: web.Request) -> web.Response:
        return web.json_response({"loads": [await self._load_entry()]})

    async def _models(self, _request: web.Request) -> web.Response:
        card = {
            "id": self._engine.reported_path,
            "object": "model",
            "owned_by": "agentrl",
            "max_model_len": self._engine.settings.context_length,
        }
        return web.json_response({"object": "list", "data": [card]})

    async def _health(self, _request: web.Request) -> web.Response:
        stats = await reply_of(self._engine.stats())
        self._was_healthy = not stats.is_paused
        return web.Response(status=200 if self._was_healthy else 503)

    async def _health_generate(self, request: web.Request) -> web.StreamResponse:
        health = await self._health(request)
        if health.status != 200:
            return health
        sampling = parse_sampling({"max_new_tokens": 1, "temperature": 0}, vocab_size=self._engine.vocab_size)
        prompt = Prompt(
            rid=f"HEALTH_CHECK_{time.monotonic_ns()}",
            input_ids=[0],
            sampling=sampling,
            return_logprob=False,
            logprob_start=-1,
            top_logprobs_num=0,
            extra_key="",
        )
        generation = self._generation(prompt, stream=False)
        try:
            async with self._submitted([generation]), asyncio.timeout(_HEALTH_TIMEOUT_S):
                _, generation.is_finished = await generation.events.get()
        except TimeoutError:
            return web.Response(status=503)
        return web.Response()

    async def _ready(self, _request: web.Request) -> web.Response:
        is_ready = self._was_healthy and not self._engine.has_stopped  # SGLang, too, remembers the last health check
        return web.Response(status=200 if is_ready else 503)

    async def _tokenize(self, request: web.Request) -> web.Response:
        text = string_field(await json_object(request), "prompt", required=True) or ""
        tokens = list(self._tokenizer.encode(text))
        answer = {"tokens": tokens, "count": len(tokens), "max_model_len": self._limits.context_length}
        return web.json_response(answer)

    async def _detokenize(self, request: web.Request) -> web.Response:
        tokens = (await json_object(request)).get("tokens")
        if not isinstance(tokens, list) or not all(
            type(item) is int and 0 <= item < self._limits.vocab_size for item in tokens
        ):
            raise RequestRefusedError("tokens must be a list of token ids", shape=ErrorShape.VALIDATION)
        return web.json_response({"text": self._tokenizer.decode(tokens)})


async def _forward_events(generation: _Generation, *, index: int, merged: asyncio.Queue[tuple[int, int, bool]]) -> None:
    while not generation.is_finished:
        num_tokens, generation.is_finished = await generation.events.get()
        merged.put_nowait((index, num_tokens, generation.is_finished))
