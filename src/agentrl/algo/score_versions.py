"""A group as another version of a scorer sees it. Pure: samplers settle by it, the trainer and the audit compare.

Record      own score      Score of the version      enters the settlement with
finished      1.0                0.0                      0.0
finished      1.0                 -                       nothing: it leaves the baseline, as a failure does
judge_error    -                 1.0                      1.0
failed         -                  -                       nothing
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from agentrl.algo.credit import turn_scores_of
from agentrl.types import Record, RecordStatus, Score, SettledGroup, StopReason

OTHER_VERSION = "score_version"  # drop reason of a settled group whose rewards are of another version than configured


def scorer_of(version: str) -> str:
    """The scorer in "<scorer>" or "<scorer> @<fingerprint>", in the spelling of versions."""
    return " ".join(version.partition(" @")[0].split())


def is_wanted(version: str | None, *, wanted: str | None) -> bool:
    """Whether a settlement of `version` may be trained; a scorer wanted without fingerprint takes all its versions."""
    if version is None or wanted is None:
        return version is wanted
    return version == wanted or (" @" not in wanted and scorer_of(version) == scorer_of(wanted))


def other_versions(groups: Sequence[SettledGroup], *, wanted: str | None) -> dict[str, str]:
    """Groups whose scores are not the wanted ones, each with its drop reason, by Task."""
    versions = {group.settlement.task_id: group.settlement.score_version for group in groups}
    return {task_id: OTHER_VERSION for task_id, version in versions.items() if not is_wanted(version, wanted=wanted)}


def versions_of(groups: Sequence[SettledGroup]) -> dict[str, str]:
    """The versions these groups were settled with, where they are not the Records' own, by Task."""
    versions = {group.settlement.task_id: group.settlement.score_version for group in groups}
    return {task_id: version for task_id, version in versions.items() if version is not None}


def can_be_scored(record: Record) -> bool:
    """Whether the policy ended the Record, or only its judge failed: what any version of a scorer may score."""
    is_unjudged = record.status is RecordStatus.FAILED and record.stop_reason is StopReason.JUDGE_ERROR
    return is_unjudged or record.status is RecordStatus.FINISHED


def with_scores(records: Sequence[Record], scores: Mapping[str, Score], *, version: str) -> list[Record]:
    """The Records with the scores of a version, by record id; those without one have none.

    A judge is asked only about answers, so a Record that only its judge failed stopped with an answer. Each episode of
    a meta-episode has its score of the version; where the version scored the Record as a whole, it has none. Other
    scores of single turns belong to the Record's own score: here it is one episode.
    """
    return [_with_score(record, scores.get(record.id), version=version) for record in records]


def _with_score(record: Record, score: Score | None, *, version: str) -> Record:
    if score is None or not can_be_scored(record) or len(score.episode_values) != len(record.episodes):
        return replace(record, score=None, turn_scores=(), episodes=())
    episodes = tuple(
        replace(episode, score=value) for episode, value in zip(record.episodes, score.episode_values, strict=True)
    )
    return replace(
        record,
        status=RecordStatus.FINISHED,
        stop_reason=_stop_reason(record),
        score=score.value,
        scorer=version,
        turn_scores=turn_scores_of(episodes),
        episodes=episodes,
    )


def _stop_reason(record: Record) -> StopReason | None:
    """How a Record ended; one that its judge failed, before it was judged."""
    if record.stop_reason is not StopReason.JUDGE_ERROR:
        return record.stop_reason
    return record.episodes[-1].stop_reason if record.episodes else StopReason.ANSWER
