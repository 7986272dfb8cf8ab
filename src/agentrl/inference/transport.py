"""HTTP bodies of the embedded engine's server: reading JSON, errors in SGLang's shapes, server-sent events."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from agentrl.inference.engine import EngineStoppedError
from agentrl.inference.parameters import ErrorShape, RequestRefusedError
from agentrl.inference.wire import error_body


class DetailError(Exception):
    """Answered with `{"detail": message}`."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


@web.middleware
async def errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer what handlers raise."""
    try:
        return await handler(request)
    except RequestRefusedError as error:
        return web.json_response(error_body(error), status=error.status)
    except DetailError as error:
        return web.json_response({"detail": str(error)}, status=error.status)
    except EngineStoppedError as error:
        return web.json_response({"detail": str(error)}, status=503)
    except web.HTTPException as error:
        return web.json_response({"detail": error.reason}, status=error.status)


async def json_body(request: web.Request) -> Any:
    """The JSON of a request; an empty body is an empty object."""
    raw = await request.read()
    if not raw:
        return {}
    try:
        return json.loads(raw)
    except ValueError as error:
        raise RequestRefusedError(f"the body is no JSON: {error}", shape=ErrorShape.VALIDATION) from error


async def json_object(request: web.Request) -> Mapping[str, Any]:
    """The JSON object of a request."""
    body = await json_body(request)
    if not isinstance(body, Mapping):
        raise RequestRefusedError("the body must be a JSON object", shape=ErrorShape.VALIDATION)
    return body


def string_field(body: Mapping[str, Any], name: str, *, required: bool = False) -> str | None:
    """A field that must be a string, or may be missing."""
    value = body.get(name)
    if (value is None and required) or (value is not None and not isinstance(value, str)):
        raise RequestRefusedError(f"{name} must be a string, got {value!r}", shape=ErrorShape.VALIDATION)
    return value


async def start_stream(request: web.Request) -> web.StreamResponse:
    """Begin a stream of server-sent events."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    return response


async def send_event(response: web.StreamResponse, payload: Mapping[str, Any]) -> None:
    """Send one event."""
    await response.write(b"data: " + json.dumps(payload).encode() + b"\n\n")


async def end_stream(response: web.StreamResponse) -> web.StreamResponse:
    """Close the stream the way SGLang does."""
    await response.write(b"data: [DONE]\n\n")
    await response.write_eof()
    return response


async def stream_error(request: web.Request, error: RequestRefusedError) -> web.StreamResponse:
    """Tell an error in a stream: status 200, the error as its only event."""
    response = await start_stream(request)
    detail = {"message": str(error), "type": "BadRequestError", "code": error.status, "retryable": False}
    await send_event(response, {"error": detail})
    return await end_stream(response)
