"""Meta-episodes through a store: from the sampled tokens to training rows, and what the audit says of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agentrl.config import AlgoConfig, ReflectionConfig, RunConfig
from agentrl.inspector.audit import audit_run
from agentrl.protocols import Store
from agentrl.rollout.groups import GroupRunner
from agentrl.store import MemoryStore
from agentrl.tools import FunctionToolbox
from agentrl.types import DBRecordData, EpisodeResult, PolicyVersion, Record, RecordStatus, Recovery, TaskClaim
from audit_run import CALL, CONFIG, MemoryForger, add, claim, make_runner, make_task
from scripted_engine import Script, ScriptedEngine
from tiny_chat import write_tiny_chat

TASK = "train:0:q0"
REFLECT = "Reflect now."
MALFORMED = "<tool_call>{oops</tool_call>"
TURNS = (("hm", MALFORMED, CALL, "<answer>4</answer>"), ("think <answer>5</answer>",), (CALL, "<answer>6</answer>"))
META = CONFIG.model_copy(
    update={
        "reflection": ReflectionConfig(episodes=3, reflection_prompt=REFLECT),
        "algo": AlgoConfig(advantage="turn_rloo", tasks_per_step=2),
    }
)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_chat(tmp_path_factory.mktemp("chat"))


def script(context: str, depth: int) -> str:
    """The first Record of the group plays TURNS, the second one answers 5 in every episode."""
    episode = context.count(REFLECT)
    if depth % 2 and not episode and context.count("<|im_start|>assistant") == 1:
        return "<answer>5</answer>"
    own = context.rpartition(REFLECT)[2].count("<|im_start|>assistant")
    is_second = "4" not in context and episode > 0
    return "<answer>5</answer>" if is_second else TURNS[episode][own - 1]


async def claimed(
    store: Store, model_dir: Path, *, config: RunConfig, script: Script = script
) -> tuple[GroupRunner, TaskClaim]:
    """A sampler under these settings, and its claim on the group."""
    runner = make_runner(store, ScriptedEngine(model_dir, script), model_dir, config=config)
    runner.agent = replace(runner.agent, toolbox=FunctionToolbox([add], recovery=Recovery.STATELESS))
    await store.publish_policy(PolicyVersion(version=0, path="v0"))
    await store.insert_tasks([make_task("q0")])
    return runner, await claim(store, split="train", lease_s=60)


async def run_group(store: Store, model_dir: Path, *, config: RunConfig = META) -> list[Record]:
    runner, taken = await claimed(store, model_dir, config=config)
    await runner.run(taken)
    return sorted(await store.list_records(task_id=TASK), key=lambda record: record.id)


async def rows_of(store: Store, records: list[Record]) -> list[DBRecordData]:
    (group,) = await store.settled_groups(split="train", limit=1)
    return list(await store.load_sequences([summary.id for summary in group.sequences]))


async def test_each_token_carries_the_credit_of_its_episode_and_only_the_models_are_trained(
    store: Store, model_dir: Path
) -> None:
    records = await run_group(store, model_dir)
    long, short = sorted(records, key=lambda record: -len(record.turn_ids))
    assert [episode.score for episode in long.episodes] == [0.0, 1.0, 0.0]
    assert [episode.score for episode in short.episodes] == [1.0, 1.0, 1.0]
    row = next(row for row in await rows_of(store, records) if row.record_id == long.id)
    credit_by_episode = [-2.0, -1.0, -1.0]  # r~ = (-1, 0, -1), summed from there on
    wanted: list[tuple[int, bool, float]] = []
    episode = -1
    texts = [text for part in TURNS for text in part]
    starts = [0, 4, 5]
    turns = await store.load_turns(long)
    for position, turn in enumerate(turns):
        episode += position in starts
        wanted += [(token, False, 0.0) for token in turn.tokens.prompt_ids]
        wanted += [(token, True, credit_by_episode[episode]) for token in turn.tokens.completion_ids]
        assert turn.model.response["text"] == texts[position]
    found = zip(row.token_ids.tolist(), row.loss_mask.tolist(), row.advantages.tolist(), strict=True)
    assert list(found) == wanted
    assert_shown_but_not_trained(row, model_dir)


def assert_shown_but_not_trained(row: DBRecordData, model_dir: Path) -> None:
    """Question, nudge, tool results, what is said of a malformed call, and requests to reflect: in the row, masked."""
    decode = ScriptedEngine(model_dir, script).tokenizer.decode
    pieces = np.split(row.token_ids, np.flatnonzero(np.diff(row.loss_mask.astype(int))) + 1)
    shown = [decode(piece.tolist(), skip_special_tokens=False) for piece in pieces]
    masked, trained = "".join(shown[0::2]), "".join(shown[1::2])
    for said in ("q0: 2+3?", "Call a tool, or give the final answer.", "<tool_response>5</tool_response>", REFLECT):
        assert (said in masked, said in trained) == (True, False)
    assert masked.count(REFLECT) == 2
    assert trained == "".join(f"{text}<|im_end|>" for part in TURNS for text in part)


async def test_the_audit_finds_nothing_in_meta_episodes_and_they_read_back_equal(store: Store, model_dir: Path) -> None:
    here = await run_group(store, model_dir)
    memory = await run_group(MemoryStore(), model_dir)
    assert sorted(map(by_value, here)) == sorted(map(by_value, memory))
    assert all(len(record.episodes) == 3 for record in here)
    report = await audit_run(store, config=META, run_dir=None)
    assert report.is_clean, report.as_json()


def by_value(record: Record) -> tuple[str, str]:
    return str(record.episodes), str(record.turn_scores)


@pytest.mark.parametrize("settings", [{"reflection_context": "last_k"}, {"episodes": 1, "episode_unit": "step"}])
async def test_the_audit_finds_nothing_in_short_contexts_and_steps(
    memory_store: MemoryStore, model_dir: Path, settings: dict[str, object]
) -> None:
    reflection = ReflectionConfig.model_validate({"episodes": 3, "reflection_prompt": REFLECT} | settings)
    config = META.model_copy(update={"reflection": reflection})
    records = await run_group(memory_store, model_dir, config=config)
    assert all(record.episodes for record in records)
    report = await audit_run(memory_store, config=config, run_dir=None)
    assert report.is_clean, report.as_json()


async def test_groups_settled_with_another_version_have_a_score_of_it_for_every_episode(
    memory_store: MemoryStore, model_dir: Path
) -> None:
    config = META.model_copy(update={"algo": META.algo.model_copy(update={"score_version": "0.5*em"})})
    records = await run_group(memory_store, model_dir, config=config)
    (group,) = await memory_store.settled_groups(split="train", limit=1)
    own = {record.id: [episode.score for episode in record.episodes] for record in records}
    halved = {record_id: tuple(0.5 * score for score in scores if score) for record_id, scores in own.items()}
    settled = group.settlement.episode_scores
    assert {record_id: tuple(filter(None, scores)) for record_id, scores in settled.items()} == halved
    assert {len(scores) for scores in settled.values()} == {3}
    report = await audit_run(memory_store, config=config, run_dir=None)
    assert report.is_clean, report.as_json()
    [version] = await memory_store.count_scores()
    [score, *_] = (await memory_store.find_scores(records, version=version)).values()
    await MemoryForger(memory_store).put_score(replace(score, episode_values=(0.125, *score.episode_values[1:])))
    report = await audit_run(memory_store, config=config, run_dir=None)
    assert {result.check.value for result in report.results if result.findings} >= {"settlement"}


MASKED = META.algo.model_copy(update={"episode_reward_mask": [0.0, 0.0, 1.0]})
LATER_SETTINGS = {
    "fewer episodes": {
        "reflection": ReflectionConfig(episodes=2, reflection_prompt=REFLECT),
        "algo": META.algo.model_copy(update={"episode_reward_mask": [0.0, 1.0]}),
    },
    "one episode": {"reflection": ReflectionConfig(), "algo": AlgoConfig(advantage="rloo", tasks_per_step=2)},
    "steps": {"reflection": ReflectionConfig(episode_unit="step"), "algo": META.algo},
}


@pytest.mark.parametrize("later", LATER_SETTINGS)
async def test_a_group_begun_under_other_settings_is_finished_and_settled_and_audits_clean(
    memory_store: MemoryStore, model_dir: Path, later: str
) -> None:
    num_asked = 0

    def killed(context: str, depth: int) -> str | BaseException:
        nonlocal num_asked
        num_asked += 1
        return RuntimeError("killed") if num_asked == 8 else script(context, depth)  # one Record is complete by then

    masked = META.model_copy(update={"algo": MASKED})
    runner, taken = await claimed(memory_store, model_dir, config=masked, script=killed)
    with pytest.raises(BaseExceptionGroup):
        await runner.run(taken)
    await memory_store.release_claim(taken)
    after = META.model_copy(update=LATER_SETTINGS[later])
    records = await run_group(memory_store, model_dir, config=after)
    assert {record.status for record in records} == {RecordStatus.FINISHED}
    assert 3 in {len(record.episodes) for record in records}
    report = await audit_run(memory_store, config=after, run_dir=None)
    assert report.is_clean, report.as_json()


def with_episode(record: Record, number: int, change: Callable[[EpisodeResult], EpisodeResult]) -> Record:
    episodes = list(record.episodes)
    episodes[number] = change(episodes[number])
    return replace(record, episodes=tuple(episodes))


FORGERIES: dict[str, Callable[[Record], Record]] = {
    "score": lambda record: with_episode(record, 0, lambda episode: replace(episode, score=0.5)),
    "score everywhere": lambda record: replace(
        with_episode(record, 0, lambda episode: replace(episode, score=0.5)),
        turn_scores=tuple(
            0.5 if position == record.episodes[0].num_turns - 1 else score
            for position, score in enumerate(record.turn_scores)
        ),
    ),
    "answer": lambda record: with_episode(record, 2, lambda episode: replace(episode, answer="5")),
    "tool calls": lambda record: with_episode(record, 0, lambda episode: replace(episode, num_tool_calls=7)),
    "tokens": lambda record: with_episode(record, 1, lambda episode: replace(episode, num_completion_tokens=7)),
    "boundary": lambda record: with_episode(
        with_episode(record, 0, lambda episode: replace(episode, num_turns=episode.num_turns + 1)),
        1,
        lambda episode: replace(episode, num_turns=episode.num_turns - 1),
    ),
    "missing": lambda record: replace(record, episodes=()),
}


@pytest.mark.parametrize("forged", FORGERIES)
async def test_the_audit_finds_a_forged_episode(memory_store: MemoryStore, model_dir: Path, forged: str) -> None:
    records = await run_group(memory_store, model_dir)
    record = max(records, key=lambda record: len(record.turn_ids))
    await MemoryForger(memory_store).put_record(FORGERIES[forged](record))
    report = await audit_run(memory_store, config=META, run_dir=None)
    found = {result.check.value for result in report.results if result.findings}
    assert ("settlement" if forged == "score everywhere" else "episodes") in found
