"""A ChatModel that plays a function of the request, or fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from agentrl.types import ChatReply


class ScriptedChatModel:
    """Stands where a browse agent's models would; remembers what it was asked."""

    models = ("scripted",)

    def __init__(self, answer: Callable[[str], str | Exception]) -> None:
        self.answer = answer
        self.requests: list[str] = []

    async def complete(self, messages: Sequence[Mapping[str, str]], *, deadline_s: float) -> ChatReply:
        """The scripted reply to the last message."""
        request = messages[-1]["content"]
        self.requests.append(request)
        answer = self.answer(request)
        if isinstance(answer, Exception):
            raise answer
        return ChatReply(
            text=answer, model="scripted", prompt_tokens=len(request), completion_tokens=len(answer), cost_nano_usd=7
        )

    async def close(self) -> None:
        """Nothing to release."""
