"""The connectors against a local service that speaks as Serper, Jina and a retriever do, and fails as they do."""

import asyncio
import json
import random
import time

import pytest
from aiohttp import web

from agentrl.tools.servers.connector import Connector
from agentrl.tools.servers.retriever import retriever_service, retriever_tool
from agentrl.tools.servers.serving import OperationError
from agentrl.tools.servers.web_page import page_service, read_page_tool
from agentrl.tools.servers.web_search import search_service, web_search_tool

KEY = "key-that-must-not-be-shown"
ORGANIC = [
    {"title": f"T{n}", "link": f"https://example.org/{n}", "snippet": f"S{n}", "date": "2025"} for n in range(30)
]


class FakeService:
    """Answers with what is queued, then with `reply`; keeps the requests."""

    def __init__(self):
        self.reply = {}
        self.queue = []
        self.requests = []

    async def handle(self, request):
        self.requests.append((dict(request.headers), await request.json()))
        status, headers, body = self.queue.pop(0) if self.queue else (200, {}, self.reply)
        if status is None:
            request.transport.close()
        if body == "hang":
            await asyncio.sleep(30)
        text = body if isinstance(body, str) else json.dumps(body)
        return web.Response(status=status or 200, headers=headers, text=text, content_type="application/json")


@pytest.fixture
async def service():
    fake = FakeService()
    app = web.Application()
    app.router.add_post("/", fake.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fake.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/"
    yield fake
    await runner.cleanup()


def fast(made):
    from dataclasses import replace

    return Connector(replace(made, first_pause_s=0.01), rng=random.Random(0))


def search_tool(service, *, timeout_s=5.0, max_chars=20_000):
    made = search_service(service.url, key=KEY, timeout_s=timeout_s)
    return web_search_tool(fast(made), max_results=10, max_chars=max_chars).run


def page_tool(service, *, max_chars=1000):
    return read_page_tool(fast(page_service(service.url, key=KEY, timeout_s=5.0)), max_chars=max_chars).run


async def test_a_search_sends_key_and_query_and_shows_answer_and_results(service):
    service.reply = {"answerBox": {"answer": "42", "link": "https://a.example"}, "organic": ORGANIC}
    text = await search_tool(service)({"query": "emba", "max_results": 2})
    headers, body = service.requests[0]
    assert (headers["X-API-KEY"], body) == (KEY, {"q": "emba", "num": 2})
    assert text == (
        "answer: 42\nhttps://a.example\n\nT0 (2025)\nhttps://example.org/0\nS0\n\nT1 (2025)\nhttps://example.org/1\nS1"
    )


async def test_a_page_is_read_with_the_key_as_bearer_token_and_cut(service):
    service.reply = {"code": 200, "data": {"title": "Emba", "url": "u", "content": "x" * 5000}}
    text = await page_tool(service)({"url": "https://example.org/a#b"})
    headers, body = service.requests[0]
    assert (headers["Authorization"], body) == (f"Bearer {KEY}", {"url": "https://example.org/a#b"})
    assert text.startswith("Emba\n\nxxx")
    assert text.endswith("[cut: the text has 5006 characters]")
    assert len(text) < 1100


def retriever(service, *, max_chars=1000):
    return retriever_tool(fast(retriever_service(service.url, timeout_s=5.0)), top_k=2, max_chars=max_chars).run


async def test_a_retriever_is_asked_for_one_query_and_its_passages_are_shown_with_their_titles(service):
    passages = [{"document": {"contents": f'"Emba {n}"\nA town\n on {n} rivers.'}, "score": 0.5} for n in range(3)]
    service.reply = {"result": [passages]}
    text = await retriever(service)({"query": "Emba"})
    assert service.requests[0][1] == {"queries": ["Emba"], "topk": 2, "return_scores": True}
    assert text == "[1] Emba 0: A town on 0 rivers.\n[2] Emba 1: A town on 1 rivers."
    service.reply = {"result": [[]]}
    assert await retriever(service)({"query": "x"}) == "No results."


@pytest.mark.parametrize("reply", [[], {"result": []}, {"result": [[], []]}, {"result": [[{"document": "x"}]]}])
async def test_what_is_no_list_of_passages_is_an_error_the_model_can_read(service, reply):
    service.reply = reply
    with pytest.raises(OperationError, match="no list of passages"):
        await retriever(service)({"query": "x"})


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (401, {"message": "Unauthorized."}, "auth"),
        (403, {"message": "Unauthorized."}, "auth"),
        (402, {"name": "InsufficientBalanceError", "readableMessage": "Account balance not enough"}, "quota"),
        (400, {"message": "Not enough credits", "statusCode": 400}, "quota"),
        (400, {"message": "Missing query"}, None),
        (422, "<html>nonsense</html>", None),
    ],
)
async def test_what_is_refused_for_good_is_typed_and_asked_once(service, status, body, expected):
    service.queue = [(status, {}, body)] * 9
    with pytest.raises(OperationError) as caught:
        await search_tool(service)({"query": "x"})
    assert (caught.value.status, len(service.requests)) == (expected, 1)
    assert KEY not in str(caught.value)


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504, None])
async def test_what_passes_is_asked_again(service, status):
    service.queue = [(status, {}, "")] * 2
    service.reply = {"organic": ORGANIC[:1]}
    assert "T0" in await search_tool(service)({"query": "x"})
    assert len(service.requests) == 3


@pytest.mark.parametrize(("status", "expected"), [(429, "rate_limited"), (500, None), (None, "timeout")])
async def test_what_does_not_pass_is_typed_after_the_last_retry(service, status, expected):
    service.queue = [(status, {}, "")] * 9
    with pytest.raises(OperationError) as caught:
        await search_tool(service)({"query": "x"})
    assert (caught.value.status, len(service.requests)) == (expected, 4)


async def test_retry_after_is_kept_to_and_a_pause_beyond_the_deadline_is_not_begun(service):
    service.queue = [(429, {"Retry-After": "0.3"}, "")]
    service.reply = {"organic": []}
    began = time.monotonic()
    assert await search_tool(service)({"query": "x"}) == "No results."
    assert time.monotonic() - began > 0.29
    service.queue = [(429, {"Retry-After": "600"}, "")]
    with pytest.raises(OperationError) as caught:
        await search_tool(service)({"query": "x"})
    assert (caught.value.status, caught.value.retry_after_s) == ("rate_limited", 600)


async def test_a_service_that_hangs_is_given_up_in_time(service):
    service.queue = [(200, {}, "hang")]
    with pytest.raises(OperationError) as caught:
        await search_tool(service, timeout_s=0.3)({"query": "x"})
    assert caught.value.status == "timeout"


@pytest.mark.parametrize("body", ["no json", [], "[" * 100_000])
async def test_a_reply_that_is_no_result_list_is_an_error(service, body):
    service.queue = [(200, {}, body)]
    with pytest.raises(OperationError, match="answered what is no"):
        await search_tool(service)({"query": "x"})


@pytest.mark.parametrize("body", [{}, {"organic": "x"}, {"organic": [1, None, {"title": 3}]}, {"answerBox": []}])
async def test_odd_results_do_not_break_the_search(service, body):
    service.queue = [(200, {}, body)]
    assert await search_tool(service)({"query": "x"}) in {"No results.", "3"}


@pytest.mark.parametrize("body", ["no json", [], {}, {"data": None}, {"data": {"content": 3}}])
async def test_a_page_without_content_is_an_error(service, body):
    service.queue = [(200, {}, body)]
    with pytest.raises(OperationError, match="page reader answered"):
        await page_tool(service)({"url": "https://example.org"})


async def test_a_reply_without_end_is_cut_off(service, monkeypatch):
    monkeypatch.setattr("agentrl.tools.servers.connector.MAX_REPLY_BYTES", 1000)
    service.queue = [(200, {}, "x" * 5000)]
    with pytest.raises(OperationError, match="longer than 1000 bytes"):
        await search_tool(service)({"query": "x"})
