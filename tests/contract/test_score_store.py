"""ScoreStore on every store: facts are inserted once and stay."""

from __future__ import annotations

from dataclasses import replace

from agentrl.protocols import Store
from agentrl.types import DispatchedSamplingTask, DispatchKind, JudgeVerdict, Score
from factories import EPOCH_START, make_record, make_task


def score(value: float, *, record_id: str = "train:0:q1/g0", version: str = "em @1", attempt: int = 1) -> Score:
    return Score(
        record_id=record_id, attempt=attempt, version=version, scorer="em", value=value, episode_values=(0.5, value),
        call_ids=("c",), scored_at=EPOCH_START,
    )  # fmt: skip


def judge_call(call_id: str, *, text: str = "Correct", record_id: str = "train:0:q1/g0") -> DispatchedSamplingTask:
    return DispatchedSamplingTask(
        id=call_id, record_id=record_id, task_id="train:0:q1", turn=0, index=0, kind=DispatchKind.JUDGE, target="judge",
        status="ok", request={"messages": []}, response={"text": text}, started_at=EPOCH_START, finished_at=EPOCH_START,
    )  # fmt: skip


async def test_the_first_score_of_a_version_stays_and_versions_stand_side_by_side(store: Store) -> None:
    record = make_record(make_task())
    assert await store.put_score(score(1.0)) == score(1.0)
    assert (await store.put_score(score(0.0))).value == 1.0
    await store.put_score(score(0.5, version="f1 @2"))
    assert {k: s.value for k, s in (await store.find_scores([record], version="em @1")).items()} == {record.id: 1.0}
    assert {k: s.value for k, s in (await store.find_scores([record], version="f1 @2")).items()} == {record.id: 0.5}
    assert await store.find_scores([record], version="f1") == {}
    assert await store.count_scores() == {"em @1": 1, "f1 @2": 1}


async def test_a_score_is_of_one_attempt(store: Store) -> None:
    record = make_record(make_task())
    await store.put_score(score(1.0))
    assert await store.find_scores([replace(record, attempt=2)], version="em @1") == {}


async def test_the_first_verdict_under_a_key_stays(store: Store) -> None:
    first = JudgeVerdict(key="k", verdict="correct", model="a")
    assert await store.put_verdict(first) == first
    assert await store.put_verdict(replace(first, verdict="incorrect")) == first
    assert await store.find_verdicts(["other", "k"]) == {"k": first}


async def test_judge_calls_are_found_by_their_record_and_written_once(store: Store) -> None:
    large = judge_call("train:0:q1/g0/judge.b", text="x" * 9_000_000)
    await store.put_calls([judge_call("train:0:q1/g0/judge.a"), large])
    await store.put_calls([judge_call("train:0:q1/g0/judge.a", text="other")])
    await store.put_calls([judge_call("train:0:q1/g1/judge.c", record_id="train:0:q1/g1")])
    calls = await store.list_calls("train:0:q1/g0")
    assert [call.id for call in calls] == ["train:0:q1/g0/judge.a", "train:0:q1/g0/judge.b"]
    assert calls[0].response["text"] == "Correct"
    assert calls[1] == large
