"""Flag names AgentRL users know from earlier launch scripts: what each became, or why it is refused here.

A name is either translated into settings of `RunConfig` (TRANSLATIONS), or its feature is not available (UNAVAILABLE):
then only the value that means "off" is accepted, and any other one is refused with the reason. Nothing is ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from agentrl.config.legacy import LegacyLossFlags, loss_from_legacy_flags
from agentrl.config.settings import BOOLEAN_WORDS, settings_index, shown_value
from agentrl.errors import ConfigError

_HF_BATCH_SIZE = 8  # transformers' default of per_device_train_batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Unavailable:
    """A known flag without its feature: `neutral` are the values that ask for nothing."""

    neutral: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """Flags that mean the same as other settings here.

    `apply` gets the values given for `names` (as text or YAML values) and the settings given by any source (validated);
    it returns values by setting name. Settings in `restates` are part of its input and are replaced without a conflict.
    """

    names: tuple[str, ...]
    meaning: str
    apply: Callable[[Mapping[str, Any], Mapping[str, Any]], Mapping[str, Any]]
    booleans: tuple[str, ...] = ()
    restates: tuple[str, ...] = ()


_LOSS_FLAGS = ("loss_calculater", "token_level_loss", "skip_length_normalization")
_SHARED_LOSS_FLAGS = (
    "epsilon",
    "epsilon_higher",
    "beta1",
    "beta2",
    "strict_in_bound",
    "out_of_date_decay",
    "importance_weight_cap_ratio",
    "adv_scaling",
)


def _loss(given: Mapping[str, Any], settings: Mapping[str, Any]) -> Mapping[str, Any]:
    flags = {name: settings[name] for name in _SHARED_LOSS_FLAGS if settings.get(name) is not None}
    flags |= {name: _boolean(name, given[name]) for name in _LOSS_FLAGS[1:] if name in given}
    flags |= {"loss_calculater": str(given["loss_calculater"])} if "loss_calculater" in given else {}
    loss = loss_from_legacy_flags(LegacyLossFlags(**flags))
    return loss.model_dump(include=loss.model_fields_set)


def _batch_rows(given: Mapping[str, Any], settings: Mapping[str, Any]) -> Mapping[str, Any]:
    per_device = _whole_number("per_device_train_batch_size", given, default=_HF_BATCH_SIZE)
    accumulation = _whole_number("gradient_accumulation_steps", given, default=1)
    num_generations = _value("num_generations", settings)
    ranks_per_row = _value("tp_size", settings) * _value("cp_size", settings)
    num_ranks = max(_value("num_processes", settings) // ranks_per_row, 1)
    rows = per_device * accumulation * num_ranks
    if _value("loss", settings) == "CROSS_ENTROPY":
        return {"sft_batch_size": rows}
    if rows % num_generations:
        raise ConfigError(
            f"per_device_train_batch_size x gradient_accumulation_steps: {per_device} x {accumulation} x "
            f"{num_ranks} data parallel ranks = {rows} rows per step is no multiple of "
            f"num_generations = {num_generations}; whole groups are trained, so set --tasks_per_step instead"
        )
    return {"tasks_per_step": rows // num_generations}


def _dtype(given: Mapping[str, Any], settings: Mapping[str, Any]) -> Mapping[str, Any]:
    choices = {"bfloat16": True, "float32": False}
    value = str(given["torch_dtype"])
    if value not in choices:
        raise ConfigError(f"torch_dtype = {json.dumps(value)}: use bfloat16 or float32, or set --bf16 true or false")
    return {"bf16": choices[value]}


def _optimizer_arguments(given: Mapping[str, Any], settings: Mapping[str, Any]) -> Mapping[str, Any]:
    text = str(given["optim_args"]).replace(" ", "")
    number = r"[0-9.eE+-]+"
    match = re.fullmatch(rf"betas=[(\[]?({number}),({number})[)\]]?", text)
    if match is None:
        raise ConfigError(
            f"optim_args = {json.dumps(given['optim_args'])}: only betas=(B1,B2) of AdamW is known; "
            "set --adam_beta1, --adam_beta2 and --weight_decay"
        )
    return {"adam_beta1": match[1], "adam_beta2": match[2]}


def _value(name: str, settings: Mapping[str, Any]) -> Any:
    return settings.get(name, settings_index()[name].default)


def _boolean(name: str, value: Any) -> bool:
    word = str(value).strip().lower()
    if word not in BOOLEAN_WORDS:
        raise ConfigError(f"{name} = {json.dumps(value)}: give true or false")
    return word in {"true", "1", "yes", "on"}


def _whole_number(name: str, given: Mapping[str, Any], *, default: int) -> int:
    text = str(given.get(name, default)).strip()
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise ConfigError(f"{name} = {json.dumps(text)}: needs a whole number from 1; for example --{name} {default}")
    return int(text)


TRANSLATIONS: tuple[Translation, ...] = (
    Translation(
        names=_LOSS_FLAGS,
        meaning="`loss` and `aggregation`: token level is `token_mean`, else `seq_mean_token_mean`, or "
        "`seq_mean_token_sum` without length normalisation. Beside one of these flags `epsilon`, `strict_in_bound`, "
        "`importance_weight_cap_ratio` (then 4 by default) and the other loss flags mean what they meant there",
        apply=_loss,
        booleans=_LOSS_FLAGS[1:],
        restates=_SHARED_LOSS_FLAGS,
    ),
    Translation(
        names=("per_device_train_batch_size", "gradient_accumulation_steps"),
        meaning="rows per optimizer step (batch x accumulation x data parallel ranks), as `tasks_per_step` whole "
        "groups of `num_generations`, or as `sft_batch_size` with `loss = CROSS_ENTROPY`; micro-batches follow "
        "`max_tokens`",
        apply=_batch_rows,
    ),
    Translation(names=("torch_dtype",), meaning="`bf16`: bfloat16 is true, float32 is false", apply=_dtype),
    Translation(
        names=("optim_args",), meaning="`adam_beta1` and `adam_beta2` from `betas=(B1,B2)`", apply=_optimizer_arguments
    ),
)

_OFF = ("false", "0", "none", "no", "off", "")
_SGLANG = "parallel engines are SGLang's: start it with --tp-size/--ep-size and pass its address as --inference_url"
_PIPELINE = (
    "one forward of the trainer is one call of the model, which a pipeline of stages is not; FSDP2 shards all layers "
    "(--num_processes, --accelerate_config assets/fsdp2_dst.yml) and --tp_size splits each of them"
)
_EXPERTS = "experts are sharded by FSDP2 like all weights, not kept whole on ranks of their own"

UNAVAILABLE: Mapping[str, Unavailable] = {
    "pp_size": Unavailable(neutral=("1",), reason=_PIPELINE),
    "ep_size": Unavailable(neutral=("1",), reason=_EXPERTS),
    "inf_tp_size": Unavailable(neutral=("1",), reason=_SGLANG),
    "inf_ep_size": Unavailable(neutral=("1",), reason=_SGLANG),
    "inf_mem_ratio": Unavailable(
        neutral=(), reason="the embedded engine reserves no memory; for SGLang start it with --mem-fraction-static"
    ),
    "dynamic_batching": Unavailable(
        neutral=("true", "1", "yes", "on"),
        reason="micro-batches are always packed up to max_tokens; loss and gradient do not depend on the split",
    ),
    "pad_to_maximum": Unavailable(
        neutral=_OFF,
        reason="rows of like length share a pass, padded to the longest; --pad_to_multiple_of rounds it up",
    ),
    "target_concurrency": Unavailable(
        neutral=(), reason="the number of Records in flight is --max_concurrent_samples_per_process x --num_samplers"
    ),
    "save_only_model": Unavailable(
        neutral=_OFF, reason="checkpoints hold what a resume needs; the model alone is in the policy folders"
    ),
    "eval_strategy": Unavailable(
        neutral=("no", "none"), reason="the trainer does not evaluate; run: agentrl eval RUN_NAME"
    ),
    "eval_steps": Unavailable(neutral=(), reason="the trainer does not evaluate; run: agentrl eval RUN_NAME"),
    "trust_remote_code": Unavailable(
        neutral=_OFF, reason="model code comes from transformers, never from a model folder"
    ),
    "shift_labels": Unavailable(neutral=("true", "1"), reason="labels are always shifted"),
    "deepspeed": Unavailable(
        neutral=("none", ""),
        reason="give the whole launcher set-up instead: --accelerate_config FILE with its DeepSpeed section",
    ),
    "fp16": Unavailable(neutral=_OFF, reason="float16 overflows in this loss; use --bf16 true"),
    "log_entropy": Unavailable(neutral=("true", "1"), reason="entropy is always logged"),
    "optim": Unavailable(neutral=("adamw_torch", "adamw", "adamw_torch_fused"), reason="AdamW is the optimizer"),
}


def translated_names() -> Mapping[str, Translation]:
    """Every translated flag name and its translation."""
    return {name: translation for translation in TRANSLATIONS for name in translation.names}


def known_names() -> frozenset[str]:
    """Every name a user may write: settings, translated names, and names refused with a reason."""
    return frozenset({*settings_index(), *translated_names(), *UNAVAILABLE})


def check_available(name: str, value: Any, *, origin: str) -> None:
    """Accept the neutral value of a flag without its feature; raise ConfigError with the reason for any other."""
    unavailable = UNAVAILABLE[name]
    if str(value).strip().lower() in unavailable.neutral:
        return
    shown = shown_value(value)
    accepted = unavailable.neutral[0] if unavailable.neutral else ""
    way_out = f"remove it or set {name} {accepted}" if accepted else "remove it"
    raise ConfigError(f"{origin} = {shown}: not available here: {unavailable.reason}; {way_out}")
