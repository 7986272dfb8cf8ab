"""The loss flags of AgentRL's launch scripts, as the LossConfig that means the same here.

Two things differ on purpose. Denominators count the tokens of the whole optimizer step before any is dropped, so the
loss does not depend on the split; and beta1/beta2 select CE-GPPO, whose clipped tokens do get a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from agentrl.config.sections import LossConfig
from agentrl.errors import ConfigError

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"]

_NAMES: dict[str, str] = {
    "grpo": "GRPO",
    "gspo": "GSPO",
    "minirl": "MINIRL",
    "cispo": "CISPO",
    "ce_gppo": "CE_GPPO",
    "reinforce": "REINFORCE",
    "crossentropy": "CROSS_ENTROPY",
    "cross_entropy": "CROSS_ENTROPY",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LegacyLossFlags:
    """AgentRL's loss flags with AgentRL's defaults."""

    loss_calculater: str = "GRPO"
    epsilon: float = 0.2
    epsilon_higher: float = 0.1
    beta1: float | None = None
    beta2: float | None = None
    token_level_loss: bool = True
    skip_length_normalization: bool = False
    strict_in_bound: bool = False
    out_of_date_decay: float | None = None
    importance_weight_cap_ratio: float = 4.0
    adv_scaling: float = 1.0


def loss_from_legacy_flags(flags: LegacyLossFlags) -> LossConfig:
    """The LossConfig of a set of AgentRL flags.

        loss_calculater                GRPO with beta1 or beta2 is CE_GPPO (a beta left out is 0); CrossEntropy
        token_level_loss               token_mean
        skip_length_normalization      seq_mean_token_sum; neither: seq_mean_token_mean
        strict_in_bound                the drop mask is the clip range; else it is importance_weight_cap_ratio times as
                                       wide, narrowed by out_of_date_decay
        MINIRL without strict_in_bound the wide range is the clip range itself

    Raises ConfigError for an unknown loss and for flags that contradict each other.
    """
    loss = _loss_name(flags)
    if loss == "CROSS_ENTROPY":
        return LossConfig(loss=loss, aggregation="token_mean")
    is_wide_minirl = loss == "MINIRL" and not flags.strict_in_bound
    widen = flags.importance_weight_cap_ratio if is_wide_minirl else 1.0
    decay = None if flags.strict_in_bound else flags.out_of_date_decay
    return LossConfig(
        loss=loss,
        epsilon=flags.epsilon * widen,
        epsilon_higher=flags.epsilon_higher * widen,
        beta1=(flags.beta1 or 0.0) if _has_betas(flags) else None,
        beta2=(flags.beta2 or 0.0) if _has_betas(flags) else None,
        strict_in_bound=flags.strict_in_bound,
        out_of_date_decay=decay,
        importance_weight_cap_ratio=_cap_ratio(flags, is_wide_minirl=is_wide_minirl, decay=decay),
        adv_scaling=flags.adv_scaling,
        aggregation=_aggregation(flags),
    )


def _loss_name(flags: LegacyLossFlags) -> str:
    loss = _NAMES.get(flags.loss_calculater.lower())
    if loss is None:
        raise ConfigError(f"loss_calculater = {flags.loss_calculater!r}: use one of {', '.join(sorted(_NAMES))}")
    if not _has_betas(flags):
        return loss
    if loss not in {"GRPO", "CE_GPPO"}:
        raise ConfigError(
            f"beta1 = {flags.beta1}, beta2 = {flags.beta2}: only loss_calculater = GRPO knows them, not {loss}"
        )
    return "CE_GPPO"


def _has_betas(flags: LegacyLossFlags) -> bool:
    return flags.beta1 is not None or flags.beta2 is not None


def _aggregation(flags: LegacyLossFlags) -> Aggregation:
    if flags.token_level_loss and flags.skip_length_normalization:
        raise ConfigError(
            "skip_length_normalization = true has no effect with token_level_loss = true; set one of them to false"
        )
    if flags.token_level_loss:
        return "token_mean"
    return "seq_mean_token_sum" if flags.skip_length_normalization else "seq_mean_token_mean"


def _cap_ratio(flags: LegacyLossFlags, *, is_wide_minirl: bool, decay: float | None) -> float | None:
    if flags.strict_in_bound:
        return None
    if is_wide_minirl:
        return None if decay is None else 1.0
    return flags.importance_weight_cap_ratio
