"""A sampler of your own: the model guesses a number, and an environment instead of tools answers every guess.

    agentrl tasks load RUN --train_file numbers.jsonl
    agentrl sample RUN --sampler_module assets/examples/guessing_game.py

with rows such as {"id": "n1", "query": "Guess my number from 1 to 100.", "answer": "37", "scorer": "em"}. What the
environment says is counted as prompt and never trained; every token the model sampled is.
"""

from __future__ import annotations

import re

from agentrl.rollout import AsyncSampler, Conversation, RolloutResult, initial_messages
from agentrl.types import StopReason

_NUMBER = re.compile(r"-?\d{1,9}")


class GuessingGame(AsyncSampler):
    """One game. The secret number is the Task's answer."""

    async def run(self) -> RolloutResult:
        """Guess until the number is found, the turns are used up, or the context is full."""
        conversation = Conversation(self.record, committed=self.committed, agent=self.agent)
        secret = int(self.task.answer)
        messages = initial_messages(self.task, rollout=self.agent.rollout)
        for _ in range(self.agent.rollout.max_turns):
            reply = await conversation.ask(messages)
            if reply is None:
                return conversation.end(StopReason.CONTEXT_LIMIT)
            guess = last_number(reply.parsed.content)
            if guess == secret:
                return conversation.end(StopReason.ANSWER, answer=str(guess))
            messages = [{"role": "user", "content": verdict(guess, secret=secret)}]
        return conversation.end(StopReason.MAX_TURNS)

    async def evaluate_record(self, result: RolloutResult) -> float:
        """1 for a number found at once, less for every further guess, 0 for none."""
        if result.answer is None:
            return 0.0
        return 1.0 - (len(result.turns) - 1) / self.agent.rollout.max_turns


def last_number(text: str) -> int | None:
    """The guess in what the model said outside its thinking."""
    numbers = _NUMBER.findall(text)
    return int(numbers[-1]) if numbers else None


def verdict(guess: int | None, *, secret: int) -> str:
    """What the environment says of a wrong guess."""
    if guess is None:
        return "That is no number. Guess a whole number."
    return f"{guess} is too {'low' if guess < secret else 'high'}. Guess again."
