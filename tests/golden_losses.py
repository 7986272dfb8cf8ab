"""The loss vectors of data/losses.json as flat tensors, and the settings that each recommended case stands for.

`Golden(case, dtype)` lays the [B, T] arrays of a case end to end: entry (b, t) becomes token b * T + t of sequence b.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.algo.losses import LossConfig, LossInputs, LossOutputs, build_loss, token_weights

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-6}
DTYPES = list(TOLERANCE)


@cache
def golden_file() -> dict[str, Any]:
    return json.loads((Path(__file__).parent / "data" / "losses.json").read_text(encoding="utf-8"))


def golden_case(name: str) -> dict[str, Any]:
    return next(case for case in golden_file()["cases"] if case["name"] == name)


class Golden:
    """The input of one case."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.case = golden_case(name)
        self.options: dict[str, Any] = self.case["options"]
        self.expected: dict[str, Any] = self.case["expected"]
        self.dtype = dtype
        self.arrays = golden_file()["inputs"][self.case["input"]]
        self.num_rows = len(self.arrays["mask"])
        self.width = len(self.arrays["mask"][0])
        self.sequence_ids = torch.arange(self.num_rows).repeat_interleave(self.width)
        self.mask = self.flat("mask").bool()
        if self.options.get("mask") == "zeros":
            self.mask = torch.zeros_like(self.mask)

    def flat(self, name: str) -> Tensor:
        return self.flatten(self.arrays[name])

    def flatten(self, values: list[Any]) -> Tensor:
        """[B][T] or [B] (broadcast over tokens) -> [B * T]."""
        tensor = torch.tensor(values, dtype=self.dtype)
        return tensor.reshape(-1) if tensor.dim() == 2 else tensor.repeat_interleave(self.width)

    def advantages(self) -> Tensor:
        source = self.options.get("advantages")
        if source == "zeros":
            return torch.zeros(self.num_rows * self.width, dtype=self.dtype)
        return self.flat("advantages_token" if source == "advantages_token" else "advantages")

    def weights(self, config: LossConfig, *, counted: Tensor | None = None) -> Tensor:
        return token_weights(
            self.mask if counted is None else counted,
            self.sequence_ids,
            aggregation=config.aggregation,
            num_sequences=self.num_rows,
            constant_length=config.constant_length,
        )

    def inputs(self, config: LossConfig, *, weights: Tensor | None = None, **replaced: Any) -> LossInputs:
        """All tensors of the case; `replaced` overrides single ones (None leaves one out)."""
        tensors: dict[str, Any] = {
            "policy_logprobs": self.flat("log_probs").requires_grad_(),
            "advantages": self.advantages(),
            "mask": self.mask,
            "sequence_ids": self.sequence_ids,
            "weights": self.weights(config) if weights is None else weights,
            "old_logprobs": self.flat("old_log_probs"),
            "behaviour_logprobs": self.flat("rollout_log_probs"),
            "reference_logprobs": self.flat("ref_log_probs"),
        }
        return LossInputs(**(tensors | replaced))

    def close(self, actual: Tensor, name: str, *, rtol: float = 0.0) -> None:
        expected = self.flatten(self.expected[name]) if isinstance(self.expected[name], list) else self.expected[name]
        torch.testing.assert_close(
            actual.detach(), torch.as_tensor(expected, dtype=self.dtype), rtol=rtol, atol=TOLERANCE[self.dtype]
        )


def run_golden(name: str, config: LossConfig, *, dtype: torch.dtype, **replaced: Any) -> LossOutputs:
    """Compute a case's loss and gradient, and compare both (and the per-token loss where the case has one)."""
    golden = Golden(name, dtype)
    inputs = golden.inputs(config, **replaced)
    outputs = build_loss(config)(inputs)
    outputs.loss.backward()
    golden.close(outputs.loss, "loss")
    assert inputs.policy_logprobs.grad is not None
    golden.close(inputs.policy_logprobs.grad, "grad_log_probs")
    if "per_token_loss" in golden.expected:
        golden.close(outputs.token_losses, "per_token_loss", rtol=1e-6 if dtype is torch.float32 else 0.0)
    return outputs
