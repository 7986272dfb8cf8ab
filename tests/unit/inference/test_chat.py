"""The chat client against a real local server that fails in every way we know."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from agentrl.config.agent_config import ScorerAgentConfig
from agentrl.errors import ChatError, ChatErrorKind
from agentrl.inference.chat import REST_S, HttpChatModel
from chat_server import (
    COMPRESSED,
    DROP,
    EMPTY,
    HANG,
    MALFORMED,
    SLOW_DRIP,
    TRUNCATED,
    Fault,
    Status,
    Usage,
    chat_server,
)

ASK = [{"role": "user", "content": "hello"}]
KEY = "sk-verysecretkey12345"


def agent(*urls: str, **settings: object) -> ScorerAgentConfig:
    models = [{"base_url": url, "model": f"m{number}", "api_key": KEY} for number, url in enumerate(urls)]
    defaults: dict[str, object] = {"max_retries": 3, "retry_delay": 0.01, "timeout": 5.0}
    return ScorerAgentConfig.model_validate({"models": models, **defaults, **settings})


async def complete(config: ScorerAgentConfig, *, deadline_s: float = 10.0):
    model = HttpChatModel(config, parameters={"temperature": 0})
    try:
        return await model.complete(ASK, deadline_s=deadline_s)
    finally:
        await model.close()


async def test_a_reply_carries_text_model_and_usage():
    async with chat_server(lambda request: "hi") as server:
        reply = await complete(agent(server.url, extra_body={"top_p": 0.5}))
    assert (reply.text, reply.model, reply.prompt_tokens, reply.completion_tokens) == ("hi", "m0", 11, 3)
    request = server.requests[0]
    assert (request["model"], request["messages"], request["key"]) == ("m0", ASK, KEY)
    assert (request["temperature"], request["top_p"]) == (0, 0.5)


@pytest.mark.parametrize(
    "fault",
    [Status(429), Status(500), Status(503), *map(Fault, (MALFORMED, TRUNCATED, EMPTY, DROP))],
    ids=str,
)
async def test_a_passing_fault_is_retried_until_a_reply_comes(fault):
    async with chat_server(lambda request: fault if request["attempt"] < 2 else "at last") as server:
        reply = await complete(agent(server.url))
    assert (reply.text, reply.num_attempts, len(server.requests)) == ("at last", 3, 3)


@pytest.mark.parametrize(
    ("code", "kind"), [(400, ChatErrorKind.REJECTED), (401, ChatErrorKind.AUTH), (404, ChatErrorKind.REJECTED)]
)
async def test_an_error_no_retry_can_mend_is_sent_once(code, kind):
    async with chat_server(lambda request: Status(code)) as server:
        with pytest.raises(ChatError) as caught:
            await complete(agent(server.url))
    assert (caught.value.kind, len(server.requests)) == (kind, 1)


async def test_the_next_model_answers_when_the_first_one_stays_away():
    async with chat_server(lambda request: Status(500)) as first, chat_server(lambda request: "yes") as second:
        reply = await complete(agent(first.url, second.url))
    assert (reply.text, reply.model, reply.num_attempts) == ("yes", "m1", 4)


@pytest.mark.parametrize("fault", [Status(500), Status(429), Status(401)], ids=str)
async def test_a_model_that_failed_is_passed_over_while_another_one_answers_and_tried_again_after_its_rest(
    fault, monkeypatch
):
    is_down = True
    async with (
        chat_server(lambda request: fault if is_down else "first again") as first,
        chat_server(lambda request: "second") as second,
    ):
        model = HttpChatModel(agent(first.url, second.url, max_retries=2))
        assert [(await model.complete(ASK, deadline_s=9)).text for _ in range(3)] == ["second"] * 3
        assert len(first.requests) == (1 if fault.code == 401 else 2)
        is_down = False
        assert (await model.complete(ASK, deadline_s=9)).text == "second"
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: time.monotonic() + REST_S)
        assert (await model.complete(ASK, deadline_s=9)).text == "first again"
        await model.close()


async def test_when_all_models_rest_all_are_tried():
    async with chat_server(lambda request: Status(503) if request["attempt"] < 4 else "back") as server:
        model = HttpChatModel(agent(server.url, server.url, max_retries=2))
        with pytest.raises(ChatError):
            await model.complete(ASK, deadline_s=9)
        assert (await model.complete(ASK, deadline_s=9)).text == "back"
        await model.close()


async def test_a_request_that_is_refused_makes_no_model_rest():
    async with (
        chat_server(lambda request: Status(400) if request["attempt"] == 0 else "first") as first,
        chat_server(lambda request: "second") as second,
    ):
        model = HttpChatModel(agent(first.url, second.url))
        assert [(await model.complete(ASK, deadline_s=9)).text for _ in range(2)] == ["second", "first"]
        await model.close()


async def test_an_outage_counts_as_one_although_the_last_model_refuses_the_key():
    async with chat_server(lambda request: Status(503)) as first, chat_server(lambda request: Status(401)) as second:
        with pytest.raises(ChatError, match="status 503") as caught:
            await complete(agent(first.url, second.url))
    assert caught.value.retryable


async def test_a_server_that_hangs_costs_its_timeout_and_then_the_next_one_answers():
    async with chat_server(lambda request: Fault(HANG)) as first, chat_server(lambda request: "yes") as second:
        reply = await complete(agent(first.url, second.url, timeout=0.2, max_retries=1))
    assert reply.model == "m1"


async def test_a_body_that_drips_for_ever_does_not_outlive_the_timeout():
    async with chat_server(lambda request: Fault(SLOW_DRIP)) as server:
        started = time.monotonic()
        with pytest.raises(ChatError) as caught:
            await complete(agent(server.url, timeout=0.3, max_retries=1))
    assert caught.value.kind is ChatErrorKind.TIMEOUT
    assert time.monotonic() - started < 2


async def test_a_compressed_reply_is_not_asked_for_and_not_unpacked():
    async with chat_server(lambda request: Fault(COMPRESSED)) as server:
        with pytest.raises(ChatError, match=r"no JSON \(\d{4,5} bytes\)") as caught:
            await complete(agent(server.url, max_retries=1))
    assert caught.value.kind is ChatErrorKind.INVALID_REPLY
    assert server.requests[0]["encoding"] == "identity"


async def test_the_deadline_bounds_requests_delays_and_failover_together():
    async with chat_server(lambda request: Status(503)) as server:
        started = time.monotonic()
        with pytest.raises(ChatError, match=r"within 0\.4 s") as caught:
            await complete(agent(server.url, server.url, max_retries=50, retry_delay=0.2), deadline_s=0.4)
    assert caught.value.kind is ChatErrorKind.TIMEOUT
    assert time.monotonic() - started < 2


async def test_a_refused_connection_is_unreachable_and_retried():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        with pytest.raises(ChatError, match="3 requests") as caught:
            await complete(agent(url))
    assert caught.value.kind is ChatErrorKind.UNREACHABLE


async def test_a_key_that_the_server_quotes_is_in_no_message_and_no_log(caplog):
    async with chat_server(lambda request: Status(401, f"bad key {KEY}")) as server:
        config = agent(server.url)
        with pytest.raises(ChatError) as caught:
            await complete(config)
    assert "status 401: bad key ***" in str(caught.value)
    assert KEY not in f"{caught.value!r} {caplog.text} {config!r} {config.model_dump_json()}"


async def test_a_key_in_a_reply_is_masked_and_a_word_as_short_as_a_dummy_key_is_not():
    async with chat_server(lambda request: f"{KEY} is EMPTY") as server:
        assert (await complete(agent(server.url))).text == "*** is EMPTY"
        dummy = ScorerAgentConfig.model_validate(
            {"models": [{"base_url": server.url, "model": "m", "api_key": "EMPTY"}]}
        )
        assert (await complete(dummy)).text.endswith("is EMPTY")


async def test_half_a_surrogate_pair_in_a_question_is_sent_as_a_question_mark():
    async with chat_server(lambda request: request["messages"][0]["content"]) as server:
        model = HttpChatModel(agent(server.url))
        try:
            reply = await model.complete([{"role": "user", "content": "a\ud800 \u00e9"}], deadline_s=10)
        finally:
            await model.close()
    assert reply.text == "a? \u00e9"


@pytest.mark.parametrize("count", [10**30, -1, 1e300, "many"])
async def test_a_number_of_tokens_that_nobody_can_count_is_none(count):
    async with chat_server(lambda request: Usage("hi", count)) as server:
        reply = await complete(agent(server.url))
    assert (reply.text, reply.prompt_tokens, reply.completion_tokens) == ("hi", 0, 3)


async def test_cancellation_passes_through_and_leaves_nothing_running():
    async with chat_server(lambda request: Fault(HANG)) as server:
        before = len(asyncio.all_tasks())
        running = asyncio.create_task(complete(agent(server.url)))
        while not server.requests:
            await asyncio.sleep(0.005)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert len(asyncio.all_tasks()) <= before
