from dataclasses import replace

import pytest
from rich.console import Console

from agentrl.errors import UnavailableError
from agentrl.inspector import load_trajectory, render_records, render_trajectory
from agentrl.store import MemoryStore
from agentrl.types import (
    EPISODE,
    EpisodeResult,
    GroupOutcome,
    GroupSettlement,
    RecordStatus,
    StepStatus,
    StopReason,
    TrainStep,
)
from factories import make_record, make_sequence, make_task, make_turn


def text_of(renderable: object, *, width: int = 140) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


async def store_with_one_group() -> tuple[MemoryStore, str]:
    """A Task of two generations: one answered after a tool call, one failed; trained in step 1."""
    store = MemoryStore()
    await store.prepare()
    task = make_task(num_generations=2, query="What is [bold]6*7[/bold]?", answer="42")
    await store.insert_tasks([task])
    (claim,) = await store.claim_tasks(split="train", owner="w", lease_s=60, limit=1)
    good, bad = await store.open_records(claim)
    good = await store.commit_turn(good, make_turn(good, text="<tool_call>...</tool_call>", tool_results=("42",)))
    good = await store.commit_turn(good, make_turn(good, text="<answer>42</answer>", version=1))
    good = replace(
        good, status=RecordStatus.FINISHED, stop_reason=StopReason.ANSWER, answer="42", score=1.0, scorer="em"
    )
    bad = replace(bad, status=RecordStatus.FAILED, stop_reason=StopReason.ENGINE_ERROR, error="engine went away")
    await store.finish_record(good)
    await store.finish_record(bad)
    row = make_sequence(good, advantage=0.7)
    settlement = GroupSettlement(
        task_id=task.id, outcome=GroupOutcome.TRAINABLE, rewards={good.id: 1.0}, advantages={good.id: 0.7}, num_failed=1
    )
    await store.settle_task(claim, settlement, [row])
    step = TrainStep(step=1, status=StepStatus.PLANNED, policy_version=0, task_ids=(task.id,), sequence_ids=(row.id,))
    await store.commit_step(replace(await store.plan_step(step), status=StepStatus.COMMITTED))
    return store, good.id


async def test_a_meta_episode_shows_what_became_of_each_episode():
    store, record_id = await store_with_one_group()
    shown = await load_trajectory(store, record_id=record_id)
    last = EpisodeResult(
        answer="42", score=1.0, stop_reason=StopReason.ANSWER, num_turns=1, num_tool_calls=0, num_completion_tokens=2
    )
    first = replace(last, answer=None, score=0.0, stop_reason=StopReason.MAX_TURNS, num_tool_calls=1)
    turns = list(shown.turns)
    mark = {EPISODE: {"number": 1, "after": "max_turns"}}
    turns[1] = replace(turns[1], model=replace(turns[1].model, request=mark))
    meta = replace(shown, record=replace(shown.record, episodes=(first, last)), turns=tuple(turns))
    text = text_of(render_trajectory(meta))
    assert "episode 1 begins: the one before ended with max_turns" in text
    assert "no answer, score 0.000, stopped: max_turns, 1 turns, 1 tool calls, 2 tokens" in text
    assert "answer 42, score 1.000, stopped: answer" in text


async def test_names_from_a_task_file_are_shown_literally():
    store = MemoryStore()
    await store.prepare()
    task = make_task("[/x]\u202e", num_generations=1, query="a\x1b[2Jb", answer="[/y]")
    await store.insert_tasks([task])
    (claim,) = await store.claim_tasks(split="train", owner="w", lease_s=60, limit=1)
    (record,) = await store.open_records(claim)
    assert "[/x]\\u202e" in text_of(render_records([record]))
    shown = text_of(render_trajectory(await load_trajectory(store, record_id=record.id)))
    assert r"a\x1b[2Jb" in shown
    assert "[/y]" in shown


async def test_a_trajectory_reads_from_question_to_the_step_that_trained_it():
    store, record_id = await store_with_one_group()
    shown = text_of(render_trajectory(await load_trajectory(store, record_id=record_id)))
    wanted = [
        record_id, "expected", "42", "2 turns", "v0, v1", "user", "What is [bold]6*7[/bold]?",
        "turn 0", "+3 prompt, 2 sampled", "mean log-prob -0.500", "<tool_call>", 'calculate({"expression": "1 + 1"})',
        "ok", "tool", "42", "turn 1", "v1", "<answer>42</answer>", "stopped", "answer", "score", "1.00", "+0.700",
        "trainable", "step 1 (on policy v0)",
    ]  # fmt: skip
    position = 0
    for text in wanted:
        position = shown.find(text, position)
        assert position >= 0, f"{text!r} is missing or out of order in\n{shown}"


async def test_a_failed_record_shows_its_reason_and_no_score():
    store, record_id = await store_with_one_group()
    shown = text_of(render_trajectory(await load_trajectory(store, record_id=record_id.replace("/g0", "/g1"))))
    assert "engine_error: engine went away" in shown
    assert "enter no baseline" in shown
    assert "not trained: step 1 consumed its group" in shown


async def test_a_missing_record_is_a_user_error_that_says_where_to_look():
    store, _ = await store_with_one_group()
    with pytest.raises(UnavailableError, match="'nope' is not in this run; `agentrl inspect RUN_NAME` lists"):
        await load_trajectory(store, record_id="nope")


def test_the_table_has_one_line_per_record_and_no_score_for_failures():
    good = make_record(status=RecordStatus.FINISHED, stop_reason=StopReason.ANSWER, score=1.0, answer="42")
    bad = replace(make_record(generation=1, status=RecordStatus.FAILED), error="engine went away")
    lines = text_of(render_records([good, bad])).splitlines()
    assert len(lines) == 3
    assert good.id in lines[1]
    assert "1.00" in lines[1]
    assert " - " in lines[2]
    assert "engine went away" in lines[2]
