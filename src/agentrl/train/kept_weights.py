"""Which policy versions of a run can still be loaded, from what checkpoints and published policies are on disk."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.sections import RunConfig
from agentrl.train.checkpoint import checkpoint_path
from agentrl.train.export import is_whole_model
from agentrl.train.session import checkpoints_dir


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptWeights:
    """The weights of one policy version on disk, as a model folder."""

    version: int
    path: Path
    source: str  # in words: where they are from, and what was lost on the way


def find_weights(config: RunConfig, *, version: int) -> KeptWeights | None:
    """The closest there is to the weights of a version: exact where possible; None if they are gone."""
    published = config.run.run_dir / "policy" / f"v{version}"
    checkpoint = checkpoint_path(checkpoints_dir(config), version)
    start = config.model.model_name_or_path
    rounded = "rounded to bfloat16" if config.model.bf16 else "exact"
    candidates = [
        (published, f"published policy v{version}, {rounded}"),
        (checkpoint, f"checkpoint of step {version}, exact"),
        *([(start, "the start model, exact")] if version == 0 and start is not None else []),
    ]
    candidates.sort(key=lambda candidate: not candidate[1].endswith("exact"))  # stable: exact ones first
    for path, source in candidates:
        if is_whole_model(path):
            return KeptWeights(version=version, path=path, source=source)
    return None


def replayable_steps(config: RunConfig, steps: Iterable[int]) -> list[int]:
    """Of these steps, those whose weights before the update are still on disk."""
    return [step for step in steps if find_weights(config, version=step - 1) is not None]
