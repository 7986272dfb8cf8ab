"""The context of one Record, for samplers with a loop of their own: token-exact, committed turn by turn, resumable.

    messages ──render only them──► prompt ids ─┐
    what the engine saw and sampled so far ────┴─► engine ──► commit turn ──► Reply

A Record taken over from another sampler is replayed: as long as there are committed turns, `ask` gives the completion
that was sampled then. So a loop needs no code for recovery if what it says depends on the replies alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.chat import Message, ParsedCompletion
from agentrl.errors import RolloutError
from agentrl.rollout.agent import Agent, RolloutResult, ask_model
from agentrl.rollout.context import NextCall
from agentrl.rollout.deadlines import deadline, stopped_clock
from agentrl.rollout.limits import Limits
from agentrl.types import Record, StopReason, ToolSpec, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the model said."""

    text: str
    parsed: ParsedCompletion
    is_truncated: bool  # cut by max_new_tokens
    turn: Turn


class Conversation:
    """Messages in, replies out. `record` is the current header, `turns` what is committed of this conversation."""

    def __init__(self, record: Record, *, committed: Sequence[Turn], agent: Agent) -> None:
        self.record = record
        self.turns: list[Turn] = []
        self._to_replay = list(committed)
        self._agent = agent
        self._context_ids: list[int] = []
        self._max_context_tokens = Limits.from_config(
            agent.rollout, context_length=agent.inference.context_length
        ).max_context_tokens

    async def ask(self, messages: Sequence[Message], *, tools: Sequence[ToolSpec] = ()) -> Reply | None:
        """The model's reply to new messages, committed; None where the context has no room for them.

        The first call takes the whole beginning of the conversation, later ones only what is new.

        Raises:
            EngineError: no engine can answer.
            TimeoutError: no reply within `turn_timeout_s`.
            RolloutError: a Record that was taken over is told something else than before.
        """
        prompt_ids = self._render(messages, tools=tools)
        if len(self._context_ids) + len(prompt_ids) > self._max_context_tokens:
            return None
        turn = self._replayed(prompt_ids) if self._to_replay else await self._sampled(prompt_ids)
        self.turns.append(turn)
        self._context_ids += [*prompt_ids, *turn.tokens.completion_ids]
        text = str(turn.model.response["text"])
        return Reply(
            text=text,
            parsed=self._agent.chat.parse(text, tools=tools),
            is_truncated=turn.tokens.finish_reason == "length",
            turn=turn,
        )

    def end(self, stop_reason: StopReason, *, answer: str | None = None) -> RolloutResult:
        """What `AsyncSampler.run` returns: the conversation ended for this reason, with this answer.

        Raises RolloutError where a Record that was taken over ends before the turns committed already.
        """
        if self._to_replay:
            raise self._not_the_same(self._to_replay[0])
        return RolloutResult(record=self.record, turns=tuple(self.turns), stop_reason=stop_reason, answer=answer)

    def _render(self, messages: Sequence[Message], *, tools: Sequence[ToolSpec]) -> tuple[int, ...]:
        if not self.turns:
            return self._agent.chat.render_prompt(messages, tools=tools)
        last = self.turns[-1].tokens.completion_ids
        return self._agent.chat.render_continuation(messages, completion_ids=last, tools=tools)

    def _replayed(self, prompt_ids: tuple[int, ...]) -> Turn:
        turn = self._to_replay.pop(0)
        if tuple(turn.tokens.prompt_ids) != prompt_ids:
            raise self._not_the_same(turn)
        return turn

    def _not_the_same(self, turn: Turn) -> RolloutError:
        return RolloutError(
            f"{self.record.id} was taken over, and its environment says something else before turn {turn.index} "
            "than it did: what an environment says must depend on the Task and the replies alone"
        )

    async def _sampled(self, prompt_ids: tuple[int, ...]) -> Turn:
        async with deadline(self._agent.rollout.turn_timeout_s):
            index = len(self.turns)
            call = NextCall(parent_turn=index - 1, context_ids=self._context_ids, prompt_ids=prompt_ids)
            model = await ask_model(self.record, index=index, call=call, agent=self._agent)
        turn = Turn(model=model)
        with stopped_clock():
            self.record = await self._agent.commit_turn(self.record, turn)
        return turn
