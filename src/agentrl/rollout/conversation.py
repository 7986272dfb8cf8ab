"""The context of one Record, for samplers with a loop of their own: token-exact, committed turn by turn, resumable.

    messages ──render only them──► prompt ids ─┐
    what the engine saw and sampled so far ────┴─► engine ──► commit turn ──► Reply

A Record taken over from another sampler is replayed: as long as there are committed turns, `ask` gives the completion
that was sampled then. So a loop needs no code for recovery if what it says depends on the replies alone.

Several conversations may share a Record: agents that talk to each other, all of them the policy. Each sees only what it
was told and said itself; in the Record it is a branch, and becomes a training row of its own.

    turn 0  solver          turn 2  solver, parent 0          row s0: turns 0 2
    turn 1  critic, new     turn 3  critic, parent 1          row s1: turns 1 3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl.chat import Message, ParsedCompletion
from agentrl.errors import RolloutError
from agentrl.rollout.agent import Agent, RolloutResult, ask_model
from agentrl.rollout.context import NextCall
from agentrl.rollout.deadlines import deadline, stopped_clock
from agentrl.rollout.limits import Limits
from agentrl.types import BRANCH, CONVERSATION, Record, StopReason, ToolSpec, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the model said."""

    text: str
    parsed: ParsedCompletion
    is_truncated: bool  # cut by max_new_tokens
    turn: Turn


@dataclass(slots=True, kw_only=True)
class _SharedRecord:
    """The Record of all its conversations."""

    record: Record
    to_replay: list[Turn]
    turns: list[Turn] = field(default_factory=list)


class Conversation:
    """Messages in, replies out. `name` says in the database who spoke, where a Record has several conversations."""

    def __init__(self, record: Record, *, committed: Sequence[Turn], agent: Agent, name: str = "first") -> None:
        self.name = name
        self._shared = _SharedRecord(record=record, to_replay=list(committed))
        self._agent = agent
        self._last: Turn | None = None
        self._context_ids: list[int] = []
        self._max_context_tokens = Limits.from_config(
            agent.rollout, context_length=agent.inference.context_length
        ).max_context_tokens

    @property
    def record(self) -> Record:
        """The Record's current header."""
        return self._shared.record

    @property
    def turns(self) -> Sequence[Turn]:
        """The Record's turns so far, those of its other conversations included."""
        return self._shared.turns

    def beside(self, name: str) -> Conversation:
        """Another conversation in the same Record, with nothing said yet."""
        other = Conversation(self.record, committed=(), agent=self._agent, name=name)
        other._shared = self._shared
        return other

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
        call = self._next_call(prompt_ids)
        turn = self._replayed(call) if self._shared.to_replay else await self._sampled(call)
        self._shared.turns.append(turn)
        self._last = turn
        self._context_ids += [*prompt_ids, *turn.tokens.completion_ids]
        text = str(turn.model.response["text"])
        return Reply(
            text=text,
            parsed=self._agent.chat.parse(text, tools=tools),
            is_truncated=turn.tokens.finish_reason == "length",
            turn=turn,
        )

    def end(self, stop_reason: StopReason, *, answer: str | None = None) -> RolloutResult:
        """What `AsyncSampler.run` returns: the Record ended for this reason, with this answer.

        Raises RolloutError where a Record that was taken over ends before the turns committed already.
        """
        if self._shared.to_replay:
            raise self._not_the_same(self._shared.to_replay[0])
        return RolloutResult(record=self.record, turns=tuple(self.turns), stop_reason=stop_reason, answer=answer)

    def _render(self, messages: Sequence[Message], *, tools: Sequence[ToolSpec]) -> tuple[int, ...]:
        if self._last is None:
            return self._agent.chat.render_prompt(messages, tools=tools)
        last = self._last.tokens.completion_ids
        return self._agent.chat.render_continuation(messages, completion_ids=last, tools=tools)

    def _next_call(self, prompt_ids: tuple[int, ...]) -> NextCall:
        parent = -1 if self._last is None else self._last.index
        follows = parent == len(self.turns) - 1
        marks = {} if follows else {BRANCH: {"strategy": CONVERSATION, "because": self.name}}
        return NextCall(parent_turn=parent, context_ids=self._context_ids, prompt_ids=prompt_ids, marks=marks)

    def _replayed(self, call: NextCall) -> Turn:
        turn = self._shared.to_replay.pop(0)
        if (turn.tokens.parent_turn, tuple(turn.tokens.prompt_ids)) != (call.parent_turn, call.prompt_ids):
            raise self._not_the_same(turn)
        return turn

    def _not_the_same(self, turn: Turn) -> RolloutError:
        return RolloutError(
            f"{self.record.id} was taken over, and its environment says something else before turn {turn.index} "
            "than it did: what an environment says must depend on the Task and the replies alone"
        )

    async def _sampled(self, call: NextCall) -> Turn:
        async with deadline(self._agent.rollout.turn_timeout_s):
            model = await ask_model(self.record, index=len(self.turns), call=call, agent=self._agent)
        turn = Turn(model=model)
        with stopped_clock():
            self._shared.record = await self._agent.commit_turn(self.record, turn)
        return turn
