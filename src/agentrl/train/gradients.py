"""How gradients are accumulated, clipped and applied: by PyTorch (this file) or by DeepSpeed (`zero3.py`).

Either way in three separate moves, so that the loop can look at the gradient before anything is changed (L3).
"""

from __future__ import annotations

from typing import Protocol

import torch
from accelerate import Accelerator

from agentrl.train.export import unwrapped
from agentrl.train.optimizer import clip_gradients, set_learning_rate
from agentrl.train.parallel import Ranks, clip_split_gradients


class Gradients(Protocol):
    """The gradient of one optimizer step over all ranks."""

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Add the gradient of one forward pass. `is_last`: no other follows in this step."""

    def clip(self) -> float:
        """Norm of the accumulated gradient over all ranks; from here on it is clipped."""

    def step(self, *, learning_rate: float) -> None:
        """Update the weights once and forget the gradient."""

    def forget(self) -> None:
        """Drop what was accumulated; weights stay as they are."""


class TorchGradients:
    """Gradients in `.grad` of the parameters, reduced by DDP or FSDP2 as backward goes along."""

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        policy: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        ranks: Ranks,
        max_norm: float,
    ) -> None:
        self._accelerator = accelerator
        self._policy = policy
        self._optimizer = optimizer
        self._ranks = ranks
        self._max_norm = max_norm

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Every backward reduces over the ranks; the last one is no different."""
        self._accelerator.backward(loss)

    def clip(self) -> float:
        """Scale the gradients in place where their norm is too large."""
        if self._ranks.mesh is not None:
            causal_lm = unwrapped(self._accelerator, self._policy).causal_lm
            return clip_split_gradients(causal_lm, mesh=self._ranks.mesh, max_norm=self._max_norm)
        return clip_gradients(self._policy.parameters(), max_norm=self._max_norm)

    def step(self, *, learning_rate: float) -> None:
        """AdamW at the step's learning rate."""
        set_learning_rate(self._optimizer, learning_rate)
        self._optimizer.step()
        self.forget()

    def forget(self) -> None:
        """Gradients become None."""
        self._optimizer.zero_grad()
