"""The routes of the embedded engine that change or check its weights, in SGLang's form."""

from __future__ import annotations

import asyncio
import hashlib
import json
from concurrent.futures import Future
from typing import TypeVar

from aiohttp import web

from agentrl.inference.engine import Engine
from agentrl.inference.parameters import ErrorShape, RequestRefusedError
from agentrl.inference.transport import DetailError, json_object, string_field

T = TypeVar("T")

CONTROL_TIMEOUT_S = 120.0  # an engine thread that does not answer a control call for so long is broken
_SESSION_MESSAGE = "{name}() must run between begin_weight_update() and end_weight_update()"
_LOAD_FORMATS = (None, "auto", "safetensors")


async def reply_of(future: Future[T]) -> T:
    """What the engine thread answers to a control call, waited for within CONTROL_TIMEOUT_S.

    Raises DetailError with status 503 after that.
    """
    try:
        async with asyncio.timeout(CONTROL_TIMEOUT_S):
            return await asyncio.wrap_future(future)
    except TimeoutError as error:
        raise DetailError("the engine does not respond", status=503) from error


class WeightRoutes:
    """Updates, one after the other, and the session they may be wrapped in."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._update_lock = asyncio.Lock()
        self._in_update_session = False

    def routes(self) -> list[web.RouteDef]:
        """For the server's application."""
        return [
            web.post("/update_weights_from_disk", self._update_from_disk),
            web.post("/begin_weight_update", self._begin_update),
            web.post("/end_weight_update", self._end_update),
            web.post("/update_weights_from_tensor", self._update_unsupported),
            web.post("/update_weights_from_distributed", self._update_unsupported),
            web.post("/update_weight_version", self._update_version),
            web.post("/weights_checker", self._checksum),
        ]

    async def _update_from_disk(self, request: web.Request) -> web.Response:
        body = await json_object(request)
        path = string_field(body, "model_path", required=True)
        version = string_field(body, "weight_version")
        if body.get("load_format") not in _LOAD_FORMATS:
            raise RequestRefusedError(f"load_format = {body['load_format']!r} is not supported by the embedded engine")
        async with self._update_lock:
            update = self._engine.update_weights(
                path or "",
                version=version,
                flush_cache=body.get("flush_cache") is not False,
                abort_running=body.get("abort_all_requests") is True,
            )
            result = await asyncio.wrap_future(update)
        answer = {"success": result.success, "message": result.message, "num_paused_requests": 0}
        return web.json_response(answer, status=200 if result.success else 400)

    async def _begin_update(self, request: web.Request) -> web.Response:
        await json_object(request)
        if self._in_update_session:
            return _update_answer("begin_weight_update() was called twice without end_weight_update()")
        self._in_update_session = True
        return _update_answer(None)

    async def _end_update(self, request: web.Request) -> web.Response:
        await json_object(request)
        if not self._in_update_session:
            return _update_answer("end_weight_update() was called without begin_weight_update()")
        self._in_update_session = False
        return _update_answer(None)

    async def _update_unsupported(self, request: web.Request) -> web.Response:
        await json_object(request)
        name = request.path.removeprefix("/")
        if not self._in_update_session:
            return _update_answer(_SESSION_MESSAGE.format(name=name))
        return _update_answer(f"{name} is not supported by the embedded engine; use update_weights_from_disk")

    async def _update_version(self, request: web.Request) -> web.Response:
        body = await json_object(request)
        version = string_field(body, "new_version", required=True) or ""
        abort_running = body.get("abort_all_requests") is not False
        await reply_of(self._engine.relabel(version, abort_running=abort_running))
        message = f"Weight version updated to {version}"
        return web.json_response({"success": True, "message": message, "new_version": version})

    async def _checksum(self, request: web.Request) -> web.Response:
        action = (await json_object(request)).get("action")
        if action != "checksum":
            message = f"action must be checksum, got {action!r}"
            raise RequestRefusedError(message, shape=ErrorShape.VALIDATION)
        sums = await reply_of(self._engine.checksums())
        total = hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()
        ranks = [{"checksums": sums}]
        answer = {"success": True, "message": "Success.", "ranks": ranks, "per_engine_checksum": total}
        return web.json_response(answer)


def _update_answer(problem: str | None) -> web.Response:
    answer = {"success": problem is None, "message": problem or "Success."}
    return web.json_response(answer, status=200 if problem is None else 400)
