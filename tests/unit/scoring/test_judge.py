"""The judge against a real local server: rule, cache, model, and what a failure is."""

from __future__ import annotations

import pytest

from agentrl.errors import ConfigError, ScoringError
from agentrl.scoring import MCPScorerFactory, ScoreRequest, ScoringContext, score_request
from agentrl.scoring.judge import JudgeCall
from agentrl.store.memory import MemoryStore
from chat_server import HANG, MALFORMED, Behaviour, Fault, Status, chat_server
from judges import judge_for

TRUTH = {"query": "Who painted it?", "answer": "Leonardo da Vinci"}


async def judged(
    behave: Behaviour, *, scorer: str = "agentcpm", answer: str | None = "Leonardo", store: MemoryStore | None = None,
    template: str | None = None,
) -> tuple[float | str, list[JudgeCall], int]:  # fmt: skip
    """Score or error, the calls logged, the requests the server saw."""
    calls: list[JudgeCall] = []
    async with chat_server(behave) as server:
        async with judge_for([server.url], store or MemoryStore(), template=template, deadline_s=2.0) as judge:
            request = ScoreRequest(answer=answer, ground_truth=TRUTH)
            try:
                result: float | str = await score_request(
                    scorer, request, context=ScoringContext(judge=judge), calls=calls
                )
            except ScoringError as error:
                result = str(error)
        return result, calls, len(server.requests)


@pytest.mark.parametrize(
    ("scorer", "reply", "score"),
    [
        ("agentcpm", '{"reason": "same", "verdict": "correct"}', 1.0),
        ("agentcpm", "Not correct", 0.0),
        ("asearcher", "Correct", 1.0),
        ("simpleqa", "A", 1.0),
        ("simpleqa", "A clear mismatch: B", 0.0),
        ("simpleqa", "NOT ATTEMPTED", 0.0),
        ("browsecomp", "reasoning: it differs\ncorrect: no", 0.0),
    ],
)
async def test_a_verdict_becomes_a_score_and_its_request_a_call(scorer, reply, score):
    result, calls, _ = await judged(lambda request: reply, scorer=scorer)
    assert result == score
    [call] = calls
    assert (call.status, call.model, call.response["text"]) == ("ok", "judge-0", reply)
    assert (call.response["prompt_tokens"], call.response["completion_tokens"]) == (11, 3)


async def test_an_accepted_answer_costs_no_request():
    assert await judged(lambda request: "B", answer=" leonardo  DA vinci. ") == (1.0, [], 0)


@pytest.mark.parametrize("answer", [None, "", "  "])
async def test_no_answer_is_wrong_without_a_request(answer):
    assert await judged(lambda request: "Correct", answer=answer) == (0.0, [], 0)


async def test_the_same_question_is_paid_for_once():
    store = MemoryStore()
    first = await judged(lambda request: "Incorrect", store=store)
    again = await judged(lambda request: "Correct", store=store)
    assert (first[0], first[2]) == (0.0, 1)
    assert again == (0.0, [], 0)
    other = await judged(lambda request: "Correct", store=store, answer="da Vinci")
    assert (other[0], other[2]) == (1.0, 1)
    template = "{question} {labeled_answer} {pred_answer}"
    another_prompt = await judged(lambda request: "Correct", store=store, template=template)
    assert (another_prompt[0], another_prompt[2]) == (1.0, 1)


async def test_a_reply_nobody_can_read_is_asked_for_again_with_a_reminder():
    result, calls, num_requests = await judged(lambda r: "Hm." if r["attempt"] == 0 else "Correct")
    assert (result, num_requests, [call.status for call in calls]) == (1.0, 2, ["unreadable", "ok"])
    assert [message["role"] for message in calls[1].request["messages"]] == ["system", "user", "assistant", "user"]


async def test_junk_to_the_end_is_a_failure_and_never_a_score():
    result, calls, _ = await judged(lambda request: "Hm.")
    assert "no verdict in 3 replies" in str(result)
    assert [call.status for call in calls] == ["unreadable"] * 3


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (Status(500), "overloaded"), (Status(429), "rate_limited"), (Status(401), "auth"),
        (Fault(MALFORMED), "invalid_reply"),
        (Fault(HANG), "timeout"),
    ],
    ids=["500", "429", "401", "malformed", "hang"],
)  # fmt: skip
async def test_an_outage_is_a_failure_and_never_a_score(fault, status):
    result, calls, _ = await judged(lambda request: fault)
    assert str(result).startswith("scorer 'agentcpm' failed: ScoringError: judge agentcpm: no chat model replied")
    assert [call.status for call in calls] == [status]


async def test_a_failed_verdict_is_not_cached():
    store = MemoryStore()
    assert isinstance((await judged(lambda request: Status(503), store=store))[0], str)
    assert (await judged(lambda request: "Correct", store=store))[0] == 1.0


async def test_the_rule_decides_first_in_a_cascade():
    assert await judged(lambda request: "B", scorer="(gaia or simpleqa)", answer="leonardo-da-vinci") == (1.0, [], 0)


async def test_the_version_of_a_judge_names_models_and_prompt():
    store = MemoryStore()
    async with judge_for(["http://h/v1"], store) as one, judge_for(["http://h/v1", "http://h/v1"], store) as two:
        versions = {
            MCPScorerFactory.version("agentcpm", judge=one),
            MCPScorerFactory.version("agentcpm", judge=two),
            MCPScorerFactory.version("simpleqa", judge=one),
        }
    assert len(versions) == 3
    with pytest.raises(ConfigError, match="agent_config_path"):
        MCPScorerFactory.version("agentcpm", judge=None)
