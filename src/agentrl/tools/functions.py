"""`FunctionToolbox`: plain Python functions as tools, for tests, scripts and tools that need no process of their own.

    def add(a: int, b: int) -> int:
        "Add two numbers."
        return a + b

    toolbox = FunctionToolbox([add])

The schema comes from the signature, the description from the docstring. `recovery` says what calls of these functions
leave behind: they live in the sampler's process, so unless declared otherwise what they keep dies with it.

A plain function runs in a thread; at its deadline the caller gets `timeout` at once, but the thread runs on until the
function returns, because Python cannot stop it. Long work belongs in an `async` function or in a server.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from agentrl.errors import ConfigError
from agentrl.tools.requests import ArgumentCheck, cut, failure, refuse
from agentrl.types import Recovery, ToolRequest, ToolResult, ToolSpec, ToolStatus
from agentrl.user_modules import described, without_end, without_exit

_CANCEL_GRACE_S = 1.0


class FunctionToolbox:
    """Implements protocols.Toolbox over Python functions, sync or async. Use it in one event loop."""

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        *,
        recovery: Recovery = Recovery.STATEFUL,
        max_in_flight: int = 16,
        max_result_chars: int = 20_000,
    ) -> None:
        tools = [_inspect_function(function, recovery=recovery) for function in functions]
        self._tools = {tool.spec.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            raise ConfigError(f"two functions have the same name: {', '.join(tool.spec.name for tool in tools)}")
        self._max_result_chars = max_result_chars
        self._slots = asyncio.Semaphore(max_in_flight)
        self._threads = ThreadPoolExecutor(max_workers=max_in_flight, thread_name_prefix="function-tool")
        self._running: set[asyncio.Task[Any]] = set()
        self._is_closed = False

    def list_tools(self) -> Sequence[ToolSpec]:
        """One tool per function, in the order given."""
        return tuple(tool.spec for tool in self._tools.values())

    async def call(self, request: ToolRequest, *, deadline_s: float) -> ToolResult:
        """One call within `deadline_s`; the outcome is typed, never raised."""
        refusal = refuse(request, self._tools)
        if refusal is not None:
            return refusal
        tool = self._tools[request.name]
        try:
            arguments = tool.parse(request.arguments)
        except ValidationError as error:
            return failure(ToolStatus.BAD_ARGUMENTS, f"invalid arguments for {request.name}: {_first_problem(error)}")
        try:
            async with asyncio.timeout(deadline_s), self._slots:
                return await self._run(tool, arguments)
        except TimeoutError:
            return failure(ToolStatus.TIMEOUT, f"{request.name} did not answer within {deadline_s:g} s")

    @asynccontextmanager
    async def for_record(self) -> AsyncIterator[FunctionToolbox]:
        """Itself: functions have no sessions."""
        yield self

    async def close(self) -> None:
        """Cancel running calls. A plain function that is running cannot be stopped: its thread ends when it returns."""
        self._is_closed = True
        running = list(self._running)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=_CANCEL_GRACE_S)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, tool: _FunctionTool, arguments: Mapping[str, Any]) -> ToolResult:
        if self._is_closed:
            return failure(ToolStatus.CANCELLED, "the tools were closed")
        task = asyncio.ensure_future(without_exit(self._start(tool, arguments)))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            # A task, so that whatever the function raises is an outcome and not an exception here.
            await asyncio.wait({task})
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=_CANCEL_GRACE_S)
        if task.cancelled():
            return failure(ToolStatus.CANCELLED, f"{tool.spec.name} was cancelled")
        error = task.exception()
        if error is not None:
            return failure(ToolStatus.TOOL_ERROR, described(error))
        return ToolResult(status=ToolStatus.OK, content=cut(task.result(), max_chars=self._max_result_chars))

    async def _start(self, tool: _FunctionTool, arguments: Mapping[str, Any]) -> str:
        call = partial(tool.function, **arguments)
        if tool.is_async:
            return _as_text(await call())
        return _as_text(await asyncio.get_running_loop().run_in_executor(self._threads, without_end(call)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _FunctionTool:
    spec: ToolSpec
    check: ArgumentCheck
    function: Callable[..., Any]
    model: type[BaseModel]
    is_async: bool

    def parse(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments as the function's own types. Raises ValidationError."""
        parsed = self.model.model_validate(dict(arguments))
        return {name: getattr(parsed, name) for name in parsed.model_fields_set}


def _inspect_function(function: Callable[..., Any], *, recovery: Recovery) -> _FunctionTool:
    name = function.__name__
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"tool function {name}: parameter {parameter} cannot be given by name")
        if parameter.name not in hints:
            raise ConfigError(f"tool function {name}: parameter {parameter.name!r} needs a type annotation")
        default = ... if parameter.default is parameter.empty else parameter.default
        fields[parameter.name] = (hints[parameter.name], default)
    model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    schema = model.model_json_schema()
    schema.pop("title", None)
    spec = ToolSpec(
        name=name,
        description=inspect.getdoc(function) or "",
        parameters=schema,
        server="python",
        recovery=recovery,
    )
    return _FunctionTool(
        spec=spec,
        check=ArgumentCheck(spec),
        function=function,
        model=model,
        is_async=inspect.iscoroutinefunction(function),
    )


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    return f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}"
