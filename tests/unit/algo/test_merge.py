from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algo.merge import merge_record
from agentrl.types import Turn, VersionSpan
from factories import make_record, make_turn

RECORD = make_record()


def turn(index: int, parent: int, *, prompt: list[int], completion: list[int], version: int = 3) -> Turn:
    return make_turn(
        RECORD,
        index=index,
        parent_turn=parent,
        prompt_ids=prompt,
        completion_ids=completion,
        logprobs=[-token / 100 for token in completion],
        version=version,
    )


def test_a_linear_record_becomes_one_row_with_every_array_aligned() -> None:
    turns = [
        turn(0, -1, prompt=[1, 2], completion=[10, 11], version=3),
        turn(1, 0, prompt=[3], completion=[12, 13], version=4),
    ]
    (row,) = merge_record(RECORD, turns, reward=1.0, advantages=[0.5] * len(turns))
    assert row.id == f"{RECORD.id}/s0"
    assert row.token_ids.tolist() == [1, 2, 10, 11, 3, 12, 13]
    assert row.loss_mask.tolist() == [False, False, True, True, False, True, True]
    assert row.policy_versions.tolist() == [-1, -1, 3, 3, -1, 4, 4]
    assert row.advantages.tolist() == [0, 0, 0.5, 0.5, 0, 0.5, 0.5]
    assert row.behaviour_logprobs is not None
    assert row.behaviour_logprobs.tolist() == pytest.approx([0, 0, -0.10, -0.11, 0, -0.12, -0.13])
    assert row.turn_ids == tuple(turn.model.id for turn in turns)
    assert (row.reward, row.task_id, row.record_id, row.split) == (1.0, RECORD.task_id, RECORD.id, "train")
    assert row.summary.min_policy_version == 3


def test_branches_share_a_prefix_as_context_and_train_it_once() -> None:
    turns = [
        turn(0, -1, prompt=[1], completion=[10]),
        turn(1, 0, prompt=[2], completion=[11]),
        turn(2, 1, prompt=[3], completion=[12]),
        turn(3, 0, prompt=[4], completion=[13]),
        turn(4, -1, prompt=[5], completion=[14]),
    ]
    rows = merge_record(RECORD, turns, reward=1.0, advantages=[1.0] * len(turns))
    assert [row.id.rpartition("/")[2] for row in rows] == ["s0", "s1", "s2"]
    assert [row.token_ids.tolist() for row in rows] == [[1, 10, 2, 11, 3, 12], [1, 10, 4, 13], [5, 14]]
    assert [row.token_ids[row.loss_mask].tolist() for row in rows] == [[10, 11, 12], [13], [14]]
    assert rows[1].policy_versions.tolist() == [-1, -1, -1, 3]


def test_a_generation_over_a_weight_update_keeps_both_versions() -> None:
    whole = turn(0, -1, prompt=[1], completion=[10, 11, 12])
    spans = (VersionSpan(version=3, start=0, end=1), VersionSpan(version=4, start=1, end=3))
    spanning = replace(whole, model=replace(whole.model, tokens=replace(whole.tokens, version_spans=spans)))
    (row,) = merge_record(RECORD, [spanning], reward=0.0, advantages=[1.0])
    assert row.policy_versions.tolist() == [-1, 3, 4, 4]


def test_nothing_sampled_gives_no_rows() -> None:
    assert merge_record(RECORD, [], reward=0.0, advantages=[]) == []
    assert merge_record(RECORD, [turn(0, -1, prompt=[1], completion=[])], reward=0.0, advantages=[1.0]) == []


@st.composite
def turn_trees(draw: st.DrawFn) -> list[Turn]:
    """Any tree of turns. Sampled tokens are unique (from 1000), context tokens are small."""
    turns = []
    next_token = 1000
    for index in range(draw(st.integers(1, 8))):
        length = draw(st.integers(0, 3))
        prompt = draw(st.lists(st.integers(0, 99), min_size=1, max_size=3))
        completion = list(range(next_token, next_token + length))
        next_token += length
        turns.append(turn(index, draw(st.integers(-1, index - 1)), prompt=prompt, completion=completion, version=index))
    return turns


@given(turns=turn_trees())
def test_no_sampled_token_is_lost_or_trained_twice(turns: list[Turn]) -> None:
    rows = merge_record(RECORD, turns, reward=1.0, advantages=[2.0] * len(turns))
    trained = Counter(token for row in rows for token in row.token_ids[row.loss_mask].tolist())
    assert trained == Counter(token for one in turns for token in one.tokens.completion_ids)


@given(turns=turn_trees())
def test_rows_are_what_the_engine_saw_with_everything_else_masked(turns: list[Turn]) -> None:
    by_id = {one.model.id: one for one in turns}
    for row in merge_record(RECORD, turns, reward=1.0, advantages=[2.0] * len(turns)):
        chain = [by_id[turn_id] for turn_id in row.turn_ids]
        seen = [token for one in chain for token in (*one.tokens.prompt_ids, *one.tokens.completion_ids)]
        assert row.token_ids.tolist() == seen
        assert [one.tokens.parent_turn for one in chain] == [-1, *(one.index for one in chain[:-1])]
        assert (row.token_ids[row.loss_mask] >= 1000).all()
        mask = row.loss_mask
        assert row.behaviour_logprobs is not None
        for array, outside in ((row.advantages, 0), (row.behaviour_logprobs, 0), (row.policy_versions, -1)):
            assert array.shape == row.token_ids.shape
            assert (array[~mask] == outside).all()
        version_of = {token: one.index for one in turns for token in one.tokens.completion_ids}
        trained = row.token_ids[mask].tolist()
        assert row.policy_versions[mask].tolist() == [version_of[token] for token in trained]
        assert row.behaviour_logprobs[mask].tolist() == pytest.approx([-token / 100 for token in trained], rel=1e-6)
        assert (row.advantages[mask] == 2.0).all()


@given(turns=turn_trees())
def test_row_ids_are_consecutive_and_every_row_trains_something(turns: list[Turn]) -> None:
    rows = merge_record(RECORD, turns, reward=1.0, advantages=[2.0] * len(turns))
    assert [row.id for row in rows] == [f"{RECORD.id}/s{k}" for k in range(len(rows))]
    assert all(row.loss_mask.any() for row in rows)


def test_turns_that_do_not_fit_are_refused_by_name() -> None:
    good = turn(0, -1, prompt=[1], completion=[10, 11])

    def broken(**changes: object) -> Turn:
        return replace(good, model=replace(good.model, tokens=replace(good.tokens, **changes)))

    gap = (VersionSpan(version=0, start=1, end=2),)
    short = (VersionSpan(version=0, start=0, end=1),)
    for bad, message in [
        (broken(logprobs=(-1.0,)), "1 log-probs for 2 tokens"),
        (broken(parent_turn=0), "parent_turn 0"),
        (broken(version_spans=gap), "does not continue at 0"),
        (broken(version_spans=short), "cover 1 of 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            merge_record(RECORD, [bad], reward=0.0, advantages=[1.0])
    with pytest.raises(ValueError, match="at position 1"):
        merge_record(RECORD, [good, good], reward=0.0, advantages=[1.0, 1.0])
