"""Settings of meta-episodes (MR-Search): several attempts at one question in one Record. See docs/mr_search.md."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from agentrl.config.credit import EPISODE_METHODS, CreditConfig
from agentrl.config.section import Section

MAX_EPISODES = 1000  # the header of a Record has a line for each


class ReflectionConfig(Section):
    """Several attempts at one question, each after a reflection on those before (docs/mr_search.md)."""

    episodes: int = Field(
        1,
        ge=1,
        le=MAX_EPISODES,
        description="Attempts at the question per Record. Above 1 the MetaEpisodeSampler makes the Records; max_turns "
        "and the other limits then hold for each attempt.",
    )
    reflection_prompt: str = Field(
        "Think again about the answer you have just given. What in it is uncertain, unsupported or possibly mistaken? "
        "Look for further evidence with the tools, check what the answer rests on, and then give your answer again, "
        "improved if you can, in the same form as before.",
        min_length=1,
        description="User message between two attempts. It says nothing about whether the answer was right.",
    )
    reflect_when: Literal["always", "wrong"] = Field(
        "always",
        description="`wrong`: another attempt only after a wrong answer, which the Task's scorer decides at once; not "
        "for scorers that ask a judge.",
    )
    reflection_context: Literal["full", "last_k"] = Field(
        "full", description="What an attempt sees of those before it: all, or the last `keep_episodes` only."
    )
    keep_episodes: int = Field(1, ge=1, description="Earlier attempts kept by `reflection_context = last_k`.")
    tool_calls_per_episode: int | None = Field(
        None,
        ge=1,
        description="Tool calls one attempt may make; the completion after the last one must give the answer. Empty: "
        "any number.",
    )
    episode_unit: Literal["episode", "step"] = Field(
        "episode",
        description="What is scored on its own: an attempt, or every step of a single one, a step ending with its tool "
        "calls and the answer given beside them.",
    )

    @property
    def is_meta(self) -> bool:
        """Whether a Record has more than one score."""
        return self.episodes > 1 or self.episode_unit == "step"

    @model_validator(mode="after")
    def _check_options_have_an_effect(self) -> ReflectionConfig:
        if self.episode_unit == "step" and self.episodes > 1:
            raise ValueError(
                f"episode_unit = step, episodes = {self.episodes}: the steps of one attempt are scored, nothing is "
                "reflected on between them; set episodes = 1 or episode_unit = episode"
            )
        if self.episodes == 1 and (self.reflect_when != "always" or self.reflection_context != "full"):
            raise ValueError(
                f"reflect_when = {self.reflect_when}, reflection_context = {self.reflection_context} with episodes = "
                "1: there is nothing to reflect on; raise episodes or leave both at always and full"
            )
        if self.keep_episodes != 1 and self.reflection_context != "last_k":
            raise ValueError(
                f"keep_episodes = {self.keep_episodes} with reflection_context = {self.reflection_context}: all "
                "episodes are kept; set reflection_context = last_k or unset keep_episodes"
            )
        if not self.reflection_prompt.strip():
            raise ValueError("reflection_prompt: only spaces; the model would not know that it is to try again")
        return self


def check_episode_credit(reflection: ReflectionConfig, *, credit: CreditConfig) -> None:
    """Refuse credit per episode that does not fit the episodes there are. Raises ValueError."""
    mask = credit.episode_reward_mask
    if credit.shapes_episodes and not reflection.is_meta:
        raise ValueError(
            f"episodes = {reflection.episodes}: episode_reward_mask, improvement_bonus, turn_weight, outcome_weight "
            "and distinct_answer_penalty tell episodes apart, and there is one; raise episodes or unset them"
        )
    if credit.gamma != 1.0 and credit.advantage in EPISODE_METHODS and not reflection.is_meta:
        raise ValueError(
            f"gamma = {credit.gamma:g} with advantage = {credit.advantage}, episodes = {reflection.episodes}: rewards "
            "of later episodes are discounted, and there is one episode; raise episodes or leave gamma at 1"
        )
    if mask and reflection.episode_unit == "step":
        raise ValueError(
            "episode_reward_mask with episode_unit = step: Records differ in their number of steps; unset one of them"
        )
    if mask and len(mask) != reflection.episodes:
        raise ValueError(
            f"episode_reward_mask has {len(mask)} entries, episodes = {reflection.episodes}: give one per episode"
        )
    if mask and reflection.reflect_when == "wrong":
        raise ValueError(
            "episode_reward_mask with reflect_when = wrong: a Record that is right at once has no later episodes to "
            "earn from; use reflect_when = always"
        )
