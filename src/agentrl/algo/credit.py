"""From the rewards of a group to the credit of every sampled token: where an advantage method meets the turns. Pure.

    Record   turn 0   turn 1   turn 2   turn 3        group_norm ... none          one number per Record
             ──────   ──────   ──────   ──────        turn_rloo                    one number per episode
    scores     -       0.0       -       1.0          reinforce_plus_plus          one number per token: what is
             └── episode 0 ──┘└── episode 1 ──┘        mt_grpo_turn, _pooled        rewarded from there on

Where rewards come from: the `episodes` of a meta-episode, those that found no room included (reward 0, no tokens). Else
a Record's `turn_scores` name the turns that were scored; each ends an episode, and turns after the last one are an
episode without reward. Without either the Record is one episode, rewarded with its score on its last turn. What shaping
adds to a Record's score (`efficient_rewarding`) is added to its last episode.

REINFORCE++ returns are stored as they are; the trainer whitens them over all trained tokens of its optimizer step
(`train/whitening.py`), because a group does not know the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.algo.advantages import (
    Float64Array,
    GroupMethod,
    discounted_returns,
    group_advantages,
    pooled_advantages,
    turn_level_advantages,
)
from agentrl.config.credit import EPISODE_METHODS
from agentrl.config.sections import AlgoConfig
from agentrl.types import EpisodeResult, Record, Turn

GROUP_METHODS: Mapping[str, GroupMethod] = {
    "group_norm": "group_norm",
    "group_mean": "group_mean",
    "rloo": "rloo",
    "leave_one_out_sign_clip": "leave_one_out_sign_clip",
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Credit:
    """The advantages of one Record, for `merge_record`."""

    of_turns: tuple[float | Float64Array, ...]  # one number for all sampled tokens of a turn, or one for each
    mean: float  # over sampled tokens

    @property
    def is_zero(self) -> bool:
        """Whether no token gets any credit."""
        return self.mean == 0.0 and not any(np.any(values) for values in self.of_turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """The stretches of a Record that were rewarded on their own."""

    rewards: tuple[float, ...]
    of_turns: tuple[int, ...]  # index of each turn's episode


def episodes_of(record: Record, *, num_turns: int, reward: float) -> Episodes:
    """The episodes of a scored Record whose shaped reward is `reward`.

    Raises ValueError naming the Record if its `turn_scores` are not one per turn, or its `episodes` not its turns.
    """
    shift = reward - float(record.score or 0.0)
    if record.episodes:
        return _of_meta_episode(record, num_turns=num_turns, shift=shift)
    if not record.turn_scores:
        return Episodes(rewards=(reward,), of_turns=(0,) * num_turns)
    if len(record.turn_scores) != num_turns:
        raise ValueError(f"record {record.id} has {len(record.turn_scores)} turn_scores for {num_turns} turns")
    rewards: list[float] = []
    of_turns: list[int] = []
    for score in record.turn_scores:
        of_turns.append(len(rewards))
        if score is not None:
            rewards.append(score)
    if record.turn_scores[-1] is None:
        rewards.append(0.0)
    rewards[-1] += shift
    return Episodes(rewards=tuple(rewards), of_turns=tuple(of_turns))


def _of_meta_episode(record: Record, *, num_turns: int, shift: float) -> Episodes:
    of_turns = [number for number, episode in enumerate(record.episodes) for _ in range(episode.num_turns)]
    scores = [episode.score for episode in record.episodes if episode.score is not None]
    if len(of_turns) != num_turns or len(scores) != len(record.episodes):
        raise ValueError(
            f"record {record.id} has {num_turns} turns, its {len(record.episodes)} episodes {len(of_turns)} turns and "
            f"{len(scores)} scores"
        )
    return Episodes(rewards=(*scores[:-1], scores[-1] + shift), of_turns=tuple(of_turns))


def turn_scores_of(episodes: Sequence[EpisodeResult]) -> tuple[float | None, ...]:
    """The `turn_scores` of a meta-episode, one entry per turn: the score of the episode that ends there."""
    scores: list[float | None] = []
    for episode in episodes:
        if episode.num_turns:
            scores += [None] * (episode.num_turns - 1) + [episode.score]
    return tuple(scores)


def group_credit(
    records: Sequence[Record], turns: Mapping[str, Sequence[Turn]], *, rewards: Mapping[str, float], algo: AlgoConfig
) -> dict[str, Credit]:
    """Credit of every sampled token of a group's scored Records, by record id."""
    method = algo.advantage
    if method == "none":
        return {record.id: _one_number(1.0, turns[record.id]) for record in records}
    if method in GROUP_METHODS:
        values = group_advantages([rewards[record.id] for record in records], method=GROUP_METHODS[method])
        return {record.id: _one_number(value, turns[record.id]) for record, value in zip(records, values, strict=True)}
    episodes = {
        record.id: episodes_of(record, num_turns=len(turns[record.id]), reward=rewards[record.id]) for record in records
    }
    if method in EPISODE_METHODS:
        per_episode = _episode_advantages(records, [found.rewards for found in episodes.values()], algo=algo)
        return {
            record_id: _one_per_episode(values, episodes[record_id], turns[record_id])
            for record_id, values in zip(episodes, per_episode, strict=True)
        }
    if method == "reinforce_plus_plus_baseline":
        totals = {record_id: sum(found.rewards) for record_id, found in episodes.items()}
        mean = sum(totals.values()) / max(len(totals), 1)
        return {record_id: _one_number(total - mean, turns[record_id]) for record_id, total in totals.items()}
    return {record_id: _returns(found, turns[record_id], gamma=algo.gamma) for record_id, found in episodes.items()}


def _episode_advantages(
    records: Sequence[Record], rewards: Sequence[Sequence[float]], *, algo: AlgoConfig
) -> list[list[float]]:
    """turn_weight * A[i][n] + outcome_weight * A_outcome[i] for every episode n of Record i."""
    bonus = algo.improvement_bonus
    shaped = [[own + bonus * (own - before) for own, before in zip(row, (0.0, *row), strict=False)] for row in rewards]
    mask = _mask_of(rewards, algo=algo)
    baseline: GroupMethod = "rloo" if algo.advantage == "turn_rloo" else "group_norm"
    if algo.advantage == "mt_grpo_pooled":
        of_episodes = pooled_advantages(shaped, credit_mask=mask)
    else:
        of_episodes = turn_level_advantages(shaped, gamma=algo.gamma, credit_mask=mask, method=baseline)
    penalty = algo.distinct_answer_penalty
    outcomes = [
        row[-1] - penalty * _repeated_share(record.episodes) for record, row in zip(records, rewards, strict=True)
    ]
    of_records = group_advantages(outcomes, method=baseline)
    return [
        [algo.turn_weight * own + algo.outcome_weight * outcome for own in row]
        for row, outcome in zip(of_episodes, of_records, strict=True)
    ]


def _mask_of(rewards: Sequence[Sequence[float]], *, algo: AlgoConfig) -> list[float] | None:
    """One weight per episode; None: all ones. A Record begun when more episodes were wanted goes on with the last."""
    mask = algo.episode_reward_mask
    num_episodes = max(map(len, rewards), default=0)
    return [*mask, *mask[-1:] * (num_episodes - len(mask))] if mask else None


def _repeated_share(episodes: Sequence[EpisodeResult]) -> float:
    """1 - distinct answers / episodes; case and spaces make no difference, and no answer is not an answer."""
    answers = {" ".join(episode.answer.casefold().split()) for episode in episodes if episode.answer is not None}
    return 1.0 - len(answers) / len(episodes) if episodes else 0.0


def _one_number(value: float, turns: Sequence[Turn]) -> Credit:
    return Credit(of_turns=(value,) * len(turns), mean=value)


def _one_per_episode(values: Sequence[float], episodes: Episodes, turns: Sequence[Turn]) -> Credit:
    of_turns = [values[episode] for episode in episodes.of_turns]
    counts = [_lengths(turn)[1] for turn in turns]
    if len(set(of_turns)) < 2 or not sum(counts):
        return Credit(of_turns=tuple(of_turns), mean=values[0])
    return Credit(of_turns=tuple(of_turns), mean=float(np.average(of_turns, weights=counts)))


def _returns(episodes: Episodes, turns: Sequence[Turn], *, gamma: float) -> Credit:
    """Discounted rewards from each sampled token on, in the order of time; tool tokens count as steps of time.

    An episode is rewarded at its last sampled token; one without sampled tokens has nothing to reward.
    """
    lengths = [_lengths(turn) for turn in turns]
    ends = np.cumsum([num_prompt + num_sampled for num_prompt, num_sampled in lengths], dtype=np.int64).tolist()
    rewards_T = np.zeros(ends[-1] if ends else 0)
    last_turns = {episode: position for position, episode in enumerate(episodes.of_turns) if lengths[position][1] > 0}
    for episode, position in last_turns.items():
        rewards_T[ends[position] - 1] += episodes.rewards[episode]
    returns_T = discounted_returns(rewards_T, gamma=gamma)
    of_turns = tuple(returns_T[end - num_sampled : end] for end, (_, num_sampled) in zip(ends, lengths, strict=True))
    sampled = np.concatenate(of_turns) if of_turns else np.zeros(0)
    return Credit(of_turns=of_turns, mean=float(sampled.mean()) if sampled.size else 0.0)


def _lengths(turn: Turn) -> tuple[int, int]:
    """New prompt tokens and sampled tokens of a turn; none where its engine did not tell."""
    tokens = turn.model.tokens
    return (0, 0) if tokens is None else (len(tokens.prompt_ids), len(tokens.completion_ids))
