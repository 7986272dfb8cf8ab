"""Meta-episodes against a scripted engine: what each episode sees, how it ends, and what is kept of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from agentrl.algo.score_versions import can_be_scored
from agentrl.errors import ConfigError
from agentrl.rollout.agent import Agent
from agentrl.rollout.browse import Browser
from agentrl.rollout.meta_sampler import MetaEpisodeSampler
from agentrl.rollout.partial import LegLimits
from agentrl.rollout.scoring import RecordScorer
from agentrl.scoring import ScoringContext
from agentrl.store import MemoryStore
from agentrl.tools import FunctionToolbox
from agentrl.types import (
    BRANCH,
    EPISODE,
    FINAL_ANSWER,
    Record,
    RecordStatus,
    Recovery,
    StopReason,
    ToolRequest,
    ToolResult,
    ToolStatus,
    Turn,
)
from chat_server import Status, chat_server
from judges import judge_for
from scripted_chat_model import ScriptedChatModel
from scripted_engine import Script, ScriptedEngine
from scripted_rollout import RECORD, TASK, Rollout
from tiny_chat import write_tiny_chat

CALL = '<tool_call>{"name": "look", "arguments": {"n": 1}}</tool_call>'
REFLECT = "Reflect now."
QUESTION = "<|im_start|>user\n2+3?<|im_end|>"


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat(tmp_path_factory.mktemp("chat"))


def look(n: int) -> str:
    """A page that spells an answer, which is not the model's."""
    return f"page {n}: <answer>5</answer>"


def play(*texts: str) -> Script:
    """The n-th completion of the Record is the n-th text."""
    remaining = list(texts)
    return lambda context, depth: remaining.pop(0)


def by_context(*texts: str) -> Callable[[str, int], str]:
    """The n-th completion of each episode is the n-th text: a function of the context, so also after a takeover."""

    def script(context: str, depth: int) -> str:
        own = context.rpartition(REFLECT)[2]
        return texts[min(own.count("<|im_start|>assistant"), len(texts)) - 1]

    return script


def make(
    model_dir: Path, script: Script, *, reflection: dict[str, object] | None = None, **settings: object
) -> Rollout:
    wanted: dict[str, object] = {"episodes": 3, "reflection_prompt": REFLECT} | (reflection or {})
    return Rollout(
        model_dir=model_dir, script=script, tools=[look], settings={"max_turns": 3} | settings, reflection=wanted
    )


def contexts(rollout: Rollout) -> list[str]:
    decode = rollout.engine.tokenizer.decode
    return [decode(list(request.input_ids), skip_special_tokens=False) for request in rollout.engine.requests]


def outcomes(record: Record) -> list[tuple[str | None, float | None, str, int]]:
    return [(e.answer, e.score, e.stop_reason.value, e.num_turns) for e in record.episodes]


async def test_every_episode_follows_a_request_to_reflect_and_is_scored_on_its_own(model_dir: Path) -> None:
    rollout = make(model_dir, play(CALL, "<answer>4</answer>", "hm <answer>5</answer>", CALL, "<answer>6</answer>"))
    record, turns = await rollout.sample()
    assert outcomes(record) == [("4", 0.0, "answer", 2), ("5", 1.0, "answer", 1), ("6", 0.0, "answer", 2)]
    assert [episode.num_tool_calls for episode in record.episodes] == [1, 0, 1]
    assert [episode.num_completion_tokens for episode in record.episodes] == [
        sum(len(turn.tokens.completion_ids) for turn in part) for part in (turns[:2], turns[2:3], turns[3:])
    ]
    assert record.turn_scores == (None, 0.0, 1.0, None, 0.0)
    assert (record.status, record.stop_reason) == (RecordStatus.FINISHED, StopReason.ANSWER)
    assert (record.answer, record.score) == ("6", 0.0)
    assert [turn.model.request.get(EPISODE) for turn in turns] == [
        None, None, {"number": 1, "after": "answer"}, {"number": 2, "after": "answer"}, None,
    ]  # fmt: skip
    assert contexts(rollout)[2].endswith(
        f"<answer>4</answer><|im_end|>\n<|im_start|>user\n{REFLECT}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [turn.tokens.parent_turn for turn in turns] == [-1, 0, 1, 2, 3]


async def test_an_episode_without_an_answer_scores_0_and_says_why_and_the_next_one_sees_its_last_results(
    model_dir: Path,
) -> None:
    """Answers inside thinking and in tool results are none; the last of several is the answer."""
    script = play(
        CALL, "<think><answer>5</answer></think>" + CALL, CALL + " ", "<answer>4</answer> no, <answer>5</answer>", "1",
        "2", "3",
    )  # fmt: skip
    rollout = make(model_dir, script)
    record, turns = await rollout.sample()
    assert outcomes(record) == [(None, 0.0, "max_turns", 3), ("5", 1.0, "answer", 1), (None, 0.0, "max_turns", 3)]
    assert (record.answer, record.score, record.stop_reason) == (None, 0.0, StopReason.MAX_TURNS)
    assert turns[3].model.request[EPISODE] == {"number": 1, "after": "max_turns"}
    ending = contexts(rollout)[3].rpartition("<tool_response>")[2]
    assert ending.startswith("page 1")
    assert REFLECT in ending


async def test_limits_hold_for_each_episode_and_repairs_happen_within_one(model_dir: Path) -> None:
    malformed = "<tool_call>{oops</tool_call>"
    script = play("hm", malformed, "<answer>4</answer>", "hm", "hm", malformed, "hm", "<answer>5</answer>")
    rollout = make(model_dir, script, repetition_early_stop_times=2, max_turns=4)
    record, turns = await rollout.sample()
    assert outcomes(record) == [("4", 0.0, "answer", 3), (None, 0.0, "repetition", 2), ("5", 1.0, "answer", 3)]
    assert "Call a tool, or give the final answer." in contexts(rollout)[1]
    assert turns[1].tools[0].status == ToolStatus.MALFORMED
    assert [episode.num_tool_calls for episode in record.episodes] == [1, 0, 1]


async def test_a_truncated_completion_ends_its_episode_alone(model_dir: Path) -> None:
    record, _ = await make(
        model_dir, play("".join(map(str, range(99))) * 2, "<answer>5</answer>", "<answer>5</answer>")
    ).sample()
    assert outcomes(record)[0] == (None, 0.0, "format_error", 1)
    assert [score for _, score, _, _ in outcomes(record)] == [0.0, 1.0, 1.0]


async def test_a_tool_that_reports_an_error_is_answered_within_the_episode(model_dir: Path) -> None:
    def look(n: int) -> str:
        """A page that is not there."""
        raise ValueError("no such page")

    rollout = make(model_dir, play(CALL, "<answer>4</answer>", "<answer>5</answer>", "<answer>5</answer>"))
    rollout.tools = [look]
    record, turns = await rollout.sample()
    assert turns[0].tools[0].status == ToolStatus.TOOL_ERROR
    assert outcomes(record)[0] == ("4", 0.0, "answer", 2)
    assert record.score == 1.0


async def test_tools_that_are_away_fail_the_record_and_no_episode_of_it_has_a_score(model_dir: Path) -> None:
    class DeadToolbox(FunctionToolbox):
        async def call(self, request: ToolRequest, *, deadline_s: float) -> ToolResult:
            return ToolResult(status=ToolStatus.CRASHED, content="server died", error="server died")

    rollout = make(model_dir, play("<answer>5</answer>", CALL))
    rollout.engine = ScriptedEngine(model_dir, rollout.script)
    agent = replace(rollout.agent(), toolbox=DeadToolbox([look]))
    record, _ = await MetaEpisodeSampler(TASK, record=RECORD, committed=(), agent=agent).sample()
    assert (record.status, record.stop_reason, record.score) == (RecordStatus.FAILED, StopReason.TOOL_ERROR, None)
    assert (record.episodes, record.turn_scores) == ((), ())


@pytest.mark.parametrize(
    ("reflection", "settings"),
    [
        ({}, {}),
        ({"reflection_context": "last_k"}, {}),
        ({"tool_calls_per_episode": 1}, {"force_final_answer": True}),
        ({"reflect_when": "wrong"}, {}),
        ({"episodes": 1, "episode_unit": "step"}, {"max_turns": 9}),
        ({"episodes": 6}, {"max_prompt_tokens": 700}),
        ({"episodes": 6}, {"max_prompt_tokens": 700, "new_context": "last_k", "last_k_turns": 2}),
        ({"episodes": 6}, {"max_prompt_tokens": 700, "new_context": "discard_all_tools"}),
        ({"episodes": 6}, {"max_prompt_tokens": 700, "new_context": "discard_all"}),
        ({"episodes": 6}, {"max_prompt_tokens": 700, "force_final_answer": True}),
    ],
)
async def test_a_record_taken_over_at_any_turn_ends_as_if_nothing_had_happened(
    model_dir: Path, reflection: dict[str, object], settings: dict[str, object]
) -> None:
    def fresh() -> Rollout:
        rollout = make(model_dir, by_context("hm " * 20, CALL, "<answer>4</answer>"), reflection=reflection, **settings)
        rollout.browser = make_browser()
        return rollout

    whole, turns = await fresh().sample()
    for num_committed in range(len(turns) + 1):
        resumed, again = await fresh().sample(committed=turns[:num_committed])
        assert [turn.tokens for turn in again] == [turn.tokens for turn in turns]
        assert [turn.model.request for turn in again] == [turn.model.request for turn in turns]
        assert (resumed.episodes, resumed.turn_scores) == (whole.episodes, whole.turn_scores)
        assert (resumed.answer, resumed.stop_reason) == (whole.answer, whole.stop_reason)


def make_browser() -> Browser:
    return Browser(
        model=ScriptedChatModel(lambda request: "looked at page 1"), tools=("look",), min_result_tokens=10**6,
        max_result_tokens=10**6, timeout_s=5.0, encode=str.encode, clock=lambda: datetime.now(UTC),
    )  # fmt: skip


async def test_an_episode_that_finds_no_room_is_present_with_score_0_and_the_question_is_never_lost(
    model_dir: Path,
) -> None:
    rollout = make(model_dir, by_context(CALL, "<answer>5</answer>"), reflection={"episodes": 6}, max_prompt_tokens=500)
    record, turns = await rollout.sample()
    num_begun = sum(episode.num_turns > 0 for episode in record.episodes)
    assert 1 < num_begun < 6
    assert outcomes(record)[num_begun:] == [(None, 0.0, "context_limit", 0)] * (6 - num_begun)
    assert (record.status, record.stop_reason, record.score) == (RecordStatus.FINISHED, StopReason.CONTEXT_LIMIT, 0.0)
    assert outcomes(record)[0] == ("5", 1.0, "answer", 2)
    assert len(record.turn_scores) == len(turns)
    assert all(context.startswith(QUESTION) for context in contexts(rollout))


async def test_an_episode_that_overflows_stops_there_and_the_next_one_sees_no_result_that_does_not_fit(
    model_dir: Path,
) -> None:
    def look(n: int) -> str:
        """A long page."""
        return "x" * 900

    rollout = make(model_dir, by_context(CALL, "<answer>5</answer>"), max_prompt_tokens=400)
    rollout.tools = [look]
    record, turns = await rollout.sample()
    assert outcomes(record)[0] == (None, 0.0, "context_limit", 1)
    assert turns[1].model.request[EPISODE] == {"number": 1, "after": "context_limit"}
    assert "xxx" not in contexts(rollout)[1]
    assert all(context.startswith(QUESTION) for context in contexts(rollout))


@pytest.mark.parametrize("new_context", ["last_k", "discard_all_tools", "discard_all"])
async def test_with_a_new_context_every_episode_is_had_in_a_recorded_branch(model_dir: Path, new_context: str) -> None:
    rollout = make(
        model_dir, by_context(CALL, "<answer>5</answer>"), reflection={"episodes": 6}, max_prompt_tokens=500,
        new_context=new_context, last_k_turns=2,
    )  # fmt: skip
    rollout.browser = make_browser()
    record, turns = await rollout.sample()
    assert [score for _, score, _, _ in outcomes(record)] == [1.0] * 6
    opened = [turn for turn in turns if {BRANCH, EPISODE} <= turn.model.request.keys()]
    assert opened
    assert {turn.model.request[BRANCH]["strategy"] for turn in opened} == {new_context}
    assert all(context.startswith("<|im_start|>user\n2+3?") and REFLECT in context for context in contexts(rollout)[2:])
    if new_context == "discard_all":
        starts = [contexts(rollout)[turn.index] for turn in opened]
        assert all("looked at page 1\n\nReflect now.<|im_end|>" in context for context in starts)


async def test_a_first_prompt_that_does_not_fit_leaves_every_episode_without_turns(model_dir: Path) -> None:
    record, turns = await make(model_dir, play(), max_prompt_tokens=10).sample()
    assert (turns, outcomes(record)) == ((), [(None, 0.0, "context_limit", 0)] * 3)
    assert (record.score, record.turn_scores) == (0.0, ())


async def test_short_context_shows_the_question_and_the_last_episodes_token_for_token(model_dir: Path) -> None:
    script = play(CALL, "<answer>1</answer>", "<answer>2</answer>", CALL, "<answer>3</answer>", "<answer>5</answer>")
    rollout = make(model_dir, script, reflection={"episodes": 4, "reflection_context": "last_k"})
    record, turns = await rollout.sample()
    assert [episode.answer for episode in record.episodes] == ["1", "2", "3", "5"]
    assert [turn.tokens.parent_turn for turn in turns] == [-1, 0, 1, -1, 3, -1]
    assert turns[3].model.request[BRANCH] == {"strategy": "last_k", "because": "reflection"}
    head = turns[0].tokens.prompt_ids
    request = turns[2].tokens.prompt_ids
    assert turns[3].tokens.prompt_ids == (*head, *turns[2].tokens.completion_ids, *request)
    kept = (*turns[3].tokens.completion_ids, *turns[4].tokens.prompt_ids, *turns[4].tokens.completion_ids)
    assert turns[5].tokens.prompt_ids == (*head, *kept, *request)


async def test_a_short_context_with_room_keeps_results_whatever_a_full_one_would_discard(model_dir: Path) -> None:
    reflection = {"reflection_context": "last_k"}
    script = by_context(CALL, "<answer>5</answer>")
    kept, _ = await make(model_dir, script, reflection=reflection).sample()
    rollout = make(model_dir, script, reflection=reflection, new_context="discard_all_tools")
    record, _ = await rollout.sample()
    assert record.episodes == kept.episodes
    assert all("page 1" in context and "discarded" not in context for context in contexts(rollout)[1:])


@pytest.mark.parametrize("new_context", ["disabled", "last_k", "discard_all_tools", "discard_all"])
@pytest.mark.parametrize("reflection_context", ["full", "last_k"])
async def test_at_any_length_of_context_the_question_stays_and_every_episode_is_accounted_for(
    model_dir: Path, new_context: str, reflection_context: str
) -> None:
    for max_prompt_tokens in range(20, 620, 75):
        rollout = make(
            model_dir, by_context("hm " * 9, CALL, "<answer>5</answer>"),
            reflection={"episodes": 4, "reflection_context": reflection_context}, max_prompt_tokens=max_prompt_tokens,
            new_context=new_context, last_k_turns=2,
        )  # fmt: skip
        rollout.browser = make_browser()
        record, turns = await rollout.sample()
        assert (record.status, len(record.episodes)) == (RecordStatus.FINISHED, 4)
        assert sum(episode.num_turns for episode in record.episodes) == len(turns)
        assert all(context.startswith("<|im_start|>user\n2+3?") for context in contexts(rollout))
        assert all(len(request.input_ids) <= max_prompt_tokens for request in rollout.engine.requests)


async def test_short_context_may_keep_more_than_one_episode(model_dir: Path) -> None:
    script = play(*[f"<answer>{n}</answer>" for n in range(5)])
    reflection = {"episodes": 5, "reflection_context": "last_k", "keep_episodes": 2}
    rollout = make(model_dir, script, reflection=reflection)
    _, turns = await rollout.sample()
    assert [turn.tokens.parent_turn for turn in turns] == [-1, 0, 1, -1, -1]
    seen = [[n for n in range(5) if f"<answer>{n}</answer>" in context] for context in contexts(rollout)]
    assert seen == [[], [0], [0, 1], [1, 2], [2, 3]]
    assert [context.count(REFLECT) for context in contexts(rollout)] == [0, 1, 2, 2, 2]


async def test_after_a_right_answer_nothing_is_reflected_on_if_only_wrong_ones_are_to_be(model_dir: Path) -> None:
    reflection = {"reflect_when": "wrong"}
    rollout = make(model_dir, play(CALL, "<answer>4</answer>", "<answer>5</answer>"), reflection=reflection)
    record, _ = await rollout.sample()
    assert outcomes(record) == [("4", 0.0, "answer", 2), ("5", 1.0, "answer", 1)]
    assert (record.stop_reason, record.score) == (StopReason.ANSWER, 1.0)
    lost, _ = await make(
        model_dir, by_context(CALL, "<answer>4</answer>"), reflection=reflection, max_prompt_tokens=260
    ).sample()
    assert outcomes(lost)[-1] == (None, 0.0, "context_limit", 0)
    assert len(lost.episodes) == 3


async def test_reflecting_on_wrong_answers_is_refused_for_a_judge(model_dir: Path) -> None:
    rollout = make(model_dir, play(), reflection={"reflect_when": "wrong"})
    with pytest.raises(ConfigError, match=r"reflect_when = wrong: scorer 'agentcpm' asks a judge"):
        await rollout.sample(task=replace(TASK, scorer="agentcpm"))


async def test_a_record_whose_rule_cannot_decide_whether_to_go_on_is_aborted_and_not_scored_later(
    model_dir: Path,
) -> None:
    rollout = make(model_dir, play("<answer>4</answer>"), reflection={"reflect_when": "wrong"})
    record, _ = await rollout.sample(task=replace(TASK, answer={"kind": "matrix"}))
    assert (record.status, record.stop_reason) == (RecordStatus.FAILED, StopReason.ABORTED)
    assert "neither text, nor a number" in (record.error or "")
    assert not can_be_scored(record)


async def test_calls_beyond_the_limit_of_an_episode_are_not_made_and_the_next_completion_is_its_last(
    model_dir: Path,
) -> None:
    script = play(CALL, CALL + CALL, CALL, CALL + CALL, "<answer>5</answer>", "<answer>5</answer>")
    rollout = make(model_dir, script, reflection={"tool_calls_per_episode": 2}, max_turns=9)
    record, turns = await rollout.sample()
    assert [call.status for call in turns[1].tools] == [ToolStatus.OK, ToolStatus.OVER_LIMIT]
    assert turns[2].tools == ()
    assert turns[2].model.request[FINAL_ANSWER] == "max_turns"
    assert outcomes(record) == [(None, 0.0, "max_turns", 3), ("5", 1.0, "answer", 2), ("5", 1.0, "answer", 1)]
    assert "This is the last turn" not in contexts(rollout)[2]


async def test_a_forced_answer_is_asked_for_in_every_episode(model_dir: Path) -> None:
    def script(context: str, depth: int) -> str:
        return "<answer>5</answer>" if context.rpartition(REFLECT)[2].count("last turn") else CALL + " " * depth

    rollout = make(
        model_dir, script, reflection={"tool_calls_per_episode": 2}, force_final_answer=True, max_turns=9
    )  # fmt: skip
    record, turns = await rollout.sample()
    assert outcomes(record) == [("5", 1.0, "answer", 3)] * 3
    assert [FINAL_ANSWER in turn.model.request for turn in turns] == [False, False, True] * 3


async def test_each_step_is_scored_by_the_answer_beside_its_calls(model_dir: Path) -> None:
    script = play(f"<answer>4</answer>{CALL}", "hm", CALL, f"<answer>5</answer>{CALL}", "<answer>6</answer>")
    rollout = make(model_dir, script, reflection={"episodes": 1, "episode_unit": "step"}, max_turns=9)
    record, turns = await rollout.sample()
    assert outcomes(record) == [
        ("4", 0.0, "answer", 1), (None, 0.0, "format_error", 2), ("5", 1.0, "answer", 1), ("6", 0.0, "answer", 1),
    ]  # fmt: skip
    assert record.turn_scores == (0.0, None, 0.0, 1.0, 0.0)
    assert [len(turn.tools) for turn in turns] == [1, 0, 1, 1, 0]
    assert (record.answer, record.stop_reason) == ("6", StopReason.ANSWER)


async def test_a_judge_that_fails_for_one_episode_fails_the_record_and_the_answers_are_kept(model_dir: Path) -> None:
    def behave(request: dict[str, object]) -> str | Status:
        return Status(500) if "second" in str(request) else "Correct"

    store = MemoryStore()
    texts = ("<answer>first</answer>", "<answer>second</answer>", "<answer>third</answer>")
    rollout = make(model_dir, play(*texts))
    rollout.engine = ScriptedEngine(model_dir, rollout.script)
    async with chat_server(behave) as server, judge_for([server.url], store) as judge:
        scoring = RecordScorer(context=ScoringContext(judge=judge), store=store)
        agent = replace(rollout.agent(), scoring=scoring)
        task = replace(TASK, scorer="agentcpm")
        record, _ = await MetaEpisodeSampler(task, record=RECORD, committed=(), agent=agent).sample()
    assert (record.status, record.stop_reason, record.score) == (RecordStatus.FAILED, StopReason.JUDGE_ERROR, None)
    assert [(e.answer, e.score) for e in record.episodes] == [("first", None), ("second", None), ("third", None)]
    assert (record.answer, record.turn_scores) == ("third", ())


async def test_a_meta_episode_that_is_put_down_between_turns_ends_as_one_that_is_not(model_dir: Path) -> None:
    script = by_context("hm", CALL, "<answer>5</answer>")
    whole, turns = await make(model_dir, script).sample()
    committed: Sequence[Turn] = ()
    for version in range(len(turns)):
        rollout = make(model_dir, script)
        rollout.engine = ScriptedEngine(model_dir, script, version=version)
        leg = LegLimits(max_tokens=1, max_s=None, max_staleness=99)
        agent: Agent = replace(
            rollout.agent(), leg_limits=leg, toolbox=FunctionToolbox([look], recovery=Recovery.STATELESS)
        )
        record, committed = await MetaEpisodeSampler(TASK, record=RECORD, committed=committed, agent=agent).sample()
        assert record.status is (RecordStatus.FINISHED if version == len(turns) - 1 else RecordStatus.RUNNING)
    assert record.episodes == whole.episodes
    assert [turn.tokens.prompt_ids for turn in committed] == [turn.tokens.prompt_ids for turn in turns]
