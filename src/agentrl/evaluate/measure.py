"""Measures test-time scaling: rolls out once, with as many turns or samples as asked for, and reads all points off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agentrl.config import RunConfig
from agentrl.errors import ConfigError, UnavailableError
from agentrl.evaluate.attempts import check_truths, read_attempts
from agentrl.evaluate.scaling import MAX_SAMPLES, Attempt, SamplePoint, TurnPoint, sample_points, turn_points
from agentrl.evaluate.scaling_report import ScalingReport
from agentrl.evaluate.split import fingerprint, reflecting_always, sample_split, split_name
from agentrl.rollout.custom import sampler_of
from agentrl.rollout.dataset import TaskRow
from agentrl.rollout.parts import RunParts
from agentrl.types import RecordStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPlan:
    """Which turns and which numbers of samples are looked at, each from 1 up; None: not at all."""

    turns: range | None = None
    samples: range | None = None
    num_generations: int = 1  # trajectories per question; samples per question where that is more than `samples` needs

    def __post_init__(self) -> None:
        """Refuse more samples than votes can be counted for."""
        if self.samples is not None and self.num_samples > MAX_SAMPLES:
            raise ConfigError(
                f"{self.num_samples} samples per question: votes are averaged over all subsets, of at most "
                f"{MAX_SAMPLES}; lower --parallel or --generations"
            )

    @property
    def num_samples(self) -> int:
        """Samples that are made of each question."""
        return 0 if self.samples is None else max(self.samples.stop - 1, self.num_generations)

    def check(self, config: RunConfig, *, rows: Sequence[TaskRow]) -> None:
        """Raise ConfigError for what would be measured in vain."""
        if self.turns is not None and self.num_generations > 1 and temperature_of(config) == 0:
            raise ConfigError(
                f"--generations {self.num_generations} with temperature 0: all Records of a question would be the "
                "same; leave one of them out"
            )
        if self.num_samples > 1 and temperature_of(config) == 0:
            raise ConfigError(
                f"--parallel with temperature 0: all {self.num_samples} samples of a question would be the same; leave "
                "one of them out"
            )
        if self.turns is not None:
            sampler_of(with_episodes(config, episodes=self.turns.stop - 1))
        check_truths(rows)


def temperature_of(config: RunConfig) -> float:
    """The temperature of every completion of a run; 0 is greedy."""
    return float(config.inference.preferred_sampling_params.get("temperature", 1.0))


async def measure_scaling(
    parts: RunParts, *, rows: Sequence[TaskRow], policy_version: int, plan: ScalingPlan
) -> ScalingReport:
    """Roll out what the plan needs under the weights the parts' client serves. Finished Records are not repeated.

    Raises UnavailableError if no Record could be scored.
    """
    turns: list[TurnPoint] = []
    samples: list[SamplePoint] = []
    splits: list[_Split] = []
    if plan.turns is not None:
        num_turns = plan.turns.stop - 1
        splits.append(
            await _roll_out(
                parts,
                rows=rows,
                policy_version=policy_version,
                episodes=num_turns,
                num_generations=plan.num_generations,
            )
        )
        points_of_turns = turn_points(splits[-1].questions, num_turns=num_turns)
        turns = [point for point in points_of_turns if point.turn in plan.turns]
    if plan.samples is not None:
        splits.append(
            await _roll_out(
                parts, rows=rows, policy_version=policy_version, episodes=1, num_generations=plan.num_samples
            )
        )
        questions = [[attempt for (attempt,) in question] for question in splits[-1].questions]
        points = sample_points(questions, num_samples=plan.samples.stop - 1)
        samples = [point for point in points if point.samples in plan.samples]
    return ScalingReport(
        run_name=parts.config.run.run_name,
        policy_version=policy_version,
        temperature=temperature_of(parts.config),
        num_questions=len(rows),
        num_failed=sum(split.num_failed for split in splits),
        splits=tuple(split.name for split in splits),
        tasks=fingerprint([[row.query, row.answer] for row in rows]),
        turns=tuple(turns),
        samples=tuple(samples),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Split:
    """What was rolled out."""

    name: str
    questions: tuple[Sequence[Sequence[Attempt]], ...]  # by question, Record and episode
    num_failed: int


async def _roll_out(
    parts: RunParts, *, rows: Sequence[TaskRow], policy_version: int, episodes: int, num_generations: int
) -> _Split:
    config = with_episodes(parts.config, episodes=episodes)
    parts = replace(parts, config=config, sampler_class=sampler_of(config))
    variant = f"-turns{episodes}-samples{num_generations}"
    name = split_name(parts, rows=rows, policy_version=policy_version, variant=variant)
    tasks, records = await sample_split(parts, rows=rows, split=name, num_generations=num_generations)
    attempts = await read_attempts(parts.store, tasks=tasks, records=records, by_episode=episodes > 1)
    if not any(attempts.values()):
        raise UnavailableError(
            f"none of the {len(records)} Records of {name} could be scored; see agentrl inspect {config.run.run_name}"
        )
    num_failed = sum(record.status is RecordStatus.FAILED for record in records)
    return _Split(name=name, questions=tuple(attempts.values()), num_failed=num_failed)


def with_episodes(config: RunConfig, *, episodes: int) -> RunConfig:
    """The configuration of Records of so many attempts, each reflected on without a look at the truth."""
    reflection = config.reflection.model_copy(update={"episodes": episodes, "episode_unit": "episode"})
    return reflecting_always(config.model_copy(update={"reflection": reflection}))
