"""From the turns of a Record to training rows: the linear layout, one row per branch.

A turn stores only its new tokens and points to its parent; a branch is the chain from a root turn to a leaf turn.

    turn 0   parent -1   P0 A0          ┌─ turn 1  T1 A1 ─ turn 2  T2 A2           s0   P0 A0 T1 A1 T2 A2
    turn 1   parent 0    T1 A1     P0 A0┤                                     mask       0  1  0  1  0  1
    turn 2   parent 1    T2 A2          └─ turn 3  S3 A3                           s1   P0 A0 S3 A3
    turn 3   parent 0    S3 A3                                                mask       0  0  0  1

Every sampled token is trained in exactly one row: that of the first leaf below it. In later rows it is context: mask
False, log-prob 0, advantage 0 and version -1, like any token the policy did not sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from agentrl.types import DBRecordData, Record, Turn, TurnTokens

NOT_SAMPLED = -1


def merge_record(
    record: Record, turns: Sequence[Turn], *, reward: float, advantages: Sequence[npt.ArrayLike]
) -> list[DBRecordData]:
    """Training rows "<record>/s<k>" of one Record, in the order of their leaf turns; none if nothing was sampled.

    `turns` are all of the Record's, in order; `advantages` has one number per turn, or one per sampled token of it.
    Raises ValueError naming the turn whose parent, log-probs, version spans or advantages do not fit its tokens.
    """
    credits = [
        _check_turn(turn, position=position, advantages=values)
        for position, (turn, values) in enumerate(zip(turns, advantages, strict=True))
    ]
    rows: list[DBRecordData] = []
    trained: set[int] = set()
    for branch in _branches([turn.tokens for turn in turns]):
        columns = _Columns()
        for position in branch:
            is_trained = position not in trained
            columns.append(turns[position].tokens, advantages=credits[position], is_trained=is_trained)
        trained.update(branch)
        if any(columns.loss_mask):
            turn_ids = tuple(turns[position].model.id for position in branch)
            rows.append(columns.row(record, index=len(rows), reward=reward, turn_ids=turn_ids))
    return rows


def _branches(turns: Sequence[TurnTokens]) -> list[list[int]]:
    """Chains of turn positions from root to leaf, by leaf."""
    parents = {tokens.parent_turn for tokens in turns}
    chains = []
    for leaf in range(len(turns)):
        if leaf in parents:
            continue
        chain = [leaf]
        while turns[chain[-1]].parent_turn >= 0:
            chain.append(turns[chain[-1]].parent_turn)
        chains.append(chain[::-1])
    return chains


def _check_turn(turn: Turn, *, position: int, advantages: npt.ArrayLike) -> list[float]:
    """Refuse a turn that does not fit together; returns the advantage of each of its sampled tokens."""
    tokens = turn.tokens
    name = turn.model.id
    if turn.index != position:
        raise ValueError(f"turn {name} has index {turn.index} at position {position}: pass all turns, in order")
    if not -1 <= tokens.parent_turn < position:
        raise ValueError(f"turn {name} has parent_turn {tokens.parent_turn}: a parent comes before its turn")
    if len(tokens.logprobs) != len(tokens.completion_ids):
        raise ValueError(f"turn {name} has {len(tokens.logprobs)} log-probs for {len(tokens.completion_ids)} tokens")
    covered = 0
    for span in tokens.version_spans:
        if span.start != covered or span.end < span.start:
            raise ValueError(f"turn {name}: version span [{span.start}, {span.end}) does not continue at {covered}")
        covered = span.end
    if covered != len(tokens.completion_ids):
        raise ValueError(f"turn {name}: version spans cover {covered} of {len(tokens.completion_ids)} sampled tokens")
    credit = np.asarray(advantages, dtype=np.float64)
    if credit.ndim and credit.size != covered:
        raise ValueError(f"turn {name} has {credit.size} advantages for {covered} sampled tokens")
    return [float(value) for value in np.broadcast_to(credit, covered)]


@dataclass(slots=True)
class _Columns:
    """The arrays of a row while it grows; always equally long."""

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def append(self, tokens: TurnTokens, *, advantages: Sequence[float], is_trained: bool) -> None:
        self._append_context(tokens.prompt_ids)
        if not is_trained:
            self._append_context(tokens.completion_ids)
            return
        length = len(tokens.completion_ids)
        self.token_ids.extend(tokens.completion_ids)
        self.loss_mask.extend([True] * length)
        self.logprobs.extend(tokens.logprobs)
        self.advantages.extend(advantages)
        for span in tokens.version_spans:
            self.versions.extend([span.version] * (span.end - span.start))

    def _append_context(self, ids: Sequence[int]) -> None:
        self.token_ids.extend(ids)
        self.loss_mask.extend([False] * len(ids))
        self.logprobs.extend([0.0] * len(ids))
        self.advantages.extend([0.0] * len(ids))
        self.versions.extend([NOT_SAMPLED] * len(ids))

    def row(self, record: Record, *, index: int, reward: float, turn_ids: tuple[str, ...]) -> DBRecordData:
        return DBRecordData(
            id=f"{record.id}/s{index}",
            task_id=record.task_id,
            record_id=record.id,
            split=record.split,
            token_ids=np.asarray(self.token_ids, dtype=np.int32),
            loss_mask=np.asarray(self.loss_mask, dtype=np.bool_),
            advantages=np.asarray(self.advantages, dtype=np.float32),
            behaviour_logprobs=np.asarray(self.logprobs, dtype=np.float32),
            policy_versions=np.asarray(self.versions, dtype=np.int32),
            reward=reward,
            turn_ids=turn_ids,
        )
