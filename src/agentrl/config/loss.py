"""The settings of the loss; its mathematics is in `agentrl.algo.losses`, which needs torch."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from agentrl.config.section import Section

BUILT_IN_LOSSES = ("GRPO", "GSPO", "MINIRL", "CISPO", "CE_GPPO", "REINFORCE", "CROSS_ENTROPY")

CORRECTION_BOUNDS: Mapping[str, tuple[float, float]] = {
    "tis": (0.0, 2.0),
    "mis": (0.0, 3.0),
    "icepop": (0.5, 5.0),
    "geometric": (0.99, 1.01),
    "veto": (1e-4, math.inf),
}
"""Default bounds (low, high) of each `rollout_correction`; each side can be configured on its own."""

USED_WITH: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "dual_clip": ("loss", ("GRPO", "GSPO", "CE_GPPO")),
    "cispo_clip_low": ("loss", ("CISPO",)),
    "cispo_clip_high": ("loss", ("CISPO",)),
    "is_cap": ("loss", ("MINIRL",)),
    "beta1": ("loss", ("CE_GPPO",)),
    "beta2": ("loss", ("CE_GPPO",)),
    "constant_length": ("aggregation", ("constant",)),
    "rollout_correction_low": ("rollout_correction", tuple(CORRECTION_BOUNDS)),
    "rollout_correction_high": ("rollout_correction", tuple(CORRECTION_BOUNDS)),
    "rollout_correction_level": ("rollout_correction", tuple(CORRECTION_BOUNDS)),
}
"""Options that only some values of another setting look at. A loss of the user's own may look at any."""


def is_used(option: str, settings: Mapping[str, object]) -> bool:
    """Whether these settings of the loss look at an option."""
    if option not in USED_WITH:
        return True
    setting, values = USED_WITH[option]
    chosen = settings[setting]
    return chosen in values or (setting == "loss" and chosen not in BUILT_IN_LOSSES)


def unknown_loss(name: str, *, known: Sequence[str], way_out: str) -> str:
    """The message for a loss nobody knows, with the nearest one that exists."""
    near = difflib.get_close_matches(name.upper(), known, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    return f"loss = {name}: there is no such loss; {hint}Known are {', '.join(known)}; for one of your own {way_out}"


class LossConfig(Section):
    """A policy loss (specs: docs/algorithms.md). Clip range [1 - epsilon, 1 + epsilon + epsilon_higher]."""

    loss: str = Field("GRPO", description=f"Loss function: {', '.join(BUILT_IN_LOSSES)}, or one of `loss_module`.")
    loss_module: Path | None = Field(
        None, description="Python file with losses of your own in a dict `LOSSES` (docs/algorithms.md)."
    )
    epsilon: float = Field(0.2, ge=0, description="Lower clip distance, and the base of the upper one.")
    epsilon_higher: float = Field(0.1, ge=0, description="Added to epsilon on the upper side (clip-higher).")
    dual_clip: float | None = Field(None, gt=1, description="Bound of the loss for negative advantages.")
    cispo_clip_low: float = Field(0.0, ge=0, description="CISPO: lower bound of the importance weight.")
    cispo_clip_high: float = Field(5.0, gt=0, description="CISPO: upper bound of the importance weight.")
    is_cap: float | None = Field(None, gt=0, description="MINIRL: cap of policy/behaviour ratio.")
    beta1: float | None = Field(None, ge=0, description="CE_GPPO: weight of tokens clipped below; empty: 0.75.")
    beta2: float | None = Field(None, ge=0, description="CE_GPPO: weight of tokens clipped above; empty: 1.")
    strict_in_bound: bool = Field(False, description="Drop tokens outside the clip bounds from the loss.")
    out_of_date_decay: float | None = Field(None, ge=0, description="Drop mask narrows with staleness at this rate.")
    importance_weight_cap_ratio: float | None = Field(None, gt=0, description="Width of the drop mask, AgentRL's R.")
    adv_scaling: float = Field(1.0, gt=0, description="Factor on every advantage.")
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"] = Field(
        "token_mean", description="How token losses become one number."
    )
    constant_length: int | None = Field(None, ge=1, description="L of `aggregation = constant` (Dr. GRPO).")
    rollout_correction: Literal["none", "tis", "mis", "icepop", "geometric", "veto"] = Field(
        "none", description="Correction of the train/inference mismatch."
    )
    rollout_correction_level: Literal["token", "sequence"] = Field("token", description="Level of the correction.")
    rollout_correction_low: float | None = Field(
        None, ge=0, description="Lower bound of the correction; empty: the mode's default."
    )
    rollout_correction_high: float | None = Field(
        None, gt=0, description="Upper bound of the correction; empty: the mode's default."
    )
    rollout_correction_normalize: bool = Field(
        False, description="Divide the correction's weights by their mean over the optimizer step."
    )
    recompute_old_logprobs: bool = Field(
        False,
        description="Ratios are to the trainer's own log-probs at the step's start, not to the engines' behaviour "
        "log-probs. Always so with a rollout_correction.",
    )
    kl_coef: float = Field(0.0, ge=0, description="Weight of the KL penalty against the reference model.")
    kl_estimator: Literal["k1", "k2", "k3", "k3_plus"] = Field("k3", description="KL estimator.")
    kl_in_reward: bool = Field(
        False, description="The KL penalty lowers the advantages, by its sum to the sequence's end, not the loss."
    )
    entropy_coef: float = Field(0.0, ge=0, description="Weight of the entropy bonus.")

    @property
    def old_is_behaviour(self) -> bool:
        """Whether ratios are to the engines' log-probs; else to the policy as it is before the optimizer step."""
        return self.rollout_correction == "none" and not self.recompute_old_logprobs

    @property
    def correction_bounds(self) -> tuple[float, float]:
        """The bounds in force of `rollout_correction`: those configured, else the mode's defaults."""
        low, high = CORRECTION_BOUNDS.get(self.rollout_correction, (0.0, math.inf))
        return (
            low if self.rollout_correction_low is None else self.rollout_correction_low,
            high if self.rollout_correction_high is None else self.rollout_correction_high,
        )

    @model_validator(mode="after")
    def _check_loss_is_known(self) -> LossConfig:
        if self.loss_module is None and self.loss not in BUILT_IN_LOSSES:
            raise ValueError(unknown_loss(self.loss, known=BUILT_IN_LOSSES, way_out="set loss_module"))
        return self

    @model_validator(mode="after")
    def _check_constant_length(self) -> LossConfig:
        if self.aggregation == "constant" and self.constant_length is None:
            raise ValueError('aggregation = "constant" needs constant_length (usually max_new_tokens)')
        return self

    @model_validator(mode="after")
    def _check_bounds_are_in_order(self) -> LossConfig:
        for low_name, high_name in (
            ("cispo_clip_low", "cispo_clip_high"),
            ("rollout_correction_low", "rollout_correction_high"),
        ):
            low, high = getattr(self, low_name), getattr(self, high_name)
            if low is not None and high is not None and low > high:
                raise ValueError(f"{low_name} = {low:g} is above {high_name} = {high:g}; exchange them")
        low, high = self.correction_bounds
        if low > high:
            raise ValueError(
                f"rollout_correction = {self.rollout_correction!r} would reject every token: its bounds are {low:g} "
                f"and {high:g}, one of them by default; give rollout_correction_low and rollout_correction_high"
            )
        return self

    @model_validator(mode="after")
    def _check_options_are_used(self) -> LossConfig:
        settings = {name: getattr(self, name) for name in type(self).model_fields}
        for option, (setting, values) in USED_WITH.items():
            is_default = settings[option] == type(self).model_fields[option].default
            if is_default or is_used(option, settings) or option == "dual_clip":  # it has its own reason below
                continue
            raise ValueError(
                f"{option} = {settings[option]}: {setting} = {settings[setting]!r} does not look at it, only "
                f"{', '.join(values)}; unset it"
            )
        return self

    @model_validator(mode="after")
    def _check_options_have_an_effect(self) -> LossConfig:
        if self.dual_clip is not None and self.loss in {"MINIRL", "CISPO", "REINFORCE", "CROSS_ENTROPY"}:
            raise ValueError(f"dual_clip = {self.dual_clip}: loss = {self.loss!r} has no clipped surrogate; unset it")
        if self.out_of_date_decay is not None and self.importance_weight_cap_ratio is None and not self.strict_in_bound:
            raise ValueError(
                f"out_of_date_decay = {self.out_of_date_decay} narrows a drop mask that is off; "
                "set importance_weight_cap_ratio (AgentRL's default is 4)"
            )
        if self.rollout_correction == "icepop" and self.rollout_correction_level == "sequence":
            raise ValueError('rollout_correction = "icepop" works per token; use "mis" for the sequence level')
        if self.loss == "MINIRL" and self.rollout_correction in {"tis", "mis", "icepop"}:
            raise ValueError(
                f"rollout_correction = {self.rollout_correction!r}: MINIRL's weight policy/behaviour contains the "
                "mismatch already; use is_cap, or geometric or veto to reject sequences"
            )
        if self.kl_in_reward and (self.kl_coef == 0 or self.loss == "CROSS_ENTROPY"):
            raise ValueError(
                f"kl_in_reward: loss = {self.loss!r} with kl_coef = {self.kl_coef:g} has no KL penalty on advantages; "
                "set kl_coef, or unset it"
            )
        if self.recompute_old_logprobs and self.loss == "CROSS_ENTROPY":
            raise ValueError('recompute_old_logprobs: loss = "CROSS_ENTROPY" has no ratio; unset it')
        if self.rollout_correction_normalize and self.rollout_correction not in {"tis", "mis", "icepop"}:
            raise ValueError(
                f"rollout_correction_normalize: rollout_correction = {self.rollout_correction!r} has no weights"
            )
        return self
