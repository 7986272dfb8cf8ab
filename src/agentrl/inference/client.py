"""EngineClient: one SGLang-compatible inference service over its native HTTP API, for router, registrar and tests.

Token in, token out: prompts go as ids, replies carry ids, log-probabilities and the policy version of every token.
Every call has a deadline and fails only with EngineError, whose kind says what the caller can do.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp

from agentrl.errors import EngineError, EngineErrorKind
from agentrl.inference.replies import (
    PromptScore,
    check_input_ids,
    decode_body,
    error_message,
    parse_prompt_score,
    parse_reply,
    status_error,
)
from agentrl.types import GenerateReply, GenerateRequest, SamplingParams

logger = logging.getLogger(__name__)

_ABORT_TIMEOUT_S = 5.0
_CONNECT_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What a service says about the weights it serves. `vocab_size` is None where neither server nor disk tells."""

    model_path: str
    weight_version: str
    vocab_size: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Requests being decoded, requests waiting for a slot, and tokens the running ones hold."""

    num_running: int
    num_waiting: int
    num_used_tokens: int = 0


def sampling_params_json(params: SamplingParams) -> dict[str, Any]:
    """All sampling parameters, explicitly: a server's defaults must never decide what is sampled."""
    seed = {} if params.seed is None else {"sampling_seed": params.seed}
    return {
        **seed,
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "stop_token_ids": list(params.stop_token_ids),
        "skip_special_tokens": False,
        "n": 1,
    }


def new_session() -> aiohttp.ClientSession:
    """A connection pool for engine traffic: as many connections as there are requests in flight."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=60, keepalive_timeout=30))


class EngineClient:
    """Talks to the service at `base_url`. `timeout_s` bounds each control call; generations bring their own deadline.

    `run_name` says whose tokens are asked for where one service serves several runs. `vocab_size` bounds the ids that
    may be sent; left out, it is asked of the service once. A `session` given by the
    caller is shared and stays open on close.
    """

    def __init__(
        self,
        base_url: str,
        *,
        timeout_s: float = 60.0,
        run_name: str | None = None,
        vocab_size: int | None = None,
        session: aiohttp.ClientSession | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._run_name = run_name
        self._vocab_size = vocab_size
        self._vocab_known = vocab_size is not None
        self._session = session
        self._owns_session = session is None
        self._aborts: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Let pending aborts finish (bounded) and release the connections."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=_ABORT_TIMEOUT_S)
        if self._owns_session and self._session is not None:
            await self._session.close()
            self._session = None

    async def generate(self, request: GenerateRequest, *, service_id: str = "") -> GenerateReply:
        """One completion within `request.deadline_s`. A timeout or a cancellation aborts it on the server, too."""
        vocab_size = await self._vocabulary(timeout_s=request.deadline_s)
        check_input_ids(request.input_ids, vocab_size=vocab_size)
        payload = {
            "rid": request.rid,
            "input_ids": list(request.input_ids),
            "sampling_params": sampling_params_json(request.params),
            "return_logprob": True,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "stream": False,
        }
        try:
            body = await self._json("POST", "/generate", payload=payload, timeout_s=request.deadline_s)
        except asyncio.CancelledError:
            self._abort_in_background(request.rid)
            raise
        except EngineError as error:
            if error.kind is EngineErrorKind.TIMEOUT:
                self._abort_in_background(request.rid)
            raise
        return parse_reply(body, request=request, service_id=service_id or self.base_url, run_name=self._run_name)

    async def score_prompt(
        self, input_ids: Sequence[int], *, rid: str, timeout_s: float, run_name: str | None = None
    ) -> PromptScore:
        """Log-probs of a prompt under the served weights, computed anew: nothing of it comes from the prefix cache.

        One token is generated as well, so an answer proves that the service generates. `run_name` says whose weights
        they should be where one service serves several runs.
        """
        payload = {
            "rid": rid,
            "input_ids": list(input_ids),
            "sampling_params": sampling_params_json(SamplingParams(max_new_tokens=1, temperature=0.0)),
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 0,
            "stream": False,
        }
        try:
            body = await self._json("POST", "/generate", payload=payload, timeout_s=timeout_s)
        except (asyncio.CancelledError, EngineError) as error:
            if isinstance(error, asyncio.CancelledError) or error.kind is EngineErrorKind.TIMEOUT:
                self._abort_in_background(rid)
            raise
        return parse_prompt_score(body, input_ids=input_ids, run_name=run_name)

    async def abort(self, rid: str) -> None:
        """Stop the generation `rid` (and any whose id starts with it). Unknown ids are ignored."""
        await self._text("POST", "/abort_request", payload={"rid": rid}, timeout_s=_ABORT_TIMEOUT_S)

    async def abort_all(self) -> None:
        """Stop every generation."""
        await self._text("POST", "/abort_request", payload={"abort_all": True}, timeout_s=_ABORT_TIMEOUT_S)

    async def pause(self, *, mode: str = "retract") -> None:
        """Stop decoding. `retract` keeps running generations: they continue under the weights loaded meanwhile."""
        await self._json("POST", "/pause_generation", payload={"mode": mode})

    async def continue_generation(self) -> None:
        """Resume after `pause`. Harmless when not paused."""
        await self._json("POST", "/continue_generation", payload={})

    async def update_weights_from_disk(self, path: str, *, version: str, timeout_s: float | None = None) -> None:
        """Load the `save_pretrained` directory `path` as weight version `version`, and flush the prefix cache.

        Raises EngineError(REJECTED) when the server says it failed; its state is then to be verified, never assumed.
        """
        payload = {
            "model_path": path,
            "weight_version": version,
            "flush_cache": True,
            "abort_all_requests": False,
        }
        body = await self._json("POST", "/update_weights_from_disk", payload=payload, timeout_s=timeout_s)
        if not isinstance(body, Mapping) or body.get("success") is not True:
            message = f"{self.base_url}: weight update to version {version} from {path} failed: {error_message(body)}"
            raise EngineError(message, kind=EngineErrorKind.REJECTED)

    async def update_weight_version(self, version: str) -> None:
        """Relabel the served weights without touching them or any running generation."""
        payload = {"new_version": version, "abort_all_requests": False}
        await self._json("POST", "/update_weight_version", payload=payload)

    async def model_info(self) -> ModelInfo:
        """Which weights are served."""
        body = await self._mapping("GET", "/model_info")
        model_path = str(body.get("model_path", ""))
        vocab_size = body.get("vocab_size")
        if vocab_size is None:
            vocab_size = await asyncio.to_thread(_vocab_size_on_disk, model_path)
        return ModelInfo(model_path=model_path, weight_version=str(body.get("weight_version")), vocab_size=vocab_size)

    async def server_info(self) -> Mapping[str, Any]:
        """Resolved server arguments, as the server gives them."""
        return await self._mapping("GET", "/server_info")

    async def load(self) -> EngineLoad:
        """How busy the service is."""
        loads = (await self._mapping("GET", "/v1/loads")).get("loads") or []
        return EngineLoad(
            num_running=sum(int(item.get("num_running_reqs", 0)) for item in loads),
            num_waiting=sum(int(item.get("num_waiting_reqs", 0)) for item in loads),
            num_used_tokens=sum(int(item.get("num_used_tokens", 0)) for item in loads),
        )

    async def checksum(self) -> Mapping[str, str]:
        """Parameter name -> digest of the weights in memory: equal before and after means no update happened."""
        body = await self._mapping("POST", "/weights_checker", payload={"action": "checksum"})
        ranks = body.get("ranks") or []
        return {
            f"{index}/{name}": digest for index, rank in enumerate(ranks) for name, digest in rank["checksums"].items()
        }

    async def ready(self) -> bool:
        """Whether the service has started. Answers at once; false when it cannot be reached."""
        return await self._is_ok("/ready", timeout_s=_CONNECT_TIMEOUT_S)

    async def health(self) -> bool:
        """Whether the service can generate now; false while it is paused. May take 20 s on SGLang."""
        return await self._is_ok("/health", timeout_s=self._timeout_s)

    async def flush_cache(self) -> None:
        """Forget cached prefixes once nothing runs; raises EngineError(REJECTED) if that takes too long."""
        wait_s = max(1, int(self._timeout_s) - 1)
        await self._text("POST", f"/flush_cache?timeout={wait_s}", payload={})

    async def _is_ok(self, path: str, *, timeout_s: float) -> bool:
        try:
            await self._text("GET", path, timeout_s=timeout_s)
        except EngineError:
            return False
        return True

    async def _vocabulary(self, *, timeout_s: float) -> int | None:
        if not self._vocab_known:
            try:
                async with asyncio.timeout(timeout_s):
                    self._vocab_size = (await self.model_info()).vocab_size
            except TimeoutError as error:
                raise EngineError(
                    f"{self.base_url}/model_info: no answer within {timeout_s:.1f} s", kind=EngineErrorKind.TIMEOUT
                ) from error
            self._vocab_known = True
            if self._vocab_size is None:
                logger.warning("%s does not tell its vocabulary size: ids are not bounds-checked", self.base_url)
        return self._vocab_size

    def _abort_in_background(self, rid: str) -> None:
        task = asyncio.get_running_loop().create_task(self._abort_quietly(rid), name=f"abort {rid}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort_quietly(self, rid: str) -> None:
        try:
            await self.abort(rid)
        except EngineError as error:
            logger.debug("abort of %s not delivered: %s", rid, error)

    async def _mapping(self, method: str, path: str, *, payload: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        body = await self._json(method, path, payload=payload)
        if not isinstance(body, Mapping):
            message = f"{self.base_url}{path} answered {str(body)[:100]!r} instead of a JSON object"
            raise EngineError(message, kind=EngineErrorKind.REJECTED)
        return body

    async def _json(
        self, method: str, path: str, *, payload: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> Any:
        return decode_body(await self._text(method, path, payload=payload, timeout_s=timeout_s))

    async def _text(
        self, method: str, path: str, *, payload: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> str:
        """Send one request. Returns the text of a 200 reply, else raises EngineError."""
        where = f"{self.base_url}{path}"
        total_s = self._timeout_s if timeout_s is None else timeout_s
        if self._session is None:
            self._session = new_session()
        timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=min(_CONNECT_TIMEOUT_S, total_s))
        try:
            async with self._session.request(method, where, json=payload, timeout=timeout) as response:
                text = await response.text()
        except aiohttp.ConnectionTimeoutError as error:
            raise EngineError(f"{where}: cannot connect: {error}", kind=EngineErrorKind.UNREACHABLE) from error
        except TimeoutError as error:
            raise EngineError(f"{where}: no answer within {total_s:.1f} s", kind=EngineErrorKind.TIMEOUT) from error
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(f"{where}: {error!r}", kind=EngineErrorKind.UNREACHABLE) from error
        if response.status != 200:
            raise status_error(response.status, decode_body(text), where=where)
        return text


def _vocab_size_on_disk(model_path: str) -> int | None:
    """Vocabulary of a model directory this machine can read, or None."""
    try:
        config = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    text_config = config.get("text_config") or {}
    vocab_size = config.get("vocab_size", text_config.get("vocab_size"))
    return vocab_size if isinstance(vocab_size, int) else None
