"""Settings of who scores: the part of section `rollout` that docs/scoring.md explains."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from agentrl.config.section import Section


class ScoringConfig(Section):
    """Scorers of the user's own, judges, and how long a judge is waited for."""

    scorer_module: str | None = Field(
        None, description="Python file or dotted module whose import registers further scorers."
    )
    agent_config_path: Path | None = Field(
        None, description="YAML file with the models of the judge (`scorer_agent`) and of the `browse_agent`."
    )
    judge_patience_s: float = Field(
        300.0,
        ge=0,
        description="Seconds for which a finished rollout is judged again while its judge is away; then `judge_error`.",
    )
