"""HttpChatModel: agentrl.protocols.ChatModel over any OpenAI-compatible `/chat/completions`.

    model 1 ── retryable? again after a jittered, growing delay, `max_retries` requests in all ─┐
    model 2 ── the same ◄──────────── still failing, or an error no retry can mend ─────────────┘
    ...            one deadline over everything: requests, delays, failover

A model that failed so, or refused the key, rests for half a minute: requests go to the others at once while there are
any. So an outage of the first model costs its retries once, not with every request.

Retryable are 429, 5xx, a connection that fails or breaks off, a request past its own timeout, and a body that is no
chat completion. A wrong key or a refused request goes to the next model at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx2

from agentrl.config.agent_config import BrowseAgentConfig, ChatEndpoint, ScorerAgentConfig
from agentrl.errors import ChatError, ChatErrorKind
from agentrl.types import ChatReply

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 10.0
_LONGEST_DELAY_S = 30.0
_MAX_REPLY_BYTES = 8 * 1024 * 1024
_SHOWN_CHARACTERS = 300
_SHORTEST_SECRET = 6  # what is shorter, such as EMPTY, would blot out words of replies
_MOST_TOKENS = 10**9  # no request has more, and no database could add up any number a server may write
MASK = "***"
REST_S = 30.0


class HttpChatModel:
    """The models of one agent, in their order. Safe for concurrent use within one event loop."""

    def __init__(
        self,
        agent: ScorerAgentConfig | BrowseAgentConfig,
        *,
        parameters: Mapping[str, Any] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """`parameters` are fields of every request, e.g. {"temperature": 0}; the agent's `extra_body` wins."""
        self._agent = agent
        self._body = {**(parameters or {}), **agent.extra_body}
        self._rng = rng or random.Random()
        self._rests_until: dict[ChatEndpoint, float] = {}  # by the event loop's clock
        timeout = httpx2.Timeout(agent.timeout, connect=min(_CONNECT_TIMEOUT_S, agent.timeout))
        self._client = httpx2.AsyncClient(timeout=timeout, limits=httpx2.Limits(max_connections=None))

    @property
    def models(self) -> Sequence[str]:
        """See ChatModel.models."""
        return tuple(endpoint.model for endpoint in self._agent.models)

    async def close(self) -> None:
        """See ChatModel.close."""
        await self._client.aclose()

    async def complete(self, messages: Sequence[Mapping[str, str]], *, deadline_s: float) -> ChatReply:
        """See ChatModel.complete."""
        attempts = 0
        errors: list[ChatError] = []
        try:
            async with asyncio.timeout(deadline_s):
                for endpoint in self._awake():
                    delay_s = self._agent.retry_delay
                    for attempt in range(1, self._agent.max_retries + 1):
                        attempts += 1
                        try:
                            return await self._request(endpoint, messages, num_attempts=attempts)
                        except ChatError as error:
                            errors.append(error)
                        logger.warning("attempt %d: %s", attempts, errors[-1])
                        if not errors[-1].retryable or attempt == self._agent.max_retries:
                            break
                        await asyncio.sleep(delay_s * self._rng.uniform(0.5, 1.5))
                        delay_s = min(delay_s * self._agent.backoff_factor, _LONGEST_DELAY_S)
                    self._rest(endpoint, errors[-1])
        except TimeoutError:
            seen = f"; before that, {errors[-1]}" if errors else ""
            message = f"no chat model replied within {deadline_s:g} s ({attempts} requests{seen})"
            raise ChatError(message, kind=ChatErrorKind.TIMEOUT) from (errors[-1] if errors else None)
        # The last model may have refused for good; another one that may be back later is what the caller can wait for.
        told = next((error for error in reversed(errors) if error.retryable), errors[-1])
        message = f"no chat model replied ({attempts} requests to {', '.join(self.models)}): {told}"
        raise ChatError(message, kind=told.kind) from told

    def _awake(self) -> Sequence[ChatEndpoint]:
        """The models to try, in their order: without those that rest, but for the case that all do."""
        now = asyncio.get_running_loop().time()
        awake = [endpoint for endpoint in self._agent.models if self._rests_until.get(endpoint, now) <= now]
        return awake or self._agent.models

    def _rest(self, endpoint: ChatEndpoint, error: ChatError) -> None:
        """Leave a model alone for a while, unless only this one request was wrong."""
        if error.kind is not ChatErrorKind.REJECTED:
            self._rests_until[endpoint] = asyncio.get_running_loop().time() + REST_S

    async def _request(
        self, endpoint: ChatEndpoint, messages: Sequence[Mapping[str, str]], *, num_attempts: int
    ) -> ChatReply:
        """One request. Raises ChatError."""
        key = endpoint.api_key.get_secret_value() if endpoint.api_key is not None else ""
        body = {**self._body, "model": endpoint.model, "messages": [dict(message) for message in messages]}
        # What is half a surrogate pair, in a page or a question, becomes a question mark: no JSON in UTF-8 has it.
        sent = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        url = f"{endpoint.base_url}/chat/completions"
        try:
            async with asyncio.timeout(self._agent.timeout):  # httpx2's is per read: a slow drip would last for ever
                async with self._client.stream("POST", url, content=sent, headers=headers) as response:
                    content = await _bounded_body(response)
                    status = response.status_code
        except (TimeoutError, httpx2.TimeoutException) as error:
            message = f"{endpoint.model} at {endpoint.base_url}: no reply within {self._agent.timeout:g} s"
            raise ChatError(message, kind=ChatErrorKind.TIMEOUT) from error
        except httpx2.HTTPError as error:
            message = f"{endpoint.model} at {endpoint.base_url}: {type(error).__name__} {error}"
            raise ChatError(_redacted(message, key), kind=ChatErrorKind.UNREACHABLE) from None
        if status != httpx2.codes.OK:
            shown = _redacted(content[: 4 * _SHOWN_CHARACTERS].decode("utf-8", "replace"), key)[:_SHOWN_CHARACTERS]
            message = f"{endpoint.model} at {endpoint.base_url}: status {status}: {' '.join(shown.split())}"
            raise ChatError(message, kind=_kind_of(status))
        reply = _parse(content, endpoint=endpoint, num_attempts=num_attempts)
        return replace(reply, text=_redacted(reply.text, key)) if len(key) >= _SHORTEST_SECRET else reply


async def _bounded_body(response: httpx2.Response) -> bytes:
    content = bytearray()
    async for chunk in response.aiter_raw():  # a few compressed bytes could become gigabytes
        content += chunk
        if len(content) > _MAX_REPLY_BYTES:
            break  # no reply is that long: what is cut is no JSON and is refused as such
    return bytes(content)


def _kind_of(status: int) -> ChatErrorKind:
    if status == httpx2.codes.TOO_MANY_REQUESTS:
        return ChatErrorKind.RATE_LIMITED
    if status in {httpx2.codes.UNAUTHORIZED, httpx2.codes.FORBIDDEN}:
        return ChatErrorKind.AUTH
    if status == httpx2.codes.REQUEST_TIMEOUT or status >= httpx2.codes.INTERNAL_SERVER_ERROR:
        return ChatErrorKind.OVERLOADED
    return ChatErrorKind.REJECTED


def _parse(content: bytes, *, endpoint: ChatEndpoint, num_attempts: int) -> ChatReply:
    where = f"{endpoint.model} at {endpoint.base_url}"
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        reason = f"{where}: the reply is no JSON ({len(content)} bytes)"
        raise ChatError(reason, kind=ChatErrorKind.INVALID_REPLY) from None
    choices = body.get("choices") if isinstance(body, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    text = message.get("content") if isinstance(message, dict) else None
    if not isinstance(text, str) or not text.strip():
        raise ChatError(f"{where}: the reply holds no text", kind=ChatErrorKind.INVALID_REPLY)
    assert isinstance(choice, dict)
    usage = body.get("usage")
    return ChatReply(
        text=text,
        model=endpoint.model,
        finish_reason=str(choice.get("finish_reason") or "stop"),
        prompt_tokens=_count(usage, "prompt_tokens"),
        completion_tokens=_count(usage, "completion_tokens"),
        num_attempts=num_attempts,
    )


def _count(usage: object, name: str) -> int:
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if isinstance(value, int) and 0 <= value <= _MOST_TOKENS else 0  # 0: it does not say


def _redacted(text: str, key: str) -> str:
    """The text without the key: servers like to quote it."""
    return text.replace(key, MASK) if key else text
