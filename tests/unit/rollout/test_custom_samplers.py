"""Samplers of a user's own: the example as it ships, through claim, turns, settlement and training rows."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.config import ReflectionConfig, RolloutConfig, RunConfig
from agentrl.errors import ConfigError
from agentrl.inspector.audit import audit_run
from agentrl.rollout import AsyncSampler, Conversation, MCPSampler, MetaEpisodeSampler
from agentrl.rollout.agent import RolloutResult
from agentrl.rollout.custom import load_sampler, sampler_of
from agentrl.store import MemoryStore
from agentrl.types import BRANCH, DBRecordData, RecordStatus, StopReason, TaskClaim
from factories import make_task
from group_run import claim_task, make_agent, make_config, records_and_rows, run_group
from scripted_engine import ScriptedEngine
from scripted_rollout import RECORD, TASK, Rollout
from tiny_chat import write_tiny_chat

EXAMPLE = Path(__file__).parents[3] / "assets" / "examples" / "guessing_game.py"
GAME = make_task(num_generations=2, query="Guess my number from 1 to 100.", answer="37")


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat(tmp_path_factory.mktemp("chat"))


@pytest.fixture
def game() -> type[AsyncSampler]:
    return load_sampler(str(EXAMPLE))


def halving(context: str, depth: int) -> str:
    """The first player of each context guesses at random, the second halves; both find it in the end."""
    if "too high" not in context:
        return "<think>not 12</think>50" if depth % 2 == 0 else "37"
    return "37" if "too low" in context else "25"


async def test_the_example_game_becomes_scored_records_and_token_exact_rows(
    model_dir: Path, game: type[AsyncSampler]
) -> None:
    store = MemoryStore()
    claim = await claim_task(store, GAME)
    engine = ScriptedEngine(model_dir, halving)
    await run_group(claim, store=store, engine=engine, sampler=game, max_turns=4)
    records, rows = await records_and_rows(store, GAME)
    assert sorted((record.score, record.answer, len(record.turn_ids)) for record in records) == [
        (0.5, "37", 3), (1.0, "37", 1),
    ]  # fmt: skip
    assert {record.stop_reason for record in records} == {StopReason.ANSWER}
    long = next(row for row in rows if len(row.turn_ids) == 3)
    text = engine.tokenizer.decode(long.token_ids.tolist(), skip_special_tokens=False)
    assert "<|im_start|>user\n50 is too high. Guess again.<|im_end|>" in text
    sampled = sum(len(reply.output_ids) for reply in engine.replies)
    assert sum(int(row.loss_mask.sum()) for row in rows) == sampled
    trained = [token for token, used in zip(long.token_ids, long.loss_mask, strict=True) if used]
    assert engine.tokenizer.decode(trained, skip_special_tokens=False) == (
        "<think>not 12</think>50<|im_end|>25<|im_end|>37<|im_end|>"
    )
    report = await audit_run(store, config=make_config(max_turns=4), run_dir=None)
    assert report.found == frozenset()
    assert report.counts["turns"] == 4


async def test_a_game_without_a_hit_ends_at_the_turn_limit_and_one_without_room_at_the_context_limit(
    model_dir: Path, game: type[AsyncSampler]
) -> None:
    for settings, expected in (
        ({"max_turns": 3}, (StopReason.MAX_TURNS, 3)),
        ({"max_turns": 50, "max_prompt_tokens": 200}, (StopReason.CONTEXT_LIMIT, 3)),
    ):
        store = MemoryStore()
        claim = await claim_task(store, GAME)
        engine = ScriptedEngine(model_dir, lambda context, depth: "I do not know")
        await run_group(claim, store=store, engine=engine, sampler=game, **settings)
        records, _ = await records_and_rows(store, GAME)
        assert [(record.score, record.stop_reason, len(record.turn_ids)) for record in records] == [
            (0.0, *expected)
        ] * 2


SOLO = replace(GAME, num_generations=1)
OPENING = [{"role": "user", "content": SOLO.query}]


async def taken_over(store: MemoryStore, model_dir: Path, *, said: str, opening: str = "50") -> TaskClaim:
    """A game whose first owner left after two guesses, having said this after the first one."""
    first = await claim_task(store, SOLO)
    (record,) = await store.open_records(first)
    engine = ScriptedEngine(model_dir, lambda context, depth: "25" if "Guess again" in context else opening)
    conversation = Conversation(record, committed=(), agent=make_agent(make_config(), store=store, engine=engine))
    await conversation.ask(OPENING)
    await conversation.ask([{"role": "user", "content": said}])
    await store.release_claim(first)
    (second,) = await store.claim_tasks(split="train", owner="second", lease_s=60, limit=1)
    return second


async def test_a_game_taken_over_goes_on_behind_the_committed_guesses(
    model_dir: Path, game: type[AsyncSampler]
) -> None:
    store = MemoryStore()
    claim = await taken_over(store, model_dir, said="50 is too high. Guess again.")
    engine = ScriptedEngine(model_dir, lambda context, depth: "37")
    await run_group(claim, store=store, engine=engine, sampler=game, max_turns=4)
    assert len(engine.requests) == 1  # only what was missing
    ((record,), _) = await records_and_rows(store, SOLO)
    assert (record.score, len(record.turn_ids), record.attempt) == (0.5, 3, 1)


@pytest.mark.parametrize(
    ("said", "opening"),
    [("50 is wrong. Guess again.", "50"), ("50 is right. Guess again.", "37")],  # the game would end, or say "too high"
)
async def test_an_environment_that_says_something_else_after_a_takeover_is_a_typed_failure(
    model_dir: Path, game: type[AsyncSampler], said: str, opening: str
) -> None:
    store = MemoryStore()
    claim = await taken_over(store, model_dir, said=said, opening=opening)
    engine = ScriptedEngine(model_dir, lambda context, depth: "37")
    await run_group(claim, store=store, engine=engine, sampler=game, max_turns=4)
    ((record,), rows) = await records_and_rows(store, SOLO)
    assert (record.status, record.stop_reason, record.score) == (RecordStatus.FAILED, StopReason.ABORTED, None)
    assert "says something else before turn 1" in str(record.error)
    assert (engine.requests, rows) == ([], [])


QUESTION = replace(make_task("six", num_generations=2, query="What is 6 times 7?", answer="42"), scorer="math")
DEBATE = str(EXAMPLE.with_name("solver_and_critic.py"))


def debate(context: str, depth: int) -> str:
    """The first Record is corrected by its critic; the second one's critic lets a mistake pass."""
    if "Check the answer" in context:
        return "6 times 7 is more." if "Answer: 41" in context and "Answer: 42" not in context else "ACCEPT"
    if "objects" in context:
        return "<answer>42</answer>"
    return f"<answer>{41 if depth == 0 else 43}</answer>"


async def test_two_agents_are_two_branches_of_a_record_and_two_training_rows(model_dir: Path) -> None:
    store = MemoryStore()
    claim = await claim_task(store, QUESTION)
    engine = ScriptedEngine(model_dir, debate)
    await run_group(claim, store=store, engine=engine, sampler=load_sampler(DEBATE))
    records, rows = await records_and_rows(store, QUESTION)
    long, short = sorted(records, key=lambda record: -len(record.turn_ids))
    assert [(r.score, r.answer, len(r.turn_ids)) for r in (long, short)] == [(1.0, "42", 4), (0.0, "43", 2)]
    solver, critic = sorted((row for row in rows if row.record_id == long.id), key=lambda row: row.id)
    assert [row.turn_ids for row in (solver, critic)] == [long.turn_ids[0::2], long.turn_ids[1::2]]

    def said(row: DBRecordData, *, is_trained: bool) -> str:
        ids = row.token_ids[row.loss_mask == is_trained].tolist()
        return engine.tokenizer.decode(ids, skip_special_tokens=False)

    assert said(solver, is_trained=True) == "<answer>41</answer><|im_end|><answer>42</answer><|im_end|>"
    assert said(critic, is_trained=True) == "6 times 7 is more.<|im_end|>ACCEPT<|im_end|>"
    assert "A reviewer objects: 6 times 7 is more." in said(solver, is_trained=False)
    assert "Check the answer" not in said(solver, is_trained=False)
    assert set(solver.advantages[solver.loss_mask]) == set(critic.advantages[critic.loss_mask])
    report = await audit_run(store, config=make_config(), run_dir=None)
    assert report.found == frozenset()
    turns = await store.load_turns(long)
    assert [turn.model.request.get(BRANCH, {}).get("because") for turn in turns] == [None, "critic", "solver", "critic"]


@pytest.mark.parametrize("num_requests", [1, 2, 3, 4])
async def test_a_debate_whose_sampler_dies_is_continued_by_the_next_one(model_dir: Path, num_requests: int) -> None:
    def script(context: str, depth: int) -> str | BaseException:
        return KeyError("dead") if len(engine.requests) == num_requests else debate(context, 0)

    store, solo = MemoryStore(), replace(QUESTION, num_generations=1)
    engine = ScriptedEngine(model_dir, script)
    first = await claim_task(store, solo)
    with pytest.raises(ExceptionGroup):
        await run_group(first, store=store, engine=engine, sampler=load_sampler(DEBATE))
    await store.release_claim(first)
    [second] = await store.claim_tasks(split="train", owner="second", lease_s=60, limit=1)
    await run_group(second, store=store, engine=engine, sampler=load_sampler(DEBATE))
    ((record,), _) = await records_and_rows(store, solo)
    assert (record.score, len(record.turn_ids), record.attempt) == (1.0, 4, 1)
    assert len(engine.requests) == 5  # four completions and the one nobody got
    assert [turn.tokens.parent_turn for turn in await store.load_turns(record)] == [-1, -1, 0, 1]


def test_without_a_module_the_sampler_is_the_default() -> None:
    assert load_sampler(None) is MCPSampler
    assert sampler_of(RunConfig()) is MCPSampler


def test_episodes_are_made_by_a_sampler_that_knows_them(tmp_path: Path) -> None:
    meta = ReflectionConfig(episodes=3)
    assert sampler_of(RunConfig(reflection=meta)) is MetaEpisodeSampler
    assert sampler_of(RunConfig(reflection=ReflectionConfig(episode_unit="step"))) is MetaEpisodeSampler
    own = tmp_path / "own.py"
    own.write_text("from agentrl.rollout import MetaEpisodeSampler\nclass Own(MetaEpisodeSampler): ...\n")
    config = RunConfig(reflection=meta, rollout=RolloutConfig(sampler_module=str(own)))
    assert sampler_of(config).__name__ == "Own"
    with_a_loop_of_its_own = RunConfig(reflection=meta, rollout=RolloutConfig(sampler_module=str(EXAMPLE)))
    with pytest.raises(ConfigError, match=r"episodes = 3.*derive it from MetaEpisodeSampler"):
        sampler_of(with_a_loop_of_its_own)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (None, "cannot be imported: ImportError: no such file"),
        ("import nowhere_at_all", r"cannot be imported: ModuleNotFoundError.*mine\.py, line 1"),
        ("x = 1\ny = missing_name", r"cannot be imported: NameError.*mine\.py, line 2"),
        ("def broken(:", "cannot be imported"),
        ("from agentrl.rollout import AsyncSampler, MCPSampler", "it defines none"),
        ("from agentrl.rollout import AsyncSampler\nclass Half(AsyncSampler): ...", "it defines none"),
        (
            "from agentrl.rollout import MCPSampler\nclass One(MCPSampler): ...\nclass Two(MCPSampler): ...",
            "it defines One, Two",
        ),
    ],
)
def test_a_module_without_exactly_one_sampler_is_refused(tmp_path: Path, source: str | None, reason: str) -> None:
    module = tmp_path / "mine.py"
    if source is not None:
        module.write_text(source, encoding="utf-8")
    with pytest.raises(ConfigError, match=reason):
        load_sampler(str(module))


@pytest.mark.parametrize("value", [None, "1", float("nan"), 10**400])
async def test_a_sampler_that_scores_with_no_finite_number_makes_a_typed_failure(
    model_dir: Path, game: type[AsyncSampler], value: object
) -> None:
    class Odd(game):  # type: ignore[valid-type, misc]
        async def evaluate_record(self, result: RolloutResult) -> float:
            return value  # type: ignore[return-value]

    store = MemoryStore()
    await run_group(
        await claim_task(store, GAME), store=store, engine=ScriptedEngine(model_dir, halving), sampler=Odd, max_turns=4
    )
    records, rows = await records_and_rows(store, GAME)
    assert {(record.stop_reason, record.score) for record in records} == {(StopReason.JUDGE_ERROR, None)}
    assert "no finite number" in str(records[0].error)
    assert not rows


async def test_a_sampler_whose_scoring_never_ends_makes_a_typed_failure(
    model_dir: Path, game: type[AsyncSampler], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.rollout.sampler.SCORING_TIMEOUT_S", 0.05)

    class Endless(game):  # type: ignore[valid-type, misc]
        async def evaluate_record(self, result: RolloutResult) -> float:
            await asyncio.Event().wait()
            raise AssertionError

    store = MemoryStore()
    await run_group(
        await claim_task(store, GAME), store=store, engine=ScriptedEngine(model_dir, halving), sampler=Endless
    )
    records, _ = await records_and_rows(store, GAME)
    assert {(record.stop_reason, record.answer) for record in records} == {(StopReason.JUDGE_ERROR, "37")}


@pytest.mark.parametrize("first", [math.nan, math.inf, "1.0", None])
async def test_a_sampler_that_scores_an_earlier_episode_with_no_number_fails_the_record(
    model_dir: Path, first: object
) -> None:
    class Odd(MetaEpisodeSampler):
        async def evaluate_record(self, result: RolloutResult) -> float:
            return first if result.answer == "1" else 1.0  # type: ignore[return-value]

    texts = ["<answer>1</answer>", "<answer>2</answer>"]
    rollout = Rollout(model_dir=model_dir, script=lambda context, depth: texts.pop(0), reflection={"episodes": 2})
    rollout.engine = ScriptedEngine(model_dir, rollout.script)
    record, _ = await Odd(TASK, record=RECORD, committed=(), agent=rollout.agent()).sample()
    assert (record.status, record.stop_reason, record.score) == (RecordStatus.FAILED, StopReason.JUDGE_ERROR, None)
    assert [episode.score for episode in record.episodes] == [None, None]
