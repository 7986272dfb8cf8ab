"""Settings of a context that grows long: the part of section `rollout` that docs/rollouts.md explains."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from agentrl.config.section import Section


class ContextConfig(Section):
    """What the model gets to see of a long Record, and how much of it is sampled at a stretch."""

    max_loop_repeats: int = Field(
        8,
        ge=0,
        description="Stop a Record whose completion ends in this many repeats of one run of tokens (at least 32 tokens "
        "in all) and calls no tool; 0 never.",
    )
    new_context: Literal["disabled", "discard_all_tools", "discard_all", "last_k"] = Field(
        "disabled",
        description="At the context limit go on in a rewritten context: without earlier tool results, from a summary "
        "by the browse agent, or with the last turns only (docs/rollouts.md).",
    )
    last_k_turns: int = Field(4, ge=1, description="Turns kept by `new_context = last_k`.")
    enable_repetition_compress: bool = Field(
        False, description="Answer a repetition with a new context instead of stopping the Record."
    )
    max_tool_result_tokens: int | None = Field(
        None, ge=1, description="Longer tool results are cut, at the end of a sentence; empty: never."
    )
    blocked_addresses: str = Field(
        "huggingface.co/datasets,huggingface.co/spaces,hf.co/datasets,hf.co/spaces",
        description="Addresses that publish benchmark answers, comma separated: host and start of the path. Kept out "
        "of tool calls and results.",
    )
    summary_prompt: str = Field(
        "You have worked on this before. What was done so far:",
        description="Stands before the summary of `new_context = discard_all`.",
    )
    partial_rollout_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens after which a Record is put down until the next policy version; empty: never.",
    )
    partial_rollout_s: float | None = Field(
        None, gt=0, description="Seconds after which a Record is put down likewise; empty: never."
    )

    @model_validator(mode="after")
    def _check_new_context(self) -> ContextConfig:
        if self.enable_repetition_compress and self.new_context == "disabled":
            raise ValueError(
                "enable_repetition_compress needs a new context to go on in; set new_context, for example to last_k"
            )
        return self
