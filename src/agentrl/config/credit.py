"""How rewards become advantages: the part of section `algo` that docs/algorithms.md and docs/mr_search.md explain."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from agentrl.config.section import Section

EPISODE_METHODS = frozenset({"turn_rloo", "mt_grpo_turn", "mt_grpo_pooled"})
DISCOUNTING_METHODS = frozenset({"turn_rloo", "mt_grpo_turn", "reinforce_plus_plus"})


class CreditConfig(Section):
    """From the rewards of a group to the credit of its Records and their episodes."""

    advantage: Literal[
        "group_norm",
        "group_mean",
        "rloo",
        "leave_one_out_sign_clip",
        "turn_rloo",
        "mt_grpo_turn",
        "mt_grpo_pooled",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "none",
    ] = Field("group_norm", description="How rewards become advantages; `none`: every trained token has advantage 1.")
    gamma: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Discount of later rewards: per episode (turn_rloo, mt_grpo_turn) or per token "
        "(reinforce_plus_plus).",
    )
    episode_reward_mask: list[float] = Field(
        default_factory=list,
        description="Weight of each episode's own advantage, for example [0, 0, 1, 1]: the first two explore and earn "
        "what they make possible. Empty: all ones.",
    )
    improvement_bonus: float = Field(
        0.0, ge=0, description="Adds this times (score - score of the episode before, 0 before the first) to a reward."
    )
    turn_weight: float = Field(1.0, ge=0, description="Weight of the advantages per episode in the sum.")
    outcome_weight: float = Field(
        0.0, ge=0, description="Weight of one more advantage, of the Record's last reward against its group's."
    )
    distinct_answer_penalty: float = Field(
        0.0,
        ge=0,
        description="Subtracts this times (1 - distinct answers / episodes) from the reward behind `outcome_weight`.",
    )

    @property
    def is_whitened_per_step(self) -> bool:
        """Whether rows carry returns that the trainer turns into advantages over its whole optimizer step."""
        return self.advantage in {"reinforce_plus_plus", "reinforce_plus_plus_baseline"}

    @property
    def needs_group(self) -> bool:
        """Whether a Record's advantage depends on the others of its group."""
        return self.advantage not in {"none", "reinforce_plus_plus"}

    @property
    def shapes_episodes(self) -> bool:
        """Whether a setting asks for more than one episode per Record."""
        is_shaped = bool(self.episode_reward_mask or self.improvement_bonus or self.distinct_answer_penalty)
        return is_shaped or (self.turn_weight, self.outcome_weight) != (1.0, 0.0)

    @model_validator(mode="after")
    def _check_credit_options_have_an_effect(self) -> CreditConfig:
        if self.gamma != 1.0 and self.advantage not in DISCOUNTING_METHODS:
            raise ValueError(
                f"gamma = {self.gamma:g}: advantage = {self.advantage} has nothing to discount; "
                "use turn_rloo, mt_grpo_turn or reinforce_plus_plus, or leave gamma at 1"
            )
        if self.shapes_episodes and self.advantage not in EPISODE_METHODS:
            raise ValueError(
                f"advantage = {self.advantage} has no credit per episode: episode_reward_mask, improvement_bonus, "
                "turn_weight, outcome_weight and distinct_answer_penalty need turn_rloo, mt_grpo_turn or mt_grpo_pooled"
            )
        if self.turn_weight == 0.0 and self.outcome_weight == 0.0:
            raise ValueError("turn_weight = 0, outcome_weight = 0: every advantage would be 0; raise one of them")
        if self.distinct_answer_penalty and not self.outcome_weight:
            raise ValueError(
                f"distinct_answer_penalty = {self.distinct_answer_penalty:g}: it is taken from the reward behind "
                "outcome_weight, which is 0; raise outcome_weight or unset the penalty"
            )
        if self.episode_reward_mask and not any(self.episode_reward_mask):
            raise ValueError("episode_reward_mask: all zeros; no episode would earn anything")
        if self.episode_reward_mask and self.turn_weight == 0.0:
            raise ValueError("episode_reward_mask with turn_weight = 0: nothing is left to mask; raise turn_weight")
        return self
