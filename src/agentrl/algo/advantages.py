"""Advantages: from rewards to signed credit. Pure numpy in float64; no tokens, no torch.

    rewards of one group        group_advantages           one number per generation
    rewards of several groups   batch_std_advantages       one number per generation, scaled by the batch
    rewards[i][n] per episode   turn_level_advantages      one number per episode, against the same episode of others
                                pooled_advantages          one number per episode, against all episodes of all
    rewards per token           reinforce_pp_advantages    one number per token, whitened over the batch

The functions over rewards raise ValueError for one that is not finite: a failed Record has no reward, never a 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]
GroupMethod = Literal["group_norm", "group_mean", "rloo", "leave_one_out_sign_clip"]
Singleton = Literal["zero", "reward"]

CORRECT_SCORE = 0.5  # a score above it counts as a correct answer
WHITENING_EPS = 1e-8


def group_advantages(
    rewards: Sequence[float],
    *,
    method: GroupMethod = "group_norm",
    eps: float = 1e-6,
    singleton: Singleton = "zero",
) -> list[float]:
    """Credit of every generation of one group, relative to its siblings.

        group_norm                (R - mean) / (std + eps), std unbiased
        group_mean                R - mean
        rloo                      R - mean of the others = G / (G - 1) * (R - mean)
        leave_one_out_sign_clip   rloo, then at most 0 for scores <= 0.5 and at least 0 for the others

    A group without spread gives exact zeros. A group of one has no baseline: 0, or its reward (taken as mean 0, std 1)
    with `singleton="reward"`. Raises ValueError for a non-finite reward or an unknown method.
    """
    rewards_G = _finite_rewards(rewards)
    if method not in _BASELINES:
        raise ValueError(f"method = {method!r}: unknown group advantage; use one of {', '.join(sorted(_BASELINES))}")
    if rewards_G.size == 1 and singleton == "reward":
        return [float(rewards_G[0] / (1.0 + eps) if method == "group_norm" else rewards_G[0])]
    if rewards_G.size < 2 or np.ptp(rewards_G) == 0:
        return [0.0] * rewards_G.size
    advantages_G: Float64Array = _BASELINES[method](rewards_G, eps)
    return [float(advantage) for advantage in advantages_G]


def batch_std_advantages(groups: Sequence[Sequence[float]], *, eps: float = 1e-4) -> list[list[float]]:
    """Group-mean baseline divided by the unbiased std of all rewards of the batch, for groups with little spread.

    Returns one list per group. A batch of fewer than two rewards, or without spread, gives zeros.
    """
    rewards = _finite_rewards([reward for group in groups for reward in group])
    if rewards.size < 2 or np.ptp(rewards) == 0:
        return [[0.0] * len(group) for group in groups]
    scale = float(rewards.std(ddof=1)) + eps
    return [[centred / scale for centred in group_advantages(group, method="group_mean")] for group in groups]


def turn_level_advantages(
    rewards: Sequence[Sequence[float]],
    *,
    gamma: float = 1.0,
    credit_mask: Sequence[float] | None = None,
    method: GroupMethod = "rloo",
) -> list[list[float]]:
    """Credit of every episode of every generation: its own relative reward plus discounted later ones.

    `rewards[i][n]` is the reward of episode n of generation i; rows may be ragged. For each n separately, the
    baseline is taken over the generations that have an episode n (a single one gets 0). Then, with m = `credit_mask`
    (all ones if None),

        A[i][n] = m[n] * relative[i][n] + gamma * A[i][n + 1]

    which lets an exploratory episode earn what it made possible (MR-Search). Raises ValueError if `credit_mask` is
    shorter than the longest row.
    """
    mask_E = _episode_mask(rewards, credit_mask=credit_mask)
    advantages = [[0.0] * len(row) for row in rewards]
    for episode in reversed(range(max((len(row) for row in rewards), default=0))):
        present = [i for i, row in enumerate(rewards) if len(row) > episode]
        relative = group_advantages([rewards[i][episode] for i in present], method=method)
        for i, own in zip(present, relative, strict=True):
            later = advantages[i][episode + 1] if len(rewards[i]) > episode + 1 else 0.0
            advantages[i][episode] = float(mask_E[episode]) * own + gamma * later
    return advantages


def pooled_advantages(
    rewards: Sequence[Sequence[float]], *, credit_mask: Sequence[float] | None = None, eps: float = 1e-6
) -> list[list[float]]:
    """Credit of every episode against all episodes of the group together: (reward - mean) / (std + eps), std unbiased.

    `rewards`, `credit_mask` and errors as for `turn_level_advantages`; nothing is discounted (MT-GRPO, pooled).
    """
    mask_E = _episode_mask(rewards, credit_mask=credit_mask)
    pooled = group_advantages([reward for row in rewards for reward in row], method="group_norm", eps=eps)
    values = iter(pooled)
    return [[float(mask_E[episode]) * next(values) for episode in range(len(row))] for row in rewards]


def reinforce_pp_advantages(
    token_rewards: Sequence[Sequence[float]],
    masks: Sequence[Sequence[bool]],
    *,
    gamma: float = 1.0,
    group_ids: Sequence[int] | None = None,
) -> list[list[float]]:
    """REINFORCE++: discounted returns per token, whitened over every trainable token of the batch.

    Returns pass through tool tokens: a token before a tool call keeps its share of the final reward. With `group_ids`
    it is the baseline variant: every trainable token of a row gets the row's total reward minus its group's mean, then
    whitening. Entries where the mask is False are 0. A row is one list in `token_rewards` and one in `masks`.
    """
    masks_RT = [np.asarray(mask, dtype=np.bool_) for mask in masks]
    rewards_RT = [np.asarray(row, dtype=np.float64) for row in token_rewards]
    if group_ids is None:
        returns_RT = [discounted_returns(row_T, gamma=gamma) for row_T in rewards_RT]
    else:
        totals = [float(row_T.sum()) for row_T in rewards_RT]
        centred = _centre_by_group(totals, group_ids)
        returns_RT = [np.full(row_T.size, value) for row_T, value in zip(rewards_RT, centred, strict=True)]
    return [row.tolist() for row in _whiten(returns_RT, masks_RT)]


def _episode_mask(rewards: Sequence[Sequence[float]], *, credit_mask: Sequence[float] | None) -> Float64Array:
    num_episodes = max((len(row) for row in rewards), default=0)
    mask_E = np.ones(num_episodes) if credit_mask is None else np.asarray(credit_mask, dtype=np.float64)
    if mask_E.size < num_episodes:
        raise ValueError(f"credit_mask has {mask_E.size} entries for {num_episodes} episodes: give one per episode")
    return mask_E


def _finite_rewards(rewards: Sequence[float]) -> Float64Array:
    rewards_G = np.asarray(rewards, dtype=np.float64)
    if not np.isfinite(rewards_G).all():
        raise ValueError(f"rewards = {list(rewards)}: every reward must be finite; a failed Record has no reward")
    return rewards_G


def _group_norm(rewards_G: Float64Array, eps: float) -> Float64Array:
    return np.asarray((rewards_G - rewards_G.mean()) / (rewards_G.std(ddof=1) + eps))


def _group_mean(rewards_G: Float64Array, eps: float) -> Float64Array:
    del eps
    return np.asarray(rewards_G - rewards_G.mean())


def _rloo(rewards_G: Float64Array, eps: float) -> Float64Array:
    del eps
    size = rewards_G.size
    return np.asarray((rewards_G - rewards_G.mean()) * (size / (size - 1)))


def _leave_one_out_sign_clip(rewards_G: Float64Array, eps: float) -> Float64Array:
    relative_G = _rloo(rewards_G, eps)
    return np.where(rewards_G > CORRECT_SCORE, np.maximum(relative_G, 0.0), np.minimum(relative_G, 0.0))


_BASELINES = {
    "group_norm": _group_norm,
    "group_mean": _group_mean,
    "rloo": _rloo,
    "leave_one_out_sign_clip": _leave_one_out_sign_clip,
}


def discounted_returns(rewards_T: Float64Array, *, gamma: float) -> Float64Array:
    """Sum of the rewards from each position on, each discounted by gamma per position in between."""
    returns_T = np.zeros_like(rewards_T)
    running = 0.0
    for position in reversed(range(rewards_T.size)):
        running = float(rewards_T[position]) + gamma * running
        returns_T[position] = running
    return returns_T


def _centre_by_group(totals: Sequence[float], group_ids: Sequence[int]) -> list[float]:
    members: dict[int, list[float]] = {}
    for total, group in zip(totals, group_ids, strict=True):
        members.setdefault(group, []).append(total)
    return [total - float(np.mean(members[group])) for total, group in zip(totals, group_ids, strict=True)]


def _whiten(values_RT: Sequence[Float64Array], masks_RT: Sequence[npt.NDArray[np.bool_]]) -> list[Float64Array]:
    trainable = [values_T[mask_T] for values_T, mask_T in zip(values_RT, masks_RT, strict=True)]
    pooled = np.concatenate(trainable) if trainable else np.zeros(0)
    mean = float(pooled.mean()) if pooled.size else 0.0
    variance = float(pooled.var(ddof=1)) if pooled.size > 1 else 0.0
    scale = 1.0 / np.sqrt(variance + WHITENING_EPS)
    return [
        np.where(mask_T, (values_T - mean) * scale, 0.0) for values_T, mask_T in zip(values_RT, masks_RT, strict=True)
    ]
