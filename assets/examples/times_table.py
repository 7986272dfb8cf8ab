"""A small `verifiers` environment without a network: a quiz that gives a hint after a wrong answer."""

from __future__ import annotations

from typing import Any

import verifiers
from datasets import Dataset


class TimesTable(verifiers.MultiTurnEnv):
    """Ends with the right number or after three answers."""

    @verifiers.stop
    async def is_right(self, state: dict[str, Any]) -> bool:
        """Whether the last answer is the number asked for."""
        return bool(state["trajectory"]) and last_answer(state) == state["answer"]

    async def env_response(self, messages: Any, state: dict[str, Any], **kwargs: Any) -> list[dict[str, str]]:
        """A hint."""
        return [{"role": "user", "content": f"No. The last digit is {state['answer'][-1]}."}]


def last_answer(state: dict[str, Any]) -> str:
    """What the model said last."""
    return str(state["trajectory"][-1]["completion"][-1].content).strip()


def right_and_early(state: dict[str, Any]) -> float:
    """1 for the right number at once, half of it for every hint."""
    return 0.5 ** (len(state["trajectory"]) - 1) if last_answer(state) == state["answer"] else 0.0


def load_environment() -> verifiers.Environment:
    """The quiz. The rows come from AgentRL's Tasks; verifiers insists on a data set of its own."""
    return TimesTable(
        dataset=Dataset.from_list([{"question": "What is 6 times 7?", "answer": "42"}]),
        system_prompt="Answer with the number alone.",
        rubric=verifiers.Rubric(funcs=[right_and_early]),
        max_turns=3,
    )
