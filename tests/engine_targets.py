"""Inference services under test: the embedded engine served over loopback, or a real SGLang server at SGLANG_URL."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from transformers import PreTrainedModel

import tiny_lm
from agentrl.config.sections import InferenceConfig
from agentrl.inference import EngineClient
from agentrl.inference.runner import EngineSettings
from agentrl.inference.serve import build_engine, listen, running_server

DEADLINE_S = 30.0


@dataclass(kw_only=True, eq=False)
class EngineTarget:
    """A running service with two sets of weights to switch between; version "0" is `model_dirs[0]`."""

    base_url: str
    model_dirs: tuple[Path, Path]
    is_sglang: bool = False
    references: dict[int, PreTrainedModel] = field(default_factory=dict)

    def reference(self, index: int) -> PreTrainedModel:
        """The Hugging Face model of `model_dirs[index]`."""
        if index not in self.references:
            self.references[index] = tiny_lm.load_lm(self.model_dirs[index])
        return self.references[index]

    async def call(self, method: str, path: str, payload: Any = None, *, timeout_s: float = DEADLINE_S) -> Reply:
        """One raw request on its own connection."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.request(method, self.base_url + path, json=payload) as response,
        ):
            text = await response.text()
            return Reply(status=response.status, text=text)

    async def generate(
        self, input_ids: list[int], *, rid: str | None = None, timeout_s: float = DEADLINE_S, **sampling: Any
    ) -> Reply:
        """A /generate call with log-probs."""
        payload = {"input_ids": input_ids, "sampling_params": sampling, "return_logprob": True}
        if rid is not None:
            payload["rid"] = rid
        return await self.call("POST", "/generate", payload, timeout_s=timeout_s)

    async def model_info(self) -> dict[str, Any]:
        """Body of /model_info."""
        return (await self.call("GET", "/model_info")).body

    async def update(self, index: int, version: str, **fields: Any) -> Reply:
        """Load `model_dirs[index]` as `version`."""
        return await self.update_folder(self.model_dirs[index], version, **fields)

    async def update_folder(self, folder: Path, version: str, **fields: Any) -> Reply:
        """Load the weights in `folder` as `version`."""
        payload = {"model_path": str(folder), "weight_version": version, **fields}
        return await self.call("POST", "/update_weights_from_disk", payload)

    async def reset(self) -> None:
        """Nothing running, nothing paused, first weights, empty cache: what every test starts from."""
        async with EngineClient(self.base_url, timeout_s=DEADLINE_S) as client:
            await client.continue_generation()
            await client.abort_all()
            await self.wait_until_idle()
            await client.flush_cache()  # waits for what is left of aborted requests
            await client.update_weights_from_disk(str(self.model_dirs[0]), version="0")
            await client.flush_cache()

    async def wait_until_idle(self, *, timeout_s: float = DEADLINE_S) -> None:
        """Wait until nothing runs or waits."""
        await self._wait_for_load(lambda running, waiting: running + waiting == 0, timeout_s=timeout_s)

    async def wait_until_running(self, count: int) -> None:
        """Wait until at least `count` generations are being decoded."""
        await self._wait_for_load(lambda running, waiting: running >= count, timeout_s=DEADLINE_S)

    async def _wait_for_load(self, is_reached: Any, *, timeout_s: float) -> None:
        async with asyncio.timeout(timeout_s), EngineClient(self.base_url) as client:
            while True:
                load = await client.load()
                if is_reached(load.num_running, load.num_waiting):
                    return
                await asyncio.sleep(0.01)

    @asynccontextmanager
    async def streaming(self, input_ids: list[int], *, rid: str, **sampling: Any) -> AsyncIterator[Stream]:
        """A streamed generation. Its events show how far it is, so that tests can act in the middle of it."""
        payload = {
            "input_ids": input_ids,
            "sampling_params": sampling,
            "return_logprob": True,
            "stream": True,
            "rid": rid,
        }
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as session,
            session.post(self.base_url + "/generate", json=payload) as response,
        ):
            yield Stream(response)


@dataclass(frozen=True, kw_only=True)
class Reply:
    """Status and body of an HTTP reply."""

    status: int
    text: str

    @property
    def body(self) -> Any:
        """The JSON body."""
        return json.loads(self.text)

    @property
    def output_ids(self) -> list[int]:
        """Tokens of a single generation."""
        return list(self.body["output_ids"])

    @property
    def logprobs(self) -> list[float]:
        """Log-probs of the output tokens, checked against the ids."""
        entries = self.body["meta_info"]["output_token_logprobs"]
        assert [entry[1] for entry in entries] == self.output_ids
        return [entry[0] for entry in entries]

    @property
    def finish(self) -> dict[str, Any]:
        """Finish reason."""
        return dict(self.body["meta_info"]["finish_reason"])


class Stream:
    """Server-sent events of one response."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self.chunks: list[dict[str, Any]] = []
        self.is_done = False

    async def next_chunk(self) -> dict[str, Any] | None:
        """The next event, None after [DONE]."""
        while True:
            line = (await self.response.content.readline()).decode().strip()
            if line == "data: [DONE]":
                self.is_done = True
                return None
            if line.startswith("data: "):
                self.chunks.append(json.loads(line.removeprefix("data: ")))
                return self.chunks[-1]
            assert line or not self.response.content.at_eof(), "the stream ended without [DONE]"

    async def read_until(self, num_tokens: int) -> None:
        """Read until that many output tokens have arrived."""
        while not self.chunks or len(self.chunks[-1]["output_ids"]) < num_tokens:
            assert await self.next_chunk() is not None, "the generation ended early"

    async def read_all(self) -> dict[str, Any]:
        """Read to the end; the last chunk has everything."""
        while await self.next_chunk() is not None:
            pass
        return self.chunks[-1]


@contextmanager
def embedded_target(directory: Path, *, kind: str, max_running_requests: int = 16) -> Iterator[EngineTarget]:
    """The embedded engine, server and all, in a thread with its own event loop."""
    model_dirs = (
        tiny_lm.write_lm(directory / "a", kind=kind, seed=1),
        tiny_lm.write_lm(directory / "b", kind=kind, seed=2),
    )
    settings = EngineSettings(
        model_path=model_dirs[0],
        max_running_requests=max_running_requests,
        context_length=tiny_lm.CONTEXT_LENGTH,
        seed=7,
        device="cpu",
    )
    engine, tokenizer = build_engine(settings)
    listener = listen(InferenceConfig())
    loop = asyncio.new_event_loop()
    is_up, stop = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with running_server(engine, tokenizer, listener):
            is_up.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert is_up.wait(DEADLINE_S)
    try:
        yield EngineTarget(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", model_dirs=model_dirs)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(DEADLINE_S)
        loop.close()


def sglang_target() -> EngineTarget | None:
    """The server tests/sglang/run.sh started, or None."""
    url = os.environ.get("SGLANG_URL")
    if not url:
        return None
    models = (Path(os.environ["SGLANG_MODEL_A"]), Path(os.environ["SGLANG_MODEL_B"]))
    return EngineTarget(base_url=url, model_dirs=models, is_sglang=True)
