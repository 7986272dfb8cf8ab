"""A GenerationClient that plays scripted completions and remembers the exact ids it was asked to continue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from agentrl.types import GenerateReply, GenerateRequest, VersionSpan

Script = Callable[[str, int], str | BaseException]
"""(context as text, number of earlier requests with a prefix of this context) -> the model's text, or what to raise."""


class ScriptedEngine:
    """Stands where an engine would, for tests of what surrounds one."""

    def __init__(self, model_dir: Path, script: Script, *, version: int = 0) -> None:
        self.model_dir = model_dir
        self.tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        self.script = script
        self.version = version
        self.requests: list[GenerateRequest] = []
        self.replies: list[GenerateReply] = []
        self.holds: Callable[[str], bool] = lambda context: False  # these requests never get a reply

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """The scripted completion, ended by <|im_end|> unless max_new_tokens cuts it."""
        seen = tuple(request.input_ids)
        depth = sum(seen[: len(tuple(past.input_ids))] == tuple(past.input_ids) for past in self.requests)
        self.requests.append(request)
        context = self.tokenizer.decode(list(seen), skip_special_tokens=False)
        if self.holds(context):
            await asyncio.Event().wait()
        text = self.script(context, depth)
        if isinstance(text, BaseException):
            raise text
        ids = tuple(self.tokenizer.encode(text + "<|im_end|>", add_special_tokens=False).ids)
        limit = request.params.max_new_tokens
        reason = "stop" if len(ids) <= limit else "length"
        reply = make_reply(ids[:limit], version=self.version, finish_reason=reason)
        self.replies.append(reply)
        return reply

    async def close(self) -> None:
        """Nothing to release."""


def make_reply(ids: Sequence[int], *, version: int, finish_reason: str = "stop") -> GenerateReply:
    """A well-formed reply; the log-prob of token i is -(i + 1) / 8, exact in float32."""
    return GenerateReply(
        output_ids=tuple(ids),
        logprobs=tuple(-(index + 1) / 8 for index in range(len(ids))),
        version_spans=(VersionSpan(version=version, start=0, end=len(ids)),) if ids else (),
        finish_reason=finish_reason,
        service_id="scripted",
    )
