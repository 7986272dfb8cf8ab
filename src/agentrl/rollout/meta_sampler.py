"""`MetaEpisodeSampler`: the default agent, attempting a question several times and scored each time (MR-Search)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from agentrl.algo.credit import turn_scores_of
from agentrl.algo.group_policies import is_right
from agentrl.errors import ConfigError
from agentrl.rollout.agent import RolloutResult, run_rollout
from agentrl.rollout.context import episode_start, episode_starts
from agentrl.rollout.episodes import EpisodePlanner, attempt_results, step_results, turns_of_episodes
from agentrl.rollout.limits import read_turn
from agentrl.rollout.sampler import MCPSampler
from agentrl.scoring import MCPScorerFactory, checked_score
from agentrl.types import EpisodeResult, Record, StopReason, Turn


class MetaEpisodeSampler(MCPSampler):
    """One Record of several episodes, as section `reflection` describes them; each is scored by the Task's scorer.

    The Record's answer and score are those of its last episode; `turn_scores` has each episode's score at its last
    turn. An episode without an answer scores 0. A judge that fails for any of them makes the Record a typed failure.
    """

    async def run(self) -> RolloutResult:
        """The loop of `rollout.agent`, with an `EpisodePlanner`.

        With `reflect_when = wrong` it raises ScoringError like the scorer, and ConfigError for one that asks a judge.
        """
        reflection = self.agent.reflection
        planner = EpisodePlanner(within=self.agent.planner(self.task), reflection=reflection)
        verify = None
        if reflection.reflect_when == "wrong":
            check_verifiable([self.task.scorer])
            verify = self._is_right
        result = await run_rollout(
            self.task, record=self.record, committed=self.committed, agent=self.agent, planner=planner, verify=verify
        )
        if result.stop_reason is None or result.stop_reason.is_infrastructure:
            return result
        episodes = self._episodes(result.turns, planner=planner, stop_reason=result.stop_reason)
        return replace(result, record=replace(result.record, episodes=episodes), answer=episodes[-1].answer)

    async def scored_record(self, result: RolloutResult) -> Record:
        """The header with the score of every episode: `evaluate_record` is asked for each, as if it were all."""
        episodes = [
            await self._scored(episode, result=result, turns=turns)
            for episode, turns in turns_of_episodes(result.turns, result.record.episodes)
        ]
        return replace(
            result.record,
            episodes=tuple(episodes),
            turn_scores=turn_scores_of(episodes),
            score=episodes[-1].score,
        )

    def _episodes(
        self, turns: Sequence[Turn], *, planner: EpisodePlanner, stop_reason: StopReason
    ) -> tuple[EpisodeResult, ...]:
        readings = [read_turn(turn, schema=self.task.answer_schema, chat=self.agent.chat) for turn in turns]
        is_begun_as_attempts = bool(episode_starts(turns))  # before the setting was changed
        if self.agent.reflection.episode_unit == "step" and not is_begun_as_attempts:
            return step_results(turns, readings=readings, stop_reason=stop_reason)
        return attempt_results(turns, readings=readings, planner=planner, stop_reason=stop_reason)

    async def _scored(self, episode: EpisodeResult, *, result: RolloutResult, turns: tuple[Turn, ...]) -> EpisodeResult:
        if not episode.num_turns:
            return replace(episode, score=0.0)
        alone = replace(result, turns=turns, stop_reason=episode.stop_reason, answer=episode.answer)
        return replace(episode, score=checked_score(type(self).__name__, await self.evaluate_record(alone)))

    async def _is_right(self, turns: Sequence[Turn]) -> bool:
        """Whether the answer that the last turn gives is right, by the Task's scorer."""
        answer = read_turn(turns[-1], schema=self.task.answer_schema, chat=self.agent.chat).answer
        own_turns = tuple(turns[episode_start(turns) :])
        alone = RolloutResult(record=self.record, turns=own_turns, stop_reason=StopReason.ANSWER, answer=answer)
        return is_right(await self.evaluate_record(alone))


def check_verifiable(scorers: Sequence[str]) -> None:
    """Refuse `reflect_when = wrong` for scorers that ask a judge. Raises ConfigError."""
    for scorer in scorers:
        if MCPScorerFactory.needs_judge(scorer):
            raise ConfigError(
                f"reflect_when = wrong: scorer {scorer!r} asks a judge, and whether to go on must be decided at once "
                "and the same way after a takeover; use a rule such as em, f1 or math, or reflect_when = always"
            )
