"""Meta-episodes against a scripted engine: what each episode sees, how it ends, and what is kept of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.rollout.context import branch_turns
from agentrl.types import EPISODE, RecordStatus, StopReason
from scripted_engine import Script
from scripted_rollout import Rollout
from tiny_chat import write_tiny_chat

CALL = '<tool_call>{"name": "look", "arguments": {"n": 1}}</tool_call>'
REFLECT = "Reflect now."


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat(tmp_path_factory.mktemp("chat"))


def look(n: int) -> str:
    """A page."""
    return f"page {n}: <answer>99</answer>"


def play(*texts: str) -> Script:
    """The n-th completion of the Record is the n-th text."""
    remaining = list(texts)
    return lambda context, depth: remaining.pop(0)


def make(
    model_dir: Path, script: Script, *, reflection: dict[str, object] | None = None, **settings: object
) -> Rollout:
    wanted: dict[str, object] = {"episodes": 3, "reflection_prompt": REFLECT} | (reflection or {})
    return Rollout(
        model_dir=model_dir, script=script, tools=[look], settings={"max_turns": 3} | settings, reflection=wanted
    )


def contexts(rollout: Rollout) -> list[str]:
    decode = rollout.engine.tokenizer.decode
    return [decode(list(request.input_ids), skip_special_tokens=False) for request in rollout.engine.requests]


async def test_every_episode_follows_a_request_to_reflect_and_is_scored_on_its_own(model_dir: Path) -> None:
    rollout = make(model_dir, play(CALL, "<answer>4</answer>", "hm <answer>5</answer>", CALL, "<answer>6</answer>"))
    record, turns = await rollout.sample()
    assert [(e.answer, e.score, e.num_turns, e.num_tool_calls) for e in record.episodes] == [
        ("4", 0.0, 2, 1), ("5", 1.0, 1, 0), ("6", 0.0, 2, 1),
    ]  # fmt: skip
    assert [e.num_completion_tokens for e in record.episodes] == [
        sum(len(turn.tokens.completion_ids) for turn in part) for part in (turns[:2], turns[2:3], turns[3:])
    ]
    assert record.turn_scores == (None, 0.0, 1.0, None, 0.0)
    assert (record.status, record.stop_reason) == (RecordStatus.FINISHED, StopReason.ANSWER)
    assert (record.answer, record.score) == ("6", 0.0)
    assert [turn.model.request.get(EPISODE) for turn in turns] == [
        None, None, {"number": 1, "after": "answer"}, {"number": 2, "after": "answer"}, None,
    ]  # fmt: skip
    assert contexts(rollout)[2].endswith(
        f"<answer>4</answer><|im_end|>\n<|im_start|>user\n{REFLECT}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [turn.tokens.parent_turn for turn in turns] == [-1, 0, 1, 2, 3]
    assert len(branch_turns(turns)) == 5
