"""A `verifiers` environment as a sampler: its loop, stop condition and rubric, the engine's token ids."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.rollout.custom import load_sampler
from agentrl.store import MemoryStore
from agentrl.types import DBRecordData, Record, RecordStatus, StopReason, Task
from factories import make_task
from group_run import claim_task, records_and_rows, run_group
from scripted_engine import Script, ScriptedEngine
from tiny_chat import write_tiny_chat

pytest.importorskip(
    "verifiers", reason="verifiers is not installed: pip install verifiers==0.2.0 (docs/custom_samplers.md)"
)

EXAMPLES = Path(__file__).parents[2] / "assets" / "examples"
TOOLS = '''
import verifiers
from datasets import Dataset

def lookup(city: str) -> str:
    """Inhabitants of a city, in thousands.

    Args:
        city: its name
    """
    return {"Bern": "134"}[city]

def said_134(completion) -> float:
    return float("134" in completion[-1].content)

def load_environment():
    rows = Dataset.from_list([{"question": "q", "answer": "a"}])
    return verifiers.ToolEnv(tools=[lookup], dataset=rows, rubric=verifiers.Rubric(funcs=[said_134]), max_turns=4)
'''
FAILING = (
    TOOLS.replace("verifiers.ToolEnv(tools=[lookup],", "Failing(")
    + """
class Failing(verifiers.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        raise verifiers.InfraError("the sandbox is gone")
"""
)
REWRITING = (
    TOOLS.replace("verifiers.ToolEnv(tools=[lookup],", "Rewriting(")
    + """
class Rewriting(verifiers.MultiTurnEnv):
    async def get_prompt_messages(self, state):
        return state["prompt"] + [{"role": "user", "content": str(len(state["trajectory"]))}]
    async def env_response(self, messages, state, **kwargs):
        return []
"""
)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat(tmp_path_factory.mktemp("chat"))


def task_for(environment: Path, *, query: str = "What is 6 times 7?", answer: str = "42") -> Task:
    task = make_task(num_generations=2, query=query, answer=answer)
    return replace(task, metadata={"environment": str(environment)})


async def play(
    model_dir: Path, task: Task, script: Script, **rollout: object
) -> tuple[ScriptedEngine, list[Record], list[DBRecordData]]:
    store = MemoryStore()
    engine = ScriptedEngine(model_dir, script)
    sampler = load_sampler(str(EXAMPLES / "verifiers_environment.py"))
    await run_group(await claim_task(store, task), store=store, engine=engine, sampler=sampler, **rollout)
    return engine, *await records_and_rows(store, task)


async def test_the_example_quiz_is_scored_by_its_rubric_and_trained_on_the_engines_ids(model_dir: Path) -> None:
    script: Script = lambda context, depth: "42" if depth % 2 or "last digit" in context else "<think>6*7</think>41"  # noqa: E731
    engine, records, rows = await play(model_dir, task_for(EXAMPLES / "times_table.py"), script)
    assert sorted((record.score, record.answer, len(record.turn_ids)) for record in records) == [
        (0.5, "42", 2), (1.0, "42", 1),
    ]  # fmt: skip
    long = next(row for row in rows if len(row.turn_ids) == 2)
    assert engine.tokenizer.decode(long.token_ids.tolist(), skip_special_tokens=False) == (
        "<|im_start|>system\nAnswer with the number alone.<|im_end|>\n<|im_start|>user\nWhat is 6 times 7?<|im_end|>\n"
        "<|im_start|>assistant\n<think>6*7</think>41<|im_end|>\n<|im_start|>user\nNo. The last digit is 2.<|im_end|>\n"
        "<|im_start|>assistant\n42<|im_end|>"
    )
    assert sum(int(row.loss_mask.sum()) for row in rows) == sum(len(reply.output_ids) for reply in engine.replies)


async def test_tools_of_the_environment_run_and_a_call_that_cannot_be_read_is_answered(
    model_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "lookup.py").write_text(TOOLS, encoding="utf-8")

    def script(context: str, depth: int) -> str:
        if "<tool_response>134" in context:
            return "134 thousand"
        if "<tool_response>" in context:
            return '<tool_call>{"name": "lookup", "arguments": {"city": "Bern"}}</tool_call>'
        return "<tool_call>lookup Bern</tool_call>"

    _, records, _ = await play(model_dir, task_for(tmp_path / "lookup.py"), script)
    assert [(record.score, record.stop_reason, len(record.turn_ids)) for record in records] == [
        (1.0, StopReason.ANSWER, 3)
    ] * 2


@pytest.mark.parametrize(
    ("source", "reason"), [(FAILING, "the sandbox is gone"), (REWRITING, "the environment rewrites its context")]
)
async def test_an_environment_that_fails_or_rewrites_history_is_a_typed_failure(
    model_dir: Path, tmp_path: Path, source: str, reason: str
) -> None:
    (tmp_path / "bad.py").write_text(source, encoding="utf-8")
    _, records, rows = await play(model_dir, task_for(tmp_path / "bad.py"), lambda *_: "x")
    assert [(record.status, record.stop_reason) for record in records] == [
        (RecordStatus.FAILED, StopReason.ABORTED)
    ] * 2
    assert all(reason in str(record.error) for record in records)
    assert rows == []


async def test_our_limits_bound_an_environment_without_limits(model_dir: Path) -> None:
    for settings, expected in (
        ({"max_turns": 2}, StopReason.MAX_TURNS),
        ({"max_prompt_tokens": 160}, StopReason.CONTEXT_LIMIT),
    ):
        _, records, _ = await play(model_dir, task_for(EXAMPLES / "times_table.py"), lambda *_: "41", **settings)
        assert [(record.stop_reason, record.score) for record in records] == [(expected, 0.0)] * 2
