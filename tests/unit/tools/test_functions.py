import asyncio
import sys
import threading
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from agentrl.errors import ConfigError
from agentrl.tools import FunctionToolbox
from agentrl.types import ToolRequest, ToolStatus


class Point(BaseModel):
    x: int
    y: int = 0


def request(name, /, **arguments):
    return ToolRequest(call_id="call-1", name=name, arguments=arguments)


async def test_the_schema_comes_from_the_signature():
    def paint(point: Point, colour: Literal["red", "blue"] = "red", *, size: Annotated[int, Field(ge=1)] = 1) -> str:
        """Paint a point."""
        return f"{point.x},{point.y} {colour} {size}"

    box = FunctionToolbox([paint])
    (spec,) = box.list_tools()
    assert spec.name == "paint"
    assert spec.parameters["required"] == ["point"]
    assert spec.parameters["properties"]["colour"]["enum"] == ["red", "blue"]
    assert (await box.call(request("paint", point={"x": 3}), deadline_s=5)).content == "3,0 red 1"
    bad = await box.call(request("paint", point={"x": 3}, size=0), deadline_s=5)
    assert bad.status is ToolStatus.BAD_ARGUMENTS
    assert (await box.call(request("paint", point={"x": 3}, shape="o"), deadline_s=5)).status is bad.status
    await box.close()


async def test_what_only_pydantic_can_check_is_refused_too():
    class Even(BaseModel):
        n: int

        def model_post_init(self, _context):
            if self.n % 2:
                raise ValueError("odd")

    async def half(even: Even) -> int:
        return even.n // 2

    box = FunctionToolbox([half])
    assert (await box.call(request("half", even={"n": 4}), deadline_s=5)).content == "2"
    assert (await box.call(request("half", even={"n": 3}), deadline_s=5)).status is ToolStatus.BAD_ARGUMENTS
    await box.close()


async def test_results_that_are_no_text_become_json():
    async def table() -> dict:
        return {"städte": [1, 2.5, None]}

    box = FunctionToolbox([table])
    assert (await box.call(request("table"), deadline_s=5)).content == '{"städte": [1, 2.5, null]}'
    await box.close()


async def test_plain_functions_run_beside_each_other_in_threads():
    barrier = threading.Barrier(3, timeout=10)

    def meet() -> str:
        barrier.wait()
        return threading.current_thread().name

    box = FunctionToolbox([meet], max_in_flight=3)
    results = await asyncio.gather(*(box.call(request("meet"), deadline_s=10) for _ in range(3)))
    assert {result.status for result in results} == {ToolStatus.OK}
    assert len({result.content for result in results}) == 3
    await box.close()


async def test_a_plain_function_that_hangs_gives_a_timeout_at_the_deadline():
    release = threading.Event()

    def hang() -> str:
        release.wait(timeout=30)
        return "late"

    box = FunctionToolbox([hang])
    assert (await box.call(request("hang"), deadline_s=0.1)).status is ToolStatus.TIMEOUT
    release.set()
    await box.close()


async def test_a_function_that_cancels_itself_is_an_outcome_and_not_a_cancellation_of_the_caller():
    async def give_up() -> str:
        raise asyncio.CancelledError

    box = FunctionToolbox([give_up])
    assert (await box.call(request("give_up"), deadline_s=5)).status is ToolStatus.CANCELLED
    await box.close()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x, "needs a type annotation"),
        (eval("lambda *args: args"), "cannot be given by name"),
    ],
)
def test_a_function_without_a_usable_signature_is_refused(function, message):
    with pytest.raises(ConfigError, match=message):
        FunctionToolbox([function])


def test_two_functions_of_one_name_are_refused():
    def one() -> str:
        return ""

    with pytest.raises(ConfigError, match="same name"):
        FunctionToolbox([one, one])


def _endless(value):
    value.append(value)
    return value


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: sys.exit(3), "SystemExit: 3"),
        (lambda: next(iter(())), "StopIteration"),
        (lambda: _endless([]), "Circular reference"),
    ],
)
async def test_whatever_a_function_raises_or_returns_is_the_tools_error(is_async, act, message):
    def direct() -> object:
        return act()

    async def awaited() -> object:
        return act()

    function = awaited if is_async else direct
    box = FunctionToolbox([function])
    result = await box.call(request(function.__name__), deadline_s=30)
    assert result.status is ToolStatus.TOOL_ERROR
    assert message in str(result.error)
    await box.close()
