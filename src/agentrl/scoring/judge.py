"""`Judge`: an LLM's verdict on an answer. First the rule, then the cache, then the model.

    the answer is an accepted one, letter for letter? ──yes──► correct, no request
              │ no
    same question, answer, truth, models and prompt judged before? ──yes──► that verdict
              │ no
    ask ──► readable? ──no──► remind and ask again ──► still not ──► ScoringError

An outage or a reply nobody can read is a ScoringError, never a verdict. After an outage the Record is judged again, for
a bounded time; else it ends with judge_error. Every request becomes a JudgeCall for the Record.
"""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from agentrl.errors import ChatError, ScoringError
from agentrl.protocols import ChatModel, VerdictCache
from agentrl.scoring.ground_truth import accepted_answers, as_number
from agentrl.scoring.judge_prompts import JUDGE_PROMPTS, JudgePrompt, custom_prompt
from agentrl.scoring.verdict import Verdict, parse_verdict
from agentrl.types import ChatReply, JudgeVerdict

JUDGE_DEADLINE_S = 300.0
MAX_ASKED = 3
UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeCall:
    """One request to a judge and what came of it; `status` is "ok", "unreadable" or a ChatErrorKind value."""

    model: str
    status: str
    request: Mapping[str, Any]
    response: Mapping[str, Any]
    started_at: datetime
    finished_at: datetime
    error: str | None = None
    cost_nano_usd: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Judges for one configuration of models and prompts; shared by all Records of a process."""

    chat: ChatModel
    cache: VerdictCache
    clock: Callable[[], datetime]
    template: str | None = None  # replaces the prompt of agentcpm
    deadline_s: float = JUDGE_DEADLINE_S
    prompts: Mapping[str, JudgePrompt] = field(init=False)

    def __post_init__(self) -> None:
        own = {} if self.template is None else {"agentcpm": custom_prompt(self.template)}
        object.__setattr__(self, "prompts", {**JUDGE_PROMPTS, **own})

    def version(self, name: str) -> str:
        """Changes with the prompt of `name` and with the judge's models."""
        models = hashlib.sha256(json.dumps(list(self.chat.models)).encode()).hexdigest()
        return f"{self.prompts[name].version}.{models[:8]}"

    async def verdict(
        self, name: str, *, answer: str, ground_truth: Mapping[str, Any], calls: list[JudgeCall]
    ) -> Verdict:
        """The verdict of prompt `name` on `answer`; requests are appended to `calls`. Raises ScoringError."""
        accepted = accepted_answers(ground_truth)
        if any(_same(answer, truth) for truth in accepted):
            return Verdict.CORRECT
        if not answer.strip():
            return Verdict.INCORRECT
        prompt, query = self.prompts[name], str(ground_truth.get("query", ""))
        keys = [
            _cache_key(query, answer, accepted, model=model, prompt_version=prompt.version)
            for model in self.chat.models
        ]
        known = await self.cache.find_verdicts(keys)
        for key in keys:
            if key in known:
                return Verdict(known[key].verdict)
        messages = prompt.messages(query=query, accepted=accepted, answer=answer)
        verdict, reply = await self._ask(prompt, messages, calls=calls)
        key = keys[list(self.chat.models).index(reply.model)]
        stored = await self.cache.put_verdict(JudgeVerdict(key=key, verdict=verdict.value, model=reply.model))
        return Verdict(stored.verdict)

    async def _ask(
        self, prompt: JudgePrompt, messages: Sequence[Mapping[str, str]], *, calls: list[JudgeCall]
    ) -> tuple[Verdict, ChatReply]:
        asked: list[Mapping[str, str]] = list(messages)
        for _ in range(MAX_ASKED):
            reply = await self._request(prompt, asked, calls=calls)
            verdict = parse_verdict(reply.text, letters=prompt.letters)
            if verdict is not None:
                return verdict, reply
            asked += [{"role": "assistant", "content": reply.text[:500]}, {"role": "user", "content": prompt.reminder}]
        raise ScoringError(f"judge {prompt.name}: no verdict in {MAX_ASKED} replies; the last is {reply.text[:120]!r}")

    async def _request(
        self, prompt: JudgePrompt, messages: Sequence[Mapping[str, str]], *, calls: list[JudgeCall]
    ) -> ChatReply:
        request = {"prompt": prompt.version, "messages": [dict(message) for message in messages]}
        started_at = self.clock()
        try:
            reply = await self.chat.complete(messages, deadline_s=self.deadline_s)
        except ChatError as error:
            calls.append(
                JudgeCall(
                    model=self.chat.models[0], status=error.kind.value, request=request, response={},
                    started_at=started_at, finished_at=self.clock(), error=str(error),
                    cost_nano_usd=error.cost_nano_usd,
                )
            )  # fmt: skip
            raise ScoringError(f"judge {prompt.name}: {error}", retryable=error.retryable) from error
        verdict = parse_verdict(reply.text, letters=prompt.letters)
        response = {
            "text": reply.text,
            "verdict": None if verdict is None else verdict.value,
            "prompt_tokens": reply.prompt_tokens,
            "completion_tokens": reply.completion_tokens,
            "num_attempts": reply.num_attempts,
        }
        calls.append(
            JudgeCall(
                model=reply.model, status=UNREADABLE if verdict is None else "ok", request=request, response=response,
                started_at=started_at, finished_at=self.clock(), cost_nano_usd=reply.cost_nano_usd,
            )
        )  # fmt: skip
        return reply


def _same(answer: str, truth: str) -> bool:
    """Equal up to letter case, spacing and a full stop, or equal numbers: nothing a judge could see otherwise."""
    numbers = as_number(answer), as_number(truth)
    if numbers[0] is not None and numbers[1] is not None:
        return numbers[0] == numbers[1]
    return _bare(answer) == _bare(truth)


def _bare(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split()).removesuffix(".")


def _cache_key(query: str, answer: str, accepted: Sequence[str], *, model: str, prompt_version: str) -> str:
    content = json.dumps([query, answer, list(accepted), model, prompt_version])
    return hashlib.sha256(content.encode("ascii")).hexdigest()
