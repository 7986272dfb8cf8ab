"""The engine of the kill campaign: SGLang's HTTP API with a script in place of a model."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

from aiohttp import web
from tokenizers import Tokenizer

from kill_points import KillPoints
from scripted_engine import make_reply

GENERATION_S = (0.1, 0.3)


class ScriptedServer:
    """SGLang's API as far as router and registrar use it. Calls the tool two or three times, then answers."""

    def __init__(self, model_dir: Path, *, points: KillPoints) -> None:
        self._points = points
        self._tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self._rng = random.Random()
        self._version, self._path = "default", str(model_dir)
        self._running = asyncio.Event()
        self._running.set()
        self._num_running = 0

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=2**24)
        app.add_routes(
            [
                web.post("/generate", self._generate),
                web.get("/model_info", self._model_info),
                web.get("/v1/loads", self._loads),
                web.get("/health", self._done),
                web.get("/health_generate", self._done),
                web.get("/ready", self._done),
                web.post("/abort_request", self._done),
                web.post("/pause_generation", self._pause),
                web.post("/continue_generation", self._continue),
                web.post("/update_weight_version", self._relabel),
                web.post("/update_weights_from_disk", self._update),
            ]
        )
        return app

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        input_ids = body["input_ids"]
        if body["logprob_start_len"] == 0:
            return await self._score(input_ids)
        text = self._text(self._tokenizer.decode(input_ids, skip_special_tokens=False)) + "<|im_end|>"
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        half = len(ids) // 2
        self._num_running += 1
        try:
            first = await self._decode()
            self._points.reach("in generation")
            second = await self._decode()
        finally:
            self._num_running -= 1
        spans = [{"version": first, "start": 0, "end": half}, {"version": second, "start": half, "end": len(ids)}]
        logprobs = make_reply(ids, version=0).logprobs
        meta = {
            "finish_reason": {"type": "stop"},
            "prompt_tokens": len(input_ids),
            "weight_version": second,
            "weight_versions": spans if first != second else [{"version": second, "start": 0, "end": len(ids)}],
            "output_token_logprobs": [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=True)],
        }
        return web.json_response({"output_ids": ids, "meta_info": meta})

    async def _score(self, input_ids: list[int]) -> web.Response:
        """A canary: not a generation anybody waits for, so no point to be killed at."""
        await self._running.wait()
        entries = [[None if index == 0 else -1.0, token, None] for index, token in enumerate(input_ids)]
        meta = {
            "finish_reason": {"type": "length"},
            "weight_version": self._version,
            "input_token_logprobs": entries,
        }
        return web.json_response({"output_ids": [0], "meta_info": meta})

    async def _decode(self) -> str:
        """Half of a generation; the version of its tokens."""
        await asyncio.sleep(self._rng.uniform(*GENERATION_S) / 2)
        await self._running.wait()
        return self._version

    def _text(self, context: str) -> str:
        num_results = context.count("<tool_response>")
        if num_results < 2 or (num_results == 2 and self._rng.random() < 0.5):
            return f'<tool_call>{{"name": "add", "arguments": {{"a": 2, "b": {num_results}}}}}</tool_call>'
        return f"<answer>{self._rng.choice((4, 5))}</answer>"

    async def _model_info(self, request: web.Request) -> web.Response:
        info = {
            "model_path": self._path,
            "weight_version": self._version,
            "vocab_size": self._tokenizer.get_vocab_size(),
        }
        return web.json_response(info)

    async def _loads(self, request: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_running_reqs": self._num_running, "num_waiting_reqs": 0}]})

    async def _done(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def _pause(self, request: web.Request) -> web.Response:
        self._running.clear()
        return web.json_response({})

    async def _continue(self, request: web.Request) -> web.Response:
        self._running.set()
        return web.json_response({})

    async def _relabel(self, request: web.Request) -> web.Response:
        self._version = (await request.json())["new_version"]
        return web.json_response({})

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        self._points.reach("in weight update")
        self._version, self._path = body["weight_version"], body["model_path"]
        return web.json_response({"success": True, "message": ""})
