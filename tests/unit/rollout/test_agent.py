"""The rollout loop against a scripted engine and real Python tools."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from agentrl.chat import ChatFormat
from agentrl.config import InferenceConfig, RolloutConfig
from agentrl.errors import EngineError, EngineErrorKind
from agentrl.rollout.agent import Agent, RolloutResult, run_rollout
from agentrl.rollout.sampler import MCPSampler
from agentrl.store import MemoryStore
from agentrl.tools import FunctionToolbox
from agentrl.types import Record, RecordStatus, Recovery, StopReason, Task, ToolResult, ToolStatus, Turn
from scripted_engine import Script, ScriptedEngine
from tiny_chat import write_tiny_chat

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
TASK = Task(id="train:0:q", item_id="q", split="train", epoch=0, query="2+3?", answer="5", num_generations=2)
RECORD = Record(
    id="train:0:q/g0", task_id="train:0:q", split="train", generation=0, fence=1, status=RecordStatus.RUNNING
)


def add(a: int, b: int) -> str:
    """Sum of two integers."""
    return str(a + b)


def play(*texts: str) -> Script:
    """Answer the n-th request of a context with the n-th text, then repeat the last."""
    return lambda context, depth: texts[min(depth, len(texts) - 1)]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat(tmp_path_factory.mktemp("chat"))


def make_agent(
    model_dir: Path, engine: ScriptedEngine, *, committed: list[Turn] | None = None, **rollout: object
) -> Agent:
    log = committed if committed is not None else []

    async def commit(record: Record, turn: Turn) -> Record:
        log.append(turn)
        return replace(record, turn_ids=(*record.turn_ids, turn.model.id))

    return Agent(
        chat=ChatFormat.load(model_dir),
        client=engine,
        toolbox=FunctionToolbox([add], recovery=Recovery.STATELESS),
        journal=MemoryStore(),
        commit_turn=commit,
        rollout=RolloutConfig(max_new_tokens=400, max_prompt_tokens=3000, **rollout),
        inference=InferenceConfig(context_length=4000),
        tool_timeout_s=5.0,
        clock=lambda: datetime.now(UTC),
    )


async def rollout(
    model_dir: Path, script: Script, *, committed: Sequence[Turn] = (), **settings: object
) -> tuple[RolloutResult, ScriptedEngine]:
    engine = ScriptedEngine(model_dir, script)
    agent = make_agent(model_dir, engine, **settings)
    return await run_rollout(TASK, record=RECORD, committed=committed, agent=agent), engine


async def test_a_tool_result_reaches_the_model_and_the_answer_ends_the_record(model_dir: Path) -> None:
    result, engine = await rollout(model_dir, play(CALL, "<answer>5</answer>"))
    assert (result.stop_reason, result.answer, len(result.turns)) == (StopReason.ANSWER, "5", 2)
    call = result.turns[0].tools[0]
    assert (call.target, call.status, call.response["content"]) == ("add", "ok", "5")
    assert "<tool_response>5</tool_response>" in engine.tokenizer.decode(
        list(engine.requests[1].input_ids), skip_special_tokens=False
    )


async def test_each_context_is_exactly_the_previous_context_its_completion_and_new_ids(model_dir: Path) -> None:
    result, engine = await rollout(model_dir, play(CALL, CALL + " ", "hm", "<answer>5</answer>"))
    context: list[int] = []
    for turn, request, reply in zip(result.turns, engine.requests, engine.replies, strict=True):
        context += turn.tokens.prompt_ids
        assert list(request.input_ids) == context
        assert turn.tokens.completion_ids == reply.output_ids
        assert turn.tokens.logprobs == reply.logprobs
        context += reply.output_ids


async def test_calls_of_one_turn_run_at_the_same_time_and_keep_their_order(model_dir: Path) -> None:
    started = asyncio.Event()

    async def first(x: int) -> str:
        """Waits for the second call."""
        await asyncio.wait_for(started.wait(), 5)
        return f"first {x}"

    async def second(x: int) -> str:
        """Lets the first call go on."""
        started.set()
        return f"second {x}"

    calls = "".join(
        f'<tool_call>{{"name": "{name}", "arguments": {{"x": 1}}}}</tool_call>' for name in ("first", "second")
    )
    engine = ScriptedEngine(model_dir, play(calls, "<answer>5</answer>"))
    agent = replace(make_agent(model_dir, engine), toolbox=FunctionToolbox([first, second]))
    result = await run_rollout(TASK, record=RECORD, committed=(), agent=agent)
    assert [tool.response["content"] for tool in result.turns[0].tools] == ["first 1", "second 1"]


async def test_an_answer_beside_a_call_ends_the_record_without_running_the_call(model_dir: Path) -> None:
    result, _ = await rollout(model_dir, play(CALL + "<answer>5</answer>"))
    assert result.stop_reason is StopReason.ANSWER
    assert result.turns[0].tools == ()


async def test_an_answer_inside_thinking_does_not_count(model_dir: Path) -> None:
    text = "<think>maybe <answer>4</answer></think>" + CALL
    result, _ = await rollout(model_dir, play(text, "<answer>5</answer>"))
    assert result.answer == "5"


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("<tool_call>{oops</tool_call>", ToolStatus.MALFORMED),
        ('<tool_call>{"name": "nope", "arguments": {}}</tool_call>', ToolStatus.UNKNOWN_TOOL),
        ('<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>', ToolStatus.BAD_ARGUMENTS),
    ],
)
async def test_a_wrong_call_is_answered_to_the_model_and_the_record_goes_on(
    model_dir: Path, text: str, status: ToolStatus
) -> None:
    result, _ = await rollout(model_dir, play(text, "<answer>5</answer>"))
    assert result.stop_reason is StopReason.ANSWER
    assert result.turns[0].tools[0].status == status
    assert result.turns[0].tools[0].response["content"]


async def test_turns_without_a_call_obey_the_turn_limit(model_dir: Path) -> None:
    texts = [f"thinking {index}" for index in range(9)]
    result, _ = await rollout(model_dir, play(*texts), max_turns=3)
    assert (result.stop_reason, len(result.turns)) == (StopReason.MAX_TURNS, 3)


async def test_a_turn_without_a_call_is_followed_by_a_nudge_of_the_user(model_dir: Path) -> None:
    result, engine = await rollout(model_dir, play("thinking", "<answer>5</answer>"), nudge_prompt="Go on, please.")
    assert result.answer == "5"
    asked = engine.tokenizer.decode(list(engine.requests[1].input_ids), skip_special_tokens=False)
    assert asked.index("thinking") < asked.index("Go on, please.")


@pytest.mark.parametrize("text", [CALL, "no call"])
async def test_identical_completions_stop_as_repetition(model_dir: Path, text: str) -> None:
    result, _ = await rollout(model_dir, play(text), repetition_early_stop_times=3)
    assert (result.stop_reason, len(result.turns)) == (StopReason.REPETITION, 3)


@pytest.mark.parametrize("text", [CALL, "no call " * 10])
async def test_a_growing_context_stops_before_the_call_that_would_not_fit(model_dir: Path, text: str) -> None:
    texts = [f"{text} {index}" for index in range(99)]
    result, engine = await rollout(model_dir, play(*texts), max_turns=99)
    assert result.stop_reason is StopReason.CONTEXT_LIMIT
    assert max(len(request.input_ids) for request in engine.requests) <= 3000


async def test_a_completion_cut_by_its_limit_without_a_call_is_a_format_error(model_dir: Path) -> None:
    result, _ = await rollout(model_dir, play(" ".join(map(str, range(2000)))))
    assert result.stop_reason is StopReason.FORMAT_ERROR
    assert len(result.turns[0].tokens.completion_ids) == 400


async def test_the_last_turn_can_be_spent_on_a_forced_answer(model_dir: Path) -> None:
    script: Script = lambda context, depth: "<answer>5</answer>" if depth == 2 else f"{CALL} {depth}"  # noqa: E731
    result, engine = await rollout(model_dir, script, max_turns=2, force_final_answer=True)
    assert (result.stop_reason, len(result.turns)) == (StopReason.ANSWER, 3)
    assert "last turn" in engine.tokenizer.decode(list(result.turns[2].tokens.prompt_ids))


@pytest.mark.parametrize("num_committed", [0, 1, 2, 3])
async def test_a_record_taken_over_after_any_turn_ends_as_if_nothing_had_happened(
    model_dir: Path, num_committed: int
) -> None:
    script = play(CALL, CALL + " ", "<answer>5</answer>")
    whole, _ = await rollout(model_dir, script)
    engine = ScriptedEngine(model_dir, lambda context, depth: script(context, num_committed + depth))
    agent = make_agent(model_dir, engine)
    resumed = await run_rollout(TASK, record=RECORD, committed=whole.turns[:num_committed], agent=agent)
    assert [turn.tokens for turn in resumed.turns] == [turn.tokens for turn in whole.turns]
    assert (resumed.stop_reason, resumed.answer) == (whole.stop_reason, whole.answer)
    assert len(engine.requests) == 3 - num_committed


def sampler_for(model_dir: Path, script: Script, **settings: object) -> MCPSampler:
    agent = make_agent(model_dir, ScriptedEngine(model_dir, script), **settings)
    return MCPSampler(TASK, record=RECORD, committed=(), agent=agent)


async def test_an_engine_failure_is_a_typed_failure_without_a_score(model_dir: Path) -> None:
    error = EngineError("connection refused", kind=EngineErrorKind.UNREACHABLE)
    record, _ = await sampler_for(model_dir, lambda context, depth: error).sample()
    assert (record.status, record.stop_reason, record.score) == (RecordStatus.FAILED, StopReason.ENGINE_ERROR, None)
    assert "connection refused" in str(record.error)


async def test_a_tool_server_that_dies_is_a_typed_failure_without_a_score(model_dir: Path) -> None:
    sampler = sampler_for(model_dir, play(CALL))

    class DyingToolbox(FunctionToolbox):
        async def call(self, request: object, *, deadline_s: float) -> ToolResult:
            return ToolResult(status=ToolStatus.CRASHED, content="server died", error="server died")

    sampler.agent = replace(sampler.agent, toolbox=DyingToolbox([add]))
    record, turns = await sampler.sample()
    assert (record.status, record.stop_reason, record.score) == (RecordStatus.FAILED, StopReason.TOOL_ERROR, None)
    assert len(turns) == 1


async def test_a_record_without_time_left_is_a_timeout_without_a_score(model_dir: Path) -> None:
    sampler = sampler_for(model_dir, play(CALL), record_timeout_s=0.05)
    sampler.agent.client.holds = lambda context: True  # type: ignore[attr-defined]  # ScriptedEngine
    record, _ = await sampler.sample()
    assert (record.status, record.stop_reason, record.score) == (RecordStatus.FAILED, StopReason.TIMEOUT, None)


@pytest.mark.parametrize(
    ("script", "score"), [(play("<answer>5</answer>"), 1.0), (play("<answer>6</answer>"), 0.0), (play("x" * 999), 0.0)]
)
async def test_what_the_policy_ends_is_scored(model_dir: Path, script: Callable[..., str], score: float) -> None:
    record, _ = await sampler_for(model_dir, script).sample()
    assert (record.status, record.score, record.scorer) == (RecordStatus.FINISHED, score, "em")
