"""`agentrl rescore`: as a library on every kind of Record, and as a process that is killed in the middle."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

from agentrl.cli.main import main
from agentrl.evaluate.rescore import RescorePlan, rescore
from agentrl.rollout.scoring import RecordScorer
from agentrl.scoring import ScoringContext
from agentrl.store import MongoStore
from agentrl.store.memory import MemoryStore
from agentrl.types import EpisodeResult, Record, RecordStatus, StopReason
from chat_server import ChatServer, Status, chat_server
from factories import make_task, make_turn
from judges import judge_for

NUM_RECORDS = 40
TIMEOUT_S = 60.0


async def sampled(store: MemoryStore | MongoStore, *, num_records: int) -> list[Record]:
    """A settled history: answers a0, a1, ...; every fourth Record lost its judge, every fifth its engine."""
    task = replace(make_task(num_generations=num_records, answer="a1"), scorer="em")
    await store.insert_tasks([task])
    [claim] = await store.claim_tasks(split="train", owner="w", lease_s=600, limit=1)
    records = []
    for number, opened in enumerate(await store.open_records(claim)):
        record = await store.commit_turn(opened, make_turn(opened))
        final = replace(
            record, status=RecordStatus.FINISHED, stop_reason=StopReason.ANSWER, answer=f"a{number}",
            score=float(number == 1), scorer="em",
        )  # fmt: skip
        if number % 4 == 3 or number % 5 == 4:
            reason = StopReason.JUDGE_ERROR if number % 4 == 3 else StopReason.ENGINE_ERROR
            final = replace(final, status=RecordStatus.FAILED, stop_reason=reason, score=None, scorer=None)
        await store.finish_record(final)
        records.append(final)
    return records


def even_is_correct(request: dict) -> str:
    """A judge whose verdict depends on the answer alone."""
    answer = request["messages"][1]["content"].split('"a')[1].split('"')[0]
    return "Correct" if int(answer) % 2 == 0 else "Incorrect"


async def run_rescore(store: MemoryStore, server: ChatServer, **settings: object):
    progress: list[tuple[int, int]] = []
    async with judge_for([server.url], store) as judge:
        scoring = RecordScorer(context=ScoringContext(judge=judge), store=store)
        report = await rescore(
            store, plan=RescorePlan(**settings), scoring=scoring, tools=(),
            progress=lambda done, total: progress.append((done, total)),
        )  # fmt: skip
    return report, progress


async def test_a_new_version_stands_beside_the_old_score_and_running_it_again_asks_nothing() -> None:
    store = MemoryStore()
    records = await sampled(store, num_records=12)
    async with chat_server(even_is_correct) as server:
        report, progress = await run_rescore(store, server, scorer="agentcpm")
        num_requests = len(server.requests)
        again, _ = await run_rescore(store, server, scorer="agentcpm")
        assert len(server.requests) == num_requests
    [version] = report.versions
    scorable = [r for r in records if r.stop_reason is not StopReason.ENGINE_ERROR]
    scores = await store.find_scores(records, version=version)
    expected = {r.id: float(r.generation % 2 == 0 or r.generation == 1) for r in scorable}
    assert {record_id: score.value for record_id, score in scores.items()} == expected
    assert (report.num_scored, again.num_scored, again.num_known) == (len(scorable), 0, len(scorable))
    assert progress[-1] == (12, 12)
    stored = await store.find_records([record.id for record in records])
    assert [(r.score, r.status) for r in stored] == [(r.score, r.status) for r in records]


async def test_only_judge_errors_are_judged_again_and_an_outage_leaves_them_for_next_time() -> None:
    store = MemoryStore()
    await sampled(store, num_records=12)
    async with chat_server(lambda request: Status(503)) as server:
        report, _ = await run_rescore(store, server, scorer="agentcpm", only_judge_errors=True)
    assert (report.num_scored, report.num_failed) == (0, 3)
    assert await store.count_scores() == {}
    async with chat_server(even_is_correct) as server:
        report, _ = await run_rescore(store, server, scorer="agentcpm", only_judge_errors=True)
    assert (report.num_scored, report.num_failed) == (3, 0)


async def test_every_episode_of_a_meta_episode_is_scored_and_one_that_was_not_begun_asks_nobody() -> None:
    store = MemoryStore()
    [first, *_] = await sampled(store, num_records=4)
    episodes = tuple(
        EpisodeResult(
            answer=answer, score=0.0, stop_reason=StopReason.ANSWER if answer else StopReason.CONTEXT_LIMIT,
            num_turns=int(answer is not None), num_tool_calls=0, num_completion_tokens=2,
        )
        for answer in ("a1", "a2", "a3", None)
    )  # fmt: skip
    meta = replace(first, id="meta/g0", turn_ids=first.turn_ids * 3, answer=None, episodes=episodes)
    async with chat_server(even_is_correct) as server, judge_for([server.url], store) as judge:
        scoring = RecordScorer(context=ScoringContext(judge=judge), store=store)
        task = replace(make_task(answer="a1"), scorer="agentcpm")
        scored = await scoring.score_again(task, scorer="agentcpm", record=meta, turns=(), tools=())
        assert len(server.requests) == 2, "the rule decides on the first one"
    assert (scored.value, scored.episode_values) == (0.0, (1.0, 1.0, 0.0, 0.0))
    assert len(scored.call_ids) == 2


async def test_two_at_once_agree_on_every_verdict_of_a_judge_that_does_not(store: MemoryStore | MongoStore) -> None:
    records = await sampled(store, num_records=12)
    async with chat_server(lambda request: ("Correct", "Incorrect")[request["attempt"] % 2]) as server:
        reports = await asyncio.gather(*(run_rescore(store, server, scorer="agentcpm") for _ in range(2)))
    assert [report.num_failed for report, _ in reports] == [0, 0]
    [version] = reports[0][0].versions
    scores = await store.find_scores(records, version=version)
    assert scores.keys() == {r.id for r in records if r.stop_reason is not StopReason.ENGINE_ERROR}
    async with chat_server(lambda request: Status(500)) as server:  # nobody is asked: the verdicts are kept
        for record in records:
            if record.id in scores:
                async with judge_for([server.url], store) as judge:
                    scoring = RecordScorer(context=ScoringContext(judge=judge), store=store)
                    task = replace(make_task(answer="a1"), scorer="agentcpm")
                    again = await scoring.score(
                        task, scorer="agentcpm", record=record, turns=(), answer=record.answer, tools=()
                    )
                assert again.value == scores[record.id].value


async def test_killed_in_the_middle_and_started_again_gives_the_same_scores(
    mongo_store: MongoStore, mongo_uri: str, database_name: str, tmp_path: Path, capsys
) -> None:
    records = await sampled(mongo_store, num_records=NUM_RECORDS)
    reached = asyncio.Event()

    def slowly(request: dict) -> str:
        if request["attempt"] == NUM_RECORDS // 3:
            reached.set()
        return even_is_correct(request)

    async with chat_server(slowly) as server:
        agents = tmp_path / "agent_config.yml"
        agents.write_text(f"scorer_agent: {{models: [{{base_url: '{server.url}', model: judge}}]}}", encoding="utf-8")
        arguments = (
            *("rescore", database_name, "--scorer", "agentcpm", "--parallel", "2", "--agent_config_path", str(agents)),
            *("--db_connection_string", mongo_uri, "--log_dir", str(tmp_path), "--output_dir", str(tmp_path)),
        )
        command = (sys.executable, "-m", "agentrl.cli.main", *arguments)
        first = await asyncio.create_subprocess_exec(*command, stdout=-3, stderr=-3)
        async with asyncio.timeout(TIMEOUT_S):
            await reached.wait()
        first.kill()
        await first.wait()
        counts = await mongo_store.count_scores()
        assert 0 < sum(counts.values()) < NUM_RECORDS // 2
        second = await asyncio.create_subprocess_exec(*command, stdout=-1, stderr=-3)
        async with asyncio.timeout(TIMEOUT_S):
            output, _ = await second.communicate()
    assert second.returncode == 0, output
    [version] = await mongo_store.count_scores()
    scores = await mongo_store.find_scores(records, version=version)
    scorable = [r for r in records if r.stop_reason is not StopReason.ENGINE_ERROR]
    assert {k: s.value for k, s in scores.items()} == {
        r.id: float(r.generation % 2 == 0 or r.generation == 1) for r in scorable
    }
    calls = await mongo_store.list_calls(records[2].id)
    assert [call.status for call in calls] == ["ok"]
    base = ["--db_connection_string", mongo_uri, "--log_dir", str(tmp_path), "--output_dir", str(tmp_path)]
    code = await asyncio.to_thread(main, ["inspect", database_name, "--scores", "agentcpm", "--limit", "3", *base])
    assert code == 0
    code = await asyncio.to_thread(main, ["rescore", database_name, "--scorer", "em", *base])
    assert code == 0
    capsys.readouterr()
    code = await asyncio.to_thread(main, ["rescore", database_name, "--agreement", "agentcpm", "em", *base])
    shown = capsys.readouterr().out
    assert code == 0
    assert f"records scored by both  {len(scorable)}" in shown
    assert "Cohen's kappa" in shown
