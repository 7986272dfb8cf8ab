"""What the model sees at and after the context limit: forced answers and rewritten contexts, token by token."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from agentrl.algo.merge import merge_record
from agentrl.config import RolloutConfig
from agentrl.errors import ChatError, ChatErrorKind, ConfigError
from agentrl.rollout.agent import RolloutResult
from agentrl.rollout.browse import Browser
from agentrl.rollout.context import DISCARDED, branch_turns
from agentrl.rollout.sampler import MCPSampler
from agentrl.types import BRANCH, FINAL_ANSWER, DispatchKind, RecordStatus, StopReason
from scripted_chat_model import ScriptedChatModel
from scripted_engine import ScriptedEngine
from scripted_rollout import RECORD, TASK, Rollout
from tiny_chat import write_tiny_chat


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat(tmp_path_factory.mktemp("chat"))


def look(n: int) -> str:
    """A page of 200 characters that ends with its number."""
    return f"page {n}. ".rjust(200, ".")


def call(n: int) -> str:
    return f'step {n} <tool_call>{{"name": "look", "arguments": {{"n": {n}}}}}</tool_call>'


def seen_pages(context: str) -> list[int]:
    return [n for n in range(60) if f"page {n}. " in context]


def explorer(context: str, depth: int) -> str:
    """Looks at the page after the newest one it can see, or remembers in a summary."""
    numbers = [n for n in range(60) if f"step {n} " in context]
    return call(max(numbers, default=-1) + 1)


def remember(request: str) -> str:
    """A summary that says how far the material went."""
    return f"step {max(seen_pages(request), default=0)} was done "


def make(model_dir: Path, **settings: object) -> Rollout:
    return Rollout(model_dir=model_dir, script=explorer, tools=[look], settings=settings)


def contexts(rollout: Rollout) -> list[str]:
    decode = rollout.engine.tokenizer.decode
    return [decode(list(request.input_ids), skip_special_tokens=False) for request in rollout.engine.requests]


def branch_starts(result: RolloutResult) -> list[int]:
    return [turn.index for turn in result.turns if turn.tokens.parent_turn == -1]


def assert_token_exact(rollout: Rollout, result: RolloutResult) -> None:
    """The chain of a turn is what the engine saw; each sampled token is trained once, with its log-prob."""
    for position, request in enumerate(rollout.engine.requests):
        chain = branch_turns(result.turns[: position + 1])
        ids = [token for turn in chain for token in (*turn.tokens.prompt_ids, *turn.tokens.completion_ids)]
        own = len(result.turns[position].tokens.completion_ids)
        assert ids[: len(ids) - own] == list(request.input_ids)
    rows = merge_record(result.record, result.turns, reward=1.0, advantages=[1.0] * len(result.turns))
    assert sum(int(row.loss_mask.sum()) for row in rows) == sum(len(t.tokens.completion_ids) for t in result.turns)
    logprobs = np.concatenate([row.behaviour_logprobs[row.loss_mask] for row in rows])
    assert logprobs.tolist() == [value for turn in result.turns for value in turn.tokens.logprobs]


async def test_at_the_context_limit_room_is_left_to_ask_for_the_answer(model_dir: Path) -> None:
    rollout = make(model_dir, force_final_answer=True)
    rollout.script = lambda context, depth: "<answer>5</answer>" if "last turn" in context else explorer(context, depth)
    result = await rollout.run()
    assert (result.stop_reason, result.answer) == (StopReason.ANSWER, "5")
    assert len(result.turns) > 2
    assert result.turns[-1].model.request[FINAL_ANSWER] == "context_limit"
    assert len(rollout.engine.requests[-1].input_ids) <= 1200
    assert_token_exact(rollout, result)


async def test_a_forced_answer_that_gives_none_ends_with_the_limit_and_runs_no_tools(model_dir: Path) -> None:
    result = await make(model_dir, force_final_answer=True).run()
    assert result.stop_reason is StopReason.CONTEXT_LIMIT
    assert result.turns[-1].tools == ()
    unforced = await make(model_dir).run()
    assert unforced.stop_reason is StopReason.CONTEXT_LIMIT
    assert all(FINAL_ANSWER not in turn.model.request for turn in unforced.turns)


@pytest.mark.parametrize("size", range(150, 600, 37))
async def test_the_forced_answer_fits_whatever_the_size_of_the_results(model_dir: Path, size: int) -> None:
    def look(n: int) -> str:
        """A page."""
        return "x" * size

    rollout = make(model_dir, force_final_answer=True)
    rollout.tools = [look]
    result = await rollout.run()
    assert FINAL_ANSWER in result.turns[-1].model.request
    assert len(rollout.engine.requests[-1].input_ids) <= 1200


async def test_last_k_goes_on_with_the_last_turns_as_they_were_sampled(model_dir: Path) -> None:
    rollout = make(model_dir, new_context="last_k", last_k_turns=1, max_turns=9)
    result = await rollout.run()
    assert result.stop_reason is StopReason.MAX_TURNS
    first, second = branch_starts(result)[:2]
    assert (first, second > 1) == (0, True)
    start = result.turns[second]
    assert start.model.request[BRANCH] == {"strategy": "last_k", "because": "context_limit"}
    kept = result.turns[second - 1].tokens.completion_ids
    head = result.turns[0].tokens.prompt_ids
    assert start.tokens.prompt_ids[: len(head) + len(kept)] == (*head, *kept)
    assert seen_pages(contexts(rollout)[second]) == [second - 1]
    assert_token_exact(rollout, result)


@pytest.mark.parametrize("k", [1, 2])
async def test_what_a_new_context_keeps_counts_towards_its_limit(model_dir: Path, k: int) -> None:
    rollout = make(model_dir, new_context="last_k", last_k_turns=k, max_turns=12)
    result = await rollout.run()
    first, second, third = branch_starts(result)[:3]
    assert third - second == second - first - k  # turns that fit behind those that were kept
    assert max(len(request.input_ids) for request in rollout.engine.requests) <= 1200


async def test_discard_all_tools_keeps_what_was_said_and_only_the_newest_result(model_dir: Path) -> None:
    rollout = make(model_dir, new_context="discard_all_tools", max_turns=9)
    result = await rollout.run()
    second = branch_starts(result)[1]
    context = contexts(rollout)[second]
    assert seen_pages(context) == [second - 1]
    assert f"step {second - 2} " in context
    assert DISCARDED in context
    assert_token_exact(rollout, result)


def make_browser(model: ScriptedChatModel, **settings: object) -> Browser:
    return Browser(
        model=model, tools=("look",), min_result_tokens=10**6, max_result_tokens=250, timeout_s=5.0, encode=str.encode,
        clock=lambda: datetime.now(UTC), **settings,
    )  # fmt: skip


async def test_discard_all_goes_on_from_a_summary_made_in_pieces_that_fit(model_dir: Path) -> None:
    model = ScriptedChatModel(remember)
    rollout = make(model_dir, new_context="discard_all", max_turns=12)
    rollout.browser = make_browser(model)
    result = await rollout.run()
    starts = branch_starts(result)
    assert len(starts) > 2
    assert max(len(request.split("<material>")[1]) for request in model.requests) < 250 + 120
    context = contexts(rollout)[starts[1]]
    assert f"step {starts[1] - 1} was done" in context
    assert seen_pages(context) == []
    summaries = [one for one in result.turns[starts[1]].tools if one.kind is DispatchKind.BROWSE]
    assert len(summaries) > 1
    assert str(summaries[-1].response["content"]) in str(context)
    earlier = str(summaries[-1].response["content"])
    assert any(earlier in request.split("<material>")[0] for request in model.requests[len(summaries) :])
    assert_token_exact(rollout, result)


async def test_without_a_summary_the_record_is_a_typed_failure(model_dir: Path) -> None:
    rollout = make(model_dir, new_context="discard_all")
    error = ChatError("scripted: refused", kind=ChatErrorKind.UNREACHABLE)
    rollout.browser = make_browser(ScriptedChatModel(lambda request: error))
    rollout.engine = ScriptedEngine(model_dir, explorer)
    record, _ = await MCPSampler(TASK, record=RECORD, committed=(), agent=rollout.agent()).sample()
    assert (record.status, record.stop_reason, record.score) == (RecordStatus.FAILED, StopReason.ENGINE_ERROR, None)
    assert "scripted: refused" in str(record.error)


async def test_discard_all_without_a_browse_agent_is_refused_before_anything_is_sampled(model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="browse_agent"):
        await make(model_dir, new_context="discard_all").run()


async def test_a_repetition_can_be_answered_with_a_new_context_without_the_repeated_turns(model_dir: Path) -> None:
    rollout = make(
        model_dir, new_context="last_k", enable_repetition_compress=True, repetition_early_stop_times=2, max_turns=7
    )
    rollout.script = lambda context, depth: call(0) if "step 0 " not in context else call(1)
    result = await rollout.run()
    assert result.stop_reason is StopReason.MAX_TURNS
    second = branch_starts(result)[1]
    assert second == 3
    assert result.turns[second].model.request[BRANCH]["because"] == "repetition"
    context = contexts(rollout)[second]
    assert ("step 0 " in context, "step 1 " in context) == (True, False)
    assert_token_exact(rollout, result)


@pytest.mark.parametrize("strategy", ["last_k", "discard_all_tools", "discard_all"])
@pytest.mark.parametrize("num_committed", range(10))
async def test_a_record_taken_over_between_branches_ends_as_if_nothing_had_happened(
    model_dir: Path, strategy: str, num_committed: int
) -> None:
    def fresh() -> Rollout:
        rollout = make(model_dir, new_context=strategy, last_k_turns=1, max_turns=9, force_final_answer=True)
        rollout.browser = make_browser(ScriptedChatModel(remember))
        return rollout

    whole = await fresh().run()
    assert len(branch_starts(whole)) > 1
    resumed = await fresh().run(committed=whole.turns[:num_committed])
    assert [turn.tokens for turn in resumed.turns] == [turn.tokens for turn in whole.turns]
    assert resumed.stop_reason is whole.stop_reason


async def test_a_completion_that_ends_in_a_loop_is_a_repetition(model_dir: Path) -> None:
    rollout = make(model_dir)
    rollout.script = lambda context, depth: "so " * 500
    result = await rollout.run()
    assert (result.stop_reason, len(result.turns)) == (StopReason.REPETITION, 1)
    rollout.settings["max_loop_repeats"] = 0
    assert (await rollout.run()).stop_reason is StopReason.FORMAT_ERROR


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"enable_repetition_compress": True}, "set new_context"),
        ({"force_final_answer": True, "max_new_tokens": 800}, "raise max_prompt_tokens"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RolloutConfig.model_validate(settings)
